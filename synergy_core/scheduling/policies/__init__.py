"""Scheduling policies, one file each. The decorators `ordering_policy` and `allocation_policy` register a function.

A file in this folder registers its policies; so does an entry point `synergy.policies` of an installed package, or an
import of a module that uses the decorators. `synergy_core.checking` has the rules for all policies.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import linecache
import traceback
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Self

from synergy_core import module_names
from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.jobs.beliefs import Information, InputKnowledge
from synergy_core.scheduling.jobs.samples import samples
from synergy_core.scheduling.jobs.views import (
    JOB_VIEWS,
    STATES,
    Allocations,
    EstimatedClusterState,
    EstimatedJobView,
    GoodputState,
    OracleClusterState,
    OracleGoodputState,
    OracleJobView,
    PredictedClusterState,
    PredictedJobView,
    PriorityClusterState,
    PriorityJobView,
    shown_by,
    through,
)
from synergy_core.scheduling.policies._parameters import Parametrised, described, unwrapped
from synergy_core.scheduling.policies.mechanisms import Mechanism, get_mechanism, mechanism_names
from synergy_core.units import Floats

SAFE_BUILTINS = ("abs", "bool", "float", "int", "len", "max", "min", "round")
SAFE_MODULES = ("_bisect", "synergy_core.units", "synergy_core.errors")
"""Harmless built-in functions and modules: their functions store no argument and read no attribute by name."""


def reads_only(function: Callable[..., Any], view: type, callers: tuple[object, ...] = ()) -> bool:
    """Whether the function's code uses only names that the view shows, numbers, and harmless functions.

    Such a function returns the same for the scheduler's record of a job as for a view of the record, but faster.
    """
    function = unwrapped(function)
    code = getattr(function, "__code__", None)
    if code is None or code.co_freevars or any(inspect.iscode(each) for each in code.co_consts):
        return False
    for name in set(code.co_names) - shown_by(view) - set(SAFE_BUILTINS):
        value = function.__globals__.get(name)
        if inspect.isfunction(value) and value.__module__ == function.__module__:
            harmless = value in callers or reads_only(value, view, (*callers, function))
        else:
            harmless = isinstance(value, int | float) or getattr(value, "__module__", "") in SAFE_MODULES
        if not harmless:
            return False
    return True


def load(source: str, loader: Callable[[], object]) -> None:
    """Calls `loader` to import a file; raises an InputError that names `source` if the import fails."""
    try:
        loader()
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except Exception as error:
        raise InputError(f"{source} cannot be loaded: {describe_error(error)}.") from error


def describe_error(error: BaseException, *files: str) -> str:
    """Formats an error with its place: `mine.py, line 7: ZeroDivisionError: division by zero`.

    files: the place is the traceback's last line in these files or, without files, outside the import machinery.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    importing = (__file__, importlib.__file__)
    where = ""
    for file, line in places_of(error):
        if file in files if files else file not in importing and not file.startswith("<frozen"):
            code = linecache.getline(file, line).strip()
            where = f"{file}, line {line}{f' (`{code}`)' if code else ''}: "
    return f"{where}{type(error).__name__}: {error}".rstrip(".")


def places_of(error: BaseException | None) -> list[tuple[str, int]]:
    """File and line of every call that the error passed through, followed by those of the error's cause."""
    places: list[tuple[str, int]] = []
    while error is not None:
        places += [(each.filename, each.lineno or 0) for each in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    return places


def place_of(function: Callable[..., Any]) -> tuple[str, int]:
    """The file and the first line of a function."""
    code = unwrapped(function).__code__
    return code.co_filename, code.co_firstlineno


PLANS = "+plans"
"""Suffix of a policy's name that lets the policy read the planner's tables in full."""
Backfill = Literal["none", "greedy", "easy"]
Key = tuple[Any, ...]
KeyFunction = Callable[..., Key]
ChangeFunction = Callable[..., float | None]
AnewFunction = Callable[..., bool]
WordsFunction = Callable[..., str]
RankFunction = Callable[..., Floats]
LineFunction = Callable[[EstimatedClusterState], Floats]

_found: dict[str, PlainPolicy] = {}
_broken: dict[str, InputError] = {}
"""Errors of the policy files and plug-ins that could not be loaded, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Policy(Parametrised):
    """The fields and properties that all policies have.

    view: the class that the policy reads. It determines whether the policy is an oracle, and whether it reads
    predictions, estimates, priorities or goodput. information: what the policy may know of training jobs besides each
    job's own reports. learns_input: whether input speeds are fitted to reports; else they come from offline profiles.
    batch: what users typed as their jobs' batch: `tuned` is the fixed batch with the shortest run time on the requested
    GPUs, as in Pollux's TunedJobs.
    """

    view: type
    information: Information = "own"
    learns_input: bool = False
    batch: Literal["requested", "tuned"] = "requested"

    in_rounds: ClassVar[bool] = True
    functions_of: ClassVar[tuple[str, ...]] = ()
    """Fields that hold the policy's functions."""

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        functions = {name: getattr(self, name) for name in self.functions_of}
        return {name: function for name, function in functions.items() if function is not None}

    @property
    def oracle(self) -> bool:
        """Whether the policy reads facts that no scheduler can know."""
        return issubclass(self.view, OracleJobView | OracleClusterState | OracleGoodputState)

    @property
    def predicted(self) -> bool:
        """Whether the policy reads predicted run times."""
        return issubclass(self.view, PredictedJobView | PredictedClusterState)

    @property
    def reads_estimates(self) -> bool:
        return issubclass(self.view, EstimatedJobView | EstimatedClusterState)

    @property
    def reads_priority(self) -> bool:
        return issubclass(self.view, PriorityJobView | PriorityClusterState)

    @property
    def reads_goodput(self) -> bool:
        """Whether the policy reads how fast jobs would train."""
        return issubclass(self.view, GoodputState)

    @property
    def knows(self) -> str:
        """What the policy may know of training jobs besides each job's own reports; "" if it reads no goodput."""
        return self.information if self.reads_goodput else ""

    def of_records(self) -> Self:
        """The policy with functions that take the scheduler's records."""
        return self

    def informed(self, information: Information) -> Self:
        return replace(self, information=information)

    def with_input(self, knowledge: InputKnowledge) -> Self:
        return replace(self, learns_input=knowledge == "learned")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderingPolicy(_Policy):
    """Runs jobs in the order of a key, the smallest first, each on the GPUs that its user requested."""

    key: KeyFunction
    """Function key(job) that returns a tuple. The job id breaks ties."""
    preemptive: bool = False
    """Whether a job may be stopped for one with a smaller key."""
    backfill: Backfill = "greedy"
    """Rule for later jobs while a job does not fit: "none" (all wait), "greedy" (any job that fits runs), "easy" (a job
    runs if it fits and, by its estimate, does not delay the first waiting job)."""
    falls_while_running: bool = False
    """Whether the key's first entry is a time that falls by a second per second while the job runs."""
    next_change: ChangeFunction | None = None
    """Function next_change(job, now_s) that returns the instant at which the key next changes without an event, or None
    if it does not change. None: the keys of all jobs change only at events."""
    begins_anew: AnewFunction | None = None
    """Function begins_anew(job) that returns whether the job counts as newly arrived after such a change
    (`JobView.waited_s`). None: no job does."""
    words: WordsFunction | None = None
    """Function words(job) that returns the key in words, as a part of a sentence about the job; None if the policy has
    no such text."""
    starves: bool = False
    """Whether jobs may wait for ever by definition, so that `Cluster.max_wait` does not apply."""

    in_rounds: ClassVar[bool] = False
    """Whether decisions are made only at multiples of round_s."""
    round_s: ClassVar[float] = 0.0
    """Length of a round; 0 because the policy decides at every event."""
    tunes_batch: ClassVar[bool] = False
    """Whether jobs choose their own batch; they always keep the requested one."""
    functions_of: ClassVar[tuple[str, ...]] = ("key", "next_change", "begins_anew", "words")
    takers: ClassVar[tuple[str, ...]] = functions_of

    @property
    def reads_estimates(self) -> bool:
        """Whether the policy's key or its backfill reads run times that users declared."""
        return issubclass(self.view, EstimatedJobView) or self.backfill == "easy"

    def with_input(self, knowledge: InputKnowledge) -> OrderingPolicy:
        """The policy itself: ordering policies do not read input speeds."""
        return self

    def of_views(self) -> OrderingPolicy:
        """The policy with functions that take the scheduler's records and read them through the policy's view."""
        of_records: dict[str, Any] = {name: through(self.view, each) for name, each in self.functions.items()}
        return replace(self, **of_records)

    def of_records(self) -> OrderingPolicy:
        """Like `of_views`; if the view makes no difference, functions read the records directly, which is faster."""
        if self.view in JOB_VIEWS and all(reads_only(each, self.view) for each in self.functions.values()):
            return self
        return self.of_views()

    def with_parameters(self, **parameters: Any) -> OrderingPolicy:
        """The policy with some parameters set; without preemption, `backfill` is a parameter, too."""
        backfill = parameters.pop("backfill", self.backfill)
        if backfill not in typing.get_args(Backfill):
            raise unknown(f"backfill for policy {self.name}", str(backfill), typing.get_args(Backfill))
        if self.preemptive and backfill != "greedy":
            raise InputError(f"policy {self.name} preempts, so its backfill is always greedy; got {backfill}.")
        return replace(Parametrised.with_parameters(self, **parameters), backfill=backfill)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationPolicy(_Policy):
    """Maps the state of all active jobs to each job's GPUs, every round."""

    allocate: Callable[..., Allocations]
    """Function allocate(state) that returns the `Allocations`."""
    round_s: float
    """Default length of a round."""
    tunes_batch: bool = False
    """Whether jobs choose their own batch; otherwise they keep the requested batch."""
    plans: bool = False
    """Whether the policy reads the planner's full tables. Otherwise it knows one parallel plan per job and changes only
    its number of replicas. Either way, jobs run with the best plan."""
    tells_types: bool = True
    """Whether throughput models distinguish GPU types; otherwise all observations of a job are fitted as one."""
    rank: RankFunction | None = None
    """Function rank(state) that returns (jobs,) the number by which the policy serves jobs, the largest first; None if
    it has no such number."""
    rank_name: str = ""
    """Name of that number; "" without one."""
    line: LineFunction | None = None
    """Function line(state) that returns (jobs,) the number by which mechanisms that share out CPUs and memory serve
    jobs, the largest first. Its state is an `EstimatedClusterState`. None if the policy does not work with mechanisms.
    """
    keeps_gpus: bool = False
    """Whether every job gets the number of GPUs that it requested, or none. It holds for every policy that does not
    read goodput."""

    preemptive: ClassVar[bool] = True
    """Whether a job may be stopped for another one; it always may."""
    next_change: ClassVar[None] = None
    """No function: decisions are made once per round."""
    functions_of: ClassVar[tuple[str, ...]] = ("allocate", "rank", "line")
    takers: ClassVar[tuple[str, ...]] = ("allocate",)


SHARING_ROUND_S = 300.0
"""Length of a round as published (OSDI 2022, section 5)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingPolicy(_Policy):
    """Once per round, `mechanism` gives GPUs, CPUs and memory to jobs in the order of `order`.

    Jobs that do not fit are skipped, and a running job may be stopped for jobs that come before it in the order.
    """

    order: OrderingPolicy | AllocationPolicy
    mechanism: Mechanism

    preemptive: ClassVar[bool] = True
    next_change: ClassVar[None] = None
    round_s: ClassVar[float] = SHARING_ROUND_S
    tunes_batch: ClassVar[bool] = False

    @property
    def oracle(self) -> bool:
        """Whether the order reads facts that no scheduler can know, or the mechanism gives out more than nodes have."""
        return self.order.oracle or self.mechanism.pooled

    @property
    def reads_estimates(self) -> bool:
        return self.order.reads_estimates

    @property
    def reads_goodput(self) -> bool:
        """False, because mechanisms read how fast input is prepared, not how fast jobs train."""
        return False

    @property
    def knows(self) -> str:
        """Where speeds by CPUs and memory come from: offline profiles or reports; "" if the mechanism reads none."""
        if self.mechanism.name == "proportional":
            return ""
        return self.information if self.learns_input else "profiles"

    def of_records(self) -> SharingPolicy:
        return replace(self, order=self.order.of_records())

    def with_input(self, knowledge: InputKnowledge) -> SharingPolicy:
        """The policy with input speeds from that source, if its mechanism reads any."""
        return replace(self, learns_input=knowledge == "learned" and self.mechanism.name != "proportional")

    def with_parameters(self, **parameters: Any) -> SharingPolicy:
        """The policy with some parameters of its mechanism or its order set."""
        of_mechanism = {name: value for name, value in parameters.items() if name in self.mechanism.parameters}
        of_order = {name: value for name, value in parameters.items() if name not in of_mechanism}
        order, mechanism = self.order.with_parameters(**of_order), self.mechanism.with_parameters(**of_mechanism)
        return replace(self, order=order, mechanism=mechanism, parameters={**order.parameters, **mechanism.parameters})


PlainPolicy = OrderingPolicy | AllocationPolicy
Policy = PlainPolicy | SharingPolicy


def ordering_policy(
    *,
    preemptive: bool = False,
    backfill: Backfill = "greedy",
    falls_while_running: bool = False,
    next_change: ChangeFunction | None = None,
    begins_anew: AnewFunction | None = None,
    words: WordsFunction | None = None,
    starves: bool = False,
) -> Callable[[KeyFunction], KeyFunction]:
    """Registers a key function `key(job, *, parameters…)` under its own name; see `OrderingPolicy`.

    The annotation of its first parameter declares what the function reads: `JobView`, `EstimatedJobView`,
    `PredictedJobView`, `PriorityJobView`, `OracleJobView` or a class that combines several. The function is tried on a
    few jobs, and InputError is raised if it reads anything else; a read that these jobs do not trigger raises it when
    the policy runs.
    """

    options = locals()  # all are fields of the policy

    def register(key: KeyFunction) -> KeyFunction:
        policy = OrderingPolicy(**described(key), **options, key=key, view=_view_of(key, JOB_VIEWS))
        other_functions: dict[str, Any] = {
            name: functools.partial(function, **policy.parameters)
            for name, function in policy.functions.items()
            if name != "key"
        }
        policy = replace(policy, **other_functions)
        for name, function in policy.of_views().functions.items():
            for job in samples():
                try:
                    function(job, job.submit_time_s) if name == "next_change" else function(job)
                except InputError as error:
                    raise InputError(f"policy {policy.name}: {error}") from None
                except Exception:  # only reads are checked here; other errors are raised when the policy runs
                    break
        _add(policy)
        return key

    return register


def allocation_policy(
    *,
    round_s: float,
    tunes_batch: bool = False,
    information: Information = "own",
    plans: bool = False,
    tells_types: bool = True,
    rank: RankFunction | None = None,
    rank_name: str = "",
    line: LineFunction | None = None,
    keeps_gpus: bool = False,
) -> Callable[[Callable[..., Allocations]], Callable[..., Allocations]]:
    """Registers a function `allocate(state, *, parameters…) -> Allocations` under its own name; see `AllocationPolicy`.

    The annotation of its first parameter declares what the function reads: `ClusterState`, `EstimatedClusterState` for
    declared run times, `PredictedClusterState` for predicted ones, `PriorityClusterState`, `GoodputState` for estimated
    goodputs, `OracleClusterState` or `OracleGoodputState` for true values, or a dataclass that combines several.
    Reading anything else raises InputError when the policy decides. docs/allocation_policies.md has an example.
    """

    options = locals()  # all are fields of the policy

    def register(allocate: Callable[..., Allocations]) -> Callable[..., Allocations]:
        view = _view_of(allocate, STATES)
        keeps = keeps_gpus or not issubclass(view, GoodputState)  # without goodput, no other number of GPUs is allowed
        _add(AllocationPolicy(**described(allocate), **{**options, "keeps_gpus": keeps}, allocate=allocate, view=view))
        return allocate

    return register


def _add(policy: PlainPolicy) -> None:
    """Registers the policy. It replaces one of its name only if both are of a notebook, whose cells run repeatedly."""
    same_name = [each for each in (policy, _found.get(policy.name)) if each is not None]
    modules = {unwrapped(next(iter(each.functions.values()))).__module__ for each in same_name}
    if len(same_name) > 1 and modules != {"__main__"}:
        raise InputError(f"two policies have the name {policy.name}; rename one.")
    _found[policy.name] = policy


def _view_of(function: Callable[..., Any], views: tuple[type, ...]) -> Any:
    """The view that the function reads: one of `views`, or a class that combines several of them without additions."""
    first = next(iter(inspect.signature(function).parameters), "")
    view = typing.get_type_hints(function).get(first)
    shown = set().union(*(shown_by(each) for each in views))
    if not (isinstance(view, type) and issubclass(view, views) and shown_by(view) <= shown):
        names = " or ".join(each.__name__ for each in views)
        raise InputError(
            f"policy {function.__name__}: annotate its first parameter with {names}, or with a class that combines "
            f"several of them; got {view}."
        )
    return view


def policy_names() -> dict[str, str]:
    """Name and one-line summary of every policy that can be found, sorted by name."""
    _discover()
    return {name: _found[name].summary for name in sorted(_found)}


@functools.cache
def _discover() -> None:
    """Loads this folder's files and the entry points, once. A file's error is raised when its policy is requested."""
    files: list[tuple[str, str, Callable[[], object]]] = [
        (name, f"the policy file {name}.py", functools.partial(importlib.import_module, f"{__name__}.{name}"))
        for name in module_names(__name__)
    ]
    points = entry_points(group="synergy.policies")
    files += [(each.name, f"policy plug-in {each.name} ({each.value})", each.load) for each in points]
    for name, source, loader in files:
        before = dict(_found)
        try:
            load(source, loader)
        except InputError as error:
            _broken[name] = error
            _found.clear()  # removes what the broken file registered
            _found.update(before)


def get_policy(name: str) -> Policy:
    """The policy called `name`. Raises InputError with the nearest match for an unknown name.

    `sia+plans` is sia with the planner's full tables; `fifo+tune` is the order fifo with the mechanism tune.
    """
    first, plus, second = name.partition("+")
    if not plus or name.endswith(PLANS):
        return _plain_policy(name)
    order, mechanism = _plain_policy(first), get_mechanism(second)
    if isinstance(order, AllocationPolicy) and order.line is None:
        raise InputError(
            f"policy {name}: {first} allocates GPUs itself, so {second} has no order of jobs to follow. Type "
            f"fifo+{second}, las+{second}, srtf+{second} or ftf+{second}."
        )
    # The summary of an order describes its own queue, which mechanisms do not use.
    rule = "jobs that do not fit are skipped, and running jobs may be stopped for earlier ones"
    return SharingPolicy(
        name=name,
        summary=f"In the order of {order.name}; {rule}. {mechanism.summary}",
        view=order.view,
        parameters={**order.parameters, **mechanism.parameters},
        order=order,
        mechanism=mechanism,
    )


def _plain_policy(name: str) -> PlainPolicy:
    _discover()
    base = name.removesuffix(PLANS)
    if base in _broken:
        raise _broken[base]
    if base not in _found:
        reasons = (str(error).rstrip(".") for error in _broken.values())
        hints = ("A file in synergy_core/scheduling/policies/ adds one", *reasons)
        raise unknown("policy", name, _found, hint="; ".join(hints) + ".")
    policy = _found[base]
    if name == base:
        return policy
    if not isinstance(policy, AllocationPolicy) or not policy.reads_goodput:
        raise InputError(f"policy {name}: {base} does not read how fast jobs train, so it cannot use plans.")
    if policy.plans:
        raise InputError(f"policy {name}: {base} already reads the planner's tables. Type {base}.")
    return replace(policy, name=name, plans=True)


def parts_of(name: str) -> list[str]:
    """The names under which a policy's parameters may be set: its own, its order's and its mechanism's."""
    return [*(each for each in name.split("+") if f"+{each}" != PLANS), *([name] if "+" in name else [])]


def is_mechanism(name: str) -> bool:
    """Whether there is a mechanism of that name."""
    return name in mechanism_names()
