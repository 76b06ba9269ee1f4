"""Ways to send gradients, a file each; being in the folder registers one.

A module has one frozen dataclass derived from `Scheme`; `synergy_exec.training.compression.scheme` says what it needs.
"""

from __future__ import annotations

from functools import cache
from inspect import isabstract

from synergy_core import modules_of
from synergy_exec.training.compression.scheme import Scheme


@cache
def kinds() -> tuple[type[Scheme], ...]:
    """Every scheme, by the names of their files: the order in which those of a bucket are sent."""
    found = []
    for module in modules_of(__name__):
        classes = (each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Scheme))
        found += [each for each in classes if not isabstract(each)]
    return tuple(dict.fromkeys(found))
