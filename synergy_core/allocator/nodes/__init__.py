"""Rows, nodes and shares of all jobs of a round at once: everything that is allocated is placed.

Pools of nodes are priced with what rows leave unusable charged to them (`charges`), which gives the choice and a bound
that is true for what can be placed; then GPUs get nodes (`settle`), jobs change places until shares fit (`exchange`),
every node gets the best shares that fit (`levels`), idle GPUs go to who has none (`fill`), nodes that lose most are
dealt again (`redeal`), and CPUs and memory that nobody asked for go to who gains from them (`spare`). Why a job has
what it has is told at the pools' prices (`explain`).
docs/resources.md says what else was tried.
"""

from synergy_core.allocator.nodes.allocate import allocate
from synergy_core.allocator.nodes.explain import explain_placed
from synergy_core.allocator.nodes.problem import NodeGroups, NodeProblem, NodeSolution, Pieces

__all__ = ["NodeGroups", "NodeProblem", "NodeSolution", "Pieces", "allocate", "explain_placed"]
