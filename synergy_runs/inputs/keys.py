"""Declares configuration keys as dataclass fields with meaning, default and bounds, and checks what Hydra composes.

Hydra accepts any key that is added with `+`; here an unknown key is an error that names the nearest known key. This
file has the keys that both programs share, and each program's `settings.py` has its own. The simulator's defaults are
in conf/; the executor's are in its `settings.py` (`defaults` passes them to Hydra).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.jobs.cluster import MAX_GPUS_PER_NODE, MAX_NODES, PlacementRule

Settable = TypeVar("Settable")


class Bounds(NamedTuple):
    """A condition on a key's value beyond its type. words: the condition in messages. hold: tests non-null values."""

    words: str
    hold: Callable[[Any], bool]


ANY = Bounds("", lambda value: True)
COUNT = Bounds("a whole number ≥ 0", lambda value: value >= 0)
POSITIVE = Bounds("at least 1", lambda value: value >= 1)
FRACTION = Bounds("a fraction in [0, 1]", lambda value: 0 <= value <= 1)
PART = Bounds("a fraction in (0, 1]", lambda value: 0 < value <= 1)
NOT_NEGATIVE = Bounds("a finite number ≥ 0", lambda value: 0 <= value < float("inf"))
ABOVE_ZERO = Bounds("a finite number > 0", lambda value: 0 < value < float("inf"))
FACTOR = Bounds("a finite factor ≥ 1", lambda value: 1 <= value < float("inf"))
ROUND = Bounds("a number of seconds, at least 0.001", lambda value: 1e-3 <= value < float("inf"))
NODES = Bounds(f"at least 1 and at most {MAX_NODES:,}", lambda value: 1 <= value <= MAX_NODES)
GPUS_PER_NODE = Bounds(f"1 to {MAX_GPUS_PER_NODE}", lambda value: 1 <= value <= MAX_GPUS_PER_NODE)
NAME = Bounds(
    "a name, not a path; results are filed under it",
    lambda name: name and "/" not in name and not name.startswith("."),
)
FOLDER = Bounds("a folder, such as results", lambda path: str(path) != ".")
SEEDS = Bounds("one or more whole numbers ≥ 0", lambda seeds: seeds and min(seeds) >= 0)

COMPRESSION_MEANING = (
    "how replicas compress the gradients that they exchange: none, uniform (all layers with compressor), lgreco "
    "(each layer its own, within the error of compressor; both at the requested batch), naive (as lgreco, with the "
    "batch chosen as if compression cost no progress), coadaptive (compressor and batch chosen together)"
)
FigureFormat = Literal["png", "pdf", "svg"]
Figures = bool | list[FigureFormat]
MAX_WAIT_MEANING = (
    "how many times max(60 s, 2 × the mean run time so far) a job may wait before it goes first: others are stopped "
    "for it or, under policies that stop none, do not start until it does; srtf is exempt. 0: as long as the policy "
    "lets it wait"
)
FIGURES_MEANING = (
    "formats of the figures, one or a list: [png,pdf,svg]; true: png. report.html and traces for Perfetto are written "
    "with them; false: none of all these"
)
COMPRESSOR_MEANING = "compressor for uniform, lgreco and naive: bf16, q8, q4, q2, topk-FRACTION, powersgd-RANK"


def key(meaning: str, default: Any = MISSING, bounds: Bounds = ANY) -> Any:
    """Declares a settings field. meaning: a line for --help. A field without a default gets its value from conf/."""
    described = {"meaning": meaning, "bounds": bounds}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=described)
    return field(default=default, metadata=described)


def group(of: type) -> Any:
    """Declares a field with a part of the keys. Users type these keys without the field's name."""
    return field(default_factory=of, metadata={"group": of})


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSettings:
    """Settings of the trace, which defines the jobs that arrive."""

    name: str = key("the trace's name, which is the folder of its results", bounds=NAME)
    path: Path | None = key("a job log; null: the first of `find` that exists, else the generator")
    find: list[str] = key("file names to look for in $SYNERGY_DATA, $SYNERGY_DATA/traces and ./traces")
    generator: str | None = key("statistics, or a law such as osdi22, to draw jobs from where there is no log")
    jobs: int | None = key("for a law: the number of jobs")
    jobs_per_hour: float | None = key("for a law: the arrival rate of a Poisson process")
    job_gpus: Literal["one", "philly"] | None = key("for a law: GPUs per job, one, or up to 16 drawn as in Philly")
    run_times: list[list[float]] | None = key(
        "for a law: [[share, a, b], …], where a run time is 60·10^U(a, b) seconds with probability share"
    )
    class_mix: list[float] = key("shares of image, language and speech models, for a law and for models=by_class")
    format: str | None = key("the log's format; null: recognised by its content")
    columns: dict[str, str] = key(
        "for a CSV of any other kind: our column → the file's, such as {submit_time: arrival_time, gpus: num_gpu}", {}
    )
    window: str = key(
        "all, 7d, 2017-10-09/7d, 2017-10-09/2017-10-16 or 2017-10-09; of two windows, as in `2017-10-09/7d or 7d`, the "
        "first applies to a log and the second to drawn jobs"
    )
    carry_in: bool = key("whether jobs that were running at the window's start enter with their remaining work")
    sample: float = key("fraction of the jobs to keep, drawn with the seed", bounds=PART)
    min_gpus: int = key("jobs that request fewer GPUs are left out", bounds=COUNT)
    bad_rows: Literal["stop", "skip"] = key("what to do with impossible rows")
    attempts: Literal["apart", "merged"] = key(
        "requeued and retried jobs: a submission per attempt (apart), or one long run per job (merged)"
    )
    overestimate: float = key("missing estimates are drawn: duration × (1 + overestimate·U[0,1))", bounds=NOT_NEGATIVE)
    models: Literal["auto", "none", "as_given", "mix", "by_class", "llm"] = key(
        "training jobs: none (run times only), as_given (the log names them), mix (drawn by GPU-time; run times kept), "
        "by_class (the log's, else by class_mix; run times kept), "
        "llm (as mix, but large jobs are language models with parallel plans), "
        "auto (as_given where the log names models and batches, mix where a policy needs it)"
    )
    measured_jobs: str | None = key("ids of the jobs that job metrics include, such as 4000-4999; null: all")
    llm_gpus: int = key("with models=llm, jobs with at least this many GPUs are language models", bounds=POSITIVE)
    gpu_type: str | None = key(
        "the GPU type that run times were logged on where the log does not say; on another type they are converted, as "
        "measured or by data sheets; null: where the log does not say, they are used unchanged. Simulator only",
        None,
    )
    nodes: int | None = key(
        "nodes of the cluster unless cluster.nodes is set; null: those that the log's jobs ran on", bounds=NODES
    )
    gpus_per_node: int | None = key("GPUs per node; null: as in the log, else 8", bounds=GPUS_PER_NODE)
    slots: int | None = key(
        "for the executor: slots on a machine without GPUs, which share its CPU cores; null: one slot per core",
        None,
        POSITIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTypeSettings:
    """Settings of a group of identical nodes."""

    gpu_type: str = key("a name such as v100")
    nodes: int = key("number of nodes", bounds=NODES)
    gpus_per_node: int = key("GPUs per node", bounds=GPUS_PER_NODE)
    cpus_per_node: float | Literal["sheet"] | None = key("CPU cores per node; null: cluster.cpus_per_node", None)
    memory_gb_per_node: float | Literal["sheet"] | None = key("host memory; null: cluster.memory_gb_per_node", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Settings of the cluster that jobs run on."""

    nodes: int | None = key("number of nodes; null: trace.nodes, or those in the log", bounds=NODES)
    gpus_per_node: int | None = key("GPUs per node; null: trace.gpus_per_node, or as in the log", bounds=GPUS_PER_NODE)
    add_nodes: int = key("number of nodes to add (or remove: -8), if all nodes are alike", 0)
    cpus_per_node: float | Literal["sheet"] | None = key(
        "CPU cores per node; sheet: as in the catalog's nodes of that GPU type; null: CPUs are not modelled"
    )
    memory_gb_per_node: float | Literal["sheet"] | None = key("host memory per node, GB; sheet, null: as for CPU cores")
    storage_mb_per_s: float | None = key(
        "rate at which each node reads training data that is not cached in its memory, MB/s; null: never a bottleneck"
    )
    network_gbps: float | None = key(
        "bandwidth that all-reduces between nodes reach, Gb/s per node; null: as measured. Simulator only, with "
        "truth.measured=false",
        None,
        ABOVE_ZERO,
    )
    gpu_type: str | None = key(
        "the GPU type of all nodes, from the catalog or gpu_sheets; null: the most frequent type in the log, else "
        "trace.gpu_type, else v100"
    )
    gpu_sheets: list[Path] = key(
        "data sheets of further GPU types: YAML files named after the type, in the form of the catalog's gpus/",
        [],
    )
    gpu_names: dict[str, str] = key(
        "{theirs: ours}: what the log's names of GPU types mean, as far as the catalog does not know them", {}
    )
    anonymous_gpu_types: list[str] = key(
        "GPU types without data sheet or measurements, on which run times are used unchanged", []
    )
    node_types: list[NodeTypeSettings] | None = key(
        "several node types, in order of preference, instead of the keys above; cluster.node_types.0.nodes=12 changes "
        "one value"
    )
    load: float = key("factor on the trace's arrival rate; 1: as in the trace", bounds=ABOVE_ZERO)
    offered_load: float | None = key(
        "sets the arrival rate such that requested GPUs × run times are this fraction of the cluster's GPU time; null: "
        "as `load` says",
        None,
        bounds=ABOVE_ZERO,
    )
    virtual_clusters: Literal["trace"] | dict[str, int] | None = key(
        "quotas: null, trace (as the log says), or {tenant: GPUs}"
    )
    borrowing: bool = key("whether a tenant may exceed its quota while GPUs are idle")
    reclaim: Literal["any", "never"] | None = key(
        "with borrowing, whether a job within its tenant's quota stops jobs beyond theirs: any, or never (a quota is "
        "then no guarantee); null: any under policies that stop jobs, never under the others",
        None,
    )
    placement: PlacementRule = key(
        "where jobs run: consolidate (on one node if they fit, else on whole nodes; until then they wait), relax (the "
        "same until they have waited patience_s), spread (on any free GPUs), even (as spread, with "
        "equal numbers of GPUs per node: 2 + 2, not 3 + 1), most_free (on the emptiest nodes)"
    )
    patience_s: float = key("how long a job waits for a consolidated placement if placement=relax", bounds=NOT_NEGATIVE)
    max_wait: float = key(MAX_WAIT_MEANING, 0.0, NOT_NEGATIVE)
    partitions: Literal["trace"] | None = key(
        "trace: each job runs only on the nodes of the partition that the log says it was submitted to; null: all "
        "nodes are one pool. A node type of a partition is named a100@PARTITION",
        None,
    )
    ignore_gpu_types: bool = key("whether jobs run on any GPU type, regardless of the type that they request")


class Key(NamedTuple):
    """A setting of a program. name: with dots, such as cluster.nodes. bounds: conditions on its value."""

    name: str
    type: Any
    meaning: str
    bounds: Bounds


def keys(of: type, prefix: str = "") -> Iterator[Key]:
    """All keys of a settings class, each section before its keys. prefix: text before each name, such as `cluster.`.

    A list of sections, such as cluster.node_types, is represented by its first entry: cluster.node_types.0.nodes.
    """
    hints = _types(of)
    for each in dataclasses.fields(of):
        if "group" in each.metadata:
            yield from keys(each.metadata["group"], prefix)
            continue
        hint = hints[each.name]
        yield Key(prefix + each.name, hint, each.metadata["meaning"], each.metadata["bounds"])
        for choice in alternatives(hint):
            is_list = typing.get_origin(choice) is list
            section = typing.get_args(choice)[0] if is_list else choice
            if dataclasses.is_dataclass(section):
                yield from keys(section, f"{prefix}{each.name}.{'0.' * is_list}")  # type: ignore[arg-type]


def alternatives(hint: Any) -> list[Any]:
    """The members of a union type, without None; for any other type, the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return [each for each in typing.get_args(hint) if each is not type(None)] if is_union else [hint]


def inside(hint: Any, part: str) -> Any:
    """The type of a part of a setting; None if there is no such part. part: a section's key, a name or a list index."""
    for each in alternatives(hint):
        origin, choices = typing.get_origin(each), typing.get_args(each)
        if each is Any:
            return Any
        if dataclasses.is_dataclass(each):
            return _types(each).get(part)
        if origin is dict or (origin is list and part.isdecimal()):
            return choices[-1]
    return None


def defaults(of: type) -> dict[str, Any]:
    """The defaults of all keys that have one, as plain values."""
    found: dict[str, Any] = {}
    for each in dataclasses.fields(of):
        if "group" in each.metadata:
            found |= defaults(each.metadata["group"])
            continue
        value = each.default if each.default_factory is MISSING else each.default_factory()
        if value is not MISSING:
            section = dataclasses.is_dataclass(value)
            found[each.name] = defaults(type(value)) if section else str(value) if isinstance(value, Path) else value
    return found


def _read_types(of: type) -> dict[str, Any]:
    """The type of every key of a settings class, including the keys of its groups."""
    hints = typing.get_type_hints(of)
    found: dict[str, Any] = {}
    for each in dataclasses.fields(of):
        found |= _types(each.metadata["group"]) if "group" in each.metadata else {each.name: hints[each.name]}
    return found


_types: Callable[[Any], dict[str, Any]] = functools.cache(_read_types)
"""Compiling the annotations of a class takes longer than reading a whole job file."""


def build(settings: type[Settable], values: Mapping[str, Any], prefix: str = "") -> Settable:
    """Builds a settings object from plain values. Raises InputError for unknown, missing or mistyped keys."""
    hints = _types(settings)
    for name in values:
        if name not in hints:
            raise unknown("key", prefix + str(name), [prefix + each for each in hints])
    values, made = {**defaults(settings), **values}, {}
    for each in dataclasses.fields(settings):  # type: ignore[arg-type]
        if (of_group := each.metadata.get("group")) is not None:
            made[each.name] = build(of_group, {name: values[name] for name in values.keys() & _types(of_group)}, prefix)
            continue
        name, bounds, hint = prefix + each.name, each.metadata["bounds"], hints[each.name]
        if each.name not in values:
            raise InputError(f"{name} is missing: {expected(hint)}.")
        made[each.name] = value = cast(values[each.name], hint, name)
        if value is not None and not bounds.hold(value):
            raise InputError(f"{name}={typed(values[each.name])}: expected {expected(hint, bounds)}.")
    return settings(**made)


def cast(value: Any, hint: Any, where: str) -> Any:
    """Converts a value to a setting's type. where: the dotted key. Raises InputError if that would lose information."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    types_allowed = alternatives(hint)
    if len(types_allowed) > 1:
        for each in types_allowed:
            with contextlib.suppress(InputError):
                return cast(value, each, where)
        raise InputError(f"{where}={typed(value)}: expected {expected(hint)}.")
    hint = types_allowed[0]
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin is Literal:
        if str(value) not in choices:
            raise unknown(f"value of {where}", typed(value), choices)
        return str(value)
    if origin is list and isinstance(value, Mapping) and value and all(str(each).isdigit() for each in value):
        raise InputError(f"{where}.{next(iter(value))}: there is no list to change; set all of {where} first.")
    if origin is list and not isinstance(value, Mapping):
        several = isinstance(value, list | tuple)
        each_where = f"{where}.{{}}" if several and dataclasses.is_dataclass(choices[0]) else where
        return [cast(each, choices[0], each_where.format(i)) for i, each in enumerate(value if several else [value])]
    if origin is dict and isinstance(value, Mapping):
        return {str(name): cast(item, choices[1], f"{where}.{name}") for name, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, where + ".")  # type: ignore[arg-type]
    if hint in (str, Path) and isinstance(value, str | int | float | Path) and not isinstance(value, bool):
        return hint(str(value))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint in (int, bool) and type(value) is hint:
        return value
    raise InputError(f"{where}={typed(value)}: expected {expected(hint)}.")


def typed(value: Any) -> str:
    """Formats a value as a user types it after `key=`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {typed(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(typed, value)) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_PLAIN = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    Any: "any value",
    type(None): "null",
}


def expected(hint: Any, bounds: Bounds = ANY) -> str:
    """The values that a key of this type accepts, in words."""
    origin, choices = typing.get_origin(hint), typing.get_args(hint)
    if bounds.words:
        return bounds.words + ", or null" * (type(None) in choices)
    if alternatives(hint) != [hint]:
        return ", or ".join(map(expected, choices))
    if origin is Literal:
        *others, last = choices
        return f"{', '.join(others)} or {last}" if others else last
    if origin is list:
        each = expected(choices[0])
        return f"a list: [{each}, …]" if dataclasses.is_dataclass(choices[0]) else f"{each}, or a list: [a,b]"
    if origin is dict:
        return f"{{name: {expected(choices[1])}, …}}"
    if dataclasses.is_dataclass(hint):
        every = dataclasses.fields(typing.cast(type, hint))
        needed = [each.name for each in every if each.default is MISSING and each.default_factory is MISSING]
        return "{" + ", ".join(f"{name}: …" for name in needed or [each.name for each in every]) + "}"
    return _PLAIN.get(hint, "a value")
