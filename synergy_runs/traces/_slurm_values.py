"""What Slurm writes in a column: durations, time limits, instants, states, trackable resources."""

from __future__ import annotations

import re
from dataclasses import dataclass

from synergy_runs.traces._values import BadValueError, end_state, instant_s, is_missing, number, shown
from synergy_runs.traces.rows import UNKNOWN

_DURATION = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d{1,2}):(\d{1,2}(?:\.\d+)?)", re.ASCII)
_NO_LIMIT = frozenset({"unlimited", "partition_limit", "infinite", "invalid"})
_GPU = "gres/gpu"

WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
RUNNING = frozenset({"RUNNING", "COMPLETING", "CONFIGURING", "RESIZING", "SIGNALING", "STAGE_OUT", "SUSPENDED"})
_SLICE = re.compile(r"\dg[._-]?\d+gb|mig")
_SHARED = ("gres/shard", "gres/mps")
_NOT_HERE = "and a GPU here is held by one job"
ENDED_BADLY = {"REVOKED": "killed", "LAUNCH_FAILED": "failed", "RECONFIG_FAIL": "failed"}


class PartOfGpuError(BadValueError):
    """Raised for a job that has less than a whole GPU."""


@dataclass(frozen=True, slots=True)
class AskedGpus:
    """How many, and which types are named, in lower case; none where a count is all there is."""

    count: int
    gpu_types: tuple[str, ...]


NO_GPUS = AskedGpus(0, ())


def elapsed_s(text: str, column: str) -> float:
    """Seconds of `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS`, with fractions of a second where present."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise BadValueError(column, shown(text), "a duration such as 1-02:03:04, 02:03:04 or 03:04")
    days, hours, minutes, seconds = found.groups()
    whole = int(days or 0) * 86_400 + int(hours or 0) * 3_600 + int(minutes) * 60
    return whole + float(seconds)


def limit_s(text: str, raw_minutes: str) -> float:
    """The time limit, seconds: TimelimitRaw (minutes) where there is one, else Timelimit; NaN for none."""
    if not is_missing(raw_minutes) and raw_minutes.strip().lower() not in _NO_LIMIT:
        return number(raw_minutes, "TimelimitRaw", "minutes") * 60
    if is_missing(text) or text.strip().lower() in _NO_LIMIT:
        return UNKNOWN
    return elapsed_s(text, "Timelimit")


def time_s(text: str, column: str) -> float | None:
    """Seconds since 1970 of a date or, under SLURM_TIME_FORMAT=%s, of a number; None for Unknown, None and empty."""
    return None if is_missing(text) else instant_s(text, column)


def state(text: str) -> str:
    """The state's first word: `CANCELLED by 1000` is CANCELLED, and `CANCELLED+` is it cut short."""
    words = text.split()
    return words[0].rstrip("+").upper() if words else ""


def ended_as(word: str) -> str:
    """completed, killed or failed for the state of a job that has ended."""
    return ENDED_BADLY.get(word) or end_state(word, "State")


def node_names(text: str) -> list[str]:
    """The nodes of `gpu[01-03,07],login1`; none of an empty column, `None assigned` and what cannot be read."""
    names = []
    for item in re.findall(r"[^,\[\]\s]+(?:\[[^\]]*\][^,\[\]\s]*)?", "" if "assigned" in text else text):
        stem, bracket, rest = item.partition("[")
        if not bracket:
            names.append(item)
            continue
        numbers, _, end = rest.partition("]")
        for part in numbers.split(","):
            low, _, high = part.partition("-")
            high = high or low
            if low.isdigit() and high.isdigit() and len(high) < 7:
                names += [f"{stem}{number:0{len(low)}d}{end}" for number in range(int(low), int(high) + 1)]
    return names


def components(job_id: str) -> tuple[str, int | None]:
    """(job, component) of `105+1`, the second part of heterogeneous job 105; no component for any other job."""
    base, plus, number = job_id.partition("+")
    return (base, int(number)) if plus and number.isascii() and number.isdigit() else (job_id, None)


def gpus(tres: str, column: str) -> AskedGpus:
    """The GPUs of `billing=8,cpu=8,gres/gpu:a100=4,gres/gpu=4,node=1`.

    The untyped count is the total and is not added to the typed ones. Raises PartOfGpuError for MIG slices, which are
    types such as a100_1g.5gb, 1g.10gb or a100-mig, and for shards and mps where no whole GPU stands beside them.
    """
    total: int | None = None
    typed: dict[str, int] = {}
    shared = ""
    for item in tres.split(","):
        name, equals, count = item.strip().partition("=")
        if name.startswith(_SHARED) and count != "0":
            shared = shared or item
        if name != _GPU and not name.startswith(f"{_GPU}:"):
            continue
        if not (equals and count.isascii() and count.isdigit() and len(count) < 10):
            raise BadValueError(column, shown(item), "a count of GPUs such as gres/gpu=4")
        if name == _GPU:
            total = int(count)
            continue
        gpu_type = name[len(_GPU) + 1 :].lower()
        if int(count) and _SLICE.search(gpu_type):
            raise PartOfGpuError(column, shown(item), f"whole GPUs: a MIG slice is part of one, {_NOT_HERE}")
        typed[gpu_type] = typed.get(gpu_type, 0) + int(count)
    count_of_all = sum(typed.values()) if total is None else total
    if shared and not count_of_all:
        raise PartOfGpuError(column, shown(shared), f"whole GPUs: this shares one, {_NOT_HERE}")
    return AskedGpus(count_of_all, tuple(gpu_type for gpu_type, number in typed.items() if number))
