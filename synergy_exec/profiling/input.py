"""How a model's input is prepared: steps with as many CPUs as optimistic profiling asks for, while one run trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import median

from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_core.goodput.optimistic import searched_steps
from synergy_core.jobs.testbed_profiles import ProfiledInput, StepAtCpus
from synergy_exec.messages import PlanMessage
from synergy_exec.profiling.finder import Data
from synergy_exec.profiling.testbed import RunOnTestbed, Testbed

FEWEST_STEPS = 10
MEMORY = 2.0
"""Bytes of memory per byte of data, so that all of it fits with what is kept beside each item."""


async def measured_input(
    testbed: Testbed, job: int, plan: PlanMessage, data: Data, *, seconds: float, say: Callable[[int], None]
) -> ProfiledInput:
    """The input of a job that is measured on one slot of the first node, alone. seconds: of training at each number of
    CPUs; say: is told each. Raises InputError where it does not train.
    """
    most = testbed.cores(0)
    memory_bytes = MEMORY * data.samples * data.item_bytes
    run = testbed.start(job, ((0, 1),), plan, Share(float(most), memory_bytes))
    steps: dict[int, StepAtCpus] = {}
    loop = asyncio.get_running_loop()

    def seconds_of(cpus: int) -> float:
        """A step with so many CPUs; called in a thread of its own, as the search waits for it."""
        loop.call_soon_threadsafe(say, cpus)
        share = Share(float(cpus), memory_bytes)
        steps[cpus] = asyncio.run_coroutine_threadsafe(_at(run, share, seconds), loop).result()
        return steps[cpus].step_s

    try:
        await run.first_step()
        await asyncio.to_thread(searched_steps, seconds_of, most)
    finally:
        run.kill()
        await run.left
    return _fitted(testbed.cluster.node_types[0].gpu_type, plan.global_batch, data, list(steps.values()))


async def _at(run: RunOnTestbed, share: Share, seconds: float) -> StepAtCpus:
    """Medians of the run's steps with that share. Raises InputError where the run ends before."""
    run.reshare(share)
    began_s: float | None = None
    while True:
        report = await run.report()
        granted = run.granted.get(0)
        if granted is not None and granted.cpus < granted.asked == share.cpus:
            raise InputError(f"the node gave {granted.cpus:g} of {share.cpus:g} CPUs; something else holds them.")
        if report.cpus != share.cpus or not report.step_s:
            continue
        began_s = report.told_s if began_s is None else began_s
        if report.told_s - began_s >= seconds and report.steps >= FEWEST_STEPS and report.cpu_s:
            return StepAtCpus(report.cpus, report.step_s, report.waited_s, report.cpu_s)


def _fitted(gpu_type: str, batch: int, data: Data, steps: list[StepAtCpus]) -> ProfiledInput:
    """CPU-seconds as the kernel counted them, which neighbours on the machine change little, unlike times of steps."""
    return ProfiledInput(
        gpu_type,
        batch,
        cpu_s=median(each.cpu_s for each in steps) / batch,
        gpu_s=min(each.step_s - each.waited_s for each in steps),
        sample_bytes=float(data.item_bytes),
        data_bytes=float(data.samples * data.item_bytes),
        steps=tuple(sorted(steps)),
    )
