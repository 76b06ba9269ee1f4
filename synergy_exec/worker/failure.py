"""What an error in a worker means: the job's own, or the echo of another rank's."""

from __future__ import annotations

import re

import torch
from torch import distributed

from synergy_core.errors import InputError

_OUT_OF_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|not enough memory|out of memory", re.I)
_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|timed? ?out|connect|read error|write error|broken pipe)"
    r"|(closed|reset) by peer|NCCL.*(remote|unhandled system|aborted|timeout)|Socket Timeout",
    re.I | re.S,
)
_LONGEST = 600


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the GPU or of the machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_OUT_OF_MEMORY.search(str(error)))


def from_peers(error: BaseException) -> bool:
    """Whether it may only say that another rank is gone or silent."""
    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_PEER.search(str(error)))


def sentence(rank: int, doing: str, error: BaseException) -> str:
    """Which rank failed at what, and how; one line of bounded length."""
    kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    text = " ".join(str(error).split()) or "no message"
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}…"
    return f"rank {rank}, {doing}: {kind}{text}"
