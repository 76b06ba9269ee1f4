"""Profiles: what `python -m synergy_exec profile` measured of models on one testbed, plan by plan.

A profile is what the planner's tables are for models nobody measured: the rows of a job's ConfigurationTable. The
executor chooses by it, and the simulator takes it for the truth about that testbed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Any, NamedTuple

from synergy_core.errors import InputError, unknown
from synergy_core.goodput.pipeline import Pipeline
from synergy_core.planner.plan import Plan

FORMAT = 2


class Degrees(NamedTuple):
    """The part of a plan that cannot change while a job runs."""

    data: int
    tensor: int
    pipeline: int
    interleave: int
    zero: int


def degrees_of(plan: Plan) -> Degrees:
    """The plan without what a running job may change: micro-batch and accumulation."""
    return Degrees(plan.data, plan.tensor, plan.pipeline, plan.interleave, plan.zero)


@dataclass(frozen=True, slots=True)
class ProfiledRow:
    """One measured configuration.

    step_s: mean of what copies side by side took. spread: their range ÷ that. memory_bytes: the most that one rank
    held. predicted: it was not measured; its time follows from others (`planner/seen_plans.py`). sync_s: of step_s, of
    replicas that were seen while they trained (`SeenPlan`).
    """

    gpu_type: str
    nodes: int
    plan: Plan
    step_s: float
    spread: float = 0.0
    memory_bytes: float = 0.0
    predicted: bool = False
    sync_s: float = 0.0


class NoiseFrom(NamedTuple):
    """From that much work of a job on, in iterations at the initial batch: gradient variance ÷ squared norm at that
    batch. 0 means that it is not known yet, and that steps count as one iteration each.
    """

    work: float
    ratio: float


@dataclass(frozen=True, slots=True)
class ProfiledCosts:
    """Seconds beside training. launch_s: from a decision to the first step of a new job. restart_s: of one that loads
    a checkpoint. exit_s: from the order to stop, or the last step, until its GPUs are free, the checkpoint saved.
    """

    launch_s: float
    restart_s: float
    exit_s: float


class StepAtCpus(NamedTuple):
    """A step of one GPU with so many CPUs: how long it took, how much of that was waiting for input, and how much CPU
    it used, which does not depend on what else the machine was doing.
    """

    cpus: float
    step_s: float
    waited_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class ProfiledInput:
    """How a model's input is prepared, as one GPU showed at the initial batch with all data in memory.

    cpu_s: CPU-seconds of a sample. gpu_s: of a step that does not wait. sample_bytes, data_bytes: of one sample on
    storage, and of all. steps: what was measured.
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
        """The formula with these constants."""
        return Pipeline(self.cpu_s, self.sample_bytes, self.data_bytes)

    def step_s(self, cpus: float) -> float:
        """Seconds of a step with so many CPUs, all data in memory, by the formula."""
        prepared = self.pipeline.sample_s(cpus, self.data_bytes, storage_bytes_per_s=inf)
        return max(self.gpu_s, self.batch * float(prepared))


@dataclass(frozen=True)
class ProfiledModel:
    """One model on one testbed.

    initial_batch: at which its learning rate was tuned. noise: as training goes on, by work, which begins at 0. input:
    of a job whose samples are loaded (`LoadedJob`), None of any other. application: of its jobs (`JobSpec`), which have
    name, class and arguments in common; "": of all that have its name. tried_batch: up to which its plans were tried;
    beyond max_batch none trained.
    """

    name: str
    initial_batch: int
    max_batch: int
    parameters: float
    noise: tuple[NoiseFrom, ...]
    costs: ProfiledCosts
    rows: tuple[ProfiledRow, ...]
    input: ProfiledInput | None = None
    application: str = ""
    tried_batch: int = 0

    @cached_property
    def tried(self) -> ProfiledModel:
        """Of its degrees those that trained there, at whatever batch."""

        def there(row: ProfiledRow) -> tuple[str, int, Degrees]:
            return row.gpu_type, row.nodes, degrees_of(row.plan)

        trained = {there(row) for row in self.rows if not row.predicted}
        return dataclasses.replace(self, rows=tuple(row for row in self.rows if there(row) in trained))

    @cached_property
    def _best(self) -> dict[tuple[str, int, int, int, bool], ProfiledRow]:
        """The fastest row by GPU type, nodes, GPUs, global batch and whether it must be data-parallel."""
        best: dict[tuple[str, int, int, int, bool], ProfiledRow] = {}
        for row in self.rows:
            plan = row.plan
            for replicas_only in (False, True):
                key = (row.gpu_type, row.nodes, plan.gpus, plan.global_batch, replicas_only)
                fits = not replicas_only or plan.tensor == plan.pipeline == 1
                if fits and (key not in best or row.step_s < best[key].step_s):
                    best[key] = row
        return best

    @cached_property
    def _by_degrees(self) -> dict[tuple[str, int, int, Degrees], ProfiledRow]:
        """The fastest row by GPU type, nodes, global batch and degrees."""
        best: dict[tuple[str, int, int, Degrees], ProfiledRow] = {}
        for row in self.rows:
            key = (row.gpu_type, row.nodes, row.plan.global_batch, degrees_of(row.plan))
            if key not in best or row.step_s < best[key].step_s:
                best[key] = row
        return best

    @cached_property
    def _nodes(self) -> dict[tuple[str, int], set[int]]:
        """On how many nodes so many GPUs of a type were measured."""
        known: dict[tuple[str, int], set[int]] = {}
        for row in self.rows:
            known.setdefault((row.gpu_type, row.plan.gpus), set()).add(row.nodes)
        return known

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """The global batches that were measured, ascending."""
        return tuple(sorted({row.plan.global_batch for row in self.rows}))

    def best(
        self, gpu_type: str, nodes: int, gpus: int, batch: int, *, replicas_only: bool = False
    ) -> ProfiledRow | None:
        """The fastest plan there at that global batch; None where none was measured."""
        return self._best.get((gpu_type, nodes, gpus, batch, replicas_only))

    def with_degrees(self, gpu_type: str, nodes: int, batch: int, degrees: Degrees) -> ProfiledRow | None:
        """The fastest way to train that global batch without a restart; None where none was measured."""
        return self._by_degrees.get((gpu_type, nodes, batch, degrees))

    def knows(self, gpu_type: str, nodes: int, gpus: int, batch: int) -> bool:
        """Whether it has a plan for so many GPUs at that batch, be it on another number of nodes."""
        return self.best(gpu_type, self.nodes_like(gpu_type, nodes, gpus), gpus, batch) is not None

    def nodes_like(self, gpu_type: str, nodes: int, gpus: int) -> int:
        """The number of nodes nearest to that on which so many GPUs were measured; the same, where none was."""
        known = self._nodes.get((gpu_type, gpus), set())
        return min(known, key=lambda each: (abs(each - nodes), each), default=nodes)

    def step_s(self, gpu_type: str, nodes: int, gpus: int, batch: int, *, replicas_only: bool = False) -> float:
        """Seconds of a step under the best plan; inf where none was measured."""
        row = self.best(gpu_type, nodes, gpus, batch, replicas_only=replicas_only)
        return inf if row is None else row.step_s


@dataclass(frozen=True)
class Profile(Mapping[str, ProfiledModel]):
    """Models by name. machine, date: what was measured, and when; only to be shown."""

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
        """The model of that name, if it was measured of such jobs, else one of another name that was; else None."""
        model = self.models.get(name)
        if model is not None and model.application in ("", application):
            return model
        return next((each for each in self.models.values() if application and each.application == application), None)

    def to_json(self) -> str:
        """What `profile_of` reads again."""
        models = [_values(model) for model in self.models.values()]
        document = {"format": FORMAT, "machine": self.machine, "date": self.date, "models": models}
        return json.dumps(document, indent=1) + "\n"


def profile_of(text: str, source: str) -> Profile:
    """A profile from its JSON. source: its file's name, for errors.

    Raises InputError for anything but a profile, and for step times that are not positive.
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
            raise InputError(f"{source}: {model.name}: noise={list(model.noise)}, expected it from work 0 on.")
        for row in model.rows:
            if not (isfinite(row.step_s) and row.step_s > 0):
                raise InputError(f"{source}: {model.name}, {row.plan.describe()}: step_s={row.step_s}, expected > 0.")
    return Profile({model.name: model for model in models}, machine, date)


def _values(model: ProfiledModel) -> dict[str, Any]:
    values = {
        **{each.name: getattr(model, each.name) for each in dataclasses.fields(model)},
        "costs": dataclasses.asdict(model.costs),
        "rows": [dataclasses.asdict(row) for row in model.rows],
    }
    given = values.pop("input")
    return values if given is None else {**values, "input": dataclasses.asdict(given)}


def _model(values: dict[str, Any]) -> ProfiledModel:
    rows = tuple(ProfiledRow(**{**row, "plan": Plan(**row["plan"])}) for row in values["rows"])
    noise = tuple(NoiseFrom(float(work), float(ratio)) for work, ratio in values["noise"])
    given = values.get("input")
    if given is not None:
        given = ProfiledInput(**{**given, "steps": tuple(StepAtCpus(*map(float, each)) for each in given["steps"])})
    costs = ProfiledCosts(**values["costs"])
    return ProfiledModel(**{**values, "costs": costs, "noise": noise, "rows": rows, "input": given})


def _fault(error: Exception) -> str:
    """What is wrong with a document, in a phrase."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: line {error.lineno}"
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    odd = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if odd is not None:
        return f"nothing is called {odd[1]}"
    return "a value of another type than expected" if isinstance(error, TypeError) else str(error)
