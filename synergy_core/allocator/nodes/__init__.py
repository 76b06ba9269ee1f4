"""Chooses rows, nodes and shares of all jobs of a round at once, so that everything allocated can be placed.

`problem` prices pools of identical nodes and charges rows for what they leave unusable: that gives the rows, and a
bound on what can be placed. `layout` gives GPUs nodes, exchanges jobs until shares fit, and gives idle GPUs to jobs
without any. `allocate` chooses the best shares that fit each node and deals the nodes that lose most again.
docs/resources.md says what else was tried.
"""

from synergy_core.allocator.nodes.allocate import allocate
from synergy_core.allocator.nodes.explain import explain_placed
from synergy_core.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution, Pieces

__all__ = ["NodeGroups", "NodeProblem", "NodeSolution", "Pieces", "allocate", "explain_placed"]
