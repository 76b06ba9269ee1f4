"""What a person sees while jobs train: one table, silent when nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from synergy_core.units import format_duration
from synergy_exec.controller.api import shown
from synergy_exec.controller.controller import Controller

EVERY_S = 1.0
MOST_ROWS = 30
_ORDER = ("running", "starting", "stopping", "waiting", "failed", "cancelled", "done")


@contextlib.asynccontextmanager
async def live_table(controller: Controller) -> AsyncIterator[None]:
    """Shows all jobs on the terminal, once a second, until the block ends."""
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:

        async def refresh() -> None:
            while True:
                live.update(table(controller), refresh=True)
                await asyncio.sleep(EVERY_S)

        task = asyncio.ensure_future(refresh())
        try:
            yield
        finally:
            task.cancel()


def table(controller: Controller) -> Table:
    """The jobs as they stand, those that run first."""
    execution = controller.execution
    if execution is None:
        return Table(title="waiting for agents")
    used = sum(job.held_gpus for job in execution.decider.active.values())
    jobs = sorted(execution.jobs.values(), key=lambda job: (_ORDER.index(job.state), job.job_id))
    done = sum(job.state == "done" for job in jobs)
    cluster = execution.decider.cluster
    result = Table(
        title=f"{execution.decider.policy.name}   {format_duration(controller.now_s())}   "
        f"{done}/{len(jobs)} done   {used}/{cluster.gpus} slots"
    )
    for heading in ("job", "state", "slots", "plan", "batch", "step", "done", "iterations/s", "loss", "restarts"):
        result.add_column(heading, justify="left" if heading in ("job", "state", "plan") else "right")
    for job in jobs[:MOST_ROWS]:
        seen, values = job.seen, shown(execution, job)
        rate = values["batch"] / job.file.initial_batch / seen.step_s if seen.step_s and values["batch"] else math.nan
        result.add_row(
            job.name,
            job.state,
            f"{job.held_gpus or '–'} of {job.gpus}",
            values["plan"] or "–",
            str(values["batch"] or "–"),
            f"{seen.step:,}",
            f"{min(1.0, seen.work / job.file.work):.0%}",
            f"{rate:.1f}" if math.isfinite(rate) else "–",
            f"{seen.loss:.4g}" if math.isfinite(seen.loss) else "–",
            str(job.restarts),
        )
    return result
