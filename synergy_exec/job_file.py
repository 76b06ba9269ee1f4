"""A job file: what a user submits, in YAML. Every key is checked before anything runs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from synergy_core.errors import InputError, unknown

_CLASS = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")
MOST_BYTES = 100_000
"""A job file beyond this is something else given by mistake."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """One job as its user describes it.

    job_class: `package.module:Class` or `/path/file.py:Class`, a `TrainingJob`. arguments: of its constructor, by
    name. name: what observations are shared under, with class and arguments. initial_batch: samples a step at which
    its learning rate was tuned; max_batch: the largest it may use; batch: what policies without adaptation train at.
    work: iterations at the initial batch until it is done. slots: asked for; adaptive policies choose.
    """

    job_class: str
    name: str
    initial_batch: int
    max_batch: int
    work: float
    arguments: dict[str, Any] = field(default_factory=dict)
    batch: int = 0
    slots: int = 1

    def values(self) -> dict[str, Any]:
        """The job as in its YAML file, in plain values; `job_of` reads them back."""
        result = dataclasses.asdict(self)
        return {"class": result.pop("job_class"), **result}


_KEYS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "class": (str, "package.module:Class or path/file.py:Class"),
    "arguments": (Mapping, "a mapping {name: value}"),
    "name": (str, "a text"),
    "initial_batch": (int, "a whole number of samples"),
    "max_batch": (int, "a whole number of samples"),
    "batch": (int, "a whole number of samples"),
    "work": ((int, float), "a number of iterations at the initial batch"),
    "slots": (int, "a whole number"),
}
_REQUIRED = ("class", "initial_batch", "work")


def read_job_file(path: Path) -> JobFile:
    """The job in a YAML file; a path in `class` counts from the file's folder. Raises InputError."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: {path.stat().st_size:,} bytes; expected a job file of a few lines.")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: the job file cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    job = job_of(values, str(path))
    where, _, name = job.job_class.rpartition(":")
    if where.endswith(".py"):
        found = (path.parent / where).resolve()
        if not found.is_file():
            raise InputError(f"{path}: class: {found} is no file.")
        job = dataclasses.replace(job, job_class=f"{found}:{name}")
    return job


def job_of(values: Any, source: str) -> JobFile:
    """A job of plain values. source: for error messages. Raises InputError with what was got and expected."""
    if not isinstance(values, Mapping):
        raise InputError(f"{source}: expected a mapping with {', '.join(_REQUIRED)}; got {_shown(values)}.")
    for name, value in values.items():
        if name not in _KEYS:
            raise unknown(f"key in {source}", str(name), _KEYS)
        kind, meaning = _KEYS[name]
        if not isinstance(value, kind) or isinstance(value, bool):
            raise InputError(f"{source}: {name}={_shown(value)}; expected {meaning}.")
    for name in _REQUIRED:
        if name not in values:
            raise InputError(f"{source}: {name} is missing; expected {_KEYS[name][1]}.")
    given = dict(values)
    job_class = given.pop("class")
    if not _CLASS.fullmatch(job_class):
        raise InputError(f"{source}: class={_shown(job_class)}; expected {_KEYS['class'][1]}.")
    arguments = {str(name): value for name, value in given.pop("arguments", {}).items()}
    given.setdefault("name", job_class.rpartition(":")[2])
    given.setdefault("max_batch", given["initial_batch"])
    job = JobFile(job_class=job_class, arguments=arguments, **given)
    _check_numbers(job, source)
    return job


def _check_numbers(job: JobFile, source: str) -> None:
    if not job.name.strip():
        raise InputError(f"{source}: name is empty; expected a text.")
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
    if not (math.isfinite(job.work) and job.work > 0):
        raise InputError(f"{source}: work={job.work:g}; expected a number of iterations above 0.")
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
