"""How a module of this folder becomes a scheme: by being in it, with `OFFERED` and `named`."""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

from synergy_core.errors import InputError, unknown
from synergy_core.goodput.compression._compressor import Compressor
from synergy_core.modules import modules_of


class Scheme(Protocol):
    """A module of this folder. OFFERED: what is tried where nobody names one."""

    OFFERED: tuple[Compressor, ...]

    def named(self, name: str) -> Compressor | None:
        """The scheme's compressor of that name; None where the name is no name of this scheme."""
        ...


def compressors() -> tuple[Compressor, ...]:
    """Those that are offered where nobody names one: `none` first, then scheme by scheme."""
    found = [each for scheme in _schemes() for each in scheme.OFFERED]
    return tuple(sorted(found, key=lambda each: each.name != "none"))


def compressor_named(name: str) -> Compressor:
    """The compressor of that name, offered or with another number. Raises InputError with the nearest known name."""
    for scheme in _schemes():
        found = scheme.named(name)
        if found is not None:
            return found
    hint = "powersgd-RANK and topk-FRACTION take other numbers; a file in synergy_core/goodput/compression/ adds one."
    raise unknown("compressor", name, [each.name for each in compressors()], hint=hint)


@cache
def _schemes() -> tuple[Scheme, ...]:
    """Every module of this folder, by name. Raises InputError for one that lacks what is asked."""
    modules = modules_of(__name__.rpartition(".")[0])
    for module in modules:
        if not isinstance(getattr(module, "OFFERED", None), tuple) or not callable(getattr(module, "named", None)):
            raise InputError(f"{module.__file__}: lacks OFFERED or named(); none.py beside it is the pattern.")
    return tuple(cast(Scheme, module) for module in modules)
