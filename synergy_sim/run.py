"""One command: every policy on every seed, each written as soon as it has ended; then the comparison of all."""

from __future__ import annotations

import contextlib
import dataclasses
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

import yaml  # type: ignore[import-untyped]
from hydra.experimental.callback import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_core.scheduling.conformance import attributed_to_policy
from synergy_core.units import format_duration
from synergy_runs.asked import in_words, label_of, missing, policies_of, terms_of
from synergy_runs.command_line import of_each_swept_value
from synergy_runs.facts import Run, as_logged
from synergy_runs.files import conf_folder
from synergy_runs.inputs import about_cluster, carried_in_words, check_name
from synergy_runs.invariants import check
from synergy_runs.results import command_line, new_run, show, write_run
from synergy_runs.settings import build
from synergy_runs.workload import Workload
from synergy_sim.engine import Progress as Report
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.settings import SIMULATOR, Settings
from synergy_sim.simulate import simulate

if TYPE_CHECKING:
    from omegaconf import DictConfig

Write = Callable[[str, Run], None]
"""Stores a run of the policy asked for that has ended; called in the process that simulated it."""
SECONDS_PER_DRAWING = 0.1


def simulate_each(prepared: Sequence[PreparedRun], write: Write, *, cores: int, show: bool) -> None:
    """Simulates every run on at most `cores` processes and writes each as soon as it has ended.

    A process is forked, so that it begins with the jobs that were prepared and nothing has to be pickled. Where the
    system cannot fork, or there is one core, the simulations run one after another in this process.

    show: whether a progress bar per run is drawn, if standard error is a terminal. The first error of a run is raised
    here; runs that were under way are then stopped, and what they had begun to write is removed.
    """
    with Progress(
        TextColumn("[bold]{task.description:18}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[simulated]:>8}"),
        _Rate(),
        TimeRemainingColumn(compact=True),
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,  # it draws when it is told something, not from a thread: processes are forked meanwhile
        disable=not (show and sys.stderr.isatty()),
    ) as bars:
        if min(cores, len(prepared)) > 1 and hasattr(os, "fork"):
            # Runs that fit models to reports take longest: they begin first, so that no core is idle at the end.
            longest_first = sorted(prepared, key=lambda run: (not run.policy.tunes_batch, not run.policy.reads_goodput))
            _in_processes(longest_first, write, bars, cores)
        else:
            for run in prepared:
                _simulate(run, write, _bar_of(run, bars))


class _Rate(ProgressColumn):
    """The column of the progress bar that shows jobs per second."""

    def render(self, task: Task) -> Text:
        """`12,345 jobs/s`, or "" before the first job has ended."""
        return Text(f"{task.speed:,.0f} jobs/s" if task.speed else "")


def _bar_of(run: PreparedRun, bars: Progress) -> Report:
    """What the engine calls as the run goes on."""
    if bars.disable:
        return lambda now_s, done: None
    task, drawn_s = bars.add_task(run.policy.name, total=len(run.workload), simulated=""), 0.0
    bars.refresh()

    def report(now_s: float, done: int) -> None:
        nonlocal drawn_s
        bars.update(task, completed=done, simulated=format_duration(now_s))
        if time.monotonic() > drawn_s + SECONDS_PER_DRAWING:
            bars.refresh()
            drawn_s = time.monotonic()

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
    try:
        while waiting or running:
            while waiting and len(running) < cores:
                run = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_child, args=(run, write, theirs, [*running, ours]), daemon=True)
                process.start()
                theirs.close()
                running[ours] = process, run, _bar_of(run, bars)
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


FIRST = "000"
"""Of a sweep's runs, the one that says what is replayed."""


def run(config: DictConfig) -> None:
    """Simulates what the configuration says, writes the results, prints the table."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    settings = build(Settings, values)
    if str(settings.results_dir) in ("", "."):
        raise InputError("results_dir is empty; expected a folder, such as results.")
    check_name(settings.trace.name)
    hydra = HydraConfig.get()
    alone = hydra.mode != RunMode.MULTIRUN
    parent, name = settings.results_dir / settings.trace.name, None
    if not alone:  # the runs of a sweep share the cores, go on side by side, and say when they are done
        settings = dataclasses.replace(settings, progress=False)
        parent, name = Path(hydra.sweep.dir), f"{hydra.job.num:03d}"
    with new_run(parent, "synergy_sim", command_line(), name=name) as folder:
        folders = simulate_all(settings, values, folder, say=alone or name == FIRST, side_by_side=alone)
    if alone:  # complete even if the pictures fail
        show(folders, folder, figures=settings.figures)


def simulate_all(
    settings: Settings, values: Mapping[str, Any], folder: Path, *, say: bool, side_by_side: bool = False
) -> list[Path]:
    """Simulates every policy on every seed; returns the run folders, `<policy>-<seed>` below `folder`.

    say: print the lines that stand above the table. side_by_side: use all cores instead of one.
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
    # The log itself shows its jobs where they are all of its jobs, at its own pace, on the log's GPUs.
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


def with_same_information(settings: Settings) -> tuple[Settings, str]:
    """The settings with the rows that a fair comparison lacks (`terms.missing`), and a line on them, "" for none."""
    if not settings.same_information:
        return settings, ""
    policies = policies_of(settings.policy, settings.parameters, settings.information, settings.input)
    terms = {asked: terms_of(policy) for asked, policy in policies.items()}
    lacking = missing(terms, plans=settings.trace.models == "llm")
    order, texts = list(settings.policy), []
    for asked, (like, more) in lacking.items():
        alike = [at for at, text in enumerate(order) if _base(text) == _base(asked)]
        order.insert(alike[-1] + 1, asked)
        given = ", ".join([in_words(more, terms[like])] * (more != ["plans"]) + ["all plans"] * ("plans" in more))
        texts.append(f"{label_of(asked)} ({given})")
    line = f"added, for a comparison on equal terms: {', '.join(texts)}; same_information=false leaves that out"
    return dataclasses.replace(settings, policy=order), line if lacking else ""


def _base(asked: str) -> str:
    """The policy that a text asks for, without what is added to it."""
    return asked.partition("(")[0].removesuffix("+plans")


def _say(settings: Settings, workload: Workload, cluster: Cluster, added: str) -> None:
    """What is replayed on what, and what was left out of it."""
    jobs = int((~workload.carried).sum())
    lines = [f"{jobs:,} job{'s' * (jobs > 1)} from {workload.source}", *carried_in_words(workload), *workload.notes]
    lines += about_cluster(settings.cluster, settings.trace, workload, cluster)
    if left_out := [f"{count:,} {reason}" for reason, count in sorted(workload.left_out.items())]:
        lines.append("left out: " + "; ".join(left_out))
    if workload.bad_rows:
        lines.append(f"{workload.bad_rows:,} impossible rows skipped")
    if added:
        lines.append(added)
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 10_000
    print("\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines), file=sys.stderr)


# A sweep (`-m`): a folder of its own with a run each, and when all have ended one table, one Parquet, one report.

_SWEEP = "SYNERGY_SWEEP"
"""Of the environment, which the launcher's processes inherit: how many runs the sweep has, and the keys it varies."""
REFUSED = "refused.txt"
"""In a sweep's folder while it goes on: a line for each run that was refused."""
SWEEPS = "sweeps"
"""In results_dir, beside the traces' names."""


def swept(arguments: Sequence[str], run: Callable[[], None]) -> None:
    """Calls `run` with a new folder as Hydra's for the sweep, unless the command line names one.

    Raises InputError for values that cannot be, before the first run, and at the end where runs were refused.
    """
    for values in of_each_swept_value(SIMULATOR, sys.argv[1:]):
        build(Settings, values)
    typed = {key.lstrip("+"): value.strip("'\"") for key, _, value in (each.partition("=") for each in arguments)}
    with contextlib.ExitStack() as stack:
        if "hydra.sweep.dir" in typed:
            folder = Path(typed["hydra.sweep.dir"])
        else:
            default = yaml.safe_load((conf_folder() / "config.yaml").read_text(encoding="utf-8"))["results_dir"]
            results_dir = Path(typed.get("results_dir", default)).expanduser()
            folder = stack.enter_context(new_run(results_dir / SWEEPS, "synergy_sim", arguments))
            quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
            sys.argv.append(f"hydra.sweep.dir='{quoted}'")
        run()
        refused: list[str] = []
        if (path := folder / REFUSED).exists():
            refused = sorted(path.read_text(encoding="utf-8").splitlines())  # in the order of their settings
            path.unlink()
    if refused:
        more = f" ({len(refused) - 1} more)" if len(refused) > 1 else ""
        runs = os.environ.get(_SWEEP, "?").split()[0]
        raise InputError(f"{len(refused)} of {runs} runs were refused; {refused[0]}{more}")


class Collect(Callback):
    """Named in conf/config.yaml; Hydra calls it: before and after the sweep, and around each run, where that runs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Counts the runs."""
        from hydra.core.override_parser.overrides_parser import OverridesParser

        overrides = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        swept = [each for each in overrides if each.is_sweep_override()]
        runs = math.prod(sum(1 for _ in each.sweep_string_iterator()) for each in swept)
        os.environ[_SWEEP] = " ".join([str(runs), *(str(each.key_or_group) for each in swept)])

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Notes the time."""
        self._began_s = time.monotonic()

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        """Says on standard error that a run of the sweep is done, and how many are."""
        from hydra.core.utils import JobStatus

        from synergy_runs.stored import read_record

        if config.hydra.mode.name != "MULTIRUN" or job_return.status != JobStatus.COMPLETED:
            return
        runs, *keys = os.environ.get(_SWEEP, "?").split()
        task = [each.lstrip("+") for each in config.hydra.overrides.task]
        own = " ".join(each for each in task if each.partition("=")[0] in keys)
        if isinstance(job_return.return_value, str):
            sentence = " ".join(job_return.return_value.split())
            with open(Path(config.hydra.sweep.dir) / REFUSED, "a", encoding="utf-8") as file:
                file.write(f"{own}: {sentence}\n")
            print(f"refused: {own}", file=sys.stderr, flush=True)
            return
        records = [read_record(each) for each in Path(config.hydra.sweep.dir).glob("[0-9]*")]
        done = sum(each is not None and each.ended is not None for each in records)
        took_s = time.monotonic() - self._began_s
        print(f"{done} of {runs} runs done: {own} took {took_s:.0f} s", file=sys.stderr, flush=True)

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the comparison of everything in the sweep's folder and writes comparison.parquet there."""
        from synergy_runs.comparison import collect, compare
        from synergy_runs.report.write import write_comparison
        from synergy_runs.results import command_of
        from synergy_runs.stored import find_runs
        from synergy_runs.tables import print_comparison

        folder = Path(config.hydra.sweep.dir)
        runs = find_runs(folder)
        if not runs:
            return
        written = {"collected": collect(folder / "comparison.parquet", runs)}
        if config.figures:
            written["report"] = write_comparison(runs, folder, command=command_of(folder))
        print_comparison(compare(runs))
        for what, path in written.items():
            print(f"{what}: {path}")
