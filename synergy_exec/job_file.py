"""Job files: the YAML that a user submits. Every key is checked before anything runs."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog import yaml_fault
from synergy_exec.plain import plain
from synergy_exec.settings import Precision
from synergy_runs.inputs.keys import COUNT, NOT_NEGATIVE, POSITIVE, Bounds, build, key, typed

_CLASS = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")
MOST_BYTES = 100_000
"""Maximum size of a job file. A larger file must be something else, given by mistake."""
MOST_NAME, MOST_PATH, MOST_WORDS, MOST_WORD, MOST_SAID = 200, 1_000, 200, 20_000, 300
"""Maximum characters of a name and of a path, words of a command, and characters of a word and of an error message."""
MOST_LEVELS = 20
MOST_SAMPLES, MOST_WORK = 10**9, 1e15
"""Maximum samples of a batch and maximum work: arithmetic stays exact within these."""
DEFAULT_COMMAND_S = 3_600.0
"""Assumed run time of a command whose job file has neither `work` nor `max_seconds`."""


def _text(most: int, words: str) -> Bounds:
    return Bounds(f"{words}, at most {most} visible characters", lambda text: _seen(text, most))


def _seen(text: str, most: int) -> bool:
    return len(text) <= most and text.isprintable()


def _is_word(text: str) -> bool:
    return len(text) <= MOST_WORD and text.translate({9: None, 10: None}).isprintable()


def _within(least: float, most: float, what: str) -> Bounds:
    return Bounds(f"{what} from {least:,g} to {most:,g}", lambda value: least <= value <= most)


_NAME = Bounds("a name of 1 to 200 visible characters", lambda name: bool(_seen(name, MOST_NAME) and name.strip()))
_OTHER_NAME, _PATH = _text(MOST_NAME, "a name"), _text(MOST_PATH, "a file or a folder")
_A_CLASS = Bounds(
    "package.module:Class or path/file.py:Class",
    lambda text: not text or (_CLASS.fullmatch(text) is not None and _seen(text, MOST_PATH)),
)
_COMMAND = Bounds(
    f"a list of words, such as [torchrun, train.py]: a program first, at most {MOST_WORDS}, each of at most "
    f"{MOST_WORD:,} visible characters, line ends and tabs",
    lambda words: not words or (len(words) <= MOST_WORDS and bool(words[0].strip()) and all(map(_is_word, words))),
)
_VARIABLE = re.compile(r"(?!SYNERGY_|\w+_VISIBLE_DEVICES$)[A-Za-z_]\w*")
_ENVIRONMENT = Bounds(
    "variables with texts or numbers, such as {WANDB_MODE: offline} (true and false in quotes); SYNERGY_* and "
    "*_VISIBLE_DEVICES are set for each run",
    lambda given: all(
        _VARIABLE.fullmatch(str(name)) and type(value) in (str, int, float) and _is_word(str(value))
        for name, value in given.items()
    ),
)
_SCRIPT = re.compile(r"\S+\.(?:py|sh|bash|zsh|pl|R|jl|lua|rb|js)")
_SAMPLES = _within(1, MOST_SAMPLES, "samples")
MAX_ARRAY = 1_000
_NUMBERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
_ARRAY = Bounds(
    f"numbers such as 0-9 or 1,4,7-9, {MAX_ARRAY:,} at most",
    lambda text: not text or 0 < sum(map(len, _ranges(text))) <= MAX_ARRAY,
)


def _ranges(text: str) -> list[range]:
    """The ranges of numbers in an array; empty ones for anything else."""
    found = [_NUMBERS.fullmatch(each) for each in text.split(",")]
    return [range(int(each[1]), int(each[2] or each[1]) + 1) for each in found if each] if all(found) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedClass:
    """The class of a job that Synergy trains, and how it computes."""

    job_class: str = key("`package.module:Class` or `/path/file.py:Class`, a `TrainingJob`", bounds=_A_CLASS)
    arguments: dict[str, Any] = key("arguments of the class's constructor, by name", {})
    weights: str = key("file with the initial state_dict, as safetensors or from torch.save", "", _PATH)
    memory_gb: float = key(
        "limit of a rank's memory in GB, without Python and its libraries: plans that were measured to need more are "
        "not used; 0: none",
        0.0,
        _within(0, 1e6, "GB"),
    )
    precision: Precision = key("format in which the class computes; auto: that of the run", "auto")
    compile: bool = key("whether torch.compile compiles the class's blocks, or its model if it names none", False)
    tensorboard: bool = key("whether to write TensorBoard's event files into `tensorboard` in the job's folder", False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command: any training script. It runs once on each of its nodes."""

    words: list[str] = key(
        "words of the command; `{folder}`, `{slots}` and `{array}` are its folder, its slots and its number"
    )
    directory: str = key("folder in which the command runs", "", _PATH)
    env: dict[str, Any] = key("environment variables, beside those of the controller", {}, _ENVIRONMENT)
    venv: str = key("folder of a virtual environment, whose programs the command finds first", "", _PATH)
    conda: str = key("name or folder of a conda environment, whose programs the command finds first", "", _PATH)
    resume_command: list[str] = key("words at every start but the first; []: the same words", [], _COMMAND)
    resume_if: str = key("file without which `resume_command` is not used, such as out/ckpt.pt", "", _PATH)
    grace_s: float = key(
        "seconds from SIGTERM to SIGKILL when the command is stopped", 30.0, _within(0, 600, "seconds")
    )
    sigterm_to: Literal["all", "first"] = key(
        "processes that get SIGTERM: all, or the first alone, which tells the others itself", "all"
    )
    exit_0_when_stopped: Literal["auto", "done", "paused"] = key(
        "what exit code 0 means after SIGTERM: the command is done, or it saved and is started again (paused); auto: "
        "paused if it wrote a file in its folder or its directory after SIGTERM, or printed a line with the word "
        "SIGTERM, else done",
        "auto",
    )
    retries: int = key("number of new starts after errors without a step in between", 0, COUNT)
    retry_exit_codes: list[int] = key("exit codes after which `retries` counts; []: every one but 0", [])
    hang_s: float = key(
        "seconds without a reported step after which the command counts as hung; 0: never", 0.0, NOT_NEGATIVE
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job as its user describes it: either a class or a command.

    The work of a command is the user's estimate of its run time in seconds or, if it may run on `min_slots` to
    `max_slots` slots, its number of steps.
    """

    name: str = key(
        "name; jobs with the same name, class and arguments share what was learned about them", bounds=_NAME
    )
    work: float = key(
        "iterations at the initial batch until the job is done",
        bounds=Bounds(f"a number above 0, {MOST_WORK:g} at most", lambda work: 0 < work <= MOST_WORK),
    )
    initial_batch: int = key("samples per step for which the learning rate was tuned", bounds=_SAMPLES)
    max_batch: int = key("largest batch that the job may use", bounds=_SAMPLES)
    batch: int = key(
        "batch under policies that do not choose it, or samples of each step of a command; 0: the initial batch",
        0,
        _within(0, MOST_SAMPLES, "samples"),
    )
    slots: int = key("number of slots under policies that do not choose it", 1, POSITIVE)
    min_slots: int = key("smallest number of slots on which a command runs; 0: `slots`", 0, COUNT)
    max_slots: int = key("largest number of slots on which a command runs; 0: `slots`", 0, COUNT)
    max_seconds: float = key("limit of the run time over all runs of the job, in seconds; 0: none", 0.0, NOT_NEGATIVE)
    code: Literal["auto", "copy", "in_place"] = key(
        "where the job's code runs: in a copy made at submission (copy), which is refused if it is too large, in its "
        "own folder (in_place), or in a copy unless it is too large (auto)",
        "auto",
    )
    array: str = key(
        "numbers such as 0-9 or 1,4,7-9: a command is submitted once for each, which is `{array}` in its words",
        "",
        _ARRAY,
    )
    after: list[str] = key("names or numbers of jobs that must be done before this one starts", [])
    user: str = key("name of the job's user", "", _OTHER_NAME)
    virtual_cluster: str = key("virtual cluster whose quota the job uses", "", _OTHER_NAME)
    priority: int = key(
        "priority; higher runs sooner, under policies that read it", 0, _within(-1_000, 1_000, "a priority")
    )
    trained: TrainedClass | None = key("the class, if the job is one", None)
    command: Command | None = key("the command, if the job is one", None)

    @property
    def counts_steps(self) -> bool:
        """Whether this is a command whose work is in the steps that it reports, because its slots may change."""
        return self.command is not None and self.min_slots < self.max_slots

    @property
    def precision(self) -> Precision:
        """The format in which the job computes; auto for a command, which chooses for itself."""
        return "auto" if self.trained is None else self.trained.precision

    @property
    def title(self) -> str:
        """The name under which it is submitted."""
        return f"{self.name}-{self.array}" if self.array else self.name

    def each(self) -> list[JobFile]:
        """The jobs that it stands for: one for each number of its array, or itself."""
        numbers = dict.fromkeys(number for each in _ranges(self.array) for number in each) if self.array else ()
        return [dataclasses.replace(self, array=str(number)) for number in numbers] or [self]

    @property
    def application(self) -> str:
        """Identifies what its jobs have in common: name, class, arguments, and how it computes if that is special."""
        one = self.trained or TrainedClass(job_class="")
        arguments = json.dumps(self.command.words if self.command else one.arguments, sort_keys=True, default=str)
        how = [*([one.precision] if one.precision != "auto" else []), *(["compiled"] if one.compile else [])]
        return " ".join([self.name, one.job_class, arguments, *how])

    def values(self) -> dict[str, Any]:
        """The job as plain values, as in its YAML file; `job_of` reads them."""
        common = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        of_class, of_command = common.pop("trained"), common.pop("command")
        for name in _LIMITS_OF_CLASSES if of_command else _LIMITS_OF_COMMANDS:
            del common[name]
        own = dataclasses.asdict(of_command or of_class)
        return {_TYPED.get(name, name): value for name, value in (own | common).items()}


_REQUIRED = ("class", "initial_batch", "work")
_TYPED = {"job_class": "class", "words": "command"}
"""What users type for fields that have another name here."""
_LIMITS_OF_CLASSES, _LIMITS_OF_COMMANDS = ("initial_batch", "max_batch"), ("min_slots", "max_slots", "array")
"""Keys of `JobFile` that only a class, or only a command, has."""


def _keys_of(part: type) -> list[str]:
    return [_TYPED.get(each.name, each.name) for each in dataclasses.fields(part)]


def read_job_file(path: Path, overrides: Sequence[str] = ()) -> JobFile:
    """Reads a YAML file; paths in `class`, `directory` and `weights` are relative to its folder. Raises InputError.

    overrides: words such as slots=2 or arguments.width=64, which count before the file.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: {path.stat().st_size:,} bytes; expected a job file of a few lines.")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        for word in overrides:
            name, _, value = word.partition("=")
            *outer, last = name.split(".")
            inner = values
            for each in outer:
                inner = inner.setdefault(each, {})
            inner[last] = yaml.safe_load(value)
    except (AttributeError, TypeError):
        raise InputError(f"{path}: {' '.join(overrides)}: expected keys of the job file and their values.") from None
    except OSError as error:
        raise InputError(f"{path}: the job file cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {plain(yaml_fault(error))}.") from error
    job = job_of(values, str(path))
    found: dict[str, Any] = {}
    if (command := job.command) is not None:
        found["directory"] = str((path.parent / command.directory).resolve())
        if command.venv:
            found["venv"] = os.path.abspath(path.parent / command.venv)
        if command.conda:
            found["conda"] = str(_conda_prefix(command.conda, path))
        return dataclasses.replace(job, command=dataclasses.replace(command, **found))
    assert job.trained is not None
    where, _, name = job.trained.job_class.rpartition(":")
    if where.endswith(".py"):
        found["job_class"] = f"{_beside(path, 'class', where)}:{name}"
    if job.trained.weights:
        found["weights"] = str(_beside(path, "weights", job.trained.weights))
    return dataclasses.replace(job, trained=dataclasses.replace(job.trained, **found))


def _conda_prefix(given: str, job_file: Path) -> Path:
    """The folder of a conda environment. Raises InputError that says where it was looked for."""
    if "/" in given:
        return Path(os.path.abspath(job_file.parent / Path(given).expanduser()))
    tools = [os.environ.get("CONDA_EXE"), *map(shutil.which, ("conda", "mamba", "micromamba"))]
    roots = [Path(tool).resolve().parents[1] for tool in tools if tool]
    roots += [Path(os.environ[name]) for name in ("MAMBA_ROOT_PREFIX", "CONDA_PREFIX") if os.environ.get(name)]
    roots = [root.parents[1] if root.parent.name == "envs" else root for root in (*roots, Path.home() / ".conda")]
    places = list(dict.fromkeys(root if given == "base" else root / "envs" / given for root in roots))
    for place in places:
        if (place / "bin" / "python").exists():
            return place
    looked = ", ".join(map(str, places))
    raise InputError(f"{job_file}: conda={given}: looked for {looked}; none is there. Write the environment's folder.")


def check_folders(command: Command) -> None:
    """Checks that the folders of a command are there. Raises InputError."""
    for name, within in (("directory", "."), ("venv", "bin/python"), ("conda", "bin/python")):
        folder = getattr(command, name)
        if folder and not os.path.isabs(folder):
            raise InputError(f"{name}={folder}: expected a path from /; the command submit makes it one.")
        if folder and not Path(folder, within).exists():
            raise InputError(f"{name}={folder}: there is no {Path(folder, within)} on {os.uname().nodename}.")


def _beside(job_file: Path, key: str, given: str) -> Path:
    found = (job_file.parent / given).resolve()
    if not found.is_file():
        raise InputError(f"{job_file}: {key}: {found} is no file.")
    return found


def job_of(values: Any, source: str) -> JobFile:
    """Makes a job from plain values. source: for error messages. Raises InputError."""
    try:
        if not isinstance(values, Mapping):
            raise InputError(f"expected a mapping with {', '.join(_REQUIRED)}; got {_type_name(values)}.")
        _check_plain(values)
        given = {str(name): value for name, value in values.items()}
        if "gpus" in given:
            if "slots" in given:
                raise InputError("gpus is another name of slots; give one of the two.")
            given["slots"] = given.pop("gpus")
        common = [name for name in _keys_of(JobFile) if name not in ("trained", "command")]
        known = dict.fromkeys((*_keys_of(TrainedClass), *_keys_of(Command), *common))
        if odd := [name for name in given if name not in known]:
            raise unknown("key", odd[0], known)
        job = _of_command(given) if "command" in given else _of_class(given)
        _check_batches(job)
    except InputError as error:
        raise InputError(f"{source}: {plain(str(error), MOST_SAID)}") from None
    return job


def _type_name(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _taken(part: type, given: dict[str, Any]) -> dict[str, Any]:
    """Removes the values of a part's fields, and returns them."""
    return {each.name: given.pop(each.name) for each in dataclasses.fields(part) if each.name in given}


def _of_class(given: dict[str, Any]) -> JobFile:
    """The job that is a class. given: values as typed."""
    for name in _REQUIRED:
        if name not in given:
            raise InputError(f"{name} is missing; a job has {', '.join(_REQUIRED)}, or a command.")
    if odd := [name for name in given if name in (*_keys_of(Command), *_LIMITS_OF_COMMANDS)]:
        raise InputError(f"{odd[0]} is of a command; a job is a class or a command, not both.")
    job_class = given.pop("class")
    usual = {"name": str(job_class).rpartition(":")[2], "max_batch": given["initial_batch"]}
    trained = build(TrainedClass, {"job_class": job_class, **_taken(TrainedClass, given)})
    return dataclasses.replace(build(JobFile, {**usual, **given}), trained=trained)


def _of_command(given: dict[str, Any]) -> JobFile:
    """The job that is a command. given: values as typed."""
    if odd := [name for name in given if name in (*_keys_of(TrainedClass), *_LIMITS_OF_CLASSES)]:
        raise InputError(f"{odd[0]} is of a class; a job is a class or a command, not both.")
    words, slots, limit_s = given.pop("command"), given.get("slots", 1), given.get("max_seconds", 0.0)
    if not isinstance(words, list) or not words or not _COMMAND.hold(words := list(map(str, words))):
        raise InputError(f"command={typed(words)}: expected {_COMMAND.words}.")
    if ("min_slots" in given or "max_slots" in given) and not ("work" in given and "batch" in given):
        raise InputError("min_slots and max_slots need work, in steps, and batch, the samples of each step.")
    if given.get("venv") and given.get("conda"):
        raise InputError("venv and conda are both given; a command runs in one environment.")
    batch = given.get("batch") or (slots if isinstance(slots, int) and slots > 0 else 1)
    work = limit_s if isinstance(limit_s, int | float) and limit_s > 0 else DEFAULT_COMMAND_S
    usual = {"name": _name_of(words), "work": work, "initial_batch": batch, "max_batch": batch}
    limits = {name: given.get(name) or slots for name in ("min_slots", "max_slots")}
    command = build(Command, {"words": words, **_taken(Command, given)})
    return dataclasses.replace(build(JobFile, {**usual, **given, **limits}), command=command)


def _name_of(words: list[str]) -> str:
    """The command's script, or the module after -m, or its program."""
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    scripts = [each for each in words if _SCRIPT.fullmatch(each)]
    return plain(Path([*scripts, *module, words[0]][0]).name, MOST_NAME)


def _check_plain(values: Any) -> None:
    """Checks that values are plain, finite, and not excessively many or deep, for instance by YAML's aliases."""
    level, seen = [values], 0
    for _ in range(MOST_LEVELS):
        seen += len(level)
        if seen > MOST_BYTES:
            break
        for value in level:
            if isinstance(value, float) and not math.isfinite(value):
                raise InputError(f"{value} is in it; expected finite numbers.")
            if not isinstance(value, Mapping | list | str | int | float | NoneType):
                raise InputError(
                    f"{typed(value)} is {_type_name(value)}; expected texts, numbers, true, false, "
                    "null, lists and mappings. Write it in quotes, as a text."
                )
        level = [each for value in level if isinstance(value, Mapping | list) for each in _inside(value)]
        if not level:
            return
    raise InputError(f"expected at most {MOST_LEVELS} levels of lists and mappings, and no endless ones.")


def _inside(value: Mapping[Any, Any] | list[Any]) -> Iterable[Any]:
    return value.values() if isinstance(value, Mapping) else value


def _check_batches(job: JobFile) -> None:
    if job.command:
        if not job.min_slots <= job.slots <= job.max_slots <= job.max_batch:
            raise InputError(
                f"min_slots={job.min_slots}, slots={job.slots}, max_slots={job.max_slots}, batch={job.max_batch}; "
                "expected each to be at least as large as the one before."
            )
        return
    if job.max_batch < job.initial_batch:
        raise InputError(
            f"max_batch={job.max_batch} is below initial_batch={job.initial_batch}; expected as much or more."
        )
    if job.batch and not job.initial_batch <= job.batch <= job.max_batch:
        raise InputError(
            f"batch={job.batch}; expected {job.initial_batch} to {job.max_batch}, initial_batch to max_batch."
        )
    if job.slots > job.max_batch:
        raise InputError(f"slots={job.slots}; max_batch={job.max_batch} gives each a sample only up to that.")
    batch = job.batch or job.initial_batch
    divided = -(-batch // job.slots) * job.slots
    if divided > job.max_batch:
        raise InputError(
            f"a batch of {batch} does not divide among slots={job.slots}, and max_batch={job.max_batch} leaves no room "
            f"for {divided}. Set max_batch to {divided} or more, or ask for slots that divide {batch}."
        )
