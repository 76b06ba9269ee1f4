"""From settings to what any driver takes: a workload, a cluster, policies."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError, unknown
from synergy_core.policies import Policy
from synergy_runs.carrying import add_history, cut
from synergy_runs.fit import misfits
from synergy_runs.generators import generate, generate_whole, names
from synergy_runs.generators.laws import LawParameters, draw, laws
from synergy_runs.settings import ClusterSettings, TraceSettings
from synergy_runs.traces import formats, read_trace
from synergy_runs.traces.find import PUBLISHED_AT, VARIABLE, find
from synergy_runs.workload import (
    Workload,
    at_least,
    from_rows,
    of_any_type,
    parse_window,
    sampled,
    scaled,
    take,
    window_length_s,
    with_estimates,
)

# One independent stream per random source: what one draws never moves another, and no policy moves any.
STREAMS = ("generator", "sample", "estimates", "disturbance", "models", "history")


def seeds_of(seeds: Sequence[int]) -> list[int]:
    """The seeds, each once. Raises InputError for none or a negative one."""
    if not seeds or min(seeds) < 0:
        raise InputError(f"seed={list(seeds)}: expected one or more whole numbers ≥ 0.")
    return list(dict.fromkeys(seeds))


def random_stream(seed: int, source: str) -> np.random.SeedSequence:
    """The seed of one random source."""
    return np.random.SeedSequence(seed, spawn_key=(STREAMS.index(source),))


def check_name(name: str) -> None:
    """Raises InputError where results cannot be filed under it."""
    if not name or "/" in name or name.startswith("."):
        raise InputError(f"trace.name={name}: expected a name, not a path; results are filed under it.")


def workload_of(trace: TraceSettings, cluster: ClusterSettings, seed: int) -> Workload:
    """The jobs of this seed: found or generated, cut to the window, sampled, compressed. Estimates: `estimated`."""
    check_name(trace.name)
    if trace.format is not None and trace.format not in formats():
        raise unknown("trace.format", trace.format, formats())
    asked = _asked_of_law(trace)
    path = trace.path or find(trace.find)
    if path:
        workload = _from_log(trace, path)
    else:
        workload = _generated(trace, seed) if asked is None else _drawn_by_law(trace, asked, seed)
    if cluster.ignore_gpu_types:
        workload = of_any_type(workload)
    workload = at_least(workload, trace.min_gpus)
    workload = sampled(workload, trace.sample, np.random.default_rng(random_stream(seed, "sample")))
    return cut(scaled(workload, cluster.load))


def estimated(trace: TraceSettings, workload: Workload, seed: int, policies: Iterable[Policy]) -> Workload:
    """The workload with an estimate for every job, drawn where its log has none; policies: those that are to run."""
    random = np.random.default_rng(random_stream(seed, "estimates"))
    readers = [each.name for each in policies if each.reads_estimates]
    return with_estimates(workload, trace.overestimate, random, readers)


def _from_log(trace: TraceSettings, path: Path) -> Workload:
    # `check_fit` refuses bad rows, with all others.
    rows = read_trace(path, format_name=trace.format, bad_rows="skip", attempts=trace.attempts)
    return from_rows(rows, name=trace.name, sha256=_sha256(path), window=trace.window, before=trace.carry_in)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _asked_of_law(trace: TraceSettings) -> LawParameters | None:
    """What the generator is asked for if it is a law. Raises InputError where keys of laws are missing, or in vain."""
    if trace.generator is not None and trace.generator not in (known := (*names(), *laws())):
        raise unknown("trace.generator", trace.generator, known)
    given = {key: getattr(trace, key) for key in ("jobs", "jobs_per_hour", "job_gpus", "run_times")}
    if trace.generator in laws():
        if missing := [key for key, value in given.items() if value is None]:
            raise InputError(
                f"trace.generator={trace.generator}: trace.{missing[0]} is null; +trace={trace.generator} sets it."
            )
        return LawParameters(**given, class_mix=trace.class_mix)
    if odd := [key for key, value in given.items() if value is not None]:
        raise InputError(
            f"trace.{odd[0]}={given[odd[0]]}: only jobs that are drawn by a law ({', '.join(laws())}) read it. "
            "cluster.load=2 makes any trace twice as dense."
        )
    return None


def _drawn_by_law(trace: TraceSettings, asked: LawParameters, seed: int) -> Workload:
    assert trace.generator is not None
    workload = from_rows(draw(trace.generator, asked, seed), name=trace.name, window=trace.window)
    codes = (workload.gpus, workload.model_code)
    return replace(workload, sha256=_digest(workload.submit_time_s, workload.duration_s, *codes))


def _digest(*columns: NDArray[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(column).tobytes() for column in columns)).hexdigest()


def _no_log(trace: TraceSettings) -> str:
    """Which file is missing, where it is looked for, and where it is had."""
    if not trace.find:
        return f"+trace={trace.name}: which job log? Type trace.path=FILE."
    wanted = trace.find[0]
    page = next((page for folder, page in PUBLISHED_AT.items() if wanted.startswith(folder)), "")
    had = f"It is published at {page}. " if page else ""
    return (
        f"{trace.name}: {wanted} is not there; it is looked for in the folder that {VARIABLE} names, in its traces/, "
        f"and in ./traces. {had}Set {VARIABLE}=FOLDER, so that FOLDER/{wanted} is the file, or type trace.path=FILE."
    )


def _generated(trace: TraceSettings, seed: int) -> Workload:
    if trace.generator is None:
        raise InputError(_no_log(trace))
    stream = random_stream(seed, "generator")
    start_s, end_s = parse_window(trace.window, first_s=np.nan)
    if np.isnan(start_s):
        rows = generate(trace.generator, window_s=window_length_s(trace.window), seed=stream)
        window, first_day = "all", None
    else:
        rows, first_day = generate_whole(trace.generator, (start_s, end_s), seed=stream)
        window = trace.window
    first_s = min(rows.submit_s)
    if trace.carry_in:
        add_history(rows, trace.generator, seed=random_stream(seed, "history"), first_day=first_day)
    workload = from_rows(rows, name=trace.name, window=window, first_s=first_s, before=trace.carry_in)
    own = ~workload.carried
    digest = _digest(workload.submit_time_s[own], workload.duration_s[own], workload.gpus[own])
    return replace(workload, sha256=digest)


def without_misfits(workload: Workload, cluster: Cluster) -> Workload:
    """The workload less the jobs that can never run on the cluster, which are counted as bad rows."""
    wrong = misfits(workload, cluster)
    if not wrong.any():
        return workload
    if wrong.all():
        raise InputError(f"{workload.source}: no job fits on {cluster.describe()}; enlarge it with cluster.nodes=N.")
    return replace(take(workload, ~wrong), bad_rows=workload.bad_rows + int(wrong.sum()))


def check_compression(compression: str, policies: Iterable[Policy]) -> None:
    """Raises InputError where a policy cannot choose what is to be chosen."""
    fixed = [each.name for each in policies if not each.tunes_batch]
    if compression in ("naive", "coadaptive") and fixed:
        raise InputError(
            f"compression={compression}: jobs choose it with their batch, which they keep under "
            f"{', '.join(fixed)}; type policy=synergy, or compression=uniform."
        )
