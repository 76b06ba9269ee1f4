"""`verify`: checks whether the jobs of a run trained as they would have in one process without interruption.

It trains every job again, alone and on the CPU, with the batch and the learning-rate factor of each recorded step, and
compares the loss of each step and the weights of the newest checkpoint. Only jobs with SGD are judged, because Adam and
similar optimizers hide a wrong scale of the gradient. Dropout, compressed gradients and 16 bits are not judged either.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from synergy_core.cli import Parser
from synergy_core.commands._settings import table
from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec import job_folder
from synergy_exec.commands import export
from synergy_exec.controller.journal import RunRow, Timing, open_journal
from synergy_exec.job_file import JobFile
from synergy_exec.run import recorded
from synergy_exec.training.loading import load_job
from synergy_exec.training.precision import LOW
from synergy_exec.training.trainer import Trainer
from synergy_runs.files import atomic_file

DEFAULT_LIMIT = 1e-4
"""Largest difference of a loss or a weight: plans add in different orders, and training amplifies the rounding."""
STEPS_AFTER_CHANGE = 10
Verdict = Literal["met", "missed", "not judged"]


class RecordedStep(NamedTuple):
    """A row of steps.csv. number: from 1. rate: factor on the learning rate. run: the number of the run."""

    number: int
    batch: int
    rate: float
    loss: float
    seconds: float
    run: int


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job that has a folder. name: as submitted. steps: each once, in order."""

    folder: Path
    number: int
    name: str
    file: JobFile
    steps: tuple[RecordedStep, ...]


@dataclass(frozen=True, slots=True)
class Replayed:
    """A job trained once more."""

    optimizer: str
    """Name of its class."""
    sgd: bool
    draws: bool
    """Whether the model draws random numbers in training (dropout), which differ from plan to plan."""
    differences: tuple[float, ...]
    """|recorded − replayed loss| of steps 1, 2, … up to the first that the record lacks; infinite if only one of them
    is a number."""
    weights: float
    """Largest |difference| of a weight of the newest checkpoint; NaN if there is none."""


@dataclass(frozen=True, slots=True)
class Continuity:
    """Comparison of a job's losses with those of one process without interruption."""

    job: str
    model: str
    optimizer: str
    steps: int
    compared: int
    """Steps up to the first that the record lacks."""
    runs: int
    plans: tuple[str, ...]
    """Parallel degrees of the runs that trained, in order."""
    changes: tuple[int, ...]
    """Steps, from 1, before which the plan changed."""
    largest: float
    """Largest difference of a loss."""
    after_changes: float
    """The same in the 10 steps from each change of plan on; NaN without a change."""
    weights: float
    verdict: Verdict
    remark: str


def main(arguments: Sequence[str]) -> int:
    """Prints the table; returns 1 if a judged job is beyond the limit. Raises InputError."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m synergy_exec verify", description=__doc__, formatter_class=raw)
    parser.add_argument("work", type=Path, metavar="RUN.work", help="such as results/demo/latest/synergy-0.work")
    parser.add_argument("--jobs", nargs="+", default=[], metavar="NAME", help="names or numbers; default: all")
    parser.add_argument("--limit", type=float, default=DEFAULT_LIMIT, help="largest difference allowed (%(default)g)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type=int, default=cores, help="jobs trained at once (default: one per core)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the comparison to this file")
    given = parser.parse_args(arguments)
    if not given.limit >= 0:
        raise InputError(f"--limit {given.limit:g}: expected a difference, 0 or more.")
    if given.processes < 1:
        raise InputError(f"--processes {given.processes}: expected at least 1.")
    found = verified(given.work, given.jobs, given.limit, given.processes)
    _print(found, given.limit)
    if given.json is not None:
        values = {"limit": given.limit, "jobs": [dataclasses.asdict(each) for each in found]}
        with atomic_file(given.json) as partial:
            partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return 1 if any(each.verdict == "missed" for each in found) else 0


def _print(found: Sequence[Continuity], limit: float) -> None:
    header = ("job", "model", "optimizer", "plans", "verdict", "steps", "runs", "loss", "after changes", "weights")
    rows = []
    for each in found:
        verdict = f"{each.verdict} ({each.remark})" if each.remark else each.verdict
        numbers = ("–" if math.isnan(x) else f"{x:.2g}" for x in (each.largest, each.after_changes, each.weights))
        words = (each.job, each.model, each.optimizer, " → ".join(each.plans), verdict)
        rows.append((*words, str(each.steps), str(each.runs), *numbers))
    print(table(header, rows, left=5))
    counts = [(sum(each.verdict == verdict for each in found), verdict) for verdict in get_args(Verdict)]
    print("loss, weights: largest difference from one process without interruption; at most "
          f"{limit:g}: {', '.join(f'{count} {verdict}' for count, verdict in counts if count)}")  # fmt: skip
    print(f"after changes: the same in the {STEPS_AFTER_CHANGE} steps after each change of plan")


def recorded_jobs(work: Path) -> list[RecordedJob]:
    """All jobs of a run that have a folder, by number. Raises InputError for what cannot be read."""
    found = []
    for folder in (folder for _, folder in sorted(job_folder.folders(work).items())):
        if (folder / job_folder.DESCRIPTION).is_file():
            filed = job_folder.described(folder)
            steps = recorded(folder / job_folder.STEPS).itertuples(index=False)
            found.append(
                RecordedJob(folder, filed.number, filed.name, filed.file, tuple(RecordedStep(*each) for each in steps))
            )
    return found


def verified(work: Path, wanted: Sequence[str], limit: float, processes: int) -> list[Continuity]:
    """Returns the jobs that trained at least one step, by number. wanted: names; none for all. Raises InputError."""
    journal = open_journal(work)
    runs, timings = journal.runs(), journal.timings()
    settings = journal.meta().get("settings", {})
    seed, precision = int(settings.get("seed", 0)), str(settings.get("precision", "auto"))
    journal.close()
    jobs = [each for each in _chosen(recorded_jobs(work), wanted) if each.steps]
    if not jobs:
        raise InputError(f"{work}: none of these jobs has trained a step, so there is nothing to compare.")
    plans = {job.number: plans_of_one_rank(job, runs, timings) for job in jobs}
    again = _all_replayed(jobs, plans, seed, processes)
    compressors = ((each.run, each.parts.get("compressor", "none")) for each in timings if each.kind == "plan")
    compressed = frozenset(run for run, compressor in compressors if compressor != "none")
    return [
        continuity(job, [run for run in runs if run.job == job.number], again[job.number], limit, compressed, precision)
        for job in jobs
    ]


def _chosen(jobs: list[RecordedJob], wanted: Sequence[str]) -> list[RecordedJob]:
    known = {each.name for each in jobs} | {str(each.number) for each in jobs}
    if missing := [each for each in wanted if each not in known]:
        names = ", ".join(each.name for each in jobs) or "none"
        raise InputError(f"job '{missing[0]}' has no folder in this run; those that do: {names}.")
    return [each for each in jobs if not wanted or {each.name, str(each.number)} & {*wanted}]


def plans_of_one_rank(job: RecordedJob, runs: Sequence[RunRow], timings: Sequence[Timing]) -> list[Plan]:
    """A plan of one rank for each step. It cuts the batch as all ranks together did, so that sums round alike.

    The journal has the plans of each run in order, and steps.csv the batch of each step: a run moves to the next of its
    plans with that batch. If none has it, the batch is not cut.
    """
    degree = {run.run: int(run.plan["data"]) for run in runs}
    cuts: dict[int, list[Plan]] = {run.run: [] for run in runs}
    for each in timings:
        if each.kind == "plan" and each.run in cuts:
            micro_batch, accumulation = int(each.parts["micro_batch"]), int(each.parts["accumulation"])
            cuts[each.run].append(Plan(micro_batch=micro_batch, accumulation=accumulation * degree[each.run]))
    result = []
    for step in job.steps:
        left = cuts.get(step.run, [])
        fitting = next((at for at, plan in enumerate(left) if plan.global_batch == step.batch), None)
        if fitting is not None:
            del left[:fitting]
        result.append(left[0] if fitting is not None else Plan(micro_batch=step.batch))
    return result


def continuity(
    job: RecordedJob,
    runs: Sequence[RunRow],
    again: Replayed,
    limit: float,
    compressed: frozenset[int] = frozenset(),
    precision: str = "auto",
) -> Continuity:
    """Compares a job's record with training it again.

    compressed: the runs whose gradients were compressed. precision: of jobs whose file says auto.
    """
    degrees = {run.run: Plan(**run.plan).degrees for run in runs}
    plans: list[str] = []
    changes: list[int] = []
    for step in job.steps:
        plan = degrees.get(step.run, "?")
        if not plans or plan != plans[-1]:
            changes += [step.number] * bool(plans)
            plans.append(plan)
    differences = again.differences
    late = [each for at in changes for each in differences[at - 1 : at - 1 + STEPS_AFTER_CHANGE]]
    largest = max(differences, default=math.nan)
    is_whole = len(differences) == len(job.steps)
    remark = "" if is_whole else f"the record lacks step {len(differences) + 1}"
    verdict: Verdict = "met" if is_whole and largest <= limit and not again.weights > limit else "missed"
    reasons = {
        "draws random numbers in training": again.draws,
        "no SGD": not again.sgd,
        "computes in 16 bits": (precision if job.file.precision == "auto" else job.file.precision) in LOW,
        "compresses gradients": not compressed.isdisjoint(run.run for run in runs),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        verdict, remark = "not judged", remark or why[0]
    return Continuity(
        job=job.name,
        model=job.file.name,
        optimizer=again.optimizer,
        steps=len(job.steps),
        compared=len(differences),
        runs=sum(run.launched for run in runs),
        plans=tuple(plans),
        changes=tuple(changes),
        largest=largest,
        after_changes=max(late, default=math.nan),
        weights=again.weights,
        verdict=verdict,
        remark=remark,
    )


# A job's training once more: one process, no interruption, the recorded batches and learning rates.


def _all_replayed(
    jobs: list[RecordedJob], plans: dict[int, list[Plan]], seed: int, processes: int
) -> dict[int, Replayed]:
    """Each job in a process of its own, the longest first, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    spawn = multiprocessing.get_context("spawn")
    progress = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=spawn) as pool, progress:
        task = progress.add_task("training again", total=sum(len(job.steps) for job in jobs))
        longest_first = sorted(jobs, key=lambda job: -sum(step.batch for step in job.steps))
        futures = {pool.submit(replayed, job, plans[job.number], seed): job for job in longest_first}
        try:
            for each in as_completed(futures):
                each.result()
                progress.advance(task, len(futures[each].steps))
        except BrokenProcessPool as error:
            raise InputError(
                "a process that trained a job was killed. If memory is short, type --processes 1."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {job.number: each.result() for each, job in futures.items()}


def replayed(job: RecordedJob, plans: Sequence[Plan], seed: int) -> Replayed:
    """Trains all recorded steps of a job on the CPU, on one thread. plans: of one rank, for each step.

    seed: of the run. Raises InputError.
    """
    torch.set_num_threads(1)
    try:
        return _replayed(job, plans, seed)
    except InputError as error:
        raise InputError(f"job {job.name}: {error}") from error
    except Exception as error:  # the job's own code
        reason = f"{type(error).__name__}: {error}"
        raise InputError(f"job {job.name} cannot be trained again here ({reason}).") from error


def _replayed(job: RecordedJob, plans: Sequence[Plan], seed: int) -> Replayed:
    trained = job.file.trained
    assert trained is not None
    made = load_job(trained.job_class, trained.arguments, job_folder.kept_code(trained.job_class, job.folder))
    weights = Path(trained.weights) if trained.weights else None
    trainer = Trainer(made, plans[0], seed=seed, measure_squares=False, weights=weights)
    (optimizer,) = trainer.optimizers
    saved, saved_step = _newest_weights(job)
    losses: list[float] = []
    weights_apart = math.nan
    for loss in _losses(trainer, job, plans):
        losses.append(loss)
        if len(losses) == saved_step:
            weights_apart = _apart(saved, trainer.parts[0].state_dict())
    differences = tuple(_difference(step.loss, loss) for step, loss in zip(job.steps, losses, strict=False))
    sgd, draws = isinstance(optimizer, torch.optim.SGD), bool(losses) and _has_drawn()
    return Replayed(type(optimizer).__name__, sgd, draws, differences, weights_apart)


def _losses(trainer: Trainer, job: RecordedJob, plans: Sequence[Plan]) -> Iterator[float]:
    """Losses of steps 1, 2, … up to the first that the record lacks, at recorded learning rates."""
    for number, (step, plan) in enumerate(zip(job.steps, plans, strict=True)):
        # Steps count from 1 in the record, and from 0 where they are trained.
        if step.number != number + 1:
            break
        if plan != trainer.plan:
            trainer.retune(plan.micro_batch, plan.accumulation)
        yield trainer.step(number, rate=step.rate).loss


def _newest_weights(job: RecordedJob) -> tuple[dict[str, torch.Tensor], int]:
    """The weights of the job's newest undamaged checkpoint, and its step; no weights and 0 if there is none."""
    try:
        found, progress = export.weights(job.folder / job_folder.CHECKPOINTS)
    except InputError:
        return {}, 0
    return found, progress.step


def _apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights; infinite if their names or one of their numbers do not match."""
    if one.keys() != other.keys():
        return math.inf
    largest = [float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel()]
    return max((math.inf if math.isnan(each) else each for each in largest), default=0.0)


def _difference(one: float, other: float) -> float:
    """|one − other|; 0 if neither is a number or both are the same infinity; infinite if only one is a number."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def _has_drawn() -> bool:
    """Whether torch's default generator has drawn anything since it was last seeded, which every step does."""
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return not torch.equal(fresh, torch.get_rng_state())
