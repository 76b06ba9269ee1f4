"""What a rank makes of the CPUs that it was given."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

import torch

from synergy_exec.training.supply import Supply
from synergy_exec.worker import groups


def move(cores: Collection[int], cpus: float) -> None:
    """Binds this process and its process group to these cores.

    cpus: how many cores are its own. It computes with that many threads, at least one.
    """
    groups.pin(os.getpid(), cores)
    torch.set_num_threads(max(1, int(cpus)))


def load(supply: Supply, cpus: float) -> None:
    """As many loaders as keep that many CPUs busy. The model computes in one thread beside them: several would wait
    for each other whenever a loader has taken the core of one.
    """
    if supply.loads:
        supply.loaders = max(1, math.ceil(cpus))
        torch.set_num_threads(1)
