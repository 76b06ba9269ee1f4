"""What a person sees while a simulation runs: one bar, silent when nobody watches."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from synergy_core.units import format_duration
from synergy_sim.engine import Progress as Report


class Rate(ProgressColumn):
    """The column of the progress bar that shows jobs per second."""

    def render(self, task: Task) -> Text:
        """`12,345 jobs/s`, or nothing before the first."""
        return Text(f"{task.speed:,.0f} jobs/s" if task.speed else "")


@contextlib.contextmanager
def progress_bar(policy: str, jobs: int, *, show: bool) -> Iterator[Report]:
    """A callback for the engine; a bar with simulated time, jobs done, jobs/s and time to go on a terminal."""
    if not (show and sys.stderr.isatty()):
        yield lambda now_s, done: None
        return
    columns = (
        TextColumn("[bold]{task.description:12}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[simulated]:>8}"),
        Rate(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(policy, total=jobs, simulated="")
        yield lambda now_s, done: bar.update(task, completed=done, simulated=format_duration(now_s))
