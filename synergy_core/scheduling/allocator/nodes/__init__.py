"""Chooses rows (configurations), nodes and shares of all jobs together, so that every allocated job can be placed.

The files are those of `allocator`, which chooses rows alone: `problem` (`NodeProblem` → `NodeSolution`), `prices`,
`priced` and `explain`; there is no exact method. `prices` treats identical nodes as one pool. A row pays for the
resources that it uses or makes unusable on its nodes. The solution of the pools gives rows, and bounds the utility of
all placements. `layout` assigns nodes, exchanges jobs until their shares fit, and gives idle GPUs to jobs without any.
`priced` then chooses the best shares that fit each node, and repacks nodes that lose much utility. docs/resources.md
describes other attempts.
"""

from synergy_core.scheduling.allocator.nodes.explain import explain
from synergy_core.scheduling.allocator.nodes.priced import solve
from synergy_core.scheduling.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution, Pieces

__all__ = ["NodeGroups", "NodeProblem", "NodeSolution", "Pieces", "explain", "solve"]
