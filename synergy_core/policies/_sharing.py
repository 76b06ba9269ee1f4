"""`fifo+tune`: an order, and a mechanism that shares out CPUs and memory among jobs in that order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from synergy_core.errors import InputError
from synergy_core.jobs.beliefs import Information, InputKnowledge
from synergy_core.mechanisms import Mechanism, get_mechanism, mechanism_names
from synergy_core.policies._registry import PLANS, AllocationPolicy, OrderingPolicy, PlainPolicy, plain_policy

ROUND_S = 300.0
"""As published (OSDI 2022, section 5)."""


@dataclass(frozen=True, slots=True)
class SharingPolicy:
    """Once per round, jobs in the order of `order` are given GPUs, CPUs and memory by `mechanism`.

    Whoever stands behind a job that does not fit may run; a running job gives way to one that stands before it.
    learns_input: how fast input is prepared is fitted to reports, each job's own or, by `information`, those of all
    jobs of its application; else profiles were made before.
    """

    name: str
    order: PlainPolicy
    mechanism: Mechanism
    learns_input: bool = False
    information: Information = "own"

    in_rounds = True
    preemptive = True
    round_s = ROUND_S
    next_change = None
    reads_goodput = False
    tunes_batch = False

    @property
    def summary(self) -> str:
        """A line; what an order's own says of its queue does not hold under a mechanism."""
        overtaken = "whoever does not fit is overtaken, and running jobs give way"
        return f"In the order of {self.order.name}; {overtaken}. {self.mechanism.summary}"

    @property
    def oracle(self) -> bool:
        """Whether its order reads what no scheduler can know, or its mechanism gives what no node has."""
        return self.order.oracle or self.mechanism.pooled

    @property
    def predicted(self) -> bool:
        """Whether run times are predicted for it."""
        return self.order.predicted

    @property
    def reads_estimates(self) -> bool:
        """Whether its order reads what users declared."""
        return self.order.reads_estimates

    @property
    def reads_priority(self) -> bool:
        """Whether the priorities of jobs matter to its order."""
        return self.order.reads_priority

    @property
    def knows(self) -> str:
        """How fast jobs are by CPUs and memory, from profiles made offline, or whose reports tell; "" for a mechanism
        that does not ask.
        """
        if self.mechanism.name == "proportional":
            return ""
        return self.information if self.learns_input else "profiles"

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Those of its order and of its mechanism."""
        return {**self.order.parameters, **self.mechanism.parameters}

    def of_records(self) -> SharingPolicy:
        """The policy with functions of the scheduler's own records."""
        return replace(self, order=self.order.of_records())

    def informed(self, information: Information) -> SharingPolicy:
        """The policy with that information, which matters to it where it learns how jobs are fed."""
        return replace(self, information=information)

    def with_input(self, knowledge: InputKnowledge) -> SharingPolicy:
        """The policy with that knowledge of how fast input is prepared, if its mechanism asks for any."""
        return replace(self, learns_input=knowledge == "learned" and self.mechanism.name != "proportional")

    def with_parameters(self, **parameters: Any) -> SharingPolicy:
        """The policy with some parameters of its mechanism or its order set."""
        mine = {name: value for name, value in parameters.items() if name in self.mechanism.parameters}
        others = {name: value for name, value in parameters.items() if name not in mine}
        order = self.order.with_parameters(**others) if others else self.order
        return replace(self, order=order, mechanism=self.mechanism.with_parameters(**mine))


Policy = OrderingPolicy | AllocationPolicy | SharingPolicy


def get_policy(name: str) -> Policy:
    """The policy of that name; `sia+plans`: sia, reading the planner's tables in full; `fifo+tune`: the order fifo with
    the mechanism tune.

    Raises InputError with the nearest match.
    """
    first, plus, second = name.partition("+")
    if not plus or name.endswith(PLANS):
        return plain_policy(name)
    order, mechanism = plain_policy(first), get_mechanism(second)
    if isinstance(order, AllocationPolicy) and order.line is None:
        raise InputError(
            f"policy {name}: {first} allocates GPUs itself and puts no jobs in line, so that {second} has no order to "
            f"follow. Type fifo+{second}, las+{second}, srtf+{second} or ftf+{second}."
        )
    return SharingPolicy(name, order, mechanism)


def parts_of(name: str) -> list[str]:
    """The names under which a policy's parameters may stand: its own, its order's and its mechanism's."""
    return [*(each for each in name.split("+") if f"+{each}" != PLANS), *([name] if "+" in name else [])]


def is_mechanism(name: str) -> bool:
    """Whether a mechanism has that name."""
    return name in mechanism_names()
