"""The CPU cores of a rank, and the memory that it uses: of its GPU, or of the machine if it has none."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
from collections.abc import Collection
from pathlib import Path

import torch

from synergy_exec.messages import MemoryUse
from synergy_exec.training.supply import Supply
from synergy_exec.worker import processes


def move(cores: Collection[int], cpus: float) -> None:
    """Binds this process and its descendants to these cores. The process computes with `cpus` threads, at least one."""
    processes.pin(os.getpid(), cores)
    torch.set_num_threads(max(1, int(cpus)))


def load(supply: Supply, cpus: float) -> None:
    """Sets the number of loaders to as many as keep `cpus` CPUs busy.

    The model then computes in one thread, because several threads would wait for each other whenever a loader uses the
    core of one of them.
    """
    if supply.loads:
        supply.loaders = max(1, math.ceil(cpus))
        torch.set_num_threads(1)


_FORGET_PEAK = "5"
"""Writing this to clear_refs resets the kernel's peak of memory (man 5 proc)."""
_THRESHOLD, _LARGE_BYTES = -3, 1 << 20
"""mallopt's M_MMAP_THRESHOLD, and the size from which blocks return to the kernel as soon as they are freed."""


def give_back() -> None:
    """Makes malloc return large blocks to the kernel when they are freed.

    By default malloc keeps them in fragments that fit nothing else, so that sharded parameters, gathered and freed
    layer by layer, use more memory than unsharded ones. New pages cost time, so only jobs short of memory do this.
    """
    with contextlib.suppress(OSError, AttributeError):  # a libc without it
        ctypes.CDLL(None).mallopt(_THRESHOLD, _LARGE_BYTES)


def held_bytes() -> int:
    """Memory of this process, including what it shares with others."""
    return _of_kernel("VmRSS")


def memory_use(bare_bytes: int) -> MemoryUse:
    """The memory of this process, for reports.

    bare_bytes: memory of the process before it loaded the job (Python and its libraries), which does not count. On a
    GPU nothing is subtracted; what CUDA, NCCL and other processes hold there is no room for tensors.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return MemoryUse(used_bytes=max(0, _of_kernel("VmHWM") - bare_bytes))
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return MemoryUse(
        used_bytes=torch.cuda.max_memory_allocated(),
        reserved_bytes=torch.cuda.max_memory_reserved(),
        outside_bytes=outside,
        limit_bytes=total - outside,
    )


def forget() -> None:
    """Resets the peak of memory, for instance after building and loading, or before another micro-batch."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)


def _of_kernel(name: str) -> int:
    found = re.search(rf"{name}:\s*(\d+)", processes.told(os.getpid(), "status"))
    return 1024 * int(found[1]) if found else 0
