"""A model from the `config.json` that Hugging Face keeps beside its weights; nothing is fetched.

`catalog/huggingface/<model_type>.yaml` says how its keys are read: `family`; `fields`, our names and theirs (of several
the first that is there); `absent`, what is meant where a key is missing or null, a value or `4 × hidden`; `always`,
what all models of the type have; `only`, keys of which one value is modelled; `full_beyond`, a key with a number of
tokens within which attention stays, counted as if it reached everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from synergy_core.catalog import filled, read_yaml
from synergy_core.errors import InputError, unknown
from synergy_core.planner.architecture import Architecture, Family
from synergy_core.planner.families import checked, family_named

_FOLDER = Path(__file__).parents[1] / "catalog" / "huggingface"
LONGEST = 8192
"""Tokens of a sequence, at most, where nobody says how many: models are trained on shorter ones than they can read."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """What a config.json says: a model, and in words what was taken for granted."""

    family: Family
    architecture: Architecture
    notes: tuple[str, ...]


@cache
def model_types() -> tuple[str, ...]:
    """Every `model_type` that is known."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def model_from_config(path: Path, seq_len: int | None = None) -> PublishedModel:
    """The model of a config.json, or of the folder that holds one. seq_len: tokens of a sequence; None: as many as the
    model can read, at most `LONGEST`.

    Raises InputError for what is no config.json, a type that is not known, and sizes that are missing or do not fit.
    """
    path = path / "config.json" if path.is_dir() else path
    config = _read(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise InputError(f"{path}: has no model_type; expected a config.json of Hugging Face's transformers.")
    if kind not in model_types():
        hint = (
            "Describe it by hand instead: model=mine.yaml, in the form of synergy_core/catalog/architectures/, or "
            f"synergy_core/catalog/huggingface/{kind}.yaml."
        )
        raise unknown(f"model_type in {path}:", kind, model_types(), hint=hint)
    form = read_yaml(_FOLDER / f"{kind}.yaml")
    for key, value in form.get("only", {}).items():
        if config.get(key) is not None and config[key] != value:
            raise InputError(f"{path}: {key}: {config[key]} is not modelled, only {json.dumps(value)} is.")
    values = {**form["always"], **_sizes(config, form, path)}
    longest, notes = values.get("seq_len"), []
    if seq_len is not None and longest is None:
        raise InputError(f"seq_len={seq_len}: {path} is of a model that reads no sequences; leave it out.")
    if seq_len is None and isinstance(longest, int) and longest > LONGEST:
        values["seq_len"] = LONGEST
        notes.append(f"sequences of {LONGEST:,} tokens, of up to {longest:,} that it reads; seq_len=… sets it")
    elif seq_len is not None:
        values["seq_len"] = seq_len
    family = family_named(form["family"])
    within = config.get(form.get("full_beyond", ""))
    architecture = checked(filled(family.Architecture, values, path), path)
    if isinstance(within, int) and within < values.get("seq_len", 0):
        notes.append(f"attention stays within {within:,} tokens; counted as if it reached everywhere")
    return PublishedModel(family, architecture, tuple(notes))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: holds no names and values; expected a config.json of Hugging Face's transformers.")
    return content


def _sizes(config: Mapping[str, Any], form: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Our fields from their keys. Raises InputError for the first key that is missing."""
    result: dict[str, Any] = {}
    absent = form.get("absent", {})
    for name, told in form["fields"].items():
        keys = told if isinstance(told, list) else [told]
        value = next((config[key] for key in keys if config.get(key) is not None), absent.get(name))
        if value is None:
            raise InputError(f"{path}: {keys[0]} is missing; every config.json of that model_type has it.")
        if isinstance(value, str) and "×" in value:
            times, _, other = value.partition("×")
            value = int(times) * result[other.strip()]
        result[name] = value
    return result
