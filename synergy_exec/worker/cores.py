"""What a rank makes of the CPUs that it was given."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

import torch

from synergy_exec.worker import sessions


def use(cores: Collection[int], cpus: float) -> None:
    """This process, the leader of its session, and all that it has started run on these cores alone.

    cpus: how many of them are its own; as many threads compute, at least one.
    """
    sessions.pin(os.getpid(), cores)
    torch.set_num_threads(max(1, int(cpus)))


def loaders(cpus: float) -> int:
    """How many processes keep that many CPUs busy; at least one."""
    return max(1, math.ceil(cpus))
