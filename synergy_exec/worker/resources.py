"""The CPUs that a rank computes on, and the memory that it holds: of its GPU, or of the machine without one."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from synergy_exec.training.supply import Supply
from synergy_exec.worker import processes


def move(cores: Collection[int], cpus: float) -> None:
    """Binds this process and its process group to these cores.

    cpus: how many cores are its own. It computes with that many threads, at least one.
    """
    processes.pin(os.getpid(), cores)
    torch.set_num_threads(max(1, int(cpus)))


def load(supply: Supply, cpus: float) -> None:
    """As many loaders as keep that many CPUs busy. The model computes in one thread beside them: several would wait
    for each other whenever a loader has taken the core of one.
    """
    if supply.loads:
        supply.loaders = max(1, math.ceil(cpus))
        torch.set_num_threads(1)


_STATUS = Path("/proc/self/status")
_FORGET_PEAK = "5"
"""What makes the kernel's peak begin anew when it is written to clear_refs: man 5 proc."""
_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
"""mallopt's M_MMAP_THRESHOLD, and from what size on blocks go back to the kernel as soon as they are freed."""


def give_back() -> None:
    """From now on large blocks that are freed are nobody's. By default malloc keeps them, cut into pieces that fit
    nothing else: sharded parameters, gathered and freed layer by layer, then hold more than whole ones. Fresh pages
    cost time, so only jobs that are short of memory do this.
    """
    with contextlib.suppress(OSError, AttributeError):  # a libc without it
        ctypes.CDLL(None).mallopt(_THRESHOLD, _LARGE_BYTES)


def held_bytes() -> int:
    """What this process holds of the machine's memory, what it shares with others included."""
    return _of_kernel("VmRSS")


def report(bare_bytes: int) -> dict[str, Any]:
    """The fields of `messages.Report` that say it. bare_bytes: what the process held before it had a job, Python and
    its libraries, which does not count; on a GPU nothing of it lies there.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {"memory_bytes": max(0, _of_kernel("VmHWM") - bare_bytes)}
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {"memory_bytes": torch.cuda.max_memory_allocated(), "memory_limit_bytes": total}


def release() -> None:
    """Returns the memory of a deleted model to the machine and to the GPU."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # a libc without it
        ctypes.CDLL(None).malloc_trim(0)


def forget() -> None:
    """What was held before says nothing of what comes: of building and loading, of another micro-batch."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)


def _of_kernel(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return 0
