"""Reads the `key=value` settings of `plan` and `compression`: numbers, and models from the catalog, a YAML file or a
config.json. Also formats the tables and writes the files of all commands."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from synergy_core.errors import InputError, same_family, unknown
from synergy_core.performance.catalog import CATALOG, filled, names_in, read_yaml
from synergy_core.performance.planner.families import (
    architecture_named,
    architecture_names,
    card_from_yaml,
    checked,
    family_named,
)
from synergy_core.performance.planner.work import Architecture, Family

MAX_COUNT = 10_000_000
"""The largest whole number that an argument accepts."""
MIN_KEY_SIMILARITY = 0.6
"""Similarity from which a setting is suggested for an unknown one. Settings are short: `lora` has half of `plan`."""


def parse_settings(
    settings: Sequence[str],
    readers: Mapping[str, Callable[[str, str], Any]],
    required: Mapping[str, str],
    **defaults: Any,
) -> SimpleNamespace:
    """Parses `key=value` settings into a namespace. A key without a setting has its default, or else None.

    readers: by key, a function of key and text that returns the value. required: the keys that must be set, each with
    an example value. Raises InputError for unknown or missing keys and for text that is not `key=value`.
    """
    texts: dict[str, str] = {}
    examples = [f"{key}={value}" for key, value in required.items()]
    for setting in settings:
        key, _, value = setting.partition("=")
        if not value:
            raise InputError(f"'{setting}': expected key=value, such as {examples[0]}.")
        if key not in readers:
            raise unknown("setting", key, readers, least=MIN_KEY_SIMILARITY)
        if texts.setdefault(key, value) != value:
            raise InputError(f"{key}={texts[key]} and {key}={value}: two values of one setting; leave one out.")
    for key in required:
        if key not in texts:
            raise InputError(f"{key}= is missing; for example, type {' '.join(examples)}.")
    values = {key: readers[key](key, text) for key, text in texts.items()}
    return SimpleNamespace(**{**dict.fromkeys(readers), **defaults, **values})


def as_text(_: str, text: str) -> str:
    """Returns the text unchanged: the reader of settings that are names."""
    return text


def whole(key: str, text: str, minimum: int = 1) -> int:
    """Reads a whole number from `minimum` to `MAX_COUNT`. Raises InputError for anything else."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{key}={text}: expected a whole number.") from None
    if value < minimum:
        raise InputError(f"{key}={text}: expected at least {minimum}.")
    if value > MAX_COUNT:
        raise InputError(f"{key}={text}: expected at most {MAX_COUNT:,}.")
    return value


def amount(key: str, text: str, expected: str, *, takes_suffix: bool = False) -> float:
    """Reads a number above 0. Raises InputError for anything else.

    expected: what to type, in words. takes_suffix: whether K, M, B (10^9) or T (10^12) may follow the digits."""
    number = text.rstrip("kKmMbBtT") if takes_suffix else text
    factors = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    try:
        value = float(number) * factors[text[len(number) :].lower()]
    except (ValueError, KeyError):
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise InputError(f"{key}={text}: expected {expected}.")
    return value


# Loads the model that `model=` names: from the catalog, a YAML file, or a local Hugging Face `config.json`.
#
# `catalog/huggingface/<model_type>.yaml` says how to read a config.json. `family`: the planner's family. `fields`: our
# field names and the keys of config.json (the first key found is read). `absent`: values that replace missing or null
# keys, such as 1 or `4 × hidden`. `null`: values of fields whose key is null. `always`: fields that are the same in all
# models of the type. `only`: keys with a single supported value. `full_every`: every n-th layer sees all keys, the
# others a window of `sliding_window` tokens; 0: all have the window. A list `layer_types` in config.json replaces it.
# `full_beyond`: the key of a sliding attention window, in tokens, which the planner ignores. `tower`: `fields`,
# `absent` and `always` of the layers that a vision_config describes.


DEFAULT_TOKENS = 8192
"""Default sequence length of models that can read longer sequences: most are trained on shorter ones."""


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """The model that `model=` names. notes: assumptions made when the model was read, one sentence each, to print."""

    name: str
    family: Family
    architecture: Architecture
    notes: tuple[str, ...] = ()


def default_batch(architecture: Architecture) -> int:
    """Default global batch. Sequences: GPT-3's rule of thumb, 2^19 tokens × (parameters ÷ 10^8)^¼ per step, rounded up
    to a power of two sequences. Images: 1,024.
    """
    import numpy as np

    sequence_tokens = architecture.limits().seq_len
    if not sequence_tokens:
        return 1024
    tokens = 2.0**19 * (float(architecture.parameters()) / 1e8) ** 0.25
    return 1 << max(0, round(float(np.ceil(np.log2(tokens / sequence_tokens)))))


def requested_model(name: str, seq_len: int | None = None, image_tokens: int | None = None) -> RequestedModel:
    """Loads a model from the catalog, a YAML file, or a Hugging Face config.json.

    seq_len: tokens per sequence; None: the model's own. image_tokens: patches of a sample that a frozen vision tower
    reads; None: the tower is left out. Raises InputError for an unknown model, with the nearest match, and for
    `seq_len` of a model without sequences.
    """
    path, is_known = Path(name), name in architecture_names()
    if path.suffix == ".json" or (path.is_dir() and not is_known):
        return replace(model_from_config(path, seq_len, image_tokens), name=name)
    if image_tokens is not None:
        raise InputError(f"image_tokens={image_tokens}: only a config.json describes a vision tower; leave it out.")
    if path.suffix in (".yaml", ".yml"):
        card = card_from_yaml(path)
        family, architecture = card.family, card.architecture
    elif "/" in name and not is_known:
        raise InputError(
            f"model={name}: no such file, and nothing is downloaded. For a Hugging Face model, give its config.json: "
            "model=FOLDER/config.json."
        )
    elif not is_known:
        hint = "For another model, give its config.json of Hugging Face: model=FOLDER/config.json."
        raise unknown("architecture", name, architecture_names(), hint=hint, alike=same_family)
    else:
        family, architecture = architecture_named(name)
    if seq_len is not None:
        if not architecture.limits().seq_len:
            raise InputError(f"seq_len={seq_len}: {name} does not read sequences; leave seq_len= out.")
        changed: Any = architecture
        architecture = replace(changed, seq_len=seq_len)
    return RequestedModel(name, family, architecture)


@cache
def model_types() -> tuple[str, ...]:
    """Every supported `model_type` of a Hugging Face config.json."""
    return tuple(names_in("huggingface"))


def model_from_config(path: Path, seq_len: int | None = None, image_tokens: int | None = None) -> RequestedModel:
    """Loads the model that a config.json describes. path: the file or its folder. seq_len: tokens per sequence; None:
    the longest that the model can read, at most `DEFAULT_TOKENS`. image_tokens: as in `requested_model`.

    Raises InputError for a file that is not a config.json, an unknown model type, and missing or inconsistent sizes.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error}).") from None
    whole = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(whole, str):
        raise InputError(f"{path}: has no model_type; expected a config.json of Hugging Face transformers.")
    model_type, notes = whole, []
    text = config.get("text_config")
    if isinstance(text, dict):
        model_type = str(text.get("model_type", whole))
        config = {**config, **text}
    if image_tokens is None and ("vision_config" in config or "audio_config" in config):
        notes.append(
            f"only the language model of this {whole} is planned; its encoders of images or sound are left out"
        )
    _check_modelled(config, path)
    model_type = model_type if model_type in model_types() else model_type.removesuffix("_text")
    if model_type not in model_types():
        hint = (
            "Describe it by hand instead: model=mine.yaml, in the form of synergy_core/performance/catalog/"
            f"architectures/, or synergy_core/performance/catalog/huggingface/{model_type}.yaml."
        )
        # No name is suggested: a model_type is written by a program, and another one is another model.
        raise unknown(f"model_type in {path}:", model_type, model_types(), hint=hint, alike=lambda *_: False)
    form = read_yaml(CATALOG / "huggingface" / f"{model_type}.yaml")
    for key, value in form.get("only", {}).items():
        if config.get(key) is not None and config[key] != value:
            raise InputError(f"{path}: {key}: {config[key]} is not modelled, only {json.dumps(value)} is.")
    values = form["always"] | _sizes(config, form, path)
    longest = values.get("seq_len")
    if seq_len is not None:
        if longest is None:
            raise InputError(f"seq_len={seq_len}: the model of {path} does not read sequences; leave seq_len= out.")
        values["seq_len"] = seq_len
    elif isinstance(longest, int) and longest > DEFAULT_TOKENS:
        values["seq_len"] = DEFAULT_TOKENS
        notes.append(f"sequences of {DEFAULT_TOKENS:,} tokens (the model reads up to {longest:,}); seq_len=… sets it")
    window, every = config.get("sliding_window"), form.get("full_every")
    every = every and config.get("sliding_window_pattern", every)
    if every is not None and isinstance(window, int) and window < values.get("seq_len", 0):
        layers = values["layers"]
        types = config.get("layer_types") or ["full_attention"] * (layers // every if every else 0)
        values |= {"window": window, "windowed": 1.0 - types.count("full_attention") / layers}
        notes.append(f"attention has a window of {window:,} tokens in {values['windowed']:.0%} of the layers")
    family = family_named(form["family"])
    tower: dict[str, Architecture] = {}
    if image_tokens is not None:
        if not (vision := config.get("vision_config")) or "tower" not in form:
            raise InputError(
                f"{path}: image_tokens={image_tokens}: no vision tower of {model_type} is known; leave it out."
            )
        sizes = form["tower"]["always"] | _sizes(vision, form["tower"], path) | {"seq_len": image_tokens}
        tower["tower"] = filled(family_named("transformer").Architecture, sizes, path)
        notes.append(f"the frozen vision tower reads {image_tokens:,} patches a sample; its projector is left out")
    architecture = checked(filled(family.Architecture, values, path, **tower), path)
    window = config.get(form.get("full_beyond", ""))
    if isinstance(window, int) and window < values.get("seq_len", 0):
        notes.append(f"attention has a window of {window:,} tokens; predictions ignore the window")
    return RequestedModel(str(path), family, architecture, tuple(notes))


_OTHER_LAYERS = re.compile(r"linear_(attn|attention|conv|key|num)|mamba|ssm_|rwkv|recurrent|xlstm")
"""Keys and model types of models whose layers have a state instead of attention."""
_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def _check_modelled(config: Mapping[str, Any], path: Path) -> None:
    """Raises InputError for layers that no family models, and for weights that are quantized."""
    odd = [each for each in (config.get("layer_types") or ()) if each not in _LAYER_TYPES]
    odd += [each for each in (str(config["model_type"]), *config) if _OTHER_LAYERS.search(each)]
    if 0 in (config.get("attn_type_list") or ()):  # MiniMax-01 marks layers of linear attention with 0
        odd.append("attn_type_list")
    if odd:
        raise InputError(
            f"{path}: {odd[0]}: layers of linear attention, of convolutions or with a recurrent state are not "
            "modelled, only attention is."
        )
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
        raise InputError(
            f"{path}: quantization_config: {method}: training of quantized weights is not modelled. To plan the "
            "training of all weights in 16 bits, delete quantization_config."
        )


def _sizes(config: Mapping[str, Any], form: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Reads the values of the architecture's fields from a config.json. Raises InputError for a missing key."""
    result: dict[str, Any] = {}
    for name, names in form["fields"].items():
        keys = names if isinstance(names, list) else [names]
        stated = (config[key] for key in keys if config.get(key) is not None)
        is_null = any(key in config for key in keys) and name in form.get("null", {})
        value = next(stated, form.get("null" if is_null else "absent", {}).get(name))
        if value is None:
            raise InputError(f"{path}: {keys[0]} is missing; expected it in every config.json of this model_type.")
        if isinstance(value, str) and "×" in value:
            times, _, other = value.partition("×")
            value = int(times) * result[other.strip()]
        result[name] = value
    return result


# Output of commands: plain aligned tables, and files that are written completely or not at all.


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Formats aligned columns: the first `left` columns are left-aligned, the others, numbers, right-aligned."""
    padded = []
    for index, column in enumerate(zip(header, *rows, strict=True)):
        width = max(map(len, column))
        padded.append([cell.ljust(width) if index < left else cell.rjust(width) for cell in column])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def write_whole(path: Path, text: str) -> None:
    """Writes to a temporary file next to `path`, then renames it. Raises InputError if that fails."""
    if not path.name or path.is_dir():
        raise InputError(f"{path}: is a folder; expected the name of a file to write.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(
            f"{path}: cannot be written ({error.strerror}); expected a path in an existing folder."
        ) from None
