"""Ways to send gradients, a file each; being in the folder registers one.

A module has one frozen dataclass derived from `Scheme`; `synergy_exec.training.compression.scheme` says what it needs.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from synergy_exec.training.compression.scheme import Scheme


@cache
def kinds() -> tuple[type[Scheme], ...]:
    """Every scheme, by the names of their files: the order in which those of a bucket are sent."""
    found = []
    for name in sorted(each.name for each in iter_modules(__path__)):
        values = vars(import_module(f"{__name__}.{name}")).values()
        found += [each for each in values if isinstance(each, type) and issubclass(each, Scheme) and each is not Scheme]
    return tuple(dict.fromkeys(found))
