"""What the ranks of a measuring run do: train under one plan after another, and write down how long steps take.

The run holds all slots of one type. Rank 0 chooses the plans (`Selection`) and tells the other ranks through the store
at which they meet. As many copies of the job as there is room for train side by side, so that a plan is measured beside
busy neighbours. The processes stay from one plan to the next: in new ones the first steps of each kind of plan are
slow, since PyTorch sets much up at first use. A plan that fails ends the run; `profile.py` notes why and launches it
again, and it goes on after what stands in the record.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from torch import distributed
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from synergy_core.goodput.pipeline import searched_steps
from synergy_core.jobs.testbed_profiles import StepAtCpus, degrees_of
from synergy_core.planner.plan import Plan
from synergy_exec.messages import MeansToLeave
from synergy_exec.profiling.selection import Selection, Task, record_of
from synergy_exec.training import noise
from synergy_exec.training.cache import Cache
from synergy_exec.training.integrity import FEWEST_NOISE_STEPS, Progress
from synergy_exec.training.loading import load_job
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer
from synergy_exec.wire import whole_lines
from synergy_exec.worker import resources
from synergy_exec.worker.loop import LOOK_S, Wishes, agree, train_step
from synergy_exec.worker.rank import Rank, guarded, make_data
from synergy_exec.worker.start import Descriptors, Start
from synergy_exec.worker.steps import Meter, Pace, StepClock

MIN_INPUT_STEPS = 10
MAX_NOISE_STEPS = 3 * FEWEST_NOISE_STEPS
"""Steps in which gradient noise should have become known."""
NOISE_LOOKS = 4
"""How often gradient noise is looked at during the time in which a plan is measured."""


def run(start: Start, descriptors: Descriptors) -> int:
    """Carries out the task that the launch names; returns the exit code."""
    return guarded(MeasuringRank, start, descriptors)


class MeasuringRank(Rank):
    """One rank of a measuring run. One model at a time is built; `_build` and `_drop` replace it."""

    _trainer: Trainer | None = None
    _store: Store
    _cache: Cache

    def train(self, descriptors: Descriptors) -> int:
        """Carries out the task."""
        faulthandler.register(signal.SIGUSR1)
        self._beat()
        launch = self._start.launch
        self._device = self._take_slot()
        self._store = self._meeting_place(descriptors.store) or HashStore()
        self._cache = Cache(descriptors.cache)
        if launch.spare_memory:
            resources.give_back()
        path = Path(launch.measure)
        self._task = Task.read(path)
        self._record = record_of(path)
        if self._task.input_only:
            self._measure_input()
        else:
            self._measure_plans()
        self._agent.say(MeansToLeave(run=launch.run, rank=self._start.rank, code=0))
        return 0

    def _write(self, kind: str, **values: Any) -> None:
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    # Plans, one order after another

    def _measure_plans(self) -> None:
        orders = Orders(self._task, self._record, self._write) if self._start.rank == 0 else None
        number = 0
        while (order := self._told(number, orders)) is not None:
            copy = next((at for at, ranks in enumerate(order["copies"]) if self._start.rank in ranks), None)
            if copy is None:
                self._drop()
            else:
                self._carry_out(number, copy, order)
            number += 1
        self._drop()

    def _told(self, number: int, orders: Orders | None) -> dict[str, Any] | None:
        """What all ranks do next. Rank 0 waits until every copy has done what was before, and decides."""
        self._now("waiting for an order")
        store, key = self._store, f"order {number}"
        if orders is not None:
            if number:
                last = orders.order
                assert last is not None
                ranks = sum(map(len, last["copies"]))
                self._wait(lambda: store.add(f"through {number - 1}", 0) == ranks)
                orders.done([json.loads(store.get(f"said {number - 1} {at}")) for at in range(len(last["copies"]))])
            store.set(key, json.dumps(orders.next()))
        self._wait(lambda: store.check([key]))
        order: dict[str, Any] | None = json.loads(store.get(key))
        return order

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done():
            self._beat()
            time.sleep(LOOK_S)

    def _carry_out(self, number: int, copy: int, order: dict[str, Any]) -> None:
        plan, ranks = Plan(**order["plan"]), order["copies"][copy]
        store = self._store
        if self._trainer is None or degrees_of(self._trainer.plan) != degrees_of(plan):
            self._drop()
            self._build(plan, PrefixStore(f"group {number} {copy}", store), ranks, copy)
        elif self._trainer.plan != plan:
            self._trainer.retune(plan.micro_batch, plan.accumulation)
        said = self._seen_noise() if order["noise"] else self._timed_steps(order["warm_up_steps"])
        if self._first:
            store.set(f"said {number} {copy}", json.dumps(said))
        store.add(f"through {number}", 1)

    def _build(self, plan: Plan, store: Store, ranks: list[int], copy: int) -> None:
        """Builds the model of one copy, on these ranks of the run."""
        launch, device = self._start.launch, self._device
        self._first = self._start.rank == ranks[0]
        if len(ranks) > 1:
            self._join(store, ranks.index(self._start.rank), len(ranks))
        self._now("building")
        self._bare_bytes = resources.held_bytes()
        job = load_job(launch.job_class, launch.arguments, Path(launch.code) if launch.code else None)
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
        """Frees the model. No other rank needs the process group any more: all were through before the next order."""
        self._trainer = None
        resources.release()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _step(self) -> None:
        """One step, as in training (`worker.loop`)."""
        progress = self._progress
        assert self._trainer is not None
        self._now(f"step {progress.step + 1}")
        paced = self._pace if progress.step else None  # the first step makes caches, and others wait for it
        if paced is not None:
            paced.begin()
        train_step(self._trainer, self._job, progress, self._start.launch)
        if paced is not None:
            paced.rest()

    def _timed_steps(self, warm_up_steps: int) -> dict[str, float]:
        """Steps for the task's seconds, one at least, after those of the warm-up: their mean, and the memory held."""
        resources.forget()
        seconds, done, took_s, enough = self._task.effort.seconds, 0, 0.0, False
        since_s = time.monotonic()
        while not agree(Wishes(stop=enough)).stop:
            self._step()
            done += 1
            took_s = time.monotonic() - since_s
            if done <= warm_up_steps:
                since_s = time.monotonic()
            else:
                enough = took_s >= seconds and self._first
        held = resources.report(self._bare_bytes)
        step_s = took_s / (done - warm_up_steps)
        return {
            "step_s": step_s,
            "memory_bytes": held["memory_bytes"],
            "limit_bytes": held.get("memory_limit_bytes", 0),
        }

    def _seen_noise(self) -> list[tuple[float, float]]:
        """Trains for the task's seconds of noise, and until it is known or too small to be seen: by work, variance ÷
        squared norm of the gradient.
        """
        effort, seen, enough = self._task.effort, list[tuple[float, float]](), False
        began_s = looked_s = time.monotonic()
        while not agree(Wishes(stop=enough)).stop:
            self._step()
            now_s = time.monotonic()
            squared_norm, variance = noise.statistics(self._progress) or (0.0, 0.0)
            if squared_norm > 0 and (not seen or now_s - looked_s >= effort.seconds / NOISE_LOOKS):
                seen.append((self._progress.work, variance / squared_norm))
                looked_s = now_s
            found = squared_norm > 0 or self._progress.step >= MAX_NOISE_STEPS
            enough = found and now_s - began_s >= effort.noise_s and self._first
        return seen

    # Input

    def _measure_input(self) -> None:
        """Steps with as many CPUs as optimistic profiling asks for (`searched_steps`), on this slot alone."""
        cores = self._start.cores
        plan = next(iter(self._task.plans.values()))[0][0]
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
        """Medians of steps with that many CPUs."""
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


class Orders:
    """What rank 0 has all ranks do: the selection's next plan, and once gradient noise. order: the last one given."""

    def __init__(self, task: Task, record: Path, write: Callable[..., None]) -> None:
        lines = [json.loads(each) for each in whole_lines(record)]
        self._task, self._write, self._selection = task, write, Selection.after(task, lines)
        # Noise is measured under a plan of several slots, where there is one: two replicas show it at once.
        several = min(2, max((size for size, found in task.plans.items() if found), default=1))
        self._noise_from = several if task.noise and not any(each["kind"] == "noise" for each in lines) else None
        self._kinds: set[tuple[bool, ...]] = set()
        self._degrees: Any = None
        self.order: dict[str, Any] | None = None

    def next(self) -> dict[str, Any] | None:
        """The next order; None when there is nothing left to measure."""
        last = self.order
        if last is not None and self._noise_from is not None and Plan(**last["plan"]).gpus >= self._noise_from:
            self._noise_from = None
            self.order = {**last, "noise": True}
            return self.order
        plan = self._selection.next()
        if plan is None:
            self.order = None
            return None
        selection = self._selection
        self._write(
            "begun", plan=dataclasses.asdict(plan), decided=selection.plans - selection.undecided, plans=selection.plans
        )
        copies = self._task.part.ranks(plan.gpus)
        self.order = {
            "plan": dataclasses.asdict(plan),
            "copies": copies,
            "warm_up_steps": self._warm_up_steps(plan),
            "noise": False,
        }
        return self.order

    def _warm_up_steps(self, plan: Plan) -> int:
        """Steps that are left out: none after another batch of the same model; else the first, and the second if DDP
        rebuilds its buckets in it or the processes are new to this kind of plan.
        """
        same = degrees_of(plan) == self._degrees
        self._degrees = degrees_of(plan)
        if same:
            return 0
        kind = plan.zero > 0, plan.tensor > 1, plan.pipeline > 1
        new_kind = kind not in self._kinds
        self._kinds.add(kind)
        return 1 + int((plan.data > 1 and not plan.zero) or new_kind)

    def done(self, said: list[Any]) -> None:
        """What the copies have measured under the last order."""
        assert self.order is not None
        if self.order["noise"]:
            self._write("noise", seen=[each for copy in said for each in copy])
            return
        times = [each["step_s"] for each in said]
        step_s = mean(times)
        limit_bytes = min((each["limit_bytes"] for each in said if each["limit_bytes"]), default=float("inf"))
        line = {
            "step_s": step_s,
            "spread": (max(times) - min(times)) / step_s,
            "memory_bytes": float(max(each["memory_bytes"] for each in said)),
            "limit_bytes": float(limit_bytes),
        }
        self._write("measured", plan=self.order["plan"], **line)
        self._selection.measured(Plan(**self.order["plan"]), step_s, line["memory_bytes"], line["limit_bytes"])
