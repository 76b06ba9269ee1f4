"""Classes of models by their input data, and the rule that assigns models to jobs for a mix of these classes.

As in the published simulator of Synergy (Mohan et al., OSDI 2022), nothing is random: each job gets the class whose
share of the jobs so far is furthest below its share of the mix, and the models of a class take turns.
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
"""Most image and speech models need more CPUs than their GPUs' share of a node; language models need fewer."""


def in_turn(mix: Sequence[float], jobs: int) -> list[str]:
    """The models of `jobs` jobs, in order. mix: a weight for each of `CLASSES`; a class of weight 0 has no jobs.

    Raises InputError unless there is one weight ≥ 0 for each class and one is above 0.
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
        # (wanted share − share so far) × jobs so far × total is exact for whole weights; the first class wins ties
        at = max(wanted, key=lambda each: mix[each] * job - so_far[each] * total)
        models = CLASSES[at][1]
        chosen.append(models[so_far[at] % len(models)])
        so_far[at] += 1
    return chosen
