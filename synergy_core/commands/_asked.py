"""What commands are asked in `key=value` arguments about models of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from synergy_core.errors import InputError, unknown

if TYPE_CHECKING:
    from synergy_core.planner.architecture import Architecture, Family


def given_settings(settings: Sequence[str], known: Sequence[str], needed: Mapping[str, str]) -> dict[str, str]:
    """Values by key. needed: keys that must be there, each with an example. Raises InputError for what is unknown,
    missing or no `key=value`.
    """
    given: dict[str, str] = {}
    example = " ".join(f"{key}={value}" for key, value in needed.items())
    for each in settings:
        key, equals, value = each.partition("=")
        if not equals or not value:
            raise InputError(f"'{each}': expected key=value, such as {example.partition(' ')[0]}.")
        if key not in known:
            raise unknown("setting", key, known)
        given[key] = value
    for key in needed:
        if key not in given:
            raise InputError(f"{key}= is missing; such as {example}.")
    return given


def whole(key: str, text: str, least: int = 1) -> int:
    """A whole number of at least that much. Raises InputError."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{key}={text}: expected a whole number.") from None
    if value < least:
        raise InputError(f"{key}={text}: expected at least {least}.")
    return value


def default_batch(architecture: Architecture) -> int:
    """Sequences a step by GPT-3's rule of thumb: 2^19 tokens for 10^8 parameters, growing with their fourth root, to
    the next power of two; 1,024 images.
    """
    import numpy as np

    tokens_each = architecture.limits().seq_len
    if not tokens_each:
        return 1024
    tokens = 2.0**19 * (float(architecture.parameters()) / 1e8) ** 0.25
    return 1 << max(0, round(float(np.ceil(np.log2(tokens / tokens_each)))))


def model_asked(name: str) -> tuple[Family, Architecture]:
    """A model of the catalog, or of a YAML file. Raises InputError with the nearest match for an unknown one."""
    from synergy_core.planner.families import architecture_named, card_from_yaml

    if name.endswith((".yaml", ".yml")):
        card = card_from_yaml(Path(name))
        return card.family, card.architecture
    return architecture_named(name)
