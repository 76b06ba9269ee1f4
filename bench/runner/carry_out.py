"""Runs the tasks of experiments on all cores, and keeps each result as soon as it is there.

A result is a JSON file in results/bench/EXPERIMENT/, named after the digest of what it depends on. A call that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from runner import dependencies
from runner.experiment import ROOT, Experiment, Result, Task

KEPT = ROOT / "results" / "bench"
THREADS = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Tasks run side by side, one per core."""
MAX_LABEL = 160
"""Maximum number of characters of a task's description in a line of progress."""


def kept(task: Task, experiment: Experiment) -> Result | None:
    """The record of an earlier run: result, cpu_s, date, version, machine."""
    path = _path(task, experiment)
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _path(task: Task, experiment: Experiment) -> Path:
    return KEPT / experiment.name / f"{dependencies.of_task(task, experiment)}.json"


def run(task: Task, path: Path) -> float:
    """Executes the task, writes its record, and returns CPU seconds, those of its child processes included."""
    from synergy_runs.files import atomic_file

    before = os.times()
    result = task.execute()
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    record = {
        "task": str(task),
        "result": result,
        "cpu_s": round(cpu_s, 2),
        "date": time.strftime("%Y-%m-%d"),
        "version": dependencies.version(),
        "machine": dependencies.machine(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(record, default=str), encoding="utf-8")
    return cpu_s


def carry_out(asked: Sequence[Experiment], workers: int, *, again: bool = False) -> set[str]:
    """Runs every task that has no result yet, or all of them; returns the names of experiments with a failed task."""
    os.environ.update({name: os.environ.get(name, value) for name, value in THREADS.items()})
    waiting: dict[Path, tuple[Task, str]] = {}
    for experiment in asked:
        for task in experiment.tasks():
            path = _path(task, experiment)
            if again or not path.is_file():
                waiting[path] = (task, experiment.name)
    failed: set[str] = set()
    timed = {path: each for path, each in waiting.items() if each[0].is_timed}
    others = {path: each for path, each in waiting.items() if path not in timed}
    began_s, done = time.monotonic(), 0
    for group, processes in ((others, workers), (timed, 1)):
        if not group:
            continue
        with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
            futures = {pool.submit(run, task, path): (task, name) for path, (task, name) in group.items()}
            for future in as_completed(futures):
                task, name = futures[future]
                done += 1
                error = future.exception()
                if error is not None:
                    failed.add(name)
                told = f"failed: {type(error).__name__}: {error}" if error else f"{future.result():.1f} CPU s"
                where = f"{done}/{len(waiting)} {time.monotonic() - began_s:,.0f} s"
                print(f"{where}  {name}: {str(task)[:MAX_LABEL]}: {told}", file=sys.stderr, flush=True)
    return failed
