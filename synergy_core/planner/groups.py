"""Where the ranks of a plan's groups are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from synergy_core.planner.plan import Plans


class RankGroups:
    """Where the ranks of each group are: tensor innermost, then context, data, pipeline outermost."""

    def __init__(self, plans: Plans, per_node: int) -> None:
        def within(degree: NDArray[np.int64], stride: NDArray[np.int64]) -> NDArray[np.int64]:
            return np.minimum(degree, np.maximum(per_node // stride, 1))

        one = np.ones_like(plans.tensor)
        self.per_node = np.minimum(per_node, plans.gpus)
        self.tensor_within = within(plans.tensor, one)
        self.context_within = within(plans.context, plans.tensor)
        self.data_ranks = plans.data * plans.context
        self.data_within = within(self.data_ranks, plans.tensor)
        self.expert_within = within(plans.expert, plans.tensor)
        self.copies = np.maximum(self.data_ranks // plans.expert, 1)
        self.copies_within = within(self.copies, plans.tensor * plans.expert)
        replica = plans.tensor * plans.context * plans.data
        self.pipeline_within = (replica * plans.pipeline <= per_node) & (per_node % replica == 0)
