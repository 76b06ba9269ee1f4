"""What a person sees while jobs train: one table, silent when nobody watches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from synergy_core.units import format_duration
from synergy_exec.controller.api import shown
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.plain import plain

EVERY_S = 1.0
MOST_ROWS = 30
_HEADINGS = ("job", "state", "slots", "plan", "batch", "step", "done", "goodput", "loss", "restarts")
_TO_THE_LEFT = ("job", "state", "plan")
_STYLES = {"waiting": "dim", "done": "green", "failed": "red", "cancelled": "dim"}
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


def table(controller: Controller) -> Text:
    """A table of the jobs as they stand, those that run first.

    Lines of text, which cost little to lay out: this runs once a second in the controller's own process.
    """
    execution = controller.execution
    if execution is None:
        return Text("waiting for agents")
    used = sum(job.held_gpus for job in execution.decider.active.values())
    jobs = sorted(execution.jobs.values(), key=lambda job: (_ORDER.index(job.state), job.job_id))
    done = sum(job.state == "done" for job in jobs)
    rows = [_HEADINGS, *(_row(execution, job) for job in jobs[:MOST_ROWS])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    slots = f"{used}/{execution.decider.cluster.gpus} slots"
    title = (execution.decider.policy.name, format_duration(controller.now_s()), f"{done}/{len(jobs)} done", slots)
    result = Text(no_wrap=True, overflow="ellipsis")
    result.append("   ".join(title) + "\n", "bold")
    for row, style in zip(rows, ("underline", *(_STYLES.get(job.state, "") for job in jobs)), strict=False):
        cells = (
            cell.ljust(width) if heading in _TO_THE_LEFT else cell.rjust(width)
            for cell, width, heading in zip(row, widths, _HEADINGS, strict=True)
        )
        result.append("  ".join(cells), style).append("\n")
    if len(jobs) > MOST_ROWS:
        result.append(f"and {len(jobs) - MOST_ROWS} more: python -m synergy_exec list\n", "dim")
    return result


def _row(execution: Execution, job: ExecutedJob) -> tuple[str, ...]:
    seen, values = job.seen, shown(execution, job)
    goodput = job.goodput(values["batch"])
    return (
        plain(job.name),
        job.state,
        f"{job.held_gpus or '–'} of {job.gpus}",
        _trained(values),
        str(values["batch"] or "–"),
        f"{seen.step:,}",
        f"{min(1.0, seen.work / job.file.work):.0%}",
        f"{goodput:.1f}/s" if math.isfinite(goodput) else "–",
        f"{seen.loss:.4g}" if math.isfinite(seen.loss) else "–",
        str(job.restarts),
    )


def _trained(values: dict[str, Any]) -> str:
    """The plan's degrees, and the compressor where there is one."""
    if values["plan"] is None:
        return "–"
    return values["plan"] if values["compressor"] == "none" else f"{values['plan']} {values['compressor']}"
