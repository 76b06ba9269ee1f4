"""Model families: one module each; being in the folder registers it.

A module has a frozen dataclass `Architecture` (what `catalog/architectures/*.yaml` of that family fill) and
`work(architecture, plans, software) -> Work`: `synergy_core.planner.architecture` says what is asked of both.
"""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

from synergy_core.catalog import filled, read_yaml
from synergy_core.errors import InputError, unknown
from synergy_core.modules import module_names
from synergy_core.planner.architecture import Architecture, Family

_FOLDER = Path(__file__).parents[2] / "catalog" / "architectures"
_CARD = ("family", "title", "published_parameters", "source")


@dataclass(frozen=True, slots=True)
class Card:
    """A model of the catalog. architecture: of the family's own type. published_parameters: as its authors count."""

    name: str
    title: str
    family: Family
    architecture: Architecture
    published_parameters: float
    source: str


def family_names() -> list[str]:
    """Every family."""
    return module_names(__name__)


def family_named(name: str) -> Family:
    """A family's module. Raises InputError with the nearest match for an unknown one, and for what one lacks."""
    if name not in family_names():
        hint = "A module synergy_core/planner/families/<name>.py adds one."
        raise unknown("model family", name, family_names(), hint=hint)
    module = import_module(f"{__name__}.{name}")
    own = getattr(module, "Architecture", None)
    asked = {"work": module, "parameters": own, "limits": own, "check": own}
    missing = [each for each, where in asked.items() if not callable(getattr(where, each, None))]
    if not is_dataclass(own) or missing:
        lacks = "a dataclass Architecture" if not is_dataclass(own) else f"{', '.join(missing)}()"
        raise InputError(f"{module.__file__}: lacks {lacks}; synergy_core/planner/architecture.py says what is asked.")
    return cast(Family, module)


def architecture_names() -> list[str]:
    """Every model of the catalog."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


@cache
def card_named(name: str) -> Card:
    """A model of the catalog. Raises InputError with the nearest match for an unknown one."""
    if name not in architecture_names():
        hint = "A file synergy_core/catalog/architectures/<name>.yaml adds one."
        raise unknown("architecture", name, architecture_names(), hint=hint)
    return card_from_yaml(_FOLDER / f"{name}.yaml")


def card_from_yaml(path: Path) -> Card:
    """A file in the form of `catalog/architectures`. Raises InputError for keys that are missing or unknown."""
    content = read_yaml(path)
    missing = [key for key in _CARD if content.get(key) is None]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} missing; synergy_core/catalog/architectures/ has examples.")
    family = family_named(str(content["family"]))
    try:
        published = float(content["published_parameters"])
    except (TypeError, ValueError):
        published = float("nan")
    if not 0.0 < published < float("inf"):
        got = content["published_parameters"]
        raise InputError(f"{path}: published_parameters: {got}; expected a number above 0, such as 7.0e+9.")
    return Card(
        name=path.stem,
        title=str(content["title"]),
        family=family,
        architecture=checked(
            filled(family.Architecture, {key: content[key] for key in content if key not in _CARD}, path), path
        ),
        published_parameters=published,
        source=str(content["source"]),
    )


def checked(architecture: Architecture, path: Path) -> Architecture:
    """The architecture that a file holds. Raises InputError, naming the file, for sizes that do not fit each other."""
    try:
        architecture.check()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return architecture


def architecture_named(name: str) -> tuple[Family, Architecture]:
    """A model's family and architecture. Raises InputError with the nearest match for an unknown one."""
    card = card_named(name)
    return card.family, card.architecture
