"""Configuration keys: a dataclass field each, with all there is to say of it; what Hydra composed is checked by them.

Hydra accepts any key that is added with `+`, so a mistyped one would pass unnoticed; here it does not. Here stand the
keys that every program has; its own stand in its `settings.py`. A program of which conf/ has no groups of values but
the trace says the defaults there, too (`defaults` is what Hydra composes of them); of others they stand in conf/.
"""

from __future__ import annotations

import copy
import dataclasses
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from synergy_core.cluster import PlacementRule
from synergy_core.errors import InputError, unknown

Settable = TypeVar("Settable")


class Bounds(NamedTuple):
    """What a key's value must be, beside its type: in words, and whether a value is."""

    words: str
    hold: Callable[[Any], bool]


ANY = Bounds("anything of its type", lambda value: True)
SECONDS = Bounds("seconds above 0", lambda value: 0 < value < float("inf"))
COUNT = Bounds("a whole number ≥ 0", lambda value: value >= 0)


COMPRESSION_MEANING = (
    "whether replicas compress the gradients that they exchange: none, uniform (all with compressor), lgreco "
    "(layer by layer within the error of compressor; both at the requested batch), naive (the same, the batch "
    "chosen as if it cost no progress), coadaptive (compressor and batch chosen together)"
)
COMPRESSOR_MEANING = "of uniform, lgreco and naive: bf16, q8, q4, q2, topk-FRACTION, powersgd-RANK"
"""Of keys that several programs have."""


def key(meaning: str, default: Any = MISSING, bounds: Bounds = ANY) -> Any:
    """A field with one line that says what it means. Without a default it is required: conf/ gives it a value."""
    described = {"meaning": meaning, "bounds": bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=described)
    return field(default=default, metadata=described)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Which jobs arrive."""

    name: str = key("what results are filed under")
    path: Path | None = key("a job log; null: the first of `find` that exists, else the generator")
    find: list[str] = key("file names to look for in $SYNERGY_DATA, $SYNERGY_DATA/traces and ./traces")
    generator: str | None = key("statistics, or a law such as osdi22, to draw jobs from where there is no log")
    jobs: int | None = key("of a law: how many jobs")
    jobs_per_hour: float | None = key("of a law: how many of them arrive in an hour, a Poisson process")
    job_gpus: Literal["one", "philly"] | None = key("of a law: GPUs of a job, one, or drawn as Philly's, up to 16")
    run_times: list[list[float]] | None = key(
        "of a law: [[share, a, b], …], with that probability a run time is 60·10^U(a, b) seconds"
    )
    class_mix: list[float] = key("shares of image, language and speech models, for a law and for models=by_class")
    format: str | None = key("the log's format; null: recognised")
    window: str = key("all, 7d, 2017-10-09/7d, 2017-10-09/2017-10-16 or 2017-10-09")
    carry_in: bool = key("whether jobs that were running at the window's start enter with what was left of them")
    sample: float = key("fraction of the jobs to keep, drawn with the seed")
    min_gpus: int = key("jobs that ask for fewer GPUs are left out")
    bad_rows: Literal["stop", "skip"] = key("what to do with impossible rows")
    attempts: Literal["apart", "merged"] = key(
        "requeued and retried jobs: a submission per attempt (apart), or one long run per job (merged)"
    )
    overestimate: float = key("estimates the log lacks are duration × (1 + overestimate·U[0,1))")
    models: Literal["auto", "none", "as_given", "mix", "by_class", "llm"] = key(
        "training jobs: none (run times only), as_given (the log names them), mix (drawn by GPU-time; run times kept), "
        "by_class (the log's, else by class_mix; run times kept), "
        "llm (as mix, but large jobs are language models with parallel plans), "
        "auto (as_given where the log names models and batches, mix where a policy needs it)"
    )
    measured_jobs: str | None = key("ids of the jobs that figures of jobs are over, such as 4000-4999; null: all")
    llm_gpus: int = key("the fewest GPUs of a job that models=llm makes a language model")
    nodes: int = key("nodes of the cluster unless cluster.nodes says otherwise")
    gpus_per_node: int = key("GPUs of each of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypeSettings:
    """Nodes that are alike."""

    gpu_type: str = key("a name such as v100")
    nodes: int = key("how many nodes")
    gpus_per_node: int = key("GPUs of each")
    cpus_per_node: float | Literal["sheet"] | None = key("CPU cores of each; null: cluster.cpus_per_node", None)
    memory_gb_per_node: float | Literal["sheet"] | None = key("memory; null: cluster.memory_gb_per_node", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """What they run on."""

    nodes: int | None = key("number of nodes; null: what the trace suggests")
    gpus_per_node: int | None = key("GPUs of each node; null: what the trace suggests")
    cpus_per_node: float | Literal["sheet"] | None = key(
        "CPU cores of each node; sheet: as the catalog's nodes of that GPU type have; null: nobody looks at CPUs"
    )
    memory_gb_per_node: float | Literal["sheet"] | None = key("host memory of each node, GB; sheet and null: as above")
    storage_mb_per_s: float | None = key(
        "at which each node reads training data that is not in its memory, MB/s; null: as fast as need be"
    )
    network_gbps: float | None = key(
        "what all-reduces between nodes reach, Gb/s of a whole node; null: as measured. Of the simulator, with "
        "truth.measured=false",
        None,
    )
    gpu_type: str = key("the GPU type of all nodes")
    node_types: list[NodeTypeSettings] | None = key("several types, in order of preference, instead of the above")
    load: float = key("how many times as dense as in the trace jobs arrive")
    virtual_clusters: str | dict[str, int] | None = key("quotas: null, trace (as the log says), or {tenant: GPUs}")
    borrowing: bool = key("whether a tenant may exceed its quota while GPUs are idle")
    placement: PlacementRule = key(
        "where jobs go: consolidate (on one node up to its size, on whole nodes beyond; else they wait), relax (the "
        "same until they have waited patience_s), spread (wherever GPUs are free), even "
        "(the same, dealt alike over its nodes: 2 + 2, not 3 + 1), most_free (on the emptiest nodes)"
    )
    patience_s: float = key("how long a job waits for GPUs that lie together if placement=relax")
    ignore_gpu_types: bool = key("whether jobs run on any GPU type, whatever the log says they asked for")


def meanings(of: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, meaning) of every key, sections first."""
    for each in _fields(of):
        yield prefix + each.name, each.metadata["meaning"]
        kind = typing.get_type_hints(of)[each.name]
        for section in typing.get_args(kind) or (kind,):  # one that may be null has keys too
            if dataclasses.is_dataclass(section) and typing.get_origin(kind) is not list:
                yield from meanings(section, f"{prefix}{each.name}.")  # type: ignore[arg-type]


def defaults(of: type) -> dict[str, Any]:
    """The defaults of the keys that have one, as plain values."""
    made = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory() for each in _fields(of)
    }
    return {name: _plain(value) for name, value in made.items() if value is not MISSING}


def _fields(of: type) -> list[dataclasses.Field[Any]]:
    """The fields of a settings class, its own before those that it inherits."""
    return sorted(dataclasses.fields(of), key=lambda each: each.name not in of.__annotations__)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return defaults(type(value))
    return str(value) if isinstance(value, Path) else value


def build(kind: type[Settable], values: Mapping[str, Any], prefix: str = "") -> Settable:
    """A settings object of plain values. Raises InputError for unknown, missing or mistyped keys."""
    hints = typing.get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise unknown("key", prefix + name, [prefix + each for each in hints])
    values = {**defaults(kind), **values}
    for name in hints:
        if name not in values:
            raise InputError(f"{prefix}{name} is missing; expected {_words(hints[name])}. Set it with {prefix}{name}=.")
    made = kind(**{name: _cast(values[name], hints[name], prefix + name) for name in hints})
    for each in _fields(kind):
        bounds = each.metadata["bounds"]
        if not bounds.hold(getattr(made, each.name)):
            raise InputError(f"{prefix}{each.name}={values[each.name]}: expected {bounds.words}.")
    return made


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
