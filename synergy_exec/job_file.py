"""A job file: what a user submits, in YAML. Every key is checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import yaml  # type: ignore[import-untyped]

from synergy_core.catalog import yaml_fault
from synergy_core.errors import InputError, unknown
from synergy_exec.plain import MOST_SHOWN, plain

_CLASS = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")
MOST_BYTES = 100_000
"""A job file beyond this is something else given by mistake."""
MOST_NAME, MOST_CLASS = 200, 1_000
"""Characters."""
MOST_LEVELS = 20
MOST_SAMPLES, MOST_WORK = 10**9, 1e15
"""Of a batch, and iterations: arithmetic stays exact with room to spare."""
MOST_MEMORY_GB = 1_000_000
MOST_PRIORITY = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """One job as its user describes it.

    job_class: `package.module:Class` or `/path/file.py:Class`, a `TrainingJob`. arguments: of its constructor, by
    name. name: what observations are shared under, with class and arguments. initial_batch: samples a step at which
    its learning rate was tuned; max_batch: the largest it may use; batch: what policies without adaptation train at.
    work: iterations at the initial batch until it is done. slots: asked for; adaptive policies choose. weights: a file
    with the state_dict that training begins with, safetensors or of torch.save; "": with what `build_model` draws.
    memory_gb: what a rank may need of its slot's memory while it trains, Python and its libraries aside; plans that
    were measured to need more are not used. 0: whatever there is.
    command: in place of a class: the words of a command, such as [torchrun, train.py], which runs on `slots` slots,
    once on each node, in `directory`. `{slots}` and `{folder}`, the job's own, are filled in. grace_s: that it gets to
    save when it is moved. Its work is the user's estimate of its run time in seconds.
    max_seconds: how long the job may run, in all its runs together; 0: without limit.
    user, virtual_cluster: whose it is and whose quota it counts against; "": nobody's. priority: for policies that
    read it; the higher, the sooner.
    """

    name: str
    initial_batch: int
    max_batch: int
    work: float
    job_class: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    directory: str = ""
    grace_s: float = 30.0
    max_seconds: float = 0.0
    batch: int = 0
    slots: int = 1
    weights: str = ""
    memory_gb: float = 0.0
    user: str = ""
    virtual_cluster: str = ""
    priority: int = 0

    @property
    def application(self) -> str:
        """What jobs of one model have in common: name, class and arguments."""
        arguments = json.dumps(self.command or self.arguments, sort_keys=True, default=str)
        return f"{self.name} {self.job_class} {arguments}"

    def values(self) -> dict[str, Any]:
        """The job as in its YAML file, in plain values; `job_of` reads them back."""
        result = dataclasses.asdict(self)
        for name in _OF_CLASSES if self.command else _OF_COMMANDS:
            del result[name]
        return result if self.command else {"class": result.pop("job_class"), **result}

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> JobFile:
        """The job that gave these `values`. Nothing is checked."""
        given = dict(values)
        if "command" in given:
            return cls(initial_batch=given["slots"], max_batch=given["slots"], **given)
        return cls(job_class=given.pop("class"), **given)


_KEYS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "class": (str, "package.module:Class or path/file.py:Class"),
    "arguments": (Mapping, "a mapping {name: value}"),
    "command": (list, "a list of words, such as [torchrun, train.py]"),
    "directory": (str, "the folder that the command runs in"),
    "grace_s": ((int, float), "seconds"),
    "max_seconds": ((int, float), "seconds, 0 for no limit"),
    "name": (str, "a text"),
    "initial_batch": (int, "a whole number of samples"),
    "max_batch": (int, "a whole number of samples"),
    "batch": (int, "a whole number of samples"),
    "work": ((int, float), "a number of iterations at the initial batch"),
    "slots": (int, "a whole number"),
    "weights": (str, "the file of a state_dict"),
    "memory_gb": ((int, float), "GB of a slot's memory, 0 for whatever there is"),
    "user": (str, "the name of a user"),
    "virtual_cluster": (str, "the name of a virtual cluster"),
    "priority": (int, "a whole number"),
}
_REQUIRED = ("class", "initial_batch", "work")
_OF_CLASSES = ("job_class", "arguments", "initial_batch", "max_batch", "batch", "weights", "memory_gb")
_OF_COMMANDS = ("command", "directory", "grace_s")
MOST_WORDS, MOST_GRACE_S = 200, 600.0
DEFAULT_COMMAND_S = 3_600.0
"""Assumed run time of a command whose job file has neither `work` nor `max_seconds`."""


def read_job_file(path: Path) -> JobFile:
    """The job in a YAML file; paths in `class` and `weights` count from the file's folder. Raises InputError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: {path.stat().st_size:,} bytes; expected a job file of a few lines.")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: the job file cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {plain(yaml_fault(error))}.") from error
    job = job_of(values, str(path))
    if job.command:
        return dataclasses.replace(job, directory=str((path.parent / job.directory).resolve()))
    where, _, name = job.job_class.rpartition(":")
    if where.endswith(".py"):
        job = dataclasses.replace(job, job_class=f"{_beside(path, 'class', where)}:{name}")
    return dataclasses.replace(job, weights=str(_beside(path, "weights", job.weights))) if job.weights else job


def _beside(job_file: Path, key: str, given: str) -> Path:
    found = (job_file.parent / given).resolve()
    if not found.is_file():
        raise InputError(f"{job_file}: {key}: {found} is no file.")
    return found


def job_of(values: Any, source: str) -> JobFile:
    """A job of plain values. source: for error messages. Raises InputError with what was got and expected."""
    if not isinstance(values, Mapping):
        raise InputError(f"{source}: expected a mapping with {', '.join(_REQUIRED)}; got {_shown(values)}.")
    for name, value in values.items():
        if name not in _KEYS:
            raise unknown(f"key in {source}", plain(str(name), MOST_SHOWN), _KEYS)
        kind, meaning = _KEYS[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{source}: {name}={_shown(value)}; expected {meaning}.")
    if "command" in values:
        return _command_of(values, source)
    for name in _REQUIRED:
        if name not in values:
            raise InputError(f"{source}: {name} is missing; expected {_KEYS[name][1]}.")
    _check_plain(values.get("arguments", {}), source)
    if not (len(weights := values.get("weights", "")) <= MOST_CLASS and weights.isprintable()):
        raise InputError(f"{source}: weights={_shown(weights)}; expected {_KEYS['weights'][1]}.")
    given = dict(values)
    job_class = given.pop("class")
    if not (_CLASS.fullmatch(job_class) and job_class.isprintable() and len(job_class) <= MOST_CLASS):
        raise InputError(f"{source}: class={_shown(job_class)}; expected {_KEYS['class'][1]}.")
    arguments = {str(name): value for name, value in given.pop("arguments", {}).items()}
    given.setdefault("name", job_class.rpartition(":")[2])
    given.setdefault("max_batch", given["initial_batch"])
    job = JobFile(job_class=job_class, arguments=arguments, **given)
    _check_numbers(job, source)
    return job


def _command_of(values: Mapping[str, Any], source: str) -> JobFile:
    """A job that is a command."""
    words = values["command"]
    if odd := [name for name in values if name in ("class", *_OF_CLASSES)]:
        raise InputError(f"{source}: {odd[0]} is of a class; a job is a class or a command, not both.")
    if not 0 < len(words) <= MOST_WORDS or not all(
        isinstance(each, str) and each and len(each) <= MOST_CLASS and each.isprintable() for each in words
    ):
        raise InputError(f"{source}: command={_shown(words)}; expected {_KEYS['command'][1]}, {MOST_WORDS} at most.")
    directory = values.get("directory", "")
    if len(directory) > MOST_CLASS or not directory.isprintable():
        raise InputError(f"{source}: directory={_shown(directory)}; expected {_KEYS['directory'][1]}.")
    slots = values.get("slots", 1)
    given = {"name": Path(words[-1]).name[:MOST_NAME], "slots": slots, **values}
    limit_s = values.get("max_seconds", 0.0)
    given.setdefault("work", limit_s if limit_s > 0 else DEFAULT_COMMAND_S)
    job = JobFile(initial_batch=max(1, slots), max_batch=max(1, slots), **given)
    if not 0 <= job.grace_s <= MOST_GRACE_S:
        raise InputError(f"{source}: grace_s={_shown(job.grace_s)}; expected seconds from 0 to {MOST_GRACE_S:g}.")
    _check_numbers(job, source)
    return job


def _check_plain(values: Any, source: str) -> None:
    """That they are plain, finite, and no more or deeper than a person writes, be it by YAML's aliases."""
    level, seen = [values], 0
    for _ in range(MOST_LEVELS):
        seen += len(level)
        if seen > MOST_BYTES:
            break
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{source}: {value} stands in its arguments; expected finite numbers.")
            if not isinstance(value, Mapping | list | str | int | float | NoneType):
                raise InputError(
                    f"{source}: {_shown(value)} is a {type(value).__name__}; expected texts, numbers, true, false, "
                    "null, lists and mappings. Write it in quotes, as a text."
                )
        level = [each for value in level if isinstance(value, Mapping | list) for each in _within(value)]
        if not level:
            return
    raise InputError(f"{source}: expected at most {MOST_LEVELS} levels of lists and mappings, and no endless ones.")


def _within(value: Mapping[Any, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _check_numbers(job: JobFile, source: str) -> None:
    if not job.name.strip():
        raise InputError(f"{source}: name is empty; expected a text.")
    if len(job.name) > MOST_NAME or not job.name.isprintable():
        raise InputError(
            f"{source}: name={plain(job.name, 60)}; expected at most {MOST_NAME} characters on one line, each of which "
            "can be seen."
        )
    for key, name in (("user", job.user), ("virtual_cluster", job.virtual_cluster)):
        if len(name) > MOST_NAME or not name.isprintable():
            raise InputError(f"{source}: {key}={plain(name, 60)}; expected {_KEYS[key][1]}.")
    if abs(job.priority) > MOST_PRIORITY:
        raise InputError(f"{source}: priority={_shown(job.priority)}; expected -{MOST_PRIORITY} to {MOST_PRIORITY}.")
    if max(job.max_batch, job.initial_batch, job.batch) > MOST_SAMPLES:
        raise InputError(f"{source}: a batch of more than {MOST_SAMPLES:,} samples; expected fewer.")
    if job.initial_batch < 1:
        raise InputError(f"{source}: initial_batch={job.initial_batch}; expected at least 1 sample.")
    if job.max_batch < job.initial_batch:
        raise InputError(
            f"{source}: max_batch={job.max_batch} is below initial_batch={job.initial_batch}; expected as much or more."
        )
    if job.batch and not job.initial_batch <= job.batch <= job.max_batch:
        raise InputError(
            f"{source}: batch={job.batch}; expected {job.initial_batch} to {job.max_batch}, initial_batch to max_batch."
        )
    if not 0 < job.work <= MOST_WORK:
        raise InputError(
            f"{source}: work={_shown(job.work)}; expected a number of iterations above 0, {MOST_WORK:g} at most."
        )
    if not 0 <= job.memory_gb <= MOST_MEMORY_GB:
        raise InputError(
            f"{source}: memory_gb={_shown(job.memory_gb)}; expected GB from 0 to {MOST_MEMORY_GB:,}, such as 16."
        )
    if not 0 <= job.max_seconds < math.inf:
        raise InputError(f"{source}: max_seconds={_shown(job.max_seconds)}; expected {_KEYS['max_seconds'][1]}.")
    if job.slots < 1:
        raise InputError(f"{source}: slots={job.slots}; expected at least 1.")
    if job.slots > job.max_batch:
        raise InputError(f"{source}: slots={job.slots}; max_batch={job.max_batch} gives each a sample only up to that.")
    batch = job.batch or job.initial_batch
    divided = -(-batch // job.slots) * job.slots
    if divided > job.max_batch:
        raise InputError(
            f"{source}: a batch of {batch} does not divide among slots={job.slots}, and max_batch={job.max_batch} "
            f"leaves no room for {divided}. Set max_batch to {divided} or more, or ask for slots that divide {batch}."
        )


_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 60


def _shown(value: Any) -> str:
    return plain(_REPR.repr(value), 60)
