"""The simulations of one command, each in a process of its own, as many at once as there are cores; and their progress.

A process is forked, so that it begins with the jobs that were prepared and nothing has to be pickled. Where the system
cannot fork, or there is one core, the simulations run one after another in this process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from synergy_core.conformance import attributed_to_policy
from synergy_core.units import format_duration
from synergy_runs.invariants import check
from synergy_runs.log import Run
from synergy_sim.engine import Progress as Report
from synergy_sim.prepare import PreparedRun
from synergy_sim.simulate import simulate

Write = Callable[[PreparedRun, Run], None]
"""Stores a run that has ended; called in the process that simulated it."""
_SECONDS_PER_DRAWING = 0.1


def simulate_each(prepared: Sequence[PreparedRun], write: Write, *, cores: int, show: bool) -> None:
    """Simulates every run on at most `cores` processes and writes each as soon as it has ended.

    show: whether a progress bar per run is drawn, if standard error is a terminal. The first error of a run is raised
    here; runs that were under way are then stopped, and what they had begun to write is removed.
    """
    with _Bars(show and sys.stderr.isatty()) as bars:
        if min(cores, len(prepared)) > 1 and hasattr(os, "fork"):
            # Runs that fit models to reports take longest: they begin first, so that no core is idle at the end.
            longest_first = sorted(prepared, key=lambda run: (not run.policy.tunes_batch, not run.policy.reads_goodput))
            _in_processes(longest_first, write, bars, cores)
        else:
            for run in prepared:
                _simulate(run, write, bars.of(run))


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _simulate(run: PreparedRun, write: Write, report: Report) -> None:
    with attributed_to_policy(run.policy):
        done = simulate(
            run.workload, run.cluster, run.policy, run.execution, truth=run.truth, seed=run.seed, progress=report
        )
    check(done)
    write(run, done)


def _in_processes(runs: Sequence[PreparedRun], write: Write, bars: _Bars, cores: int) -> None:
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(runs))
    running: dict[Connection, tuple[Any, PreparedRun, Report]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                run = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(run, write, theirs, [*running, ours]), daemon=True)
                process.start()
                theirs.close()
                running[ours] = process, run, bars.of(run)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                process, run, report = running[ready]
                try:
                    said = ready.recv()
                except EOFError:
                    process.join()
                    del running[ready]
                    if process.exitcode:
                        raise RuntimeError(
                            f"the process that simulated policy {run.policy.name} ended with status {process.exitcode}"
                            + " (killed: was there enough memory?)" * (process.exitcode == -signal.SIGKILL)
                        ) from None
                    continue
                if isinstance(said, BaseException):
                    raise said
                report(*said)
    finally:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.join()


def _child(run: PreparedRun, write: Write, parent: Connection, inherited: Sequence[Connection]) -> None:
    """One simulation. Ctrl-C reaches the parent, which ends this process so that it can remove what it half wrote.

    inherited: the parent's ends of all pipes. They are closed here, so that writing fails once the parent was killed.
    """
    for each in inherited:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.suppress(BrokenPipeError):  # the parent was killed
        try:
            _simulate(run, write, lambda now_s, done: parent.send((now_s, done)))
        except BrokenPipeError:
            raise
        except Exception as error:
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
            try:
                parent.send(error)
            except Exception:  # it cannot be pickled
                parent.send(RuntimeError("".join(traceback.format_exception(error))))
        parent.close()


@dataclass
class _Bars(contextlib.AbstractContextManager["_Bars"]):
    """A bar per run on a terminal: simulated time, jobs done, jobs per second and the time to go.

    It draws when it is told something, not from a thread of its own: processes are forked while it is shown.
    """

    show: bool
    _progress: Progress | None = field(default=None, init=False)
    _drawn_s: float = field(default=0.0, init=False)

    def __enter__(self) -> _Bars:
        if self.show:
            self._progress = Progress(
                TextColumn("[bold]{task.description:18}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[simulated]:>8}"),
                _Rate(),
                TimeRemainingColumn(compact=True),
                console=Console(stderr=True),
                transient=True,
                auto_refresh=False,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def of(self, run: PreparedRun) -> Report:
        """What the engine calls as the run goes on."""
        if self._progress is None:
            return lambda now_s, done: None
        progress, task = self._progress, self._progress.add_task(run.policy.name, total=len(run.workload), simulated="")
        progress.refresh()

        def report(now_s: float, done: int) -> None:
            progress.update(task, completed=done, simulated=format_duration(now_s))
            if time.monotonic() > self._drawn_s + _SECONDS_PER_DRAWING:
                progress.refresh()
                self._drawn_s = time.monotonic()

        return report


class _Rate(ProgressColumn):
    """The column of the progress bar that shows jobs per second."""

    def render(self, task: Task) -> Text:
        """`12,345 jobs/s`, or nothing before the first."""
        return Text(f"{task.speed:,.0f} jobs/s" if task.speed else "")
