"""Chooses rows (configurations), nodes and shares of all jobs together, so that every allocated job can be placed.

`problem` treats identical nodes as one pool with prices. A row pays for the resources that it uses or makes unusable on
its nodes. The solution gives rows, and bounds the utility of all placements. `layout` assigns nodes, exchanges jobs
until their shares fit, and gives idle GPUs to jobs without any. `allocate` chooses the best shares that fit each node,
and repacks nodes that lose much utility. docs/resources.md describes other attempts.
"""

from synergy_core.scheduling.allocator.nodes.allocate import allocate
from synergy_core.scheduling.allocator.nodes.explain import explain_placed
from synergy_core.scheduling.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution, Pieces

__all__ = ["NodeGroups", "NodeProblem", "NodeSolution", "Pieces", "allocate", "explain_placed"]
