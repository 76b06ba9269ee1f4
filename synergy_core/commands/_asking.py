"""Reads the arguments `key=value` of `plan` and `compression`: numbers, and models from the catalog, a YAML file or a
config.json. Also prints the tables and writes the files of commands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from synergy_core.catalog import CATALOG, filled, names_in, read_yaml
from synergy_core.errors import InputError, unknown
from synergy_core.planner.families import architecture_named, architecture_names, card_from_yaml, checked, family_named
from synergy_core.planner.work import Architecture, Family

MAX_COUNT = 10_000_000
"""The largest whole number that an argument accepts."""


def parse_settings(
    settings: Sequence[str],
    readers: Mapping[str, Callable[[str, str], Any]],
    needed: Mapping[str, str],
    **defaults: Any,
) -> SimpleNamespace:
    """Every setting by its key. A setting that is not typed has its default, else None.

    readers: by key, a function of key and text that returns the value. needed: required keys, each with an example
    value. Raises InputError for unknown or missing keys and for text that is not `key=value`.
    """
    texts: dict[str, str] = {}
    examples = [f"{key}={value}" for key, value in needed.items()]
    for each in settings:
        key, _, value = each.partition("=")
        if not value:
            raise InputError(f"'{each}': expected key=value, such as {examples[0]}.")
        if key not in readers:
            raise unknown("setting", key, readers)
        texts[key] = value
    for key in needed:
        if key not in texts:
            raise InputError(f"{key}= is missing; such as {' '.join(examples)}.")
    given = {key: readers[key](key, text) for key, text in texts.items()}
    return SimpleNamespace(**{**dict.fromkeys(readers), **defaults, **given})


def plain(_: str, text: str) -> str:
    """Reader of settings that are names: returns the text unchanged."""
    return text


def whole(key: str, text: str, least: int = 1) -> int:
    """Reads a whole number from `least` to `MAX_COUNT`. Raises InputError for anything else."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{key}={text}: expected a whole number.") from None
    if value < least:
        raise InputError(f"{key}={text}: expected at least {least}.")
    if value > MAX_COUNT:
        raise InputError(f"{key}={text}: expected at most {MAX_COUNT:,}.")
    return value


def amount(key: str, text: str, what: str, *, large: bool = False) -> float:
    """Reads a number above 0. Raises InputError for anything else.

    what: the expected value in words, with an example. large: whether K, M, B (10^9) or T (10^12) may follow."""
    number = text.rstrip("kKmMbBtT") if large else text
    factors = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    try:
        value = float(number) * factors[text[len(number) :].lower()]
    except (ValueError, KeyError):
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{key}={text}: expected {what}.")
    return value


# The model that a command is for: from the catalog, a YAML file, or a local Hugging Face `config.json`.
#
# `catalog/huggingface/<model_type>.yaml` says how to read a config.json. `family`: the planner's family. `fields`: our
# field names and the keys of config.json (the first key found is read). `absent`: values for missing or null keys, a
# value or `4 × hidden`. `always`: fields that are the same in all models of the type. `only`: keys with a single
# supported value. `full_beyond`: the key of a sliding attention window, in tokens, which is counted as full attention.


DEFAULT_TOKENS = 8192
"""Default sequence length of models that can read longer sequences: most are trained on shorter ones."""


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """The model that a command is for. notes: sentences to print about assumptions made in reading the model."""

    name: str
    family: Family
    architecture: Architecture
    notes: tuple[str, ...] = ()


def default_batch(architecture: Architecture) -> int:
    """Default global batch: sequences by GPT-3's rule of thumb, 2^19 tokens × (parameters ÷ 10^8)^¼ per step, rounded
    up to a power of two; 1,024 for image models.
    """
    import numpy as np

    tokens_each = architecture.limits().seq_len
    if not tokens_each:
        return 1024
    tokens = 2.0**19 * (float(architecture.parameters()) / 1e8) ** 0.25
    return 1 << max(0, round(float(np.ceil(np.log2(tokens / tokens_each)))))


def requested_model(name: str, seq_len: int | None = None) -> RequestedModel:
    """Loads a model from the catalog, a YAML file, or a Hugging Face config.json. seq_len: tokens per sequence; None:
    the model's own.

    Raises InputError for an unknown model, with the nearest match, and for `seq_len` of a model without sequences.
    """
    path, is_known = Path(name), name in architecture_names()
    if path.suffix == ".json" or (path.is_dir() and not is_known):
        return replace(model_from_config(path, seq_len), name=name)
    if path.suffix in (".yaml", ".yml"):
        card = card_from_yaml(path)
        family, architecture = card.family, card.architecture
    elif "/" in name and not is_known:
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
    return RequestedModel(name, family, architecture)


@cache
def model_types() -> tuple[str, ...]:
    """Every supported `model_type` of a Hugging Face config.json."""
    return tuple(names_in("huggingface"))


def model_from_config(path: Path, seq_len: int | None = None) -> RequestedModel:
    """The model described by a config.json, or by the one in a folder. seq_len: tokens per sequence; None: the longest
    that the model can read, at most `DEFAULT_TOKENS`.

    Raises InputError for a file that is not a config.json, an unknown model type, and missing or inconsistent sizes.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}).") from None
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        raise InputError(f"{path}: has no model_type; expected a config.json of Hugging Face's transformers.")
    if kind not in model_types():
        hint = (
            "Describe it by hand instead: model=mine.yaml, in the form of synergy_core/catalog/architectures/, or "
            f"synergy_core/catalog/huggingface/{kind}.yaml."
        )
        raise unknown(f"model_type in {path}:", kind, model_types(), hint=hint)
    form = read_yaml(CATALOG / "huggingface" / f"{kind}.yaml")
    for key, value in form.get("only", {}).items():
        if config.get(key) is not None and config[key] != value:
            raise InputError(f"{path}: {key}: {config[key]} is not modelled, only {json.dumps(value)} is.")
    values = form["always"] | _sizes(config, form, path)
    longest, notes = values.get("seq_len"), []
    if seq_len is not None:
        if longest is None:
            raise InputError(f"seq_len={seq_len}: {path} is of a model that reads no sequences; leave it out.")
        values["seq_len"] = seq_len
    elif isinstance(longest, int) and longest > DEFAULT_TOKENS:
        values["seq_len"] = DEFAULT_TOKENS
        notes.append(f"sequences of {DEFAULT_TOKENS:,} tokens, of up to {longest:,} that it reads; seq_len=… sets it")
    family = family_named(form["family"])
    architecture = checked(filled(family.Architecture, values, path), path)
    within = config.get(form.get("full_beyond", ""))
    if isinstance(within, int) and within < values.get("seq_len", 0):
        notes.append(f"attention stays within {within:,} tokens; counted as if it reached everywhere")
    return RequestedModel(str(path), family, architecture, tuple(notes))


def _sizes(config: Mapping[str, Any], form: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Values of the architecture's fields, from the keys of a config.json. Raises InputError for a missing key."""
    result: dict[str, Any] = {}
    for name, names in form["fields"].items():
        keys = names if isinstance(names, list) else [names]
        given = (config[key] for key in keys if config.get(key) is not None)
        value = next(given, form.get("absent", {}).get(name))
        if value is None:
            raise InputError(f"{path}: {keys[0]} is missing; every config.json of that model_type has it.")
        if isinstance(value, str) and "×" in value:
            times, _, other = value.partition("×")
            value = int(times) * result[other.strip()]
        result[name] = value
    return result


# Output of commands: plain aligned tables, and files that are written completely or not at all.


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Formats aligned columns: the first `left` columns are left-aligned, the others, numbers, right-aligned."""
    aligned = []
    for at, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column))
        aligned.append([cell.ljust(width) if at < left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def write_whole(path: Path, text: str) -> None:
    """Writes to a temporary file next to `path`, then renames it. Raises InputError if that fails."""
    if not path.name or path.is_dir():
        raise InputError(f"{path}: is a folder; expected the name of a file to write.")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); expected a path in an existing folder."
        ) from None
