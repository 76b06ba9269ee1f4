"""What an error in a worker means: the job's own, or the echo of another rank's."""

from __future__ import annotations

import errno
import re
import traceback
from pathlib import Path

import torch
from torch import distributed

from synergy_core.errors import InputError

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|not enough memory|out of memory", re.I)
_BROKEN_DEVICE = re.compile(r"uncorrectable (ECC|NVLink) error|hardware stack error", re.I)
"""cudaErrorECCUncorrectable, cudaErrorNvlinkUncorrectable, cudaErrorHardwareStackError (CUDA Runtime API)."""
_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed? ?out|connect|read error|write error|broken pipe)"
    r"|(closed|reset) by peer|NCCL.*(remote|unhandled system|aborted|timeout)|Socket Timeout",
    re.I | re.S,
)
_LONGEST = 600
_OURS = (Path(torch.__file__).parent, Path(__file__).parent, Path(__file__).parents[1] / "training")


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY.search(str(error)))


def disk_full(error: BaseException) -> bool:
    """Whether there was no room for what was to be written: nobody's fault who trains."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def broken_device(error: BaseException) -> bool:
    """Whether the device says that it is broken itself, as CUDA and HIP name such errors."""
    return isinstance(error, RuntimeError) and bool(_BROKEN_DEVICE.search(str(error)))


def from_peers(error: BaseException) -> bool:
    """Whether it may only say that another rank is gone or silent.

    What was raised in the job's own code, or in a library that it calls, is its own, whatever it says: a connection to
    somewhere else may be reset too.
    """
    if not _raised_here(error):
        return False
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_PEER.search(str(error)))


def _raised_here(error: BaseException) -> bool:
    """Whether the innermost line of Python that it passed is torch's or Synergy's: what talks to other ranks is."""
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        innermost = frame.f_code.co_filename
    return not innermost or any(Path(innermost).is_relative_to(each) for each in _OURS)


def sentence(rank: int, doing: str, error: BaseException) -> str:
    """Which rank failed at what, and how; one line of bounded length."""
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or "no message"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return f"rank {rank}, {doing}: {kind}{text}"
