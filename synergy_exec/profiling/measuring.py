"""The ranks of a measuring run: they train under one plan after another and record step times.

The run holds all slots of one type. Rank 0 finds the possible plans, chooses the next (`Selection`) and tells the other
ranks through their store. As many copies of the job as fit train side by side, so that a plan is measured beside busy
neighbours. The processes stay for all plans, because in new processes the first steps of each kind of plan are slow:
PyTorch sets up much at first use. A plan that fails ends the run; `profile.py` records why and launches the run again,
which then continues after the recorded plans.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import signal
import time
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from statistics import mean, median
from typing import Any

from torch import distributed
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from synergy_core.goodput.pipeline import searched_steps
from synergy_core.jobs.testbed_profiles import StepAtCpus, degrees_of
from synergy_core.planner.plan import Plan
from synergy_exec.messages import MeansToLeave
from synergy_exec.profiling.selection import Selection, Task, kind_of, lines_of, record_of
from synergy_exec.training import noise
from synergy_exec.training.admitted import Admission
from synergy_exec.training.cache import Cache
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS, Progress
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker import resources
from synergy_exec.worker.loop import LOOK_S, Wishes, agree, train_step
from synergy_exec.worker.rank import Rank, guarded, make_data
from synergy_exec.worker.start import Descriptors, Start
from synergy_exec.worker.steps import Meter, Pace, StepClock

MIN_INPUT_STEPS = 10
MAX_NOISE_STEPS = 3 * FEWEST_NOISE_STEPS
"""Steps within which gradient noise should be known."""
NOISE_LOOKS = 4
"""How often gradient noise is read while a plan is measured."""


def run(start: Start, descriptors: Descriptors) -> int:
    """Executes the task that the launch names; returns the exit code."""
    return guarded(MeasuringRank, start, descriptors)


class MeasuringRank(Rank):
    """One rank of a measuring run. One model at a time is built; `_build` and `_drop` replace it."""

    _trainer: Trainer | None = None
    _kinds: frozenset[tuple[bool, ...]] = frozenset()
    _store: Store
    _cache: Cache

    def train(self, descriptors: Descriptors) -> int:
        """Executes the task."""
        faulthandler.register(signal.SIGUSR1)
        self._beat()
        launch = self._start.launch
        self._device = self._take_slot()
        self._store = self._meeting_place(descriptors.store) or HashStore()
        self._cache = Cache(descriptors.cache)
        if launch.spare_memory:
            resources.give_back()
        self._path = Path(launch.measure)
        self._task = Task.read(self._path)
        if self._task.input_at is not None:
            self._measure_input(self._task.input_at)
        else:
            self._measure_plans()
        self._agent.say(MeansToLeave(run=launch.run, rank=self._start.rank, code=0))
        return 0

    def _write(self, kind: str, **values: Any) -> dict[str, Any]:
        line = {"kind": kind, **values}
        with record_of(self._path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def _loaded_job(self) -> TrainingJob:
        launch = self._start.launch
        return load_job(launch.job_class, launch.arguments, Path(launch.code) if launch.code else None)

    # Measuring plans

    def _measure_plans(self) -> None:
        orders = self._orders() if self._start.rank == 0 else None
        number = 0
        while (order := self._told(number, orders)) is not None:
            copy = next((at for at, ranks in enumerate(order["copies"]) if self._start.rank in ranks), None)
            if copy is None:
                self._drop()
            else:
                self._carry_out(number, copy, order)
            number += 1
        self._drop()

    def _orders(self) -> Iterator[dict[str, Any] | None]:
        """Yields rank 0's orders: a plan and the ranks of each copy of the job; at the end None."""
        task, lines = self._task, lines_of(self._path)
        selection = Selection(task, lines)
        if not selection.plans:
            self._now("finding out which plans there are")
            found = Admission(self._loaded_job()).candidates(task.part.sizes, task.batches)
            selection.add(self._write("candidates", found=found.values()))
        # Noise is measured under a plan of several slots if there is one: two replicas show it at once.
        several = min(2, max((plan.gpus for plan in selection.plans), default=1))
        noise_from = several if task.noise and not any(each.get("noise") for each in lines) else inf
        number = 0
        while (plan := selection.next()) is not None:
            values = dataclasses.asdict(plan)
            self._write("begun", plan=values)
            copies = task.part.ranks(plan.gpus)
            sees_noise = plan.gpus >= noise_from
            yield {"plan": values, "copies": copies, "noise": sees_noise}
            selection.add(self._write("measured", plan=values, **_together(self._said(number, copies))))
            noise_from = inf if sees_noise else noise_from
            number += 1
        yield None

    def _said(self, number: int, copies: list[list[int]]) -> list[dict[str, Any]]:
        """The measurements of each copy under an order, when all ranks have finished it."""
        self._now("waiting for the other ranks")
        self._wait(lambda: self._store.add(f"through {number}", 0) == sum(map(len, copies)))
        return [json.loads(self._store.get(f"said {number} {at}")) for at in range(len(copies))]

    def _told(self, number: int, orders: Iterator[dict[str, Any] | None] | None) -> dict[str, Any] | None:
        """The next order of rank 0, for all ranks."""
        self._now("waiting for an order")
        store, key = self._store, f"order {number}"
        if orders is not None:
            store.set(key, json.dumps(next(orders)))
        self._wait(lambda: store.check([key]))
        order: dict[str, Any] | None = json.loads(store.get(key))
        return order

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._beat()
            time.sleep(LOOK_S)

    def _carry_out(self, number: int, copy: int, order: dict[str, Any]) -> None:
        plan, ranks = Plan(**order["plan"]), order["copies"][copy]
        warm_up_steps = 0
        if self._trainer is None or degrees_of(self._trainer.plan) != degrees_of(plan):
            self._drop()
            self._build(plan, PrefixStore(f"group {number} {copy}", self._store), ranks, copy)
            warm_up_steps = self._warm_up_steps(plan)
        elif self._trainer.plan != plan:
            self._trainer.retune(plan.micro_batch, plan.accumulation)
        said = self._timed_steps(warm_up_steps, sees_noise=order["noise"])
        if self._first:
            self._store.set(f"said {number} {copy}", json.dumps(said))
        self._store.add(f"through {number}", 1)

    def _warm_up_steps(self, plan: Plan) -> int:
        """Number of first steps of a new model to ignore: one, or two if DDP rebuilds its buckets in the second or the
        process is new to this kind of plan.
        """
        kind = kind_of(plan)
        new_kind = kind not in self._kinds
        self._kinds |= {kind}
        return 1 + int((plan.data > 1 and not plan.zero) or new_kind)

    def _build(self, plan: Plan, store: Store, ranks: list[int], copy: int) -> None:
        """Builds the model of one copy, on these ranks of the run."""
        launch, device = self._start.launch, self._device
        self._first = self._start.rank == ranks[0]
        if len(ranks) > 1:
            self._join(store, ranks.index(self._start.rank), len(ranks))
        self._now("building")
        self._bare_bytes = resources.held_bytes()
        job = self._loaded_job()
        make_data(job, Path(launch.folder) / "copies" / str(copy) / "data")
        self._supply = Supply(job, cache=self._cache)
        resources.load(self._supply, self._start.cpus)
        self._job = job
        self._trainer = Trainer(
            job,
            plan,
            device,
            seed=launch.seed,
            bfloat16=launch.bfloat16 and device.type == "cuda",
            supply=self._supply,
        )
        self._progress = Progress()
        self._pace = Pace.of(self._start)

    def _drop(self) -> None:
        """Frees the model and its process group, which no rank needs any more: all had finished the last order."""
        self._trainer = None
        resources.release()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _step(self) -> None:
        """Trains one step as `worker.loop` does."""
        progress = self._progress
        assert self._trainer is not None
        self._now(f"step {progress.step + 1}")
        paced = self._pace if progress.step else None  # the first step fills caches while other ranks wait for it
        if paced is not None:
            paced.begin()
        train_step(self._trainer, self._job, progress, self._start.launch)
        if paced is not None:
            paced.rest()

    def _timed_steps(self, warm_up_steps: int, *, sees_noise: bool) -> dict[str, Any]:
        """Trains for the task's seconds, at least one step, after the warm-up. Returns the mean step time and memory.

        sees_noise: continue for the task's seconds for noise, until the noise is known or too small to be seen. Also
        returned are noise readings by work: variance ÷ squared norm of the gradient.
        """
        resources.forget()
        effort, done, took_s, enough, seen = self._task.effort, 0, 0.0, False, list[tuple[float, float]]()
        seconds = max(effort.seconds, effort.noise_s) if sees_noise else effort.seconds
        since_s = looked_s = time.monotonic()
        while not agree(Wishes(stop=enough)).stop:
            self._step()
            done += 1
            now_s = time.monotonic()
            took_s = now_s - since_s
            if sees_noise:
                squared_norm, variance = noise.statistics(self._progress) or (0.0, 0.0)
                if squared_norm > 0 and (not seen or now_s - looked_s >= effort.seconds / NOISE_LOOKS):
                    seen.append((self._progress.work, variance / squared_norm))
                    looked_s = now_s
            if done <= warm_up_steps:
                since_s = now_s
            else:
                known = not sees_noise or bool(seen) or self._progress.step >= MAX_NOISE_STEPS
                enough = took_s >= seconds and known and self._first
        held = resources.report(self._bare_bytes)
        return {
            "step_s": took_s / (done - warm_up_steps),
            "memory_bytes": held["memory_bytes"],
            "limit_bytes": held.get("memory_limit_bytes", 0),
            "noise": seen,
        }

    # Measuring input

    def _measure_input(self, plan: Plan) -> None:
        """Measures steps with the numbers of CPUs that optimistic profiling needs (`searched_steps`), on this slot."""
        cores = self._start.cores
        self._build(plan, self._store, [0], 0)
        self._step()

        def seconds_of(cpus: int) -> float:
            self._write("cpus", cpus=cpus)
            resources.move(cores[:cpus], cpus)
            resources.load(self._supply, cpus)
            found = self._step_at(cpus)
            self._write("input", step=found)
            return found.step_s

        searched_steps(seconds_of, len(cores))

    def _step_at(self, cpus: int) -> StepAtCpus:
        """Median step times with that many CPUs."""
        assert self._trainer is not None
        plan = self._trainer.plan
        clock, meter, since_s = StepClock(), Meter(), 0.0
        while True:
            began_s = time.monotonic()
            self._step()
            ended_s = time.monotonic()
            clock.add(plan.micro_batch, plan.accumulation, ended_s - began_s, 0.0, self._supply.waited_s)
            times = clock.take()
            since_s = since_s or (ended_s if times.steps else 0.0)
            cpu_s = meter.step_s(self._progress.step, steady=times.steps > 0)
            if times.steps >= MIN_INPUT_STEPS and cpu_s and ended_s - since_s >= self._task.effort.seconds:
                return StepAtCpus(cpus, times.step_s, times.waited_s, cpu_s)


def _together(said: list[dict[str, Any]]) -> dict[str, Any]:
    """Combines the measurements of copies that trained side by side."""
    times, noise_of = [each["step_s"] for each in said], [each["noise"] for each in said]
    return {
        "step_s": mean(times),
        "spread": (max(times) - min(times)) / mean(times),
        "memory_bytes": float(max(each["memory_bytes"] for each in said)),
        "limit_bytes": float(min((each["limit_bytes"] for each in said if each["limit_bytes"]), default=inf)),
        "noise": [[median(each) for each in zip(*seen, strict=True)] for seen in zip(*noise_of, strict=False)],
    }
