"""CPUs and memory that a row of `sacct` asks for.

CPUs: `cpu` of ReqTRES, else of AllocTRES, else ReqCPUS, NCPUS, AllocCPUS. Memory: `mem` of ReqTRES, else of AllocTRES,
both of the whole job, else ReqMem: of each node (`4Gn`), of each CPU (`4Gc`), or since Slurm 21.08 of the whole job
(`4G`). Suffixes are powers of 1,024, and none is M; 0 stands for all that a node has, and is no amount. What was asked
for goes before what was given: a job that asked for one CPU and got a node (--exclusive) needs one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from synergy_runs.traces._values import BadValueError, is_missing, shown
from synergy_runs.traces.rows import UNKNOWN

_TRES = ("ReqTRES", "AllocTRES")
_CPUS = ("ReqCPUS", "NCPUS", "AllocCPUS")
_NODES = ("NNodes", "ReqNodes", "AllocNodes")
_REQ_MEM = "ReqMem"
COLUMNS = (*_TRES, *_CPUS, *_NODES, _REQ_MEM)
"""What is read here, each where the output has it."""

_MEMORY = re.compile(r"(\d{1,15}(?:\.\d*)?)([KMGTP]?)", re.ASCII | re.IGNORECASE)
_BYTES = {"K": 2**10, "M": 2**20, "": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}


def demands(values: Mapping[str, str]) -> tuple[float, float]:
    """(CPUs, bytes) of the whole job by its columns, NaN where they do not say. Raises BadValueError."""
    cpus = _first_count("cpu", _CPUS, values)
    for column in _TRES:
        text = tres(values[column], "mem")
        if not is_missing(text):
            return cpus, memory_bytes(text, column, f"mem={text}") or UNKNOWN
    text = values[_REQ_MEM].strip()
    if is_missing(text):
        return cpus, UNKNOWN
    amount, of_each = text, 1.0
    if text.endswith("n"):
        amount, of_each = text[:-1], _first_count("node", _NODES, values)
    elif text.endswith("c"):
        amount, of_each = text[:-1], cpus
    return cpus, memory_bytes(amount, _REQ_MEM, text) * of_each or UNKNOWN


def tres(text: str, name: str) -> str:
    """The value of `name` in `billing=8,cpu=8,mem=64G,node=1`; "" where it is not named."""
    for item in text.split(","):
        key, _, value = item.strip().partition("=")
        if key == name:
            return value
    return ""


def memory_bytes(text: str, column: str, whole: str) -> float:
    """Bytes in `64G`, `62.50G`, `4096M`. whole: what an error shows."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise BadValueError(column, shown(whole), "an amount of memory such as 64G, or 4Gn or 4Gc in ReqMem")
    return float(found[1]) * _BYTES[found[2].upper()]


def _first_count(name: str, columns: tuple[str, ...], values: Mapping[str, str]) -> float:
    """`name` of the first TRES that has it, else the first of the columns that has a value; NaN where none does."""
    counts = [(column, tres(values[column], name), f"{name}=") for column in _TRES]
    counts += [(column, values[column].strip(), "") for column in columns]
    for column, text, before in counts:
        if is_missing(text):
            continue
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
            raise BadValueError(column, shown(before + text), f"a count of {name}s, at least 1")
        return float(text)
    return UNKNOWN
