"""Copies in the host's memory of what is to be saved, which a thread writes while training goes on.

What is done on a GPU has never run on one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager


def staged(tree: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """The copies, and what to call before they are read.

    From a GPU they are made behind what it has to do already and before what it is told to do next, into pinned memory
    that is kept for the next checkpoint, and nobody waits for them but who reads them: so one at a time is in use.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stager = StateDictStager()
        copies: dict[str, Any] = stager.stage(tree)
        # Else a circle would keep the copies.
        stager.close()  # type: ignore[no-untyped-call]
        return copies, lambda: None
    copies = _pinned().stage(tree, non_blocking=True)
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record()
    return copies, made.synchronize


@cache
def _pinned() -> StateDictStager:
    return StateDictStager(pin_memory=True)
