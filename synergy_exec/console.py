"""What a person sees while jobs train: one table, silent when nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

from rich.console import Console
from rich.live import Live
from rich.table import Table

from synergy_core.goodput.efficiency import gain
from synergy_core.units import format_duration
from synergy_exec.controller.api import shown
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.jobs import ExecutedJob

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
    for heading in ("job", "state", "slots", "plan", "batch", "step", "done", "goodput", "loss", "restarts"):
        result.add_column(heading, justify="left" if heading in ("job", "state", "plan") else "right")
    for job in jobs[:MOST_ROWS]:
        seen, values = job.seen, shown(execution, job)
        goodput = _goodput(job, values["batch"])
        result.add_row(
            job.name,
            job.state,
            f"{job.held_gpus or '–'} of {job.gpus}",
            values["plan"] or "–",
            str(values["batch"] or "–"),
            f"{seen.step:,}",
            f"{min(1.0, seen.work / job.file.work):.0%}",
            f"{goodput:.1f}/s" if math.isfinite(goodput) else "–",
            f"{seen.loss:.4g}" if math.isfinite(seen.loss) else "–",
            str(job.restarts),
        )
    if len(jobs) > MOST_ROWS:
        result.caption = f"and {len(jobs) - MOST_ROWS} more: python -m synergy_exec list"
    return result


def _goodput(job: ExecutedJob, batch: int | None) -> float:
    """Iterations at the initial batch per second, NaN while nothing was reported or nothing runs."""
    seen = job.seen
    if not batch or not seen.step_s:
        return math.nan
    known = seen.statistics
    return float(gain(batch, *known, job.file.initial_batch) if known else 1.0) / seen.step_s
