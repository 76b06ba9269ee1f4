"""Work folders as the executor leaves them, for tests: a job really trained under several plans, and made-up ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import groups
from torch import distributed

from synergy_exec.controller.journal import JobRow, Journal
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage
from synergy_exec.training import checkpoint
from synergy_exec.training.loading import load_job
from synergy_exec.training.progress import Progress
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.steps import StepsFile
from synergy_runs.log import Kind

SEED = 7
BATCH = 16
SGD = "equality_cases:SgdGpt"
CHAIN = (
    PlanMessage(data=2, zero=3, micro_batch=4, accumulation=2),
    PlanMessage(pipeline=2, micro_batch=4, accumulation=4),
    PlanMessage(micro_batch=8, accumulation=2),
)
"""Plans that a job goes through, a run each."""
STEPS = 5
"""Of each run; the last one of each but the last run is not in its checkpoint."""
RATES = (1.0, 0.5)


def train_run(folder: str, number: int) -> int:
    """One run of the chain, on all ranks of its group; returns the step it began at, from 0."""
    plan, path = CHAIN[number], Path(folder)
    trainer = Trainer(load_job(SGD, {}), plan, seed=SEED)
    progress = checkpoint.load(path / "checkpoints", trainer.parts, trainer.optimizers) or Progress()
    began = progress.step
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    steps = StepsFile(path / "steps.csv", number) if rank == 0 else None
    for place in range(STEPS):
        if place == STEPS // 2:
            trainer.retune(2 * plan.micro_batch, plan.accumulation)
        rate = RATES[place % 2]
        result = trainer.step(progress.step, rate=rate)
        progress.step += 1
        if steps is not None:
            steps.add(progress.step, trainer.plan.global_batch, rate, result.loss, 0.01)
        if place == STEPS - 2:
            checkpoint.save(path / "checkpoints", trainer.parts, trainer.optimizers, progress)
    return began


def trained_chain(work: Path) -> None:
    """A work folder with the job `chain`, number 0, that went through all plans of CHAIN."""
    folder = job_folder(work, 0, "chain", SGD, {})
    cases = [(str(number), "recorded_runs:train_run", (str(folder), number)) for number in range(len(CHAIN))]
    began = groups.run({2: cases[:2], 1: cases[2:]}, timeout_s=120)
    assert [began[name] for name, _, _ in cases] == [0, 4, 8]
    journal = Journal(work / "journal.sqlite")
    journal.set_meta("settings", {"seed": SEED})
    add_runs(journal, 0, "chain", CHAIN)
    for number, plan in enumerate(CHAIN):
        retuned = {"micro_batch": 2 * plan.micro_batch, "accumulation": plan.accumulation}
        journal.timing(number, number + 0.5, "plan", retuned)
    journal.close()


def job_folder(work: Path, number: int, name: str, job_class: str, arguments: dict[str, object]) -> Path:
    """The job's folder with its description."""
    folder = work / "jobs" / str(number)
    folder.mkdir(parents=True)
    values = job_file(name, job_class, arguments).values()
    (folder / "job.json").write_text(json.dumps({"job": number, "submitted_as": name, **values}))
    return folder


def job_file(name: str, job_class: str = SGD, arguments: dict[str, object] | None = None) -> JobFile:
    return JobFile(
        job_class=job_class, name=name, initial_batch=BATCH, max_batch=64, work=10.0, arguments=arguments or {}
    )


def add_runs(journal: Journal, job: int, name: str, plans: Sequence[PlanMessage], *, first: int = 0) -> None:
    """The job, and a run of a second for each plan, one after the other, numbered from `first`."""
    journal.submitted(JobRow(job, name, job_file(name).values(), 0.0, None, "done", "", 0, 0))
    journal.fact(0.0, Kind.SUBMIT, job, 1)
    for place, plan in enumerate(plans):
        run, placed = first + place, ((0, (1 << plan.world) - 1),)
        journal.decided_run(run, job, float(place), placed, dataclasses.asdict(plan))
        parts = {"micro_batch": plan.micro_batch, "accumulation": plan.accumulation}
        journal.timing(run, float(place), "plan", parts)
        journal.launched(run)
        journal.fact(float(place), Kind.START, job, plan.world, placed)
        last = place == len(plans) - 1
        journal.fact(place + 1.0, Kind.FINISH if last else Kind.STOP, job, plan.world)
        journal.ended(run, "done" if last else "paused", "")


def write_steps(folder: Path, losses: Sequence[float], *, run: int, seconds: float = 0.01) -> None:
    """Steps 1, 2, … of one run at the initial batch."""
    steps = StepsFile(folder / "steps.csv", run)
    for number, loss in enumerate(losses, 1):
        steps.add(number, BATCH, 1.0, loss, seconds)
    steps.close()


def change_loss(folder: Path, step: int, by: float) -> None:
    """In the last line of that step."""
    path = folder / "steps.csv"
    lines = path.read_text().splitlines()
    at = max(at for at, line in enumerate(lines) if line.startswith(f"{step},"))
    cells = lines[at].split(",")
    cells[3] = f"{float(cells[3]) + by:.9g}"
    lines[at] = ",".join(cells)
    path.write_text("\n".join(lines) + "\n")
