"""How a function becomes a policy: two decorators, and a table of what was found."""

from __future__ import annotations

import functools
import importlib
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import Any, Literal

from synergy_core.arrays import Floats
from synergy_core.errors import InputError, unknown
from synergy_core.jobs.beliefs import Information, InputKnowledge
from synergy_core.modules import module_names
from synergy_core.policies._faults import load
from synergy_core.policies._parameters import checked
from synergy_core.policies._reads import check_reads, shows_enough, try_key
from synergy_core.state import Allocations, ClusterState, EstimatedClusterState, OracleClusterState
from synergy_core.state.goodput_state import GoodputState, OracleGoodputState
from synergy_core.state.views import (
    JOB_VIEWS,
    EstimatedJobView,
    JobView,
    OracleJobView,
    PredictedJobView,
    PriorityJobView,
    shown_by,
    through,
)

PLANS = "+plans"
"""What a policy's name ends in where it is to read the planner's tables in full."""
Backfill = Literal["none", "greedy", "easy"]
Key = tuple[Any, ...]
KeyFunction = Callable[..., Key]
ChangeFunction = Callable[..., float | None]
AnewFunction = Callable[..., bool]
WordsFunction = Callable[..., str]

STATES = (ClusterState, EstimatedClusterState, OracleClusterState, GoodputState, OracleGoodputState)

_found: dict[str, PlainPolicy] = {}
_broken: dict[str, InputError] = {}
"""Why a policy file or plug-in cannot be loaded, by its name."""


@dataclass(frozen=True, slots=True)
class OrderingPolicy:
    """Jobs run in the order of a key, the smallest first, with what their users requested.

    key(job) -> tuple; ties end with the job id. preemptive: whether a job may be stopped for one with a smaller key.
    backfill: what happens behind a job that does not fit: "none" (all wait), "greedy" (any that fits runs),
    "easy" (any that fits and, by its estimate, does not delay the first that waits).
    falls_while_running: the key's first entry is a time that falls as fast as the clock while the job runs.
    next_change(job, now_s): the instant at which the key next changes by itself, or None; for keys that jump.
    view: what both see of a job.
    begins_anew(job): whether a job whose instant has come counts as if it had just arrived (`JobView.waited_s`).
    words(job): the key for people, as a part of a sentence on the job; None: nobody wrote one.
    """

    name: str
    summary: str
    key: KeyFunction
    preemptive: bool
    backfill: Backfill
    falls_while_running: bool
    next_change: ChangeFunction | None
    view: type[JobView]
    begins_anew: AnewFunction | None = None
    words: WordsFunction | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oracle(self) -> bool:
        """Whether it reads what no scheduler can know."""
        return issubclass(self.view, OracleJobView)

    @property
    def in_rounds(self) -> bool:
        """Whether it is asked once per round; else whenever something has happened, unless it is made to wait."""
        return False

    @property
    def round_s(self) -> float:
        """The round it is meant for; 0 for none."""
        return 0.0

    @property
    def reads_goodput(self) -> bool:
        """Whether it asks how fast jobs would train."""
        return False

    @property
    def learns_input(self) -> bool:
        """Whether how fast input is prepared is fitted to reports for it."""
        return False

    @property
    def tunes_batch(self) -> bool:
        """Whether its jobs choose their batch themselves."""
        return False

    @property
    def knows(self) -> str:
        """What it may know of training jobs beside what each reports itself; "" where it asks nothing of them."""
        return ""

    @property
    def predicted(self) -> bool:
        """Whether run times are predicted for it."""
        return issubclass(self.view, PredictedJobView)

    @property
    def reads_estimates(self) -> bool:
        """Whether what users declared matters, to its key or to its backfill."""
        return issubclass(self.view, EstimatedJobView) or self.backfill == "easy"

    @property
    def reads_priority(self) -> bool:
        """Whether the priorities of jobs matter to it."""
        return issubclass(self.view, PriorityJobView)

    def of_records(self) -> OrderingPolicy:
        """The policy with functions of the scheduler's own records, of which they see no more than its view."""
        functions = [each for each in (self.key, self.next_change, self.begins_anew, self.words) if each is not None]
        if self.view in JOB_VIEWS and all(shows_enough(self.view, each) for each in functions):
            return self
        change = through(self.view, self.next_change) if self.next_change else None
        anew = through(self.view, self.begins_anew) if self.begins_anew else None
        words = through(self.view, self.words) if self.words else None
        return replace(self, key=through(self.view, self.key), next_change=change, begins_anew=anew, words=words)

    def informed(self, information: Information) -> OrderingPolicy:
        """The policy itself: it asks nothing of training jobs."""
        return self

    def with_input(self, knowledge: InputKnowledge) -> OrderingPolicy:
        """The policy itself, likewise."""
        return self

    def with_parameters(self, **parameters: Any) -> OrderingPolicy:
        """The policy with some of its parameters set; `backfill` is one too, for those that do not preempt."""
        given = dict(parameters)
        backfill = given.pop("backfill", self.backfill)
        if backfill not in typing.get_args(Backfill):
            raise unknown(f"backfill for policy {self.name}", str(backfill), typing.get_args(Backfill))
        if self.preemptive and backfill != "greedy":
            raise InputError(f"policy {self.name} preempts; its backfill is always greedy, got {backfill}.")
        given = checked(self.name, self.key, self.parameters, given)
        key = functools.partial(self.key, **given) if given else self.key
        change = functools.partial(self.next_change, **given) if self.next_change else None
        anew = functools.partial(self.begins_anew, **given) if self.begins_anew else None
        words = functools.partial(self.words, **given) if self.words else None
        given = {**self.parameters, **given}
        return replace(
            self, key=key, next_change=change, begins_anew=anew, words=words, backfill=backfill, parameters=given
        )


@dataclass(frozen=True, slots=True)
class AllocationPolicy:
    """Each round, from the state of all active jobs to the GPUs of each. round_s: the round it is meant for.

    view: the state it reads. tunes_batch: whether its jobs choose their batch themselves; else it is as requested.
    information: what it may know of jobs beside what each reports itself. learns_input: how fast input is prepared is
    fitted to those reports; else profiles were made before. plans: whether it reads the planner's tables
    in full; else it knows one parallel plan of a job, in more or fewer replicas. Jobs run with the best plan anyway.
    rank(state): (jobs,), the number by which it serves jobs, the largest first, if it has one; rank_name: its name.
    keeps_gpus: every job gets the number of GPUs that it requested, or none.
    line(state): (jobs,), from an `EstimatedClusterState`, by which jobs stand in line, the largest first, for
    mechanisms that share out CPUs and memory; None where it puts nobody in line.
    """

    name: str
    summary: str
    allocate: Callable[..., Allocations]
    round_s: float
    view: type[ClusterState]
    tunes_batch: bool
    information: Information
    plans: bool = False
    rank: Callable[..., Floats] | None = None
    rank_name: str = ""
    line: Callable[[EstimatedClusterState], Floats] | None = None
    predicted: bool = False
    learns_input: bool = False
    keeps_gpus: bool = False
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oracle(self) -> bool:
        """Whether it reads what no scheduler can know."""
        return issubclass(self.view, OracleClusterState | OracleGoodputState)

    @property
    def reads_estimates(self) -> bool:
        """Whether it reads what users declared."""
        return issubclass(self.view, EstimatedClusterState)

    @property
    def reads_priority(self) -> bool:
        """Whether the priorities of jobs matter to it."""
        return False

    @property
    def in_rounds(self) -> bool:
        """Whether it is asked once per round."""
        return True

    @property
    def preemptive(self) -> bool:
        """Whether a job may be stopped for another."""
        return True

    @property
    def next_change(self) -> None:
        """None: it has no keys that jump."""
        return None

    @property
    def reads_goodput(self) -> bool:
        """Whether it asks how fast jobs would train."""
        return issubclass(self.view, GoodputState)

    @property
    def knows(self) -> str:
        """What it may know of training jobs beside what each reports itself; "" where it asks nothing of them."""
        return self.information if self.reads_goodput else ""

    def of_records(self) -> AllocationPolicy:
        """The policy itself: its states are made of records in any case."""
        return self

    def informed(self, information: Information) -> AllocationPolicy:
        """The policy with that information."""
        return replace(self, information=information)

    def with_input(self, knowledge: InputKnowledge) -> AllocationPolicy:
        """The policy with that knowledge of how fast input is prepared."""
        return replace(self, learns_input=knowledge == "learned")

    def with_parameters(self, **parameters: Any) -> AllocationPolicy:
        """The policy with some of its parameters set."""
        parameters = checked(self.name, self.allocate, self.parameters, parameters)
        allocate = functools.partial(self.allocate, **parameters) if parameters else self.allocate
        return replace(self, allocate=allocate, parameters={**self.parameters, **parameters})


PlainPolicy = OrderingPolicy | AllocationPolicy


def ordering_policy(
    *,
    preemptive: bool = False,
    backfill: Backfill = "greedy",
    falls_while_running: bool = False,
    next_change: ChangeFunction | None = None,
    begins_anew: AnewFunction | None = None,
    words: WordsFunction | None = None,
) -> Callable[[KeyFunction], KeyFunction]:
    """Registers a key function `key(job, *, parameters…)` under its own name; see `OrderingPolicy`.

    What its first parameter is annotated with is what it sees: `JobView`, `EstimatedJobView`, `PredictedJobView`,
    `PriorityJobView`, `OracleJobView` or a class of several. Raises InputError where it reads anything else.
    """

    def register(key: KeyFunction) -> KeyFunction:
        view = _view_of(key, JOB_VIEWS)
        functions = [each for each in (key, next_change, begins_anew, words) if each is not None]
        for function in functions:
            check_reads(key.__name__, function, view, JOB_VIEWS)
        try_key(key.__name__, key, view)
        _add(
            OrderingPolicy,
            key,
            key=key,
            preemptive=preemptive,
            backfill=backfill,
            falls_while_running=falls_while_running,
            next_change=functools.partial(next_change, **_defaults(key)) if next_change else None,
            view=view,
            begins_anew=functools.partial(begins_anew, **_defaults(key)) if begins_anew else None,
            words=functools.partial(words, **_defaults(key)) if words else None,
        )
        return key

    return register


def allocation_policy(
    *,
    round_s: float,
    tunes_batch: bool = False,
    information: Information = "own",
    plans: bool = False,
    rank: Callable[..., Floats] | None = None,
    rank_name: str = "",
    line: Callable[[EstimatedClusterState], Floats] | None = None,
    keeps_gpus: bool = False,
) -> Callable[[Callable[..., Allocations]], Callable[..., Allocations]]:
    """Registers a function `allocate(state, *, parameters…) -> Allocations` under its own name; see `AllocationPolicy`.

    What its first parameter is annotated with is what it sees: `ClusterState`, `EstimatedClusterState` for what users
    declared, `GoodputState` for what is believed of each job, `OracleClusterState` or `OracleGoodputState` for the
    truth, or a class of several. Raises InputError where it reads anything else.
    """

    def register(allocate: Callable[..., Allocations]) -> Callable[..., Allocations]:
        view = _view_of(allocate, STATES)
        check_reads(allocate.__name__, allocate, view, STATES)
        _add(
            AllocationPolicy,
            allocate,
            allocate=allocate,
            round_s=round_s,
            view=view,
            tunes_batch=tunes_batch,
            information=information,
            plans=plans,
            rank=rank,
            rank_name=rank_name,
            line=line,
            keeps_gpus=keeps_gpus,
        )
        return allocate

    return register


def policy_names() -> dict[str, str]:
    """Name and one-line summary of every policy that can be found, sorted by name."""
    _discover()
    return {name: _found[name].summary for name in sorted(_found)}


def plain_policy(name: str) -> PlainPolicy:
    """The policy of that name; `sia+plans`: sia, reading the planner's tables in full.

    Raises InputError with the nearest match.
    """
    _discover()
    base = base_name(name)
    if base in _broken:
        raise _broken[base]
    if base not in _found:
        hints = ("A file in synergy_core/policies/ adds one", *(str(error).rstrip(".") for error in _broken.values()))
        raise unknown("policy", name, _found, hint="; ".join(hints) + ".")
    policy = _found[base]
    if name == base:
        return policy
    if not isinstance(policy, AllocationPolicy) or not policy.reads_goodput:
        raise InputError(f"policy {name}: {base} does not ask how fast jobs would train, so plans tell it nothing.")
    if policy.plans:
        raise InputError(f"policy {name}: {base} reads the planner's tables anyway. Type {base}.")
    return replace(policy, name=name, plans=True)


def base_name(name: str) -> str:
    """The name less `+plans`."""
    return name.removesuffix(PLANS)


@functools.cache
def _discover() -> None:
    """Loads every policy of this folder and every entry point, once. One that cannot be loaded stops nobody but who
    asks for it.
    """
    package = __name__.rpartition(".")[0]
    for name in module_names(package):
        _try_to_load(
            name, f"the policy file {name}.py", functools.partial(importlib.import_module, f"{package}.{name}")
        )
    for point in entry_points(group="synergy.policies"):
        _try_to_load(point.name, f"policy plug-in {point.name} ({point.value})", point.load)


def _try_to_load(name: str, what: str, loader: Callable[[], object]) -> None:
    """Calls `loader`, which adds policies to `_found`; keeps why it failed, and then none of them, under `name`."""
    before = dict(_found)
    try:
        load(what, loader)
    except InputError as error:
        _broken[name] = error
        _found.clear()
        _found.update(before)


def _add(kind: type[PlainPolicy], function: Callable[..., Any], **what: Any) -> None:
    """A policy of that kind, with the name, the first line and the keywords of the function it is made of."""
    name = function.__name__
    if name in _found:
        raise InputError(f"two policies are called {name}; rename one.")
    summary = (inspect.getdoc(function) or "").partition("\n")[0]
    _found[name] = kind(name=name, summary=summary, parameters=_defaults(function), **what)


def _view_of(function: Callable[..., Any], views: tuple[type, ...]) -> Any:
    """One of the views, or a class of several that shows no more than they do."""
    first = next(iter(inspect.signature(function).parameters), None)
    view = typing.get_type_hints(function).get(first or "")
    shown = set().union(*(shown_by(each) for each in views))
    if not (isinstance(view, type) and issubclass(view, views) and shown_by(view) <= shown):
        names = " or ".join(each.__name__ for each in views)
        raise InputError(
            f"policy {function.__name__}: annotate its first parameter with {names}, or a class of several; got {view}."
        )
    return view


def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
