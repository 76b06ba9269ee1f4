"""Checks whether the jobs of a run trained as they would have in one process without any break:
`python bench/verify.py results/demo/latest/synergy-0.work`.

It trains every job again, alone, with the batch and the learning-rate factor of each recorded step, and compares the
loss of each step and the weights of the newest checkpoint. Jobs with SGD are judged. Adam and similar optimizers hide a
wrong scale of the gradient, so their jobs are only reported.
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
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import torch

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec import job_folder
from synergy_exec.commands import export
from synergy_exec.controller.journal import RunRow, Timing, open_journal
from synergy_exec.job_file import JobFile
from synergy_exec.run import recorded
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_runs.files import atomic_file

LIMIT = 1e-4
"""Largest difference of a loss or a weight; plans add in different orders, and training carries the rounding on."""
STEPS_AFTER_CHANGE = 10
_MISSED = 1

Verdict = Literal["met", "missed", "not judged"]


class RecordedStep(NamedTuple):
    """A line of steps.csv. number: from 1. rate: the factor on the learning rate. run: of the job, that trained it."""

    number: int
    batch: int
    rate: float
    loss: float
    seconds: float
    run: int


class RecordedValue(NamedTuple):
    """A line of evaluations.csv: what a metric was after so many steps. run: of the job, that evaluated."""

    step: int
    metric: str
    value: float
    run: int


@dataclass(frozen=True, slots=True)
class RecordedJob:
    """A job that has a folder. name: as it was submitted. steps: each once, in order. evaluations: each once, by step.
    code: the copy of its file, None of a class of a package.
    """

    folder: Path
    number: int
    name: str
    file: JobFile
    steps: tuple[RecordedStep, ...]
    evaluations: tuple[RecordedValue, ...] = ()
    code: Path | None = None


def recorded_jobs(work: Path) -> list[RecordedJob]:
    """All jobs of a run that have a folder, by number. Raises InputError for what cannot be read."""
    folders = sorted(job_folder.folders(work).items())
    return [_job(folder) for _, folder in folders if (folder / job_folder.DESCRIPTION).is_file()]


def chosen(jobs: list[RecordedJob], wanted: list[str]) -> list[RecordedJob]:
    """The jobs of these names or numbers; all, where none is wanted. Raises InputError for one that is not there."""
    known = {each.name: each for each in jobs} | {str(each.number): each for each in jobs}
    if missing := [each for each in wanted if each not in known]:
        names = ", ".join(each.name for each in jobs) or "none"
        raise InputError(f"job '{missing[0]}' has no folder in this run; those that do: {names}.")
    numbers = {known[each].number for each in wanted}
    return [each for each in jobs if each.number in numbers or not wanted]


def _job(folder: Path) -> RecordedJob:
    filed = job_folder.described(folder)
    steps = recorded(folder / job_folder.STEPS).itertuples(index=False)
    values = recorded(folder / job_folder.EVALUATIONS).itertuples(index=False)
    return RecordedJob(
        folder,
        filed.number,
        filed.name,
        filed.file,
        tuple(RecordedStep(*each) for each in steps),
        tuple(RecordedValue(*each) for each in values),
        job_folder.kept_code(filed.file.job_class, folder),
    )


@dataclass(frozen=True, slots=True)
class Continuity:
    """How a job's losses compare with those of one process without a break.

    steps: recorded; compared: of them, up to the first that the record lacks. runs: launched. plans: parallel degrees
    of the runs that trained, in turn; changes: steps, from 1, before which the plan changed. largest: of |difference|
    over all compared steps; after_changes: over the 10 from each change on, NaN where there was none. weights: the
    largest |difference| of a weight of the newest checkpoint, NaN if there is none.
    """

    job: str
    model: str
    optimizer: str
    steps: int
    compared: int
    runs: int
    plans: tuple[str, ...]
    changes: tuple[int, ...]
    largest: float
    after_changes: float
    weights: float
    verdict: Verdict
    remark: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a judged job is beyond the limit, else 0. Raises InputError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, metavar="RUN.work", help="such as results/demo/latest/synergy-0.work")
    parser.add_argument("--jobs", nargs="+", default=[], metavar="NAME", help="names or numbers; all that trained")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"largest difference allowed, {LIMIT:g}")
    parser.add_argument("--processes", type=int, default=_cores(), help="jobs trained at once; one per core")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write what was found, too")
    given = parser.parse_args(arguments)
    if not given.limit >= 0:
        raise InputError(f"--limit {given.limit:g}: expected a difference, 0 or more.")
    if given.processes < 1:
        raise InputError(f"--processes {given.processes}: expected at least 1.")
    found = verified(given.work, given.jobs, given.limit, processes=given.processes)
    print("\n".join(table(found, given.limit)))
    if given.json is not None:
        values = {"limit": given.limit, "jobs": [dataclasses.asdict(each) for each in found]}
        with atomic_file(given.json) as partial:
            partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return _MISSED if any(each.verdict == "missed" for each in found) else 0


def verified(work: Path, wanted: Sequence[str], limit: float, *, processes: int) -> list[Continuity]:
    """Every wanted job that trained at least a step, by number. Raises InputError."""
    journal = open_journal(work)
    runs, timings = journal.runs(), journal.timings()
    seed = int(journal.meta().get("settings", {}).get("seed", 0))
    journal.close()
    jobs = [each for each in chosen(recorded_jobs(work), list(wanted)) if each.steps]
    if not jobs:
        raise InputError(f"{work}: none of the jobs asked for has trained a step; there is nothing to compare.")
    plans = {job.number: plans_of_one_rank(job, runs, timings) for job in jobs}
    again = _again(jobs, plans, seed, processes)
    trained = (each for each in timings if each.kind == "plan")
    compressed = frozenset(each.run for each in trained if each.parts.get("compressor", "none") != "none")
    return [
        continuity(job, [run for run in runs if run.job == job.number], again[job.number], limit, compressed)
        for job in jobs
    ]


def plans_of_one_rank(job: RecordedJob, runs: Sequence[RunRow], timings: Sequence[Timing]) -> list[Plan]:
    """For each step a plan that cuts its batch as all ranks together did, so that sums round alike as far as they can.

    The journal says which plans a run went through, its steps which batch each had: a run goes on to the next of its
    plans with that batch. Where none has it, the batch is not cut.
    """
    degree = {run.run: int(run.plan["data"]) for run in runs}
    cuts: dict[int, list[tuple[int, int]]] = {run.run: [] for run in runs}
    for each in timings:
        if each.kind == "plan" and each.run in cuts:
            micro_batch, accumulation = int(each.parts["micro_batch"]), int(each.parts["accumulation"])
            cuts[each.run].append((micro_batch, accumulation * degree[each.run]))
    result = []
    for step in job.steps:
        left = cuts.get(step.run, [])
        fitting = [
            at for at, (micro_batch, accumulation) in enumerate(left) if micro_batch * accumulation == step.batch
        ]
        if fitting:
            del left[: fitting[0]]
        micro_batch, accumulation = left[0] if fitting else (step.batch, 1)
        result.append(Plan(micro_batch=micro_batch, accumulation=accumulation))
    return result


def _again(jobs: list[RecordedJob], plans: dict[int, list[Plan]], seed: int, processes: int) -> dict[int, Replayed]:
    """Each job replayed in a process of its own kind, the longest first."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(jobs)), mp_context=spawn) as pool:
        in_turn = sorted(jobs, key=lambda job: -sum(step.batch for step in job.steps))
        futures = {pool.submit(replayed, job, plans[job.number], seed): job for job in in_turn}
        try:
            return {futures[each].number: each.result() for each in _watched(futures)}
        except BrokenProcessPool as error:
            raise InputError(
                "a process that trained a job was killed. If memory is short, type --processes 1."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _watched(futures: dict[Future[Replayed], RecordedJob]) -> Iterator[Future[Replayed]]:
    """Results as they end, with a progress line on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training again", total=sum(len(job.steps) for job in futures.values()))
        for each in as_completed(futures):
            progress.advance(task, len(futures[each].steps))
            yield each


def continuity(
    job: RecordedJob,
    runs: Sequence[RunRow],
    again: Replayed,
    limit: float,
    compressed: frozenset[int] = frozenset(),
) -> Continuity:
    """Puts together what was recorded, what the journal says of the job's runs, and what training again gave.

    compressed: runs in which gradients were, which training again in one process does not repeat.
    """
    degrees = {run.run: Plan(**run.plan).degrees for run in runs}
    plans: list[str] = []
    changes: list[int] = []
    for step in job.steps:
        plan = degrees.get(step.run, "?")
        if plans and plan != plans[-1]:
            changes.append(step.number)
        if not plans or plan != plans[-1]:
            plans.append(plan)
    differences = again.differences
    late = [each for at in changes for each in differences[at - 1 : at - 1 + STEPS_AFTER_CHANGE]]
    largest = max(differences, default=math.nan)
    whole = len(differences) == len(job.steps)
    remark = "" if whole else f"the record lacks step {len(differences) + 1}"
    is_met = whole and largest <= limit and not again.weights > limit
    verdict: Verdict = "met" if is_met else "missed"
    reasons = {
        "draws random numbers in training": again.draws,
        "no SGD": not again.sgd,
        "compresses gradients": not compressed.isdisjoint(run.run for run in runs),
    }
    if why := [reason for reason, given in reasons.items() if given]:
        verdict = "not judged"
        remark = remark or why[0]
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


def table(found: Sequence[Continuity], limit: float) -> list[str]:
    """The text that is printed: a line for every job, and the verdict."""
    rows: list[tuple[str, ...]] = [
        (
            *("job", "model", "optimizer", "steps", "runs", "plans"),
            *("changes", "loss", "after changes", "weights", "verdict"),
        )
    ]
    for each in found:
        verdict = f"{each.verdict} ({each.remark})" if each.remark else each.verdict
        numbers = (str(len(each.changes)), *map(_number, (each.largest, each.after_changes, each.weights)))
        plans = " → ".join(each.plans)
        rows.append((each.job, each.model, each.optimizer, str(each.steps), str(each.runs), plans, *numbers, verdict))
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = [(sum(each.verdict == verdict for each in found), verdict) for verdict in get_args(Verdict)]
    return [
        *lines,
        f"loss, weights: largest difference from one process without a break; at most {limit:g}: "
        + ", ".join(f"{count} {verdict}" for count, verdict in counts if count),
        f"after changes: in the {STEPS_AFTER_CHANGE} steps from each change of plan on",
    ]


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2g}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


# A job's training once more: one process, no break, the batches and learning rates that were recorded.


@dataclass(frozen=True, slots=True)
class Replayed:
    """A job trained once more.

    optimizer: the class's name; sgd: whether it is torch's SGD, where a wrong gradient shows as it is.

    draws: whether the model draws random numbers in training (dropout), which differ from plan to plan.
    differences: |recorded − replayed loss| of steps 1, 2, …; infinite where only one of them is a number. They end
    before the first step that the record lacks. weights: as in `Continuity`.
    """

    optimizer: str
    sgd: bool
    draws: bool
    differences: tuple[float, ...]
    weights: float


def replayed(job: RecordedJob, plans: Sequence[Plan], seed: int) -> Replayed:
    """Trains all recorded steps of a job on the CPU, one thread. plans: of one rank, for each step.

    seed: the run's. Raises InputError.
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
    trainer = _trainer(job, plans[0], seed)
    (optimizer,) = trainer.optimizers
    sgd = isinstance(optimizer, torch.optim.SGD)
    saved, step = _newest_weights(job)
    losses: list[float] = []
    weights_apart = math.nan
    for loss in _losses(trainer, job, plans):
        losses.append(loss)
        if len(losses) == step:
            weights_apart = _apart(saved, trainer.parts[0].state_dict())
    draws = bool(losses) and _drawn()
    differences = tuple(difference(step.loss, loss) for step, loss in zip(job.steps, losses, strict=False))
    return Replayed(type(optimizer).__name__, sgd, draws, differences, weights_apart)


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


def _trainer(job: RecordedJob, plan: Plan, seed: int) -> Trainer:
    made = load_job(job.file.job_class, job.file.arguments, job.code)
    weights = Path(job.file.weights) if job.file.weights else None
    return Trainer(made, plan, seed=seed, measure_squares=False, weights=weights)


def _losses(trainer: Trainer, job: RecordedJob, plans: Sequence[Plan]) -> Iterator[float]:
    """Losses of steps 1, 2, … up to the first that the record lacks, at recorded learning rates."""
    for number, (step, plan) in enumerate(zip(job.steps, plans, strict=True)):
        # Steps count from 1 in the record, and from 0 where they are trained.
        if step.number != number + 1:
            break
        if plan != trainer.plan:
            trainer.retune(plan.micro_batch, plan.accumulation)
        yield trainer.step(number, rate=step.rate).loss


def difference(one: float, other: float) -> float:
    """|one − other|; 0 where neither is a number or both are the same infinity, else infinite."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other)
    return math.inf if math.isnan(apart) else apart


def _drawn() -> bool:
    """Whether torch's default generator has drawn anything since it was last seeded, which every step does."""
    fresh = torch.Generator().manual_seed(torch.initial_seed()).get_state()
    return not torch.equal(fresh, torch.get_rng_state())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
