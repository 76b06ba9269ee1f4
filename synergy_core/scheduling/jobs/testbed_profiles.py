"""Profiles: step times of each plan of a model on one testbed, measured by `python -m synergy_exec profile`.

For the models in a profile, the profile replaces the planner's tables. The executor chooses plans by it, and the
simulator treats it as the truth about that testbed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite, log2
from typing import Any, NamedTuple

import numpy as np

from synergy_core.errors import InputError, unknown
from synergy_core.performance.goodput.pipeline import Pipeline
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.spec import Shape
from synergy_core.units import Floats

FORMAT = 2


class Degrees(NamedTuple):
    """The parallel degrees of a plan, which cannot change without a restart."""

    data: int
    tensor: int
    pipeline: int
    interleave: int
    zero: int


def degrees_of(plan: Plan) -> Degrees:
    """The degrees of a plan. A running job may change the rest: micro-batch and accumulation."""
    return Degrees(plan.data, plan.tensor, plan.pipeline, plan.interleave, plan.zero)


@dataclass(frozen=True, slots=True)
class ProfiledRow:
    """One measured configuration."""

    gpu_type: str
    """GPU type."""
    nodes: int
    """Number of nodes."""
    plan: Plan
    """The parallel plan."""
    step_s: float
    """Seconds of a step, the mean over copies that were measured side by side."""
    spread: float = 0.0
    """Range of the copies' times ÷ mean."""
    memory_bytes: float = 0.0
    """Peak memory of the rank with the highest peak."""
    predicted: bool = False
    """Whether step_s was predicted from other rows (`PlanTimes`) instead of measured."""
    sync_s: float = 0.0
    """Part of step_s in which replicas exchanged gradients and computed nothing, for plans observed in training; 0 if
    it was not measured."""
    node_gpus: tuple[int, ...] = ()
    """GPUs on each node, ascending, if other splits over as many nodes were measured too; else ()."""
    reserved_bytes: float = 0.0
    """Peak memory that torch's allocator held on a GPU for memory_bytes; 0 if no GPU was used."""
    outside_bytes: float = 0.0
    """Memory of the GPU that was in use outside torch's allocator; 0 if no GPU was used."""


class NoiseFrom(NamedTuple):
    """A job's gradient noise once it has done `work`. work: iterations at the initial batch. ratio: gradient variance ÷
    squared norm at that batch; 0 means that the noise is still unknown and each step counts as one iteration.
    """

    work: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """Overheads in seconds. launch_s: from a decision to the first step of a new job. restart_s: the same if it loads a
    checkpoint. exit_s: from the stop signal or the last step until the checkpoint is saved and the GPUs are free.
    """

    launch_s: float
    restart_s: float
    exit_s: float


class StepAtCpus(NamedTuple):
    """A step of one GPU with `cpus` CPUs: its time, the part of it spent waiting for input, and its CPU time, which
    does not depend on other load of the machine.
    """

    cpus: float
    step_s: float
    waited_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ProfiledInput:
    """How a model's input is prepared, measured on one GPU at the initial batch with all data in memory.

    cpu_s: CPU-seconds per sample. gpu_s: seconds of a step that does not wait for input. sample_bytes, data_bytes: size
    on storage of one sample and of the data set. steps: the measurements.
    """

    gpu_type: str
    batch: int
    cpu_s: float
    gpu_s: float
    sample_bytes: float
    data_bytes: float
    steps: tuple[StepAtCpus, ...]

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.cpu_s, self.sample_bytes, self.data_bytes)

    def step_s(self, cpus: float) -> float:
        """Seconds of a step with that many CPUs and all data in memory, by `Pipeline`."""
        prepared = self.pipeline.sample_s(cpus, self.data_bytes, storage_bytes_per_s=inf)
        return max(self.gpu_s, self.batch * float(prepared))


@dataclass(frozen=True)
class ProfiledModel:
    """One model on one testbed. Batches are in samples."""

    name: str
    """The model's name."""
    initial_batch: int
    """Global batch at which the learning rate was tuned."""
    max_batch: int
    """Largest global batch at which any plan could train."""
    parameters: float
    """Number of parameters."""
    noise: tuple[NoiseFrom, ...]
    """Gradient noise from each amount of work on, by rising work, from 0 on."""
    costs: ProfiledCosts | None
    """Overheads of starts and stops; None if they were not measured."""
    rows: tuple[ProfiledRow, ...]
    """The measured and predicted configurations."""
    input: ProfiledInput | None = None
    """Input preparation of jobs that load samples (`LoadedJob`), else None."""
    application: str = ""
    """`JobSpec.application` of the jobs measured, which have the same name, class and arguments. "": the model stands
    for all jobs of its name."""
    tried_batch: int = 0
    """Largest global batch at which plans were tried."""

    @cached_property
    def tried(self) -> ProfiledModel:
        """The model with only the rows whose degrees were measured, at any batch, on their GPU type and nodes."""
        keys = [(row.gpu_type, row.nodes, degrees_of(row.plan)) for row in self.rows]
        trained = {key for row, key in zip(self.rows, keys, strict=True) if not row.predicted}
        kept = tuple(row for row, key in zip(self.rows, keys, strict=True) if key in trained)
        return dataclasses.replace(self, rows=kept)

    @cached_property
    def _fastest(self) -> dict[tuple[str, int, int, object], ProfiledRow]:
        """The fastest row by GPU type, nodes, global batch, and a key of the plan. The keys of a plan are its number
        of GPUs, its degrees and, if it consists of replicas of the smallest plan for that batch, ("replicas", GPUs).
        """
        best: dict[tuple[str, int, int, object], ProfiledRow] = {}
        smallest: dict[int, Plan] = {}
        for row in sorted(self.rows, key=lambda row: (row.plan.gpus // row.plan.data, row.step_s)):
            smallest.setdefault(row.plan.global_batch, row.plan)
        for row in self.rows:
            plan, least = row.plan, smallest[row.plan.global_batch]
            plan_keys: list[object] = [plan.gpus, degrees_of(plan)]
            if (plan.tensor, plan.pipeline) == (least.tensor, least.pipeline):
                plan_keys.append(("replicas", plan.gpus))
            for plan_key in plan_keys:
                key = (row.gpu_type, row.nodes, plan.global_batch, plan_key)
                if key not in best or row.step_s < best[key].step_s:
                    best[key] = row
        return best

    @cached_property
    def _nodes(self) -> dict[tuple[str, int], set[int]]:
        """By GPU type and number of GPUs, the numbers of nodes that have rows."""
        known: dict[tuple[str, int], set[int]] = {}
        for row in self.rows:
            known.setdefault((row.gpu_type, row.plan.gpus), set()).add(row.nodes)
        return known

    @cached_property
    def _splits(self) -> dict[tuple[str, int, int], dict[int, dict[tuple[int, ...], list[ProfiledRow]]]]:
        """Rows by GPU type, GPUs and batch; then by number of nodes; then by GPUs on each node, () if not stated."""
        found: dict[tuple[str, int, int], dict[int, dict[tuple[int, ...], list[ProfiledRow]]]] = {}
        for row in self.rows:
            key = row.gpu_type, row.plan.gpus, row.plan.global_batch
            found.setdefault(key, {}).setdefault(row.nodes, {}).setdefault(row.node_gpus, []).append(row)
        return found

    @cached_property
    def batches(self) -> tuple[int, ...]:
        return tuple(sorted({row.plan.global_batch for row in self.rows}))

    def best(
        self, gpu_type: str, nodes: int, gpus: int, batch: int, *, replicas_only: bool = False
    ) -> ProfiledRow | None:
        """The fastest plan on that shape at that global batch; None if the profile has none.

        replicas_only: considers only replicas of the smallest plan, which is one GPU if the model fits on one.
        """
        return self._fastest.get((gpu_type, nodes, batch, ("replicas", gpus) if replicas_only else gpus))

    def with_degrees(self, gpu_type: str, nodes: int, batch: int, degrees: Degrees) -> ProfiledRow | None:
        """The fastest plan with these degrees at that global batch; None if the profile has none."""
        return self._fastest.get((gpu_type, nodes, batch, degrees))

    def knows(self, gpu_type: str, nodes: int, gpus: int, batch: int) -> bool:
        """Whether the profile has a plan for that many GPUs at that batch, on the nearest measured number of nodes."""
        return self.best(gpu_type, self.nodes_like(gpu_type, nodes, gpus), gpus, batch) is not None

    def nodes_like(self, gpu_type: str, nodes: int, gpus: int) -> int:
        """The nearest number of nodes on which that many GPUs were measured; `nodes` itself if there is none."""
        measured = self._nodes.get((gpu_type, gpus), set())
        return min(measured, key=lambda other: (abs(other - nodes), other), default=nodes)

    def step_s(self, gpu_type: str, node_gpus: tuple[int, ...], batch: int, degrees: Degrees | None = None) -> float:
        """Seconds of a step with these GPUs on each node; inf if nothing was measured with as many GPUs at that batch.

        If that split over nodes was not measured, returns the mean of the splits measured on the nearest number of
        nodes. degrees: those of the job's plan; for a split where they were not measured, the fastest plan counts.
        """
        by_nodes = self._splits.get((gpu_type, sum(node_gpus), batch))
        if by_nodes is None:
            return inf
        splits = by_nodes[min(by_nodes, key=lambda nodes: (abs(nodes - len(node_gpus)), nodes))]
        same = splits.get(tuple(sorted(node_gpus)))
        times_s = [
            min([row.step_s for row in rows if degrees_of(row.plan) == degrees] or [row.step_s for row in rows])
            for rows in (splits.values() if same is None else [same])
        ]
        return sum(times_s) / len(times_s)


@dataclass(frozen=True)
class TestbedProfile(Mapping[str, ProfiledModel]):
    """Profiled models by name. machine, date: where and when they were measured; for display only."""

    models: Mapping[str, ProfiledModel] = field(default_factory=dict)
    machine: str = ""
    date: str = ""

    def __getitem__(self, name: str) -> ProfiledModel:
        if name not in self.models:
            raise unknown("profiled model", name, list(self.models))
        return self.models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def __contains__(self, name: object) -> bool:
        return name in self.models

    def of(self, name: str, application: str) -> ProfiledModel | None:
        """The model of that name if it is of that application, else any model of that application, else None."""
        model = self.models.get(name)
        if model is not None and model.application in ("", application):
            return model
        return next((each for each in self.models.values() if application and each.application == application), None)

    def to_json(self) -> str:
        """JSON that `profile_of` reads."""
        models = [
            {name: value for name, value in dataclasses.asdict(model).items() if (name, value) != ("input", None)}
            for model in self.models.values()
        ]
        document = {"format": FORMAT, "machine": self.machine, "date": self.date, "models": models}
        return json.dumps(document, indent=1) + "\n"


def profile_of(text: str, source: str) -> TestbedProfile:
    """Reads a profile from its JSON. source: the file's name, for errors.

    Raises InputError if the text is not a profile or has a step time that is not positive and finite.
    """
    try:
        document = json.loads(text)
        if document["format"] != FORMAT:
            raise InputError(f"{source}: profile format {document['format']}, expected {FORMAT}; profile again.")
        models = [_model(each) for each in document["models"]]
        machine, date = str(document["machine"]), str(document["date"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{source}: not a profile ({_fault(error)}). To make one: python -m synergy_exec profile."
        ) from None
    for model in models:
        if not model.noise or model.noise[0].work != 0:
            raise InputError(f"{source}: {model.name}: noise={list(model.noise)}, expected entries from work 0 on.")
        for row in model.rows:
            if not (isfinite(row.step_s) and row.step_s > 0):
                raise InputError(f"{source}: {model.name}, {row.plan.describe()}: step_s={row.step_s}, expected > 0.")
    return TestbedProfile({model.name: model for model in models}, machine, date)


def _model(values: dict[str, Any]) -> ProfiledModel:
    rows = tuple(
        ProfiledRow(**{**row, "plan": Plan(**row["plan"]), "node_gpus": tuple(row.get("node_gpus", ()))})
        for row in values["rows"]
    )
    noise = tuple(NoiseFrom(float(work), float(ratio)) for work, ratio in values["noise"])
    input_ = values.get("input")
    if input_ is not None:
        input_ = ProfiledInput(**{**input_, "steps": tuple(StepAtCpus(*map(float, step)) for step in input_["steps"])})
    costs = ProfiledCosts(**values["costs"])
    return ProfiledModel(**{**values, "costs": costs, "noise": noise, "rows": rows, "input": input_})


def _fault(error: Exception) -> str:
    """A phrase that says what is wrong with a document."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} is not JSON"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    surplus = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if surplus is not None:
        return f"{surplus[1]} is not a known key"
    return "a value has the wrong type" if isinstance(error, TypeError) else str(error)


COMPUTE_CONSTANTS = 3
"""Number of constants in the formula of `PlanTimes` that describe computing; the others describe exchanges."""
FIXED, HELD = 0, 2
"""Indices of two of these constants: cost per micro-batch, and cost per step of the parameters that a GPU holds."""
SHRINK_WEIGHT = 0.03
"""Weight, relative to a measurement, with which a fit pulls these two constants towards 0."""


class SeenPlan(NamedTuple):
    """A measured plan, its number of nodes and the seconds of a step. sync_s: seconds of the step in which replicas
    exchanged gradients and computed nothing; 0 if these were not measured.
    """

    plan: Plan
    nodes: int
    step_s: float
    sync_s: float = 0.0


class PlanTimes:
    """Predicts step times of untried plans from at least one measured plan of the same model on the same GPUs.

    The planner's formula (docs/planner.md), for a model whose step times are all that is known:

        step = rounds · (fixed + sample · m/t) / p  +  held / (t·p)  +  exchanges
        rounds = a + (p − 1)/v

    with a micro-batches of m samples, tensor degree t, pipeline degree p, v stages per GPU and d replicas; ZeRO divides
    held by d. Exchanges: gradients that replicas send once per step (a ring of d, without ZeRO plus a fixed cost);
    parameters that ZeRO gathers for each further micro-batch; messages of tensor parallelism and of stages in every
    micro-batch, with costs per message and per sample. All cost extra across nodes. Costs are constants ≥ 0 of a linear
    model, fitted by least squares of relative errors; 0 for an untried exchange: a plan is assumed to be as fast as
    possible until it is measured. Degrees measured at one batch keep their ratio of measured to predicted time.
    """

    def __init__(self, seen: Sequence[SeenPlan]) -> None:
        from scipy.optimize import nnls

        step_s = np.array([each.step_s for each in seen])
        table = np.array([_columns(each.plan, each.nodes) for each in seen])
        sync_s = np.array([each.sync_s for each in seen])
        exchanges = np.where(np.arange(table.shape[1]) < COMPUTE_CONSTANTS, 0.0, table)[sync_s > 0]
        # A known exchange time counts as another measurement.
        relative = table / step_s[:, None]
        # One batch size cannot tell fixed costs and costs per sample apart: prefer costs per sample.
        shrinkage = SHRINK_WEIGHT * np.diag(relative.mean(axis=0))[[FIXED, HELD]]
        rows = np.concatenate([relative, exchanges / step_s[sync_s > 0, None], shrinkage])
        fractions = np.concatenate([np.ones(len(seen)), (sync_s / step_s)[sync_s > 0], np.zeros(len(shrinkage))])
        self._constants: Floats = nnls(rows, fractions)[0]
        formula_s = table @ self._constants
        self._ratios: dict[tuple[int, Degrees], float] = {
            (each.nodes, degrees_of(each.plan)): measured / formula
            for each, measured, formula in zip(seen, step_s.tolist(), formula_s.tolist(), strict=True)
        }

    def step_s(self, plan: Plan, nodes: int) -> float:
        """Seconds of a step: the formula × the ratio of measured to predicted time of these degrees, if measured."""
        formula_s = float(_columns(plan, nodes) @ self._constants)
        return formula_s * self._ratios.get((nodes, degrees_of(plan)), 1.0)


def _columns(plan: Plan, nodes: int) -> Floats:
    """The coefficients of the constants for a plan: computing, exchanges, and exchanges' extra costs across nodes."""
    d, t, p, v = plan.data, plan.tensor, plan.pipeline, plan.interleave
    m, a = plan.micro_batch, plan.accumulation
    rounds = a + (p - 1) / v
    held = 1.0 / (t * p)
    ring = (d - 1) / d * held
    sharded = plan.zero > 0
    sends = (a * v + p - 1) * (p > 1)
    exchanges = np.array(
        [
            (not sharded) * (d > 1),
            (not sharded) * ring,
            sharded * ring,
            sharded * (a - 1) * ring,
            rounds * log2(t) / p,
            rounds * m * (t - 1) / t / p,
            sends,
            sends * m,
        ]
    )
    computing = np.array([rounds / p, rounds * m / (t * p), held / (d if sharded else 1)])
    return np.concatenate([computing, exchanges, exchanges * (nodes > 1)])


def grows(model: ProfiledModel) -> bool:
    """Whether some of the model's rows are predicted; measurements may replace these."""
    return any(row.predicted for row in model.rows)


def is_new(model: ProfiledModel, shape: Shape, plan: Plan) -> bool:
    """Whether that plan was not measured yet on that shape."""
    return not any(_is(row, shape.gpu_type, shape.nodes, plan) for row in model.rows if not row.predicted)


def with_seen(model: ProfiledModel, seen: ProfiledRow, *, fits: bool = True) -> ProfiledModel:
    """The model with a new measurement and new predictions. fits: whether the plan fits in memory. If not, its time
    still improves predictions, but the plan is removed, with predictions of its degrees at its micro-batch or larger.
    """
    rows = [row for row in model.rows if not _is(row, seen.gpu_type, seen.nodes, seen.plan)]
    known = dataclasses.replace(model, rows=_predicted([*rows, seen]))
    if fits:
        return known
    shape = Shape(seen.gpu_type, seen.nodes, seen.plan.gpus)
    smaller = without(known, shape, seen.plan, least_micro_batch=seen.plan.micro_batch)
    return dataclasses.replace(smaller, rows=tuple(row for row in smaller.rows if row != seen))


def without(model: ProfiledModel, shape: Shape, plan: Plan, *, least_micro_batch: int = 1) -> ProfiledModel:
    """The model without predictions for the plan's degrees at `least_micro_batch` or more, because such plans fail."""
    failed = (shape.gpu_type, degrees_of(plan))
    rows = [
        row
        for row in model.rows
        if not row.predicted
        or (row.gpu_type, degrees_of(row.plan)) != failed
        or row.plan.micro_batch < least_micro_batch
    ]
    return dataclasses.replace(model, rows=tuple(rows))


def _is(row: ProfiledRow, gpu_type: str, nodes: int, plan: Plan) -> bool:
    return (row.gpu_type, row.nodes, row.plan) == (gpu_type, nodes, plan)


def _predicted(rows: Sequence[ProfiledRow]) -> tuple[ProfiledRow, ...]:
    """The rows, with times of unmeasured rows predicted from measurements on their GPU type. If it has none, those on
    all types are used, as if all types were equally fast. At least one row must be measured.
    """
    seen = {row: SeenPlan(row.plan, row.nodes, row.step_s, row.sync_s) for row in rows if not row.predicted}
    times = {
        gpu_type: PlanTimes([known for row, known in seen.items() if row.gpu_type == gpu_type])
        for gpu_type in {row.gpu_type for row in seen}
    }
    for gpu_type in {row.gpu_type for row in rows if row.predicted} - times.keys():
        times[gpu_type] = PlanTimes(list(seen.values()))
    return tuple(
        dataclasses.replace(row, step_s=times[row.gpu_type].step_s(row.plan, row.nodes)) if row.predicted else row
        for row in rows
    )
