"""Models by what they learn from, and which model each job of a mix of classes gets.

As in the published simulator of Synergy (Mohan et al., OSDI 2022): nothing is drawn. Each job is of the class whose
share of the jobs so far is furthest below what the mix says, and within a class models take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from synergy_core.errors import InputError

CLASSES = (
    ("image", ("alexnet", "res18", "res50", "mobilenet", "shufflenet")),
    ("language", ("gnmt", "transformer", "lstm")),
    ("speech", ("m5", "deepspeech")),
)
"""Most image and speech models want more CPUs than their GPUs' share of a node, language models fewer."""


def in_turn(mix: Sequence[float], jobs: int) -> list[str]:
    """The models of so many jobs, in order. mix: a weight for each of `CLASSES`; a class of weight 0 has no jobs.

    Raises InputError for a mix that is none.
    """
    names = ", ".join(name for name, _ in CLASSES)
    if len(mix) != len(CLASSES) or not all(0 <= each < math.inf for each in mix) or not sum(mix) > 0:
        raise InputError(
            f"trace.class_mix={list(mix)}: expected {len(CLASSES)} weights ≥ 0 ({names}), one of them above 0, such as "
            "[20,70,10]."
        )
    total = sum(mix)
    wanted = [at for at, weight in enumerate(mix) if weight > 0]
    so_far = [0] * len(CLASSES)
    chosen = []
    for job in range(jobs):
        # (its share − its share so far) × jobs so far × total, so that whole weights stay exact; ties: the first class
        at = max(wanted, key=lambda each: mix[each] * job - so_far[each] * total)
        models = CLASSES[at][1]
        chosen.append(models[so_far[at] % len(models)])
        so_far[at] += 1
    return chosen
