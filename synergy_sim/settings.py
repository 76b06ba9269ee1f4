"""Every configuration key: its type, its default's place and its meaning. What Hydra composed is checked against this.

Hydra accepts any key that is added with `+`, so a mistyped one would pass unnoticed; here it does not.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from synergy_core.errors import InputError, unknown

Settable = TypeVar("Settable")


def key(meaning: str) -> Any:
    """A field with one line that says what it means; every field is required, since conf/ gives all defaults."""
    return field(metadata={"meaning": meaning})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Which jobs arrive."""

    name: str = key("what results are filed under")
    path: Path | None = key("a job log; null: the first of `find` that exists, else the generator")
    find: list[str] = key("file names to look for in $SYNERGY_DATA, $SYNERGY_DATA/traces and ./traces")
    generator: str | None = key("published statistics to draw jobs from where there is no log")
    format: str | None = key("the log's format; null: recognised")
    window: str = key("all, 7d, 2017-10-09/7d, 2017-10-09/2017-10-16 or 2017-10-09")
    sample: float = key("fraction of the jobs to keep, drawn with the seed")
    min_gpus: int = key("jobs that ask for fewer GPUs are left out")
    bad_rows: Literal["stop", "skip"] = key("what to do with impossible rows")
    overestimate: float = key("estimates the log lacks are duration × (1 + overestimate·U[0,1))")
    models: Literal["auto", "none", "as_given", "mix", "llm"] = key(
        "training jobs: none (run times only), as_given (the log names them), mix (drawn by GPU-time; run times kept), "
        "llm (as mix, but large jobs are language models with parallel plans), "
        "auto (as_given where the log names models and batches, mix where a policy needs it)"
    )
    llm_gpus: int = key("the fewest GPUs of a job that models=llm makes a language model")
    nodes: int = key("nodes of the cluster unless cluster.nodes says otherwise")
    gpus_per_node: int = key("GPUs of each of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypeSettings:
    """Nodes that are alike."""

    gpu_type: str = key("a name such as v100")
    nodes: int = key("how many nodes")
    gpus_per_node: int = key("GPUs of each")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What they run on."""

    nodes: int | None = key("number of nodes; null: what the trace suggests")
    gpus_per_node: int | None = key("GPUs of each node; null: what the trace suggests")
    gpu_type: str = key("the GPU type of all nodes")
    node_types: list[NodeTypeSettings] | None = key("several types, in order of preference, instead of the above")
    load: float = key("how many times as dense as in the trace jobs arrive")
    virtual_clusters: str | dict[str, int] | None = key("quotas: null, trace (as the log says), or {tenant: GPUs}")
    borrowing: bool = key("whether a tenant may exceed its quota while GPUs are idle")
    whole_nodes: bool = key("whether jobs larger than a node need whole nodes")
    placement: Literal["best_fit", "most_free"] = key("where jobs go: the fullest node that fits, or the emptiest ones")
    ignore_gpu_types: bool = key("whether jobs run on any GPU type, whatever the log says they asked for")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestbedSettings:
    """How decisions are carried out."""

    round_s: float | None = key("decide once per round of so many seconds; null: whenever something happens")
    own_rounds: bool = key("whether policies that allocate keep the round they were published with")
    decide_fraction: float = key("where in a round the next is decided, in (0, 1]; 1: at its end")
    launch_s: float = key("seconds before a job's first step")
    restart_s: float = key("seconds before the first step after a preemption")
    resize_fraction: float = key("how much of restart_s a job stands still where only its GPUs' number changes")
    exit_s: float = key("seconds to save and leave after the last step of a run")
    checkpoint_interval_s: float = key("training seconds between checkpoints; 0: saves when told to stop")
    stretch: Literal["none", "log", "linear"] = key("how ended leases delay a round: a·ln(1+n) or b·min(n, most)")
    stretch_s: float = key("a or b of the stretch")
    stretch_jobs: int | None = key("most of the linear stretch; null: no limit")
    start_delay_s: float = key("seconds before the first round")
    early_launch: bool = key("whether a job may start on idle GPUs before its round does")
    free_moves: bool = key("whether a job that moves but keeps its shape pays nothing")
    whole_seconds: bool = key("whether epochs of training jobs end at whole seconds")
    storage_bytes_per_s: float = key("at which jobs with parallel plans save and load their checkpoints")
    startup_s: float = key("seconds such a job starts up, beside saving and loading, whenever it starts")
    by_model: dict[str, dict[str, float]] = key("other costs for a model: {resnet50: {launch_s: 20}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSettings:
    """Jobs with parallel plans."""

    error: float = key("standard deviation of the logarithm of true ÷ planned step times, by architecture and GPU type")
    noise_tokens: float = key("noise scale of the gradient, tokens")
    batch_growth: float = key("up to how many times the requested batch they may train at; 1: it is fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthSettings:
    """How fast training jobs really run."""

    profiles: Path | None = key("a folder of measured tables; null: profiles in $SYNERGY_DATA, else the catalog")
    measured: bool = key("whether to use measured tables where there are some")
    slowdown: dict[str, float] = key("by model, how much slower jobs are than their steps add up to: {bert: 1.2}")
    max_local_batch: dict[str, int] = key("by model, most samples on a GPU where less than what fits")
    fixed_gpus: dict[str, int] = key("by model, jobs that run on exactly so many GPUs at the requested batch")
    min_gpus: dict[str, int] = key("by model, the fewest GPUs its jobs run on")
    not_preemptible: list[str] = key("models whose jobs, once started, keep what they have")
    most_gpus: int = key("GPUs that any job may grow to, unless it asks for more")
    labels: int = key("into how many unrelated labels each model is split; observations are shared within one")
    declared_error: float = key("standard deviation of the logarithm of declared ÷ true work")
    noise_fraction: float = key("standard deviation of the logarithm of observed ÷ true step times")
    straggler_fraction: float = key("probability that a run of a job straggles")
    straggler_slowdown: float = key("how much slower it then is")
    planned: PlannedSettings = key("jobs with parallel plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A whole run."""

    trace: TraceSettings = key("which jobs arrive: +trace=philly")
    cluster: ClusterSettings = key("what they run on: cluster=default or heterogeneous")
    testbed: TestbedSettings = key("how decisions are carried out: testbed=ideal or shockwave_v100")
    truth: TruthSettings = key("how fast training jobs really run")
    information: Literal["own", "declared", "shared", "all"] | None = key(
        "what policies may know of a job beside its own reports: nothing (own), its declared work, what other jobs of "
        "its model report (shared), all; null: as each policy is published"
    )
    policy: list[str] = key("one policy, or a list to compare; the first is what the others are compared to")
    parameters: dict[str, dict[str, Any]] = key("parameters by policy: parameters.las.demote_after_gpu_s=7200")
    seed: list[int] = key("one seed or a list; each policy sees the same jobs for the same seed")
    restart_s: float = key("what a preempted job pays when it resumes, seconds")
    round_s: float | None = key("decide once per round of so many seconds; null: as the policy does")
    results_dir: Path = key("where results go")
    figures: bool = key("whether to draw figures and write report.html and traces for Perfetto")
    progress: bool = key("whether to show a progress bar (never if the output is not a terminal)")


def meanings(of: type = Settings, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, meaning) of every key, sections first."""
    for each in dataclasses.fields(of):
        yield prefix + each.name, each.metadata["meaning"]
        section = typing.get_type_hints(of)[each.name]
        if dataclasses.is_dataclass(section):
            yield from meanings(section, f"{prefix}{each.name}.")  # type: ignore[arg-type]


def build(kind: type[Settable], values: Mapping[str, Any], prefix: str = "") -> Settable:
    """A settings object of plain values. Raises InputError for unknown, missing or mistyped keys."""
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise unknown("key", prefix + name, [prefix + each for each in hints])
    for name in hints:
        if name not in values:
            raise InputError(f"{prefix}{name} is missing; expected {_words(hints[name])}. Set it with {prefix}{name}=.")
    return kind(**{name: _cast(values[name], hints[name], prefix + name) for name in hints})


def _cast(value: Any, kind: Any, where: str) -> Any:
    """`value` as the type wants it, with the conversions that lose nothing."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _cast_union(value, kind, choices, where)
    if kind is Any:
        return value
    if origin is Literal:
        if str(value) not in choices:
            raise unknown(f"value of {where}", str(value), choices)
        return str(value)
    if origin is list:
        items = value if isinstance(value, list | tuple) else [value]
        return [_cast(item, choices[0], where) for item in items]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _cast(item, choices[1], f"{where}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(kind, value, where + ".")  # type: ignore[arg-type]
    if kind in (str, Path) and isinstance(value, str | int | float | Path) and not isinstance(value, bool):
        return kind(str(value))
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind in (int, bool) and type(value) is kind:
        return value
    raise InputError(f"{where}={value}: expected {_words(kind)}.")


def _cast_union(value: Any, kind: Any, choices: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in choices:
        return None
    for choice in choices:
        if choice is not type(None):
            try:
                return _cast(value, choice, where)
            except InputError:
                if len(choices) == 2 and type(None) in choices:
                    raise
    raise InputError(f"{where}={value}: expected {_words(kind)}.")


def _words(kind: Any) -> str:
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(choice) for choice in choices)
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    if kind is type(None):
        return "null"
    if origin is Literal:
        return " or ".join(choices)
    if origin is list:
        return f"{_words(choices[0])} or a list of them"
    if origin is dict:
        return "a mapping {name: value}"
    return plain.get(kind, "a section")
