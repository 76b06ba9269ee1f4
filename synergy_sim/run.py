"""Runs one command: simulates every policy on every seed, writes each run as soon as it ends, and compares all runs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import multiprocessing
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from synergy_core.checking.conformance import attributed_to_policy
from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.units import format_duration
from synergy_runs.inputs.command_line import as_hydra, of_each_swept_value, run_sweep, swept_values
from synergy_runs.inputs.from_settings import about_cluster, about_quotas, carried_in_words
from synergy_runs.inputs.keys import build
from synergy_runs.inputs.requested import in_words, label_of, missing, policies_of, terms_of
from synergy_runs.inputs.workload import Workload
from synergy_runs.outputs.comparison import collect, compare
from synergy_runs.outputs.facts import Run, as_logged
from synergy_runs.outputs.invariants import check
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.results import command_of, new_run, resumed_run, show, write_run
from synergy_runs.outputs.stored import find_runs, read_record, read_run, typed_settings
from synergy_runs.outputs.tables import print_comparison
from synergy_sim.engine import Progress as Report
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.settings import SIMULATOR, SimulatorSettings
from synergy_sim.simulate import simulate

if TYPE_CHECKING:
    from omegaconf import DictConfig

Write = Callable[[str, Run], None]
"""Called as (requested policy, its finished run) to store the run, in the process that simulated it."""
SECONDS_PER_DRAWING = 0.1
MAX_WAIT_S = 0.2
"""Maximum time until Ctrl-C is noticed."""
MAX_CLEANING_S = 5.0
"""Time for a terminated process to remove its partial output before it is sent the signal again."""


def simulate_each(prepared: Sequence[PreparedRun], write: Write, *, cores: int, show: bool) -> None:
    """Simulates every run on at most `cores` processes and writes each as soon as it has ended.

    Processes are forked, so they inherit the prepared jobs and nothing has to be pickled. On a single core, or if the
    system cannot fork, the simulations run one after another in this process.

    show: whether to draw a progress bar per run, if standard error is a terminal. Raises the first error of a run; the
    other runs are then stopped and their partial output is removed.
    """
    with Progress(
        TextColumn("[bold]{task.description:18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[simulated]:>8} {task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # because a process with a drawing thread must not fork
        disable=not (show and sys.stderr.isatty()),
    ) as bars:
        if min(cores, len(prepared)) > 1 and hasattr(os, "fork"):
            # Runs that fit models to reports take longest. They start first, so that no core is idle at the end.
            longest_first = sorted(prepared, key=lambda run: (not run.policy.tunes_batch, not run.policy.reads_goodput))
            _in_processes(longest_first, write, bars, cores)
        else:
            for run in prepared:
                _simulate(run, write, _bar_of(run, bars))


def _bar_of(run: PreparedRun, bars: Progress) -> Report:
    """Returns the function that the engine calls to report progress."""
    if bars.disable:
        return lambda now_s, done: None
    task = bars.add_task(run.policy.name, total=len(run.workload), simulated="", rate="")
    bars.refresh()
    begun_s = drawn_s = time.monotonic()

    def report(now_s: float, done: int) -> None:
        nonlocal drawn_s
        clock_s = time.monotonic()
        rate = f"{done / (clock_s - begun_s):,.0f} jobs/s"
        bars.update(task, completed=done, simulated=format_duration(now_s), rate=rate)
        if clock_s > drawn_s + SECONDS_PER_DRAWING:
            bars.refresh()
            drawn_s = clock_s

    return report


def _simulate(run: PreparedRun, write: Write, report: Report) -> None:
    with attributed_to_policy(run.policy):
        done = simulate(
            run.workload, run.cluster, run.policy, run.execution, truth=run.truth, seed=run.seed, progress=report
        )
    check(done)
    write(run.asked, done)


def _in_processes(runs: Sequence[PreparedRun], write: Write, bars: Progress, cores: int) -> None:
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(runs))
    running: dict[Connection, tuple[Any, PreparedRun, Report]] = {}
    interrupts: list[int] = []
    # Ctrl-C is only recorded here and raised below: Python drops exceptions that a handler raises inside a destructor.
    if (handler := signal.getsignal(signal.SIGINT)) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                run = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(run, write, theirs, [*running, ours]), daemon=True)
                process.start()
                theirs.close()
                running[ours] = process, run, _bar_of(run, bars)
            for ready in wait(list(running), MAX_WAIT_S):
                assert isinstance(ready, Connection)
                process, run, report = running[ready]
                try:
                    said = ready.recv()
                except EOFError:
                    process.join()
                    del running[ready]
                    if process.exitcode in (1, -signal.SIGKILL):
                        raise MemoryError(f"policy {run.policy.name}") from None  # too little even to say so
                    if process.exitcode:
                        raise RuntimeError(
                            f"the process that simulated policy {run.policy.name} ended with status {process.exitcode}"
                        ) from None
                    continue
                if isinstance(said, BaseException):
                    raise said
                report(*said)
            if interrupts:
                raise KeyboardInterrupt
    finally:
        while alive := [process for process, _, _ in running.values() if process.is_alive()]:
            for process in alive:  # repeated: Python may drop the exception that the signal raises
                process.terminate()
            for process in alive:
                process.join(MAX_CLEANING_S)
        signal.signal(signal.SIGINT, handler)


def _child(run: PreparedRun, write: Write, parent: Connection, inherited: Sequence[Connection]) -> None:
    """Runs one simulation. Ctrl-C is left to the parent, which terminates this process and lets it clean up.

    inherited: the parent's ends of all pipes. They are closed here, so that writes fail if the parent was killed.
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
            except Exception:  # the error cannot be pickled
                parent.send(RuntimeError("".join(traceback.format_exception(error))))
        parent.close()


def run(values: dict[str, Any], words: Sequence[str], *, say: bool = True) -> Path:
    """Simulates the policies of the settings and writes the results; returns their folder.

    words: the arguments that the values were composed of. say: whether to print notes and the table.
    """
    settings = build(SimulatorSettings, values)
    with new_run(settings.results_dir / settings.trace.name, "synergy_sim", words) as folder:
        folders = simulate_all(settings, values, folder, say=say, side_by_side=True)
    if say:
        show(folders, folder, figures=settings.figures)  # the run is complete even if the figures fail
    elif settings.figures:
        runs = [read_run(each) for each in folders]
        write_comparison(runs, folder, command=command_of(folder), figures=settings.figures)
    return folder


def simulate_all(
    settings: SimulatorSettings, values: Mapping[str, Any], folder: Path, *, say: bool, side_by_side: bool = False
) -> list[Path]:
    """Simulates every policy on every seed; returns the run folders, `<policy>-<seed>` below `folder`.

    say: print the notes on the workload and the cluster. side_by_side: use all cores instead of one.
    """
    from omegaconf import OmegaConf

    settings, added = with_same_information(settings)
    values = {**values, "compared_with": list(settings.policy)}
    prepared = list(prepared_runs(settings))
    if say:
        _say(settings, prepared[0].workload, prepared[0].cluster, added)

    def write(policy: str, done: Run) -> None:
        own = OmegaConf.create({**values, "policy": policy, "seed": done.seed})
        write_run(done, folder / f"{done.policy}-{done.seed}", OmegaConf.to_yaml(own))

    folders: list[Path] = []
    # The log's own schedule is comparable only if all jobs are replayed at the log's arrival rate.
    shows_log = settings.cluster.load == 1 and settings.trace.sample == 1 and settings.trace.min_gpus <= 1
    for each in prepared:
        folders.append(folder / f"{each.policy.name}-{each.seed}")
        last = each.asked == settings.policy[-1]
        if shows_log and last and (log := as_logged(each.workload, each.cluster, each.seed)) is not None:
            folders.append(folder / f"{log.policy}-{log.seed}")
            write(log.policy, log)

    usable_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    simulate_each(prepared, write, cores=usable_cores if side_by_side else 1, show=settings.progress)
    return folders


def with_same_information(settings: SimulatorSettings) -> tuple[SimulatorSettings, str]:
    """Adds rows for a comparison on equal terms (`requested.missing`); returns (settings, a line on the rows or "")."""
    if not settings.same_information:
        return settings, ""
    policies = policies_of(settings.policy, settings.parameters, settings.information, settings.input)
    terms = {requested: terms_of(policy) for requested, policy in policies.items()}
    lacking = missing(terms, plans=settings.trace.models == "llm")
    order, texts = list(settings.policy), []
    for requested, (like, more) in lacking.items():
        alike = [at for at, text in enumerate(order) if _base(text) == _base(requested)]
        order.insert(alike[-1] + 1, requested)
        added_terms = ", ".join([in_words(more, terms[like])] * (more != ["plans"]) + ["all plans"] * ("plans" in more))
        texts.append(f"{label_of(requested)} ({added_terms})")
    line = f"added, for a comparison on equal terms: {', '.join(texts)}; same_information=false leaves them out"
    return dataclasses.replace(settings, policy=order), line if lacking else ""


def _base(requested: str) -> str:
    """The policy's name in a requested policy such as `sia(like=synergy)` or `sia+plans`."""
    return requested.partition("(")[0].removesuffix("+plans")


def _say(settings: SimulatorSettings, workload: Workload, cluster: Cluster, added: str) -> None:
    """Prints the number of replayed jobs, the cluster, and the rows that were left out."""
    jobs = int(workload.whole.sum())
    lines = [f"{jobs:,} job{'s' * (jobs > 1)} from {workload.source}", *carried_in_words(workload), *workload.notes]
    lines += [*about_cluster(settings.cluster, settings.trace, workload, cluster), *about_quotas(workload, cluster)]
    if left_out := [f"{count:,} {reason}" for reason, count in sorted(workload.left_out.items())]:
        lines.append("left out: " + "; ".join(left_out))
    if workload.bad_rows:
        lines.append(f"{workload.bad_rows:,} impossible rows skipped")
    if added:
        lines.append(added)
    if settings.progress and not sys.stderr.isatty():
        lines.append("no progress bar is shown, because standard error is not a terminal")
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 10_000
    print("\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines), file=sys.stderr)


# A sweep (`-m`) has a folder with one folder per run. After the last run it writes one table, Parquet file and report.

REFUSED = "refused.txt"
"""File in the folder of an unfinished sweep, with one line for each refused run."""
SWEEPS = "sweeps"
"""Folder of sweeps in results_dir."""


def sweep(arguments: Sequence[str], overrides: Sequence[str]) -> None:
    """Runs every setting of a sweep, then prints the comparison of all runs and writes comparison.parquet.

    If hydra.sweep.dir names the folder of an interrupted sweep, only its unfinished runs are run.

    arguments: as typed. overrides: the same in Hydra's grammar. Raises InputError for impossible values before the
    first run, and for refused runs after the last one.
    """
    swept = swept_values(overrides)
    settings, *_ = [build(SimulatorSettings, values) for values in of_each_swept_value(SIMULATOR, overrides)]
    runs = math.prod(map(len, swept.values()))
    given = [each.partition("=")[2].strip("'\"") for each in arguments if each.startswith("hydra.sweep.dir=")]
    new = functools.partial(new_run, settings.results_dir / SWEEPS, "synergy_sim", arguments)
    with _resumed_sweep(Path(given[0]), arguments) if given else new() as folder:
        place = as_hydra("hydra.sweep.dir", Path, str(folder), sweep=False)
        one = functools.partial(_run_of_sweep, runs=runs, keys=[each.lstrip("+") for each in swept])
        try:
            run_sweep(SIMULATOR, [*overrides, f"hydra.sweep.dir={place}"], one)
        except BaseException:
            if find_runs(folder):
                print(f"to resume this sweep, add hydra.sweep.dir={folder} to the same command", file=sys.stderr)
            raise
        if done := find_runs(folder):
            print_comparison(compare(done))
            print(f"collected: {collect(folder / 'comparison.parquet', done)}")
            if settings.figures:
                path = write_comparison(done, folder, command=command_of(folder), figures=settings.figures)
                print(f"report: {path}")
        refused: list[str] = []
        if (path := folder / REFUSED).exists():
            refused = sorted(path.read_text(encoding="utf-8").splitlines())  # in the order of their settings
            path.unlink()
    if refused:
        more = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
        raise InputError(f"{len(refused)} of {runs} runs were refused; {refused[0]}{more}")


def _resumed_sweep(folder: Path, arguments: Sequence[str]) -> contextlib.AbstractContextManager[Path]:
    """Resumes the interrupted sweep in `folder`.

    Raises InputError if there is none, if it is still running, or if it was started with other settings.
    """
    record = read_record(folder)
    if record is None:
        raise InputError(f"hydra.sweep.dir={folder}: no sweep was started there; leave the key out to start one.")
    if record.settings != typed_settings(arguments):
        raise InputError(f"hydra.sweep.dir={folder}: started with other settings; expected those of {record.command}")
    if record.runs_here:
        raise InputError(f"hydra.sweep.dir={folder}: this sweep is {record.state}; wait for it, or stop it first.")
    (folder / REFUSED).unlink(missing_ok=True)
    return resumed_run(folder)


def _run_of_sweep(config: DictConfig, *, runs: int, keys: Sequence[str]) -> None:
    """Does one run of a sweep in a process of the launcher and prints the number of finished runs to standard error.

    A run with invalid settings is listed in `REFUSED`, and the sweep continues. If a run is started again, by a resumed
    sweep or because its process died, a complete run is kept and a partial one is replaced. runs: number of runs in the
    sweep. keys: the swept keys.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    began_s, hydra = time.monotonic(), HydraConfig.get()
    folder = Path(hydra.sweep.dir)
    task = [each.lstrip("+") for each in hydra.overrides.task]
    own = " ".join(each for each in task if each.partition("=")[0] in keys)
    name = f"{hydra.job.num:03d}"
    earlier = read_record(folder / name)
    if earlier is not None and earlier.ended:
        return
    try:
        if earlier is not None and earlier.runs_here:
            raise InputError(f"{folder / name} is {earlier.state}; wait for it, or stop it first.")
        shutil.rmtree(folder / name, ignore_errors=True)
        values: Any = OmegaConf.to_container(config, resolve=True)
        settings = dataclasses.replace(build(SimulatorSettings, values), progress=False)
        with new_run(folder, "synergy_sim", hydra.overrides.task, name=name) as run_folder:
            simulate_all(settings, values, run_folder, say=hydra.job.num == 0)
    except (InputError, OmegaConfBaseException) as error:
        with open(folder / REFUSED, "a", encoding="utf-8") as file:
            file.write(f"{own}: {' '.join(str(error).split())}\n")
        print(f"refused: {own}", file=sys.stderr, flush=True)
        return
    records = [read_record(each) for each in folder.glob("[0-9]*")]
    done = sum(each is not None and each.ended is not None for each in records)
    print(f"{done} of {runs} runs done: {own} took {time.monotonic() - began_s:.0f} s", file=sys.stderr, flush=True)
