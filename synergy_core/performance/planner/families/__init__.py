"""Model families, one module each. Adding a module to this folder registers its family.

A module has a frozen dataclass `Architecture`, read from `catalog/architectures/*.yaml`, and a function
`work(architecture, plans, software) -> Work`, as the protocols of `synergy_core.performance.planner.work` define them.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

from synergy_core import module_names
from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import file_in, filled, names_in, read_yaml
from synergy_core.performance.planner.work import Architecture, Family

_CARD = ("family", "title", "published_parameters", "source")


@dataclass(frozen=True, slots=True)
class Card:
    """A model of the catalog. published_parameters: the number that its authors state."""

    name: str
    title: str
    family: Family
    architecture: Architecture
    published_parameters: float
    source: str


def family_named(name: str) -> Family:
    """A family's module. Raises InputError for an unknown name (with the nearest match) and an incomplete module."""
    if name not in module_names(__name__):
        hint = "A module synergy_core/performance/planner/families/<name>.py adds one."
        raise unknown("model family", name, module_names(__name__), hint=hint)
    module = import_module(f"{__name__}.{name}")
    own = getattr(module, "Architecture", None)
    asked = {"work": module, "parameters": own, "limits": own, "check": own}
    missing = [each for each, where in asked.items() if not callable(getattr(where, each, None))]
    if not is_dataclass(own) or missing:
        lacks = "a dataclass Architecture" if not is_dataclass(own) else f"{', '.join(missing)}()"
        says = "synergy_core/performance/planner/work.py says what is required."
        raise InputError(f"{module.__file__}: lacks {lacks}; {says}")
    return cast(Family, module)


def architecture_names() -> list[str]:
    """Every model of the catalog."""
    return names_in("architectures")


@cache
def card_named(name: str) -> Card:
    """A model of the catalog. Raises InputError with the nearest match for an unknown one."""
    return card_from_yaml(file_in("architectures", "architecture", name))


def card_from_yaml(path: Path) -> Card:
    """Reads a file in the format of `catalog/architectures/`. Raises InputError for missing or unknown keys."""
    content = read_yaml(path)
    missing = [key for key in _CARD if content.get(key) is None]
    if missing:
        examples = "synergy_core/performance/catalog/architectures/ has examples."
        raise InputError(f"{path}: {', '.join(missing)} missing; {examples}")
    family = family_named(str(content["family"]))
    got = content["published_parameters"]
    try:
        published = float(got)
    except (TypeError, ValueError):
        published = float("nan")
    if not 0.0 < published < float("inf"):
        raise InputError(f"{path}: published_parameters: {got}; expected a number above 0, such as 7.0e+9.")
    sizes = {key: content[key] for key in content if key not in _CARD}
    architecture = checked(filled(family.Architecture, sizes, path), path)
    return Card(path.stem, str(content["title"]), family, architecture, published, str(content["source"]))


def checked(architecture: Architecture, path: Path) -> Architecture:
    """Returns the architecture. Raises InputError, naming the file, if its sizes contradict each other."""
    try:
        architecture.check()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return architecture


def architecture_named(name: str) -> tuple[Family, Architecture]:
    """A model's family and architecture. Raises InputError with the nearest match for an unknown one."""
    card = card_named(name)
    return card.family, card.architecture
