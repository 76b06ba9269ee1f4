"""What a generator knows: statistics from `traces/*.json`, checked and completed where a rule fills a gap."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.arrays import Floats
from synergy_core.errors import InputError, unknown
from synergy_runs.generators.durations import Law, LognormalBySize, QuantilesBySize, lognormal_by_size
from synergy_runs.resources import statistics_folder
from synergy_runs.traces.rows import END_STATES

MARK = '"synergy_trace_statistics"'
MARK_WITHIN_CHARACTERS = 200
FIT_ROUNDS = 1_000
FIT_ERROR = 1e-12


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When jobs come. `*_fraction` arrays sum to 1, hours from midnight, days from Monday.

    first_day: where a log without dates of its own starts, a Monday. log_dates: the first day of the real log and the
    day after its last; None where the statistics do not say.
    most_per_hour: jobs of the busiest hour.
    slow_fraction: share of the variance of an hour's level that changes over `slow_days` rather than hours.
    hour_to_hour_correlation: of what is left, between neighbouring hours.
    gap_within_batch: mean gap between jobs of one batch over the mean gap before a new batch.
    """

    first_day: str
    mean_per_hour: float
    index_of_dispersion: float
    most_per_hour: float
    hour_of_day_fraction: Floats
    weekday_fraction: Floats
    slow_fraction: float
    slow_days: float
    hour_to_hour_correlation: float
    gap_within_batch: float
    log_dates: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """One cluster's job log in numbers. `mix[v, s]`: fraction of all jobs in tenant v with `sizes[s]` GPUs.

    checked: further figures that the log is held to. elsewhere: figures of the same cluster that it is not, because
    they are of other jobs or need a scheduler. origin: block by block, the label of where its figures are from;
    sources: what labels stand for.
    """

    name: str
    title: str
    nodes: int
    gpus_per_node: int
    arrivals: Arrivals
    sizes: tuple[int, ...]
    virtual_clusters: tuple[str, ...]
    virtual_cluster_nodes: tuple[int, ...]
    duration_score: Floats
    mix: Floats
    law: Law
    batch_tail_exponent: tuple[float, ...]
    longest_batch_jobs: int
    users: int
    user_zipf_exponent: float
    user_fraction: float
    batch_fraction: float
    end_state_job_fraction: Floats
    end_state_gpu_time_fraction: Floats
    checked: dict[str, Any]
    elsewhere: dict[str, Any]
    origin: dict[str, str]
    sources: dict[str, str]

    @property
    def quotas(self) -> dict[str, int]:
        """GPUs of each tenant."""
        nodes = zip(self.virtual_clusters, self.virtual_cluster_nodes, strict=True)
        return {name: each * self.gpus_per_node for name, each in nodes}


def blocks() -> dict[str, dict[str, Any]]:
    """The JSON of every generator, by name. A file that does not start with the mark (a download) is passed over."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(statistics_folder().glob("*.json")):
        with path.open(encoding="utf-8") as stream:
            if MARK not in stream.read(MARK_WITHIN_CHARACTERS):
                continue
            stream.seek(0)
            content = json.load(stream)
        for name, own in content["generators"].items():
            if name in found:
                raise InputError(f"{path}: a generator named {name} stands in another file too; rename one.")
            sources = content.get("sources", {})
            found[name] = _merged(content.get("shared", {}), own) | {"path": path, "sources": sources}
    return found


def statistics(name: str) -> Statistics:
    """The statistics of one generator. Raises InputError for an unknown name or a file that lacks something."""
    known = blocks()
    if name not in known:
        raise unknown("generator", name, known, hint="A new one is a JSON file in traces/, see traces/README.md.")
    block = known[name]
    try:
        return _statistics(name, block)
    except KeyError as error:
        raise InputError(f"{block['path']}: generator {name} lacks {error}; see traces/README.md.") from error


def _merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `shared`, one level down."""
    inner = {key: {**value, **own.get(key, {})} for key, value in shared.items()}
    return own | inner


def _statistics(name: str, block: dict[str, Any]) -> Statistics:
    cluster, users, batches = block["cluster"], block["users"], block["batches"]
    sizes, size_fraction = _sizes(block["sizes"])
    names, nodes, scores, mix = _tenants(block["virtual_clusters"], sizes, size_fraction, cluster, block["path"])
    states = [block["end_states"][state] for state in END_STATES]
    return Statistics(
        name=name,
        title=block["title"],
        nodes=cluster["nodes"],
        gpus_per_node=cluster["gpus_per_node"],
        arrivals=_arrivals(block["arrivals"]),
        sizes=tuple(sizes.tolist()),
        virtual_clusters=names,
        virtual_cluster_nodes=nodes,
        duration_score=scores,
        mix=mix,
        law=_law(block["durations"], sizes, mix.sum(axis=0)),
        batch_tail_exponent=tuple(_at_most(batches["tail_exponent"], int(size)) for size in sizes),
        longest_batch_jobs=batches["longest_jobs"],
        users=users["count"],
        user_zipf_exponent=users["zipf_exponent"],
        user_fraction=users["user_fraction"],
        batch_fraction=users["batch_fraction"],
        end_state_job_fraction=_normalised([state["jobs"] for state in states]),
        end_state_gpu_time_fraction=_normalised([state["gpu_time"] for state in states]),
        checked=block.get("checked", {}),
        elsewhere=block.get("elsewhere", {}),
        origin=_origin(name, block),
        sources=block["sources"],
    )


def _origin(name: str, block: dict[str, Any]) -> dict[str, str]:
    """The label of every block that holds figures. Raises InputError for one that the file does not explain."""
    found: dict[str, str] = {}
    for key, part in block.items():
        if isinstance(part, dict) and key != "sources":
            found[key] = part["from"]
            if found[key] not in block["sources"]:
                raise unknown(f"source of {key} of generator {name} in {block['path']}", found[key], block["sources"])
    found["quotas"] = block["virtual_clusters"].get("quotas_from", found["virtual_clusters"])
    return found


def _normalised(values: Any) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return np.asarray(array / array.sum())


def _at_most(table: dict[str, Any], size: int) -> Any:
    """The entry of the largest size that is not above `size`."""
    return table[str(max(known for known in map(int, table) if known <= size))]


def _arrivals(block: dict[str, Any]) -> Arrivals:
    plain = ("first_day", "mean_per_hour", "index_of_dispersion", "most_per_hour")
    more = ("slow_fraction", "slow_days", "hour_to_hour_correlation", "gap_within_batch")
    return Arrivals(
        **{key: block[key] for key in (*plain, *more)},
        hour_of_day_fraction=_normalised(block["hour_of_day_percent"]),
        weekday_fraction=_normalised(block["weekday_percent"]),
        log_dates=tuple(block["log_dates"]) if "log_dates" in block else None,
    )


def _sizes(block: dict[str, Any]) -> tuple[NDArray[np.int64], Floats]:
    """(GPUs, fraction of jobs): as listed, or powers of two whose fractions fall as a power law that gives the mean."""
    if "fractions" in block:
        return np.array([int(size) for size in block["fractions"]]), _normalised(list(block["fractions"].values()))
    sizes = 2 ** np.arange(int(block["largest_gpus"]).bit_length())
    single, rest = block["single_gpu_fraction"], sizes[1:].astype(np.float64)
    wanted = (block["mean_gpus"] - single) / (1 - single)
    steep, flat = 20.0, -20.0
    for _ in range(FIT_ROUNDS):
        exponent = (steep + flat) / 2
        fraction = _normalised(rest**-exponent)
        steep, flat = (steep, exponent) if float(fraction @ rest) > wanted else (exponent, flat)
        if steep - flat < FIT_ERROR:
            break
    return sizes, np.concatenate(([single], (1 - single) * fraction))


def _tenants(
    block: dict[str, Any], sizes: NDArray[np.int64], size_fraction: Floats, cluster: dict[str, Any], path: Path
) -> tuple[tuple[str, ...], tuple[int, ...], Floats, Floats]:
    """(names, nodes, duration scores, mix) as listed, or from a number of tenants by Zipf's law."""
    if "each" in block:
        each = block["each"]
        mix = np.array([[t["fraction"] * t["sizes"].get(str(size), 0.0) for size in sizes] for t in each])
        scores = np.array([t["duration_score"] for t in each], dtype=np.float64)
        return tuple(t["name"] for t in each), tuple(t["nodes"] for t in each), scores, _normalised(mix)
    count = block["count"]
    weight = _normalised(np.arange(1, count + 1) ** -float(block["zipf_exponent"]))
    nodes = 1 + _apportioned(weight, cluster["nodes"] - count)
    fits = sizes[None, :] <= nodes[:, None] * cluster["gpus_per_node"]
    mix = _fitted(fits, _normalised(nodes), size_fraction, path)
    names = tuple(f"vc{number:02d}" for number in range(1, count + 1))
    return names, tuple(nodes.tolist()), np.zeros(count), mix


def _apportioned(weight: Floats, seats: int) -> NDArray[np.int64]:
    """`seats` whole units shared out by `weight`, largest remainders first."""
    exact = weight * seats
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: seats - int(whole.sum())]] += 1
    return whole


def _fitted(possible: NDArray[np.bool_], rows: Floats, columns: Floats, path: Path) -> Floats:
    """The table nearest to independent with these margins, zero where not `possible`; by iterative proportions."""
    table = possible * np.outer(rows, columns)
    for _ in range(FIT_ROUNDS):
        table *= columns / table.sum(axis=0)
        gap = rows / table.sum(axis=1)
        if np.abs(gap - 1).max() < FIT_ERROR:
            return np.asarray(table)
        table *= gap[:, None]
    if np.abs(table.sum(axis=0) - columns).max() > 1e-6:
        raise InputError(f"{path}: too few tenants are large enough for the largest jobs; lower largest_gpus.")
    return np.asarray(table)


def _law(block: dict[str, Any], sizes: NDArray[np.int64], size_fraction: Floats) -> Law:
    if "quantiles_s" in block:
        tables = [_at_most(block["quantiles_s"], int(size)) for size in sizes]
        return QuantilesBySize(
            tuple(np.array([float(p) for p in table]) for table in tables),
            tuple(np.array([float(s) for s in table.values()]) for table in tables),
        )
    targets = (block["median_s"], block["mean_s"], block["gpu_s_per_job"])
    law: LognormalBySize = lognormal_by_size(
        sizes.astype(np.float64), size_fraction, *targets, longest_s=block["longest_s"]
    )
    return law
