"""Options of people's files and launch scripts, and what they say about a training.

`catalog/options/<form>.yaml` says which settings of `plan` the options of a form state, and which of its options change
neither time nor memory. The modules of `emitters/` read the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.catalog import CATALOG, read_yaml
from synergy_core.performance.planner.enumerate import FIXABLE, FROM_ZERO
from synergy_core.performance.planner.tuning import OPTIMIZERS


@dataclass(frozen=True, slots=True)
class Stated:
    """What a file says about a training.

    settings: by key of the command `plan`; also accumulation, micro-batches per step. software: the training software
    that the file chooses; empty: the format's first. changed: fields of the software that the file sets to other
    values, or functions of the architecture that give them. assumed: by key, what the file leaves to the user: the
    value unless the user types another (None: there is none), and a sentence. not_modelled: options of the file that
    predictions leave out, as written.
    """

    settings: Mapping[str, Any]
    software: str = ""
    changed: Mapping[str, Any] = field(default_factory=dict)
    assumed: Mapping[str, tuple[int | None, str]] = field(default_factory=dict)
    not_modelled: tuple[str, ...] = ()

    def joined(self, other: Stated) -> Stated:
        """What this file and one that it names say together. Raises InputError if both set an option differently."""
        for key in self.settings.keys() & other.settings.keys():
            if self.settings[key] != other.settings[key]:
                raise InputError(
                    f"{key.replace('_', ' ')} is {self.settings[key]} here, but {other.settings[key]} in the file that "
                    f"it names; make them equal."
                )
        settings = {**self.settings, **other.settings}
        stated = settings.keys() | ({"batch"} if "accumulation" in settings else set())
        assumed = {key: why for key, why in {**other.assumed, **self.assumed}.items() if key not in stated}
        phrases = tuple(dict.fromkeys((*self.not_modelled, *other.not_modelled)))
        return Stated(settings, self.software or other.software, {**self.changed, **other.changed}, assumed, phrases)

    def completed(self, typed: Mapping[str, Any], gpus: int, replacing: Collection[str] = ()) -> dict[str, Any]:
        """Merges the settings of a file with those that the user typed for the command `plan`.

        typed: by name; None: not typed. replacing: names of typed settings that may replace the file's. Raises
        InputError if the file and the user contradict each other in another setting, and if neither states the
        micro-batch.
        """
        settings = {key: value for key, value in self.settings.items() if key not in replacing}
        for key, value in settings.items():
            if typed.get(key) not in (None, value):
                raise InputError(f"already sets {key} to {value}; leave {key}= out.")
        result = settings | {key: value for key, value in typed.items() if value is not None}
        for key, (assumed, _) in self.assumed.items():
            if assumed is not None:
                result.setdefault(key, assumed)
        model_parallel = result.get("tensor", 1) * result.get("pipeline", 1)
        data = max(gpus // (model_parallel * result.get("context", 1)), 1)
        steps = result.pop("accumulation", None)
        if "micro_batch" not in result and steps and "batch" in result:
            result["micro_batch"] = max(result["batch"] // (steps * data), 1)
        if "micro_batch" not in result:
            why = self.assumed.get("micro_batch", (None, "sets no micro-batch"))[1]
            raise InputError(f"{why}; type micro_batch=, samples per GPU and pass, such as micro_batch=1.")
        share = result["micro_batch"] * data
        if steps and result.setdefault("batch", share * steps) != share * steps and "batch" not in replacing:
            raise InputError(
                f"micro-batches of {result['micro_batch']} × {steps} accumulated × {data} replicas are a batch of "
                f"{share * steps}, not {result['batch']}; make them equal."
            )
        result.setdefault("batch", share)
        if gpus == model_parallel:  # Launch scripts often set ZeRO whatever the degrees; without replicas, it is idle.
            result["zero"] = 0
        return result


def whole_plan(gpus: int, **stated: Any) -> dict[str, Any]:
    """The settings of a file that states every degree, 1 by default. Settings that are None are left out.

    Raises InputError if the degrees do not divide the GPUs, or the micro-batches of all replicas the batch."""
    settings = dict.fromkeys(FIXABLE, 1) | dict.fromkeys(FROM_ZERO, 0)
    settings |= {key: value for key, value in stated.items() if value is not None}
    factors = {name: settings[name] for name in ("tensor", "pipeline", "context")}
    replica = prod(factors.values())
    if gpus % replica:
        words = " × ".join(f"{name} {degree}" for name, degree in factors.items())
        raise InputError(f"{words} = {replica} GPUs for one replica, which does not divide gpus={gpus}.")
    data, micro_batch = gpus // replica, settings["micro_batch"]
    batch = settings.setdefault("batch", data * micro_batch)
    if batch % (data * micro_batch):
        raise InputError(
            f"a batch of {batch} is not a multiple of {data} replicas × {micro_batch} per micro-batch; "
            f"use {-(-batch // (data * micro_batch)) * data * micro_batch}."
        )
    # Launch scripts often set sequence parallelism whatever the degrees.
    return settings | {"data": data, "sequence": int(settings["sequence"] and settings["tensor"] > 1)}


@cache
def rules(form: str) -> Mapping[str, Any]:
    """What the options of a form mean, from its file in catalog/options/, and from that of the form it is `like`."""
    own = {"tables": [], "settings": {}, "known": [], **read_yaml(CATALOG / "options" / f"{form}.yaml")}
    if "like" in own:
        base = rules(own["like"])
        own |= {"settings": base["settings"] | own["settings"], "known": own["known"] + base["known"]}
    return own


def content_of(text: str) -> dict[str, Any]:
    """The keys and values of a text in JSON or YAML; empty for any other text."""
    import yaml  # type: ignore[import-untyped]

    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = yaml.safe_load(text)
        except yaml.YAMLError:
            found = None
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else {}


def file_beside(folder: Path, name: str) -> dict[str, Any]:
    """The keys and values of a file that another file names, looked for from its folder upwards and by its bare name.

    Raises InputError if there is none."""
    places = [*(each / name for each in (folder, *folder.absolute().parents)), folder / Path(name).name]
    path = next((each for each in places if each.is_file()), None)
    if path is None:
        raise InputError(f"names {name}, which is not there; put {Path(name).name} into {folder}.")
    if not (content := content_of(path.read_text(encoding="utf-8", errors="replace"))):
        raise InputError(f"names {path}, which is neither JSON nor YAML.")
    return content


def arguments_of(words: Sequence[str]) -> dict[str, list[str]]:
    """The options of a command line, `--name value …` or `--name=value`, and the words after each.

    A word with brackets, such as a pattern of the shell's `case`, is no option; `)` ends an array of a script."""
    result: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") or word == ")":
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            if re.match(r"\w[^()]*$", name):
                result[name] = values
        else:
            values.append(word)
    return result


OFF: tuple[Any, ...] = (None, False, "", "no", "none", "false", [], 0)
"""Values of options that are not in use."""


class Options(dict[str, Any]):
    """The options of a file by `name` or `table.name`. A reader takes an option out when it has read it."""

    def __init__(self, content: Mapping[str, Any], form: str) -> None:
        """form: whose rules they have. Raises InputError for another value where the form has a table."""
        super().__init__(_flat(content))
        self.rules = rules(form)
        for table in self.rules["tables"]:
            if self.get(table):
                raise InputError(f"{table}: {self[table]}; expected a table of options.")

    def settings(self) -> dict[str, Any]:
        """Takes the settings that options state by themselves, in the words of `plan`: whole numbers and optimizer."""
        result: dict[str, Any] = {}
        for setting, names in self.rules["settings"].items():
            take = self._optimizer if setting == "optimizer" else self.whole
            values = [value for name in names if (value := take(name))]
            result |= {setting: values[0]} if values else {}
        return result

    def whole(self, name: str) -> int | None:
        """Takes a whole number from 1; None if it is missing or `auto`. Raises InputError for anything else."""
        value = self.pop(name, None)
        if value in (None, "auto"):
            return None
        if isinstance(value, bool) or not str(value).isdecimal() or not int(value):
            raise InputError(f"{name}: {value}; expected a whole number from 1, or auto.")
        return int(value)

    def _optimizer(self, name: str) -> str | None:
        """Takes an optimizer; None for fp32 AdamW, which is the default. One that is not modelled is left."""
        written = str(self.get(name, "")).lower()
        known = (key for key, each in OPTIMIZERS.items() if each.words and re.fullmatch(each.words, written))
        if (found := next(known, None)) is not None:
            del self[name]
        return None if found == "adamw" else found

    def not_modelled(self, words: str = "{}: {}") -> tuple[str, ...]:
        """The options in use that nobody took and that change time or memory, as written.

        The form's `known` options do not: each is a regular expression of `name` or `name=value`, in lower case. words:
        how an option is written."""
        known, result = re.compile("|".join(self.rules["known"])), []
        for name, value in self.items():
            used = (value.lower() if isinstance(value, str) else value) not in OFF
            if used and not any(map(known.fullmatch, (name.lower(), f"{name}={value}".lower()))):
                result.append(words.format(name, value))
        return tuple(result)


def _flat(given: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (`table.key`, value) for the values of nested mappings."""
    for key, value in given.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
