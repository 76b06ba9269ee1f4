"""Runs for docs/accuracy.md: what each is, how it is carried out, and its figures, kept as JSON from call to call.

A run goes the way of `python -m synergy_sim experiment=…`: the same overrides, composed by Hydra, and
`synergy_sim.run.simulate_all`. Only the workload file may differ: seed 0 takes it as it is, another seed moves every
submission by up to a second (`jittered`), for the policies themselves draw nothing. Jobs that an experiment draws by a
law have no file: their seed is the law's.
"""

from __future__ import annotations

import csv
import hashlib
import json
import multiprocessing
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from synergy_runs.files import atomic_file

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "accuracy"
DRAWN = "drawn"
REPLAYED = "replayed"
"""As an experiment: the plain replay of tests/naive_mechanisms.py in place of a simulation."""
JITTER_S = 1.0
HOUR_S = 3600.0
SIMULATED = ("synergy_core", "synergy_runs", "synergy_sim", "conf")


@dataclass(frozen=True)
class Run:
    """One simulation. workload: below $SYNERGY_DATA/workloads, without .csv; DRAWN for the experiment's own jobs.
    settings: overrides, as typed.

    seed: 0 for the file as it is. jobs: only the first so many, 0 for all. greedy: by the allocator's method `steps`.
    """

    experiment: str
    workload: str
    policy: str
    settings: tuple[str, ...] = ()
    seed: int = 0
    greedy: bool = False
    jobs: int = 0

    def overrides(self, path: Path | None, into: Path) -> list[str]:
        """What would be typed behind `python -m synergy_sim`; path: None for jobs that are drawn."""
        return [
            f"experiment={self.experiment}",
            *([f"trace.path={path}", "trace.name=accuracy"] if path else []),
            f"policy=[{self.policy}]",
            f"seed=[{self.seed}]",
            *([f"parameters.pollux.seed={self.seed}"] if self.policy == "pollux" else []),
            *([f"parameters.{self.policy}.method=steps"] if self.greedy else []),
            *self.settings,
            "figures=false",
            "progress=false",
            f"results_dir={into}",
        ]

    @property
    def key(self) -> str:
        """A file name: readable, and different for different runs."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:10]
        return f"{self.experiment}-{self.workload.replace('/', '-')}-{self.policy}-{self.seed}-{digest}"


Result = dict[str, Any]


def known_policy(name: str) -> bool:
    """Whether this version has the policy, or the order and the mechanism of which it is made."""
    from synergy_core.policies import policy_names
    from synergy_core.policies.mechanisms import mechanism_names

    order, made_of_two, mechanism = name.partition("+")
    return order in policy_names() and (not made_of_two or mechanism in mechanism_names())


def path_of(workload: str) -> Path:
    """The file of a workload. Raises SystemExit where SYNERGY_DATA does not name its folder."""
    path = Path(os.environ.get("SYNERGY_DATA", "")) / "workloads" / f"{workload}.csv"
    if not path.is_file():
        raise SystemExit(f"{path}: no such file; SYNERGY_DATA must name the folder that holds workloads/.")
    return path


def jittered(path: Path, into: Path, seed: int, jobs: int = 0) -> Path:
    """A copy of the workload with submissions moved by a uniform ±1 s each, not below 0; seed 0 moves none."""
    if not seed and not jobs:
        return path
    with path.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))[: jobs or None]
    if seed:
        moved = np.random.default_rng((seed, 0xACC)).uniform(-JITTER_S, JITTER_S, len(rows))
        for row, by in zip(rows, moved.tolist(), strict=True):
            row["time"] = repr(max(0.0, float(row["time"]) + by))
    copy = into / path.name
    with copy.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return copy


def compose(overrides: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The settings of a command line, and the plain values they were built from."""
    from synergy_runs.command_line import composed
    from synergy_runs.settings import build
    from synergy_sim.settings import SIMULATOR, Settings

    values = composed(SIMULATOR, overrides)
    return build(Settings, values), values


def execute(run: Run) -> Result:
    """Simulates; the figures, and when, with what, and in how many CPU seconds they were found."""
    began = time.process_time()
    figures = replayed(run) if run.experiment == REPLAYED else simulated(run)
    return {
        "run": asdict(run),
        **figures,
        "total_cpu_s": time.process_time() - began,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
    }


def simulated(run: Run) -> Result:
    """Its figures, from the folder of a simulation."""
    from synergy_sim.run import simulate_all

    with tempfile.TemporaryDirectory() as folder:
        path = None
        if run.workload != DRAWN:
            path = jittered(path_of(run.workload), Path(folder), run.seed, run.jobs)
        settings, values = compose(run.overrides(path, Path(folder) / "results"))
        (into,) = simulate_all(settings, values, Path(folder) / "results", say=False)
        return figures_of(into, settings) if path else figures_of_drawn(into)


def figures_of_drawn(folder: Path) -> Result:
    """What the page needs of a run folder whose measured jobs are some of those that were drawn."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {
        "jobs": summary["jobs"],
        **{f"{name}_jct_h": summary[f"{name}_jct_s"] / HOUR_S for name in ("mean", "p99", "p999")},
        **{name: summary[name] for name in ("gpu_utilisation_fraction", "offered_load_fraction", "restarts_per_job",
                                            "overloaded", "simulation_cpu_s")},
    }  # fmt: skip


def replayed(run: Run) -> Result:
    """The same of the published jobs, by a replay that shares nothing with the simulator."""
    sys.path.insert(0, str(ROOT / "tests"))
    from naive_mechanisms import NaiveCluster, finish_times_s, published_jobs

    jobs, profiles = published_jobs(Path(os.environ["SYNERGY_DATA"]) / "resource_sensitivity")
    measured = range(4_000, 5_000)
    done = finish_times_s(jobs, profiles, run.policy.removeprefix("fifo+"), NaiveCluster(), measured)
    jct_h = np.array([done[job] - jobs[job].arrival_s for job in measured]) / HOUR_S
    shares = {
        f"{name}_jct_h": float(np.percentile(jct_h, at)) for name, at in (("p50", 50), ("p99", 99), ("p999", 99.9))
    }
    return {"jobs": len(jobs), "mean_jct_h": float(jct_h.mean()), **shares}


def figures_of(folder: Path, settings: Any) -> Result:
    """What the page needs of a run folder."""
    import pandas as pd

    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    jobs = pd.read_parquet(folder / "jobs.parquet")
    return {
        "jobs": len(jobs),
        "mean_jct_h": summary["mean_jct_s"] / HOUR_S,
        "p50_jct_h": summary["p50_jct_s"] / HOUR_S,
        "p99_jct_h": summary["p99_jct_s"] / HOUR_S,
        "makespan_h": summary["makespan_s"] / HOUR_S,
        "gpu_h_per_job": summary["service_gpu_s"] / HOUR_S / len(jobs),
        "restarts_per_job": summary["restarts_per_job"],
        "worst_rho": summary["worst_finish_time_fairness"],
        "worst_ftf": float(finish_time_fairness(jobs, settings).max()),
        "simulation_cpu_s": summary["simulation_cpu_s"],
        "jct_s": dict(zip(jobs["job_name"].tolist(), jobs["jct_s"].tolist(), strict=True)),
    }


# Finish-time fairness as Sia defines it


def finish_time_fairness(jobs: Any, settings: Any) -> np.ndarray:
    """(jobs,): Σ over GPU types of their share of the GPUs × JCT ÷ run time in an equal share of that type.

    The share of N active jobs (N: mean over the job's life) is 1/N of the cluster's GPUs, all of that type; the run
    time there is that of the fastest allowed size within it, with the best batch of every epoch, started once.
    """
    from synergy_runs.inputs import cluster_of, workload_of
    from synergy_sim.prepare import execution_of, truth_of

    workload = workload_of(settings.trace, settings.cluster, 0)
    cluster = cluster_of(settings.cluster, settings.trace, workload)
    truth, execution = truth_of(settings, 0), execution_of(settings)
    per_node = {each.gpu_type: each.gpus_per_node for each in cluster.node_types}
    result = np.zeros(len(jobs))
    for at, (jct_s, active) in enumerate(zip(jobs["jct_s"], jobs["mean_contention"], strict=True)):
        model = workload.models[workload.model_code[at]]
        app = truth.application(model)
        launch_s = execution.costs_by_model.get(model, execution.costs).launch_s
        for gpu_type in cluster.gpu_types:
            most = min(max(1, int(cluster.gpus / active)), cluster.gpus_of(gpu_type))
            alone_s = launch_s + truth.slowdown.get(model, 1.0) * fastest_s(app, gpu_type, most, per_node[gpu_type])
            result[at] += cluster.gpus_of(gpu_type) / cluster.gpus * jct_s / alone_s
    return result


_alone: dict[tuple[str, str, int, int], float] = {}


def fastest_s(app: Any, gpu_type: str, most: int, per_node: int) -> float:
    """The least run time of the whole application on at most so many GPUs: powers of two in a node, or whole nodes."""
    inside = [1 << power for power in range(per_node.bit_length()) if 1 << power <= min(most, per_node)]
    return min(_fastest_s(app, gpu_type, gpus, per_node) for gpus in [*inside, *range(per_node, most + 1, per_node)])


def _fastest_s(app: Any, gpu_type: str, gpus: int, per_node: int) -> float:
    from synergy_core.planner.plan import Plan
    from synergy_sim.truth.application import packed

    key = (app.name, gpu_type, gpus, per_node)
    if key not in _alone:
        shape = packed(gpus, per_node)
        low, high = app.local_batches(gpu_type, shape)
        epochs = np.diff((0.0, *app.work_at_epoch_end))
        rate = np.zeros(len(epochs))
        for local in sorted({low, *np.geomspace(low, high, 10).astype(int).tolist(), app.initial_batch // gpus}):
            for accumulation in (1, 2, 4, 8, 16) if local == high else (1,):
                plan = Plan(data=gpus, micro_batch=local, accumulation=accumulation)
                if low <= local <= high and app.initial_batch <= plan.global_batch <= app.max_batch:
                    gain = np.asarray(app.gains(plan.global_batch))
                    rate = np.maximum(rate, gain / app.iteration_s(gpu_type, shape, plan))
        with np.errstate(divide="ignore"):
            _alone[key] = float((epochs / rate).sum())
    return _alone[key]


# Kept results


def kept(run: Run, folder: Path = RESULTS) -> Result | None:
    """The result of an earlier call."""
    path = folder / f"{run.key}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def keep(run: Run, result: Result, folder: Path = RESULTS) -> None:
    """Writes the result, whole or not at all."""
    write_atomically(folder / f"{run.key}.json", json.dumps(result))


def write_atomically(path: Path, text: str) -> None:
    """The text."""
    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _work(run: Run, folder: str) -> tuple[Run, float]:
    result = execute(run)
    keep(run, result, Path(folder))
    return run, result["total_cpu_s"]


def carry_out(runs: Iterable[Run], workers: int, folder: Path = RESULTS) -> None:
    """Those that are not kept yet; a line for each as it ends. Policies that this version lacks are left out."""
    names: set[str] = set()
    wanted = [run for run in dict.fromkeys(runs) if kept(run, folder) is None]
    for run in wanted:
        names.add(run.policy)
    missing = {name for name in names if not known_policy(name)}
    for name in sorted(missing):
        print(f"policy {name} is not there; its rows stay empty", file=sys.stderr)
    wanted = [run for run in wanted if run.policy not in missing]
    if not wanted:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    began, failed = time.monotonic(), 0
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = {pool.submit(_work, run, str(folder)): run for run in wanted}
        for number, done in enumerate(as_completed(waiting), 1):
            run = waiting[done]
            if error := done.exception():
                failed += 1
                said = f"failed: {error}"
            else:
                said = f"{done.result()[1]:.1f} CPU s"
            spent = time.monotonic() - began
            print(f"{number}/{len(wanted)} {spent:.0f} s  {run.key}: {said}", file=sys.stderr, flush=True)
    if failed:
        print(f"{failed} runs failed; called again, only they are run again", file=sys.stderr)


def with_seeds(runs: Iterable[Run], seeds: int) -> list[Run]:
    """Each under seeds 0 … seeds − 1, seed by seed: a call that is interrupted has something of everything."""
    return [replace(run, seed=seed) for seed in range(seeds) for run in runs]


# The machine


@cache
def typed_command() -> str:
    """This process' command, as it can be typed again in the repository's root."""
    return shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def commit(folders: Sequence[str] = SIMULATED) -> str:
    """The last version that changed these folders, with a + if they have changed since."""
    try:
        told = [
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (
                ["log", "-1", "--format=%h", "--", *folders],
                ["status", "--porcelain", "--", *folders],
            )
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return told[0] + ("+" if told[1] else "")


def machine() -> str:
    """CPU model and cores."""
    model = "unknown CPU"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores"
