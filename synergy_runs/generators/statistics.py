"""Statistics for generators, read from `traces/*.json`, checked, and completed by rules where figures are missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError, unknown
from synergy_core.units import Floats
from synergy_runs.files import statistics_folder
from synergy_runs.traces.rows import END_STATES

# Durations by size: each size has a quantile function, taken from known quantiles or fitted to known means.


MIN_DURATION_S = 1.0
QUADRATURE_POINTS = 20_000
MAX_DURATIONS_FIT_ERROR = 1e-3


Law = Callable[[int, Floats], Floats]
"""Quantile function: (index of a size, probabilities in (0, 1)) → durations in seconds, in the same shape."""


def quantiles_by_size(tables: Sequence[Mapping[str, float]]) -> Law:
    """Law that interpolates linearly between the logarithms of the known quantiles of each size."""
    points = [(np.array([float(p) for p in each]), np.log([float(s) for s in each.values()])) for each in tables]

    def quantile_s(size: int, rank: Floats) -> Floats:
        return np.asarray(np.exp(np.interp(rank, *points[size])))

    return quantile_s


@cache
def lognormal_by_size(
    sizes: tuple[float, ...],
    fraction: tuple[float, ...],
    median_s: float,
    mean_s: float,
    gpu_s_per_job: float,
    longest_s: float,
) -> Law:
    """Fits a law with the given median, mean and GPU-seconds per job over all sizes.

    Durations are lognormal, truncated at `longest_s`, and the mean of ln seconds is linear in ln GPUs. sizes: in GPUs;
    fraction: of the jobs, of each size. Raises InputError if no such law exists. Kept, because a fit takes as long as
    drawing a month of jobs, and every seed asks for it.
    """
    from scipy.optimize import least_squares
    from scipy.special import ndtr, ndtri

    gpus = np.array(sizes)
    ranks = (np.arange(QUADRATURE_POINTS) + 0.5) / QUADRATURE_POINTS
    weight = np.repeat(np.array(fraction) / QUADRATURE_POINTS, QUADRATURE_POINTS)

    def law(values: Floats) -> Law:
        ln_median_s, growth, spread = float(values[0]), float(values[1]), float(np.exp(values[2]))

        def quantile_s(size: int, rank: Floats) -> Floats:
            centre = ln_median_s + growth * np.log(gpus[size])
            kept = ndtr((np.log(longest_s) - centre) / spread)
            return np.asarray(np.maximum(MIN_DURATION_S, np.exp(centre + spread * ndtri(rank * kept))))

        return quantile_s

    def errors(values: Floats) -> Floats:
        each_s = np.concatenate([law(values)(size, ranks) for size in range(len(gpus))])
        order = np.argsort(each_s)
        median = each_s[order[np.searchsorted(np.cumsum(weight[order]), 0.5)]]
        got = np.array([median, weight @ each_s, (weight * np.repeat(gpus, QUADRATURE_POINTS)) @ each_s])
        return np.asarray(np.log(got / np.array([median_s, mean_s, gpu_s_per_job])))

    start = np.array([np.log(median_s), 0.2, 0.5 * np.log(2 * np.log(mean_s / median_s))])
    found = least_squares(errors, start, diff_step=1e-3)
    if np.abs(errors(found.x)).max() > MAX_DURATIONS_FIT_ERROR:
        raise InputError(
            f"no lognormal law cut at {longest_s:g} s has median {median_s:g} s, mean {mean_s:g} s and "
            f"{gpu_s_per_job:g} GPU-s per job; give quantiles_s instead."
        )
    return law(found.x)


MARK = '"synergy_trace_statistics"'
MARK_WITHIN_CHARACTERS = 200
MAX_FIT_ROUNDS = 1_000
MAX_FIT_ERROR = 1e-12


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Statistics of arrivals. Hourly counts have a level with a slow and a fast part."""

    first_day: str
    """First day of a generated log without dates, a Monday."""
    mean_per_hour: float
    """Mean number of jobs per hour."""
    index_of_dispersion: float
    """Variance ÷ mean of the jobs per hour."""
    most_per_hour: float
    """Number of jobs in the busiest hour."""
    hour_of_day_fraction: Floats
    """(24,) fraction of the jobs in each hour of the day, from midnight; sums to 1."""
    weekday_fraction: Floats
    """(7,) fraction of the jobs on each weekday, from Monday; sums to 1."""
    slow_fraction: float
    """Fraction of the level's variance that is in its slow part, in [0, 1]."""
    slow_days: float
    """Days in which the correlation of the slow part decays to 1/e."""
    hour_to_hour_correlation: float
    """Correlation of the fast part between neighbouring hours."""
    gap_within_batch: float
    """Mean gap between jobs of one batch ÷ mean gap before a new batch."""
    log_dates: tuple[str, str] | None = None
    """First day of the real log and the day after its last; None if they are unknown."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one cluster's job log, with V tenants and S sizes of jobs."""

    name: str
    """Name of the generator."""
    title: str
    """Name of the log in text."""
    nodes: int
    """Number of nodes of the cluster."""
    gpus_per_node: int
    """GPUs of each node."""
    arrivals: Arrivals
    """Statistics of arrivals."""
    sizes: tuple[int, ...]
    """(S,) numbers of GPUs that jobs have."""
    virtual_clusters: tuple[str, ...]
    """(V,) names of the tenants."""
    virtual_cluster_nodes: tuple[int, ...]
    """(V,) number of nodes of each tenant's quota."""
    duration_score: Floats
    """(V,) mean normal score of the rank of a tenant's job among all jobs of its size, by duration."""
    mix: Floats
    """(V, S) fraction of all jobs that are of tenant v with `sizes[s]` GPUs; sums to 1."""
    law: Law
    """Quantile function of durations by size."""
    batch_tail_exponent: tuple[float, ...]
    """(S,) exponent of the sizes of batches: P(batch ≥ n) = n^−exponent."""
    longest_batch_jobs: int
    """Largest number of jobs in a batch."""
    users: int
    """Number of users."""
    user_zipf_exponent: float
    """Exponent of Zipf's law of the batches of a tenant's users."""
    user_fraction: float
    """Fraction of the variance of the duration score within a tenant that the user explains."""
    batch_fraction: float
    """Fraction of the same variance that the batch explains."""
    end_state_job_fraction: Floats
    """Fraction of the jobs in each of `rows.END_STATES`; sums to 1."""
    end_state_gpu_time_fraction: Floats
    """Fraction of the GPU-time in each of `rows.END_STATES`; sums to 1."""
    checked: dict[str, Any]
    """Further figures that a generated log must match."""
    elsewhere: dict[str, Any]
    """Figures that a generated log need not match, because they describe other jobs of the cluster or depend on a
    scheduler."""
    origin: dict[str, str]
    """Label of the source of each JSON block's figures."""
    sources: dict[str, str]
    """The source of each label."""

    @property
    def quotas(self) -> dict[str, int]:
        """GPUs of each tenant, by its name."""
        nodes = zip(self.virtual_clusters, self.virtual_cluster_nodes, strict=True)
        return {name: each * self.gpus_per_node for name, each in nodes}


def blocks() -> dict[str, dict[str, Any]]:
    """The JSON of every generator, by name. Files that do not start with `MARK`, such as downloads, are skipped."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(statistics_folder().glob("*.json")):
        with path.open(encoding="utf-8") as stream:
            if MARK not in stream.read(MARK_WITHIN_CHARACTERS):
                continue
            stream.seek(0)
            content = json.load(stream)
        for name, own in content["generators"].items():
            if name in found:
                raise InputError(f"{path}: another file also has a generator named {name}; rename one.")
            shared = {key: {**value, **own.get(key, {})} for key, value in content.get("shared", {}).items()}
            found[name] = own | shared | {"path": path, "sources": content.get("sources", {})}
    return found


def statistics(name: str) -> Statistics:
    """The statistics of one generator. Raises InputError for an unknown name or a file that lacks an entry."""
    known = blocks()
    if name not in known:
        raise unknown("generator", name, known, hint="A new one is a JSON file in traces/, see traces/README.md.")
    block = known[name]
    try:
        return _statistics(name, block)
    except KeyError as error:
        raise InputError(f"{block['path']}: generator {name} lacks {error}; see traces/README.md.") from error


def _statistics(name: str, block: dict[str, Any]) -> Statistics:
    cluster, users, batches = block["cluster"], block["users"], block["batches"]
    sizes, size_fraction = _sizes(block["sizes"])
    names, nodes, scores, mix = _tenants(block["virtual_clusters"], sizes, size_fraction, cluster, block["path"])
    states = [block["end_states"][state] for state in END_STATES]
    origin = {key: part["from"] for key, part in block.items() if isinstance(part, dict) and key != "sources"}
    for key, label in origin.items():
        if label not in block["sources"]:
            raise unknown(f"source of {key} of generator {name} in {block['path']}", label, block["sources"])
    origin["quotas"] = block["virtual_clusters"].get("quotas_from", origin["virtual_clusters"])
    arrivals = block["arrivals"]
    figures = (
        *("first_day", "mean_per_hour", "index_of_dispersion", "most_per_hour"),
        *("slow_fraction", "slow_days", "hour_to_hour_correlation", "gap_within_batch"),
    )
    durations = block["durations"]
    if "quantiles_s" in durations:
        law = quantiles_by_size([_entry_up_to(durations["quantiles_s"], int(size)) for size in sizes])
    else:
        wanted = [durations[key] for key in ("median_s", "mean_s", "gpu_s_per_job")]
        of_sizes = tuple(sizes.astype(np.float64).tolist()), tuple(mix.sum(axis=0).tolist())
        law = lognormal_by_size(*of_sizes, *wanted, durations["longest_s"])
    return Statistics(
        name=name,
        title=block["title"],
        nodes=cluster["nodes"],
        gpus_per_node=cluster["gpus_per_node"],
        arrivals=Arrivals(
            **{key: arrivals[key] for key in figures},
            hour_of_day_fraction=_normalised(arrivals["hour_of_day_percent"]),
            weekday_fraction=_normalised(arrivals["weekday_percent"]),
            log_dates=tuple(arrivals["log_dates"]) if "log_dates" in arrivals else None,
        ),
        sizes=tuple(sizes.tolist()),
        virtual_clusters=names,
        virtual_cluster_nodes=nodes,
        duration_score=scores,
        mix=mix,
        law=law,
        batch_tail_exponent=tuple(_entry_up_to(batches["tail_exponent"], int(size)) for size in sizes),
        longest_batch_jobs=batches["longest_jobs"],
        users=users["count"],
        user_zipf_exponent=users["zipf_exponent"],
        user_fraction=users["user_fraction"],
        batch_fraction=users["batch_fraction"],
        end_state_job_fraction=_normalised([state["jobs"] for state in states]),
        end_state_gpu_time_fraction=_normalised([state["gpu_time"] for state in states]),
        checked=block.get("checked", {}),
        elsewhere=block.get("elsewhere", {}),
        origin=origin,
        sources=block["sources"],
    )


def _normalised(values: Any) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    return np.asarray(array / array.sum())


def _entry_up_to(table: dict[str, Any], size: int) -> Any:
    """The table's entry for the largest known size that is at most `size`."""
    return table[str(max(known for known in map(int, table) if known <= size))]


def _sizes(block: dict[str, Any]) -> tuple[NDArray[np.int64], Floats]:
    """(GPUs, fraction of jobs) of each size: as listed, else powers of two by a power law that has the known mean."""
    if "fractions" in block:
        return np.array([int(size) for size in block["fractions"]]), _normalised(list(block["fractions"].values()))
    sizes = 2 ** np.arange(int(block["largest_gpus"]).bit_length())
    single, rest = block["single_gpu_fraction"], sizes[1:].astype(np.float64)
    wanted = (block["mean_gpus"] - single) / (1 - single)
    steep, flat = 20.0, -20.0
    for _ in range(MAX_FIT_ROUNDS):
        exponent = (steep + flat) / 2
        fraction = _normalised(rest**-exponent)
        steep, flat = (steep, exponent) if float(fraction @ rest) > wanted else (exponent, flat)
        if steep - flat < MAX_FIT_ERROR:
            break
    return sizes, np.concatenate(([single], (1 - single) * fraction))


def _tenants(
    block: dict[str, Any], sizes: NDArray[np.int64], size_fraction: Floats, cluster: dict[str, Any], path: Path
) -> tuple[tuple[str, ...], tuple[int, ...], Floats, Floats]:
    """(names, nodes, duration scores, mix) of the tenants: as listed, else with nodes distributed by Zipf's law."""
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
    """Divides `seats` indivisible units in proportion to `weight` by the largest-remainder method."""
    exact = weight * seats
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: seats - int(whole.sum())]] += 1
    return whole


def _fitted(possible: NDArray[np.bool_], rows: Floats, columns: Floats, path: Path) -> Floats:
    """Table with these sums of rows and columns, 0 where not `possible`, by iterative scaling from independence."""
    table = possible * np.outer(rows, columns)
    for _ in range(MAX_FIT_ROUNDS):
        table *= columns / table.sum(axis=0)
        gap = rows / table.sum(axis=1)
        if np.abs(gap - 1).max() < MAX_FIT_ERROR:
            return np.asarray(table)
        table *= gap[:, None]
    if np.abs(table.sum(axis=0) - columns).max() > 1e-6:
        raise InputError(f"{path}: too few tenants are large enough for the largest jobs; lower largest_gpus.")
    return np.asarray(table)
