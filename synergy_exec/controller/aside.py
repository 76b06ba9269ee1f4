"""Slots that kill what trains on them are set aside, and decisions are on the others alone.

The evidence is a worker that a signal ended which nobody sends, such as SIGSEGV or SIGBUS, or whose device said that
it is broken (`agent/causes.py`). Two such deaths on one slot
within an hour accuse it: of different jobs, or of one that ran on that slot alone and so can be tried elsewhere. A job
that dies on a second slot, too, is itself to blame: its deaths accuse nothing any more, and slots that were set aside
because of them come back. So do all when the controller is started again: a device may have been changed meanwhile.

The slots of a node that has no agent, though one was started again and again, are set aside until it has one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, replace

from synergy_core.cluster import Cluster, NodeType
from synergy_core.jobs.record import Placed
from synergy_core.units import HOUR_S
from synergy_exec.nodes.runs import Run, Slot

DEATHS = 2
"""As many on one slot accuse it."""
NO_AGENT = "its node has no agent"


@dataclass(frozen=True, slots=True)
class Death:
    """A worker of a job died on a slot. alone: its run was on that slot alone."""

    time_s: float
    job: int
    slot: Slot
    alone: bool


class Aside:
    """whole: the cluster as agents number its nodes and slots. cluster: the one that decisions are on. slots: that are
    set aside, with why.
    """

    def __init__(self, whole: Cluster) -> None:
        self.whole = self.cluster = whole
        self.slots: dict[Slot, str] = {}
        self._deaths: list[Death] = []
        self._anywhere: set[int] = set()
        self._nodes = list(range(whole.nodes))
        self._left = [list(range(each.gpus_per_node)) for each in whole.node_type_of]

    def died(self, run: Run, slot: Slot, now_s: float, asked: Iterable[int]) -> list[str]:
        """A worker of the run died on that slot; what changes by it, in sentences: then `cluster` is another.

        asked: slots that jobs ask for which have not ended: what is left must be enough for each.
        """
        recent = [each for each in self._deaths if each.time_s > now_s - HOUR_S or each.slot in self.slots]
        self._deaths = [*recent, Death(now_s, run.job, slot, alone=len(run.slots) == 1)]
        if len({each.slot for each in self._deaths if each.job == run.job}) > 1:
            self._anywhere.add(run.job)
        back = [each for each, why in self.slots.items() if why != NO_AGENT and not self._accused(each)]
        said = [f"{_named(each)} is used again: those that died on it die elsewhere, too" for each in back]
        for each in back:
            del self.slots[each]
        if slot not in self.slots and self._accused(slot) and self._can_spare({slot}, asked):
            said.append(self._set_aside(slot))
        if said:
            self._number()
        return said

    def without(self, nodes: Collection[int], asked: Iterable[int]) -> list[str]:
        """These nodes have no agent, all others have; what changes by it, in sentences. asked: as of `died`."""
        back = [each for each, why in self.slots.items() if why == NO_AGENT and each[0] not in nodes]
        said = [f"node {node} is used again: it has an agent" for node in sorted({node for node, _ in back})]
        for each in back:
            del self.slots[each]
        for node in sorted(nodes):
            used = {(node, slot) for slot in range(self.whole.node_type_of[node].gpus_per_node)} - self.slots.keys()
            if used and self._can_spare(used, asked):
                self.slots |= dict.fromkeys(sorted(used), NO_AGENT)
                said.append(f"node {node} is not used until it has an agent again")
        if said:
            self._number()
        return said

    def placed(self, placed: Placed) -> Placed:
        """A place in `cluster`, as agents number it."""
        return tuple(
            (self._nodes[node], sum(1 << slot for bit, slot in enumerate(self._left[node]) if mask >> bit & 1))
            for node, mask in placed
        )

    def _accused(self, slot: Slot) -> bool:
        found = [each for each in self._deaths if each.slot == slot and each.job not in self._anywhere]
        several = len({each.job for each in found}) > 1
        return len(found) >= DEATHS and (several or all(each.alone for each in found))

    def _can_spare(self, slots: Set[Slot], asked: Iterable[int]) -> bool:
        """Whether the others are enough: each GPU type keeps a slot, each job can have what it asks for."""
        left = Counter(self.whole.type_of_node[node] for node, _ in self._all() - self.slots.keys() - slots)
        needed = max([*asked, len(self.whole.virtual_clusters)])
        return len(left) == len(self.whole.gpu_types) and left.total() >= needed

    def _all(self) -> set[Slot]:
        return {(node, slot) for node, each in enumerate(self.whole.node_type_of) for slot in range(each.gpus_per_node)}

    def _set_aside(self, slot: Slot) -> str:
        found = [each for each in self._deaths if each.slot == slot]
        jobs = ", ".join(map(str, sorted({each.job for each in found})))
        self.slots[slot] = f"{len(found)} workers died on it within an hour, of jobs {jobs}"
        return f"{_named(slot)} is set aside: {self.slots[slot]}"

    def _number(self) -> None:
        """Nodes that are alike stand together in a cluster, so they are numbered anew."""
        alike: dict[NodeType, list[tuple[int, list[int]]]] = {}
        for node, kind in enumerate(self.whole.node_type_of):
            left = [slot for slot in range(kind.gpus_per_node) if (node, slot) not in self.slots]
            if left:
                small = replace(kind, name="", nodes=1, gpus_per_node=len(left))
                alike.setdefault(small, []).append((node, left))
        # Jobs know GPU types by their places in the cluster's.
        alike = dict(sorted(alike.items(), key=lambda each: self.whole.gpu_types.index(each[0].gpu_type)))
        types = [
            replace(kind, name=f"{kind.gpu_type}-{index}", nodes=len(nodes))
            for index, (kind, nodes) in enumerate(alike.items())
        ]
        quotas = dict(self.whole.virtual_clusters)
        while sum(quotas.values()) > sum(each.gpus for each in types):
            quotas[max(quotas, key=lambda name: quotas[name])] -= 1
        self.cluster = replace(self.whole, node_types=tuple(types), virtual_clusters=quotas)
        flat = [each for nodes in alike.values() for each in nodes]
        self._nodes, self._left = [node for node, _ in flat], [left for _, left in flat]


def _named(slot: Slot) -> str:
    return f"node {slot[0]}, slot {slot[1]}"
