"""Gradient compressors: the bytes that each sends, its codec's work and its error. Each file here adds a scheme.

docs/compression.md describes how compressors are used; the files have the formulas and sources.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol, cast

from synergy_core import modules_of
from synergy_core.errors import InputError, unknown
from synergy_core.performance.goodput.compression._compressor import Compressor


class Scheme(Protocol):
    """A module of this folder. OFFERED: the compressors that are tried if the user names none. An optional function
    `named(name)` makes compressors of other ranks or fractions; it returns None for names of other schemes.
    """

    OFFERED: tuple[Compressor, ...]


def compressors() -> tuple[Compressor, ...]:
    """The compressors that are tried if the user names none: `none` first, then scheme by scheme."""
    found = [each for scheme in _schemes() for each in scheme.OFFERED]
    return tuple(sorted(found, key=lambda each: each.name != "none"))


def compressor_named(name: str) -> Compressor:
    """The compressor called `name`. Raises InputError for an unknown name, with the nearest known one."""
    for scheme in _schemes():
        for each in scheme.OFFERED:
            if each.name == name:
                return each
        if hasattr(scheme, "named") and (found := scheme.named(name)) is not None:
            return cast(Compressor, found)
    folder = "synergy_core/performance/goodput/compression/"
    hint = f"powersgd-RANK and topk-FRACTION take other numbers; a file in {folder} adds one."
    raise unknown("compressor", name, [each.name for each in compressors()], hint=hint)


@cache
def _schemes() -> tuple[Scheme, ...]:
    """All modules of this folder, by name. Raises InputError for one without OFFERED."""
    modules = modules_of(__name__)
    for module in modules:
        if not isinstance(getattr(module, "OFFERED", None), tuple):
            raise InputError(f"{module.__file__}: OFFERED is missing; see none.py beside it for an example.")
    return tuple(cast(Scheme, module) for module in modules)
