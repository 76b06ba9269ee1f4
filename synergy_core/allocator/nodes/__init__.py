"""Chooses rows, nodes and shares of all jobs of a round together, so that everything allocated can be placed.

`problem` treats identical nodes as one pool with prices, and charges a row for what it uses or makes unusable on its
nodes; solving it gives the rows, and a bound on what can be placed. `layout` assigns nodes, exchanges jobs until their
shares fit, and gives idle GPUs to jobs without any. `allocate` chooses the best shares that fit each node, and improves
the nodes with the largest loss. docs/resources.md describes what else was tried.
"""

from synergy_core.allocator.nodes.allocate import allocate
from synergy_core.allocator.nodes.explain import explain_placed
from synergy_core.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution, Pieces

__all__ = ["NodeGroups", "NodeProblem", "NodeSolution", "Pieces", "allocate", "explain_placed"]
