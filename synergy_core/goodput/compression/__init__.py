"""Compressors of gradients: what each sends, costs and loses. A file per scheme; being in the folder registers it.

docs/compression.md says what for; formulas and sources: in the files.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.compression._compressor import Compressor


class Scheme(Protocol):
    """A module of this folder. OFFERED: what is tried where nobody names one. It may have a function named(name) for
    compressors with another number than those offered; it returns None for names of other schemes.
    """

    OFFERED: tuple[Compressor, ...]


def compressors() -> tuple[Compressor, ...]:
    """The compressors offered if the user names none: `none` first, then scheme by scheme."""
    found = [each for scheme in _schemes() for each in scheme.OFFERED]
    return tuple(sorted(found, key=lambda each: each.name != "none"))


def compressor_named(name: str) -> Compressor:
    """The compressor of that name, offered or with another number. Raises InputError with the nearest known name."""
    for scheme in _schemes():
        for each in scheme.OFFERED:
            if each.name == name:
                return each
        if hasattr(scheme, "named") and (found := scheme.named(name)) is not None:
            return cast(Compressor, found)
    hint = "powersgd-RANK and topk-FRACTION take other numbers; a file in synergy_core/goodput/compression/ adds one."
    raise unknown("compressor", name, [each.name for each in compressors()], hint=hint)


@cache
def _schemes() -> tuple[Scheme, ...]:
    """Every module of this folder, by name. Raises InputError for one that lacks what is asked."""
    modules = modules_of(__name__)
    for module in modules:
        if not isinstance(getattr(module, "OFFERED", None), tuple):
            raise InputError(f"{module.__file__}: lacks OFFERED; none.py beside it is the pattern.")
    return tuple(cast(Scheme, module) for module in modules)
