"""What commands are asked in `key=value` arguments about models of the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.errors import InputError, unknown

if TYPE_CHECKING:
    from synergy_core.planner.architecture import Architecture, Family

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""What may stand behind an amount: 300B, 15T."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model that was asked about. notes: what was taken for granted, in words."""

    name: str
    family: Family
    architecture: Architecture
    notes: tuple[str, ...] = ()


MOST = 10_000_000
"""Of anything that is counted: GPUs, sequences of a batch."""


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
    if value > MOST:
        raise InputError(f"{key}={text}: expected at most {MOST:,}.")
    return value


def amount(key: str, text: str, what: str, *, large: bool = False) -> float:
    """A number above 0. what: in words, with an example. large: it may end in K, M, B (10^9) or T (10^12). Raises
    InputError.
    """
    number = text.rstrip("kKmMbBtT") if large else text
    try:
        value = float(number) * _FACTORS[text[len(number) :].lower()]
    except (ValueError, KeyError):
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{key}={text}: expected {what}.")
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


def model_asked(name: str, seq_len: int | None = None) -> AskedModel:
    """A model of the catalog, of a YAML file, or of a config.json of Hugging Face's. seq_len: tokens of a sequence;
    None: the model's own.

    Raises InputError with the nearest match for an unknown one, and for a model that reads no sequences.
    """
    from synergy_core.planner.families import architecture_named, architecture_names, card_from_yaml
    from synergy_core.planner.huggingface import model_from_config

    path = Path(name)
    if path.suffix == ".json" or (path.is_dir() and name not in architecture_names()):
        found = model_from_config(path, seq_len)
        return AskedModel(name, found.family, found.architecture, found.notes)
    if path.suffix in (".yaml", ".yml"):
        card = card_from_yaml(path)
        family, architecture = card.family, card.architecture
    elif "/" in name and name not in architecture_names():
        raise InputError(
            f"model={name}: no such file; nothing is fetched. Of a model of Hugging Face's give its config.json, "
            "model=FOLDER/config.json."
        )
    else:
        family, architecture = architecture_named(name)
    if seq_len is not None:
        if not architecture.limits().seq_len:
            raise InputError(f"seq_len={seq_len}: {name} reads no sequences; leave it out.")
        changed: Any = architecture
        architecture = replace(changed, seq_len=seq_len)
    return AskedModel(name, family, architecture)
