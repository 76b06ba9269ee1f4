"""A sweep (`-m`): a folder of its own with a run each, and when all have ended one table, one Parquet, one report."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml  # type: ignore[import-untyped]
from hydra.experimental.callback import Callback

from synergy_core.errors import InputError
from synergy_runs.resources import conf_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig

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
    from synergy_runs.compose import of_each_swept_value
    from synergy_runs.filing import new_run
    from synergy_runs.settings import build
    from synergy_sim.program import SIMULATOR
    from synergy_sim.settings import Settings

    for values in of_each_swept_value(SIMULATOR, sys.argv[1:]):
        build(Settings, values)
    named = [each.partition("=")[2] for each in arguments if each.startswith("hydra.sweep.dir=")]
    if named:
        run()
        refused = _refused(Path(named[-1].strip("'\"")))
    else:
        with new_run(_results_dir(arguments) / SWEEPS, "synergy_sim", arguments) as folder:
            quoted = str(folder).replace("\\", "\\\\").replace("'", "\\'")
            sys.argv.append(f"hydra.sweep.dir='{quoted}'")
            run()
            refused = _refused(folder)
    if refused:
        runs, first, others = os.environ.get(_SWEEP, "?").split()[0], refused[0], len(refused) - 1
        more = f" ({others} more)" if others else ""
        raise InputError(f"{len(refused)} of {runs} runs were refused; {first}{more}")


def _refused(folder: Path) -> list[str]:
    """What runs of the sweep were refused for, in the order of their settings."""
    path = folder / REFUSED
    if not path.exists():
        return []
    lines = sorted(path.read_text(encoding="utf-8").splitlines())
    path.unlink()
    return lines


def _results_dir(arguments: Sequence[str]) -> Path:
    """Where results go, before Hydra has been asked."""
    typed = [each.partition("=")[2] for each in arguments if each.lstrip("+").startswith("results_dir=")]
    if typed:
        return Path(typed[-1].strip("'\"")).expanduser()
    return Path(yaml.safe_load((conf_folder() / "config.yaml").read_text(encoding="utf-8"))["results_dir"])


class Collect(Callback):
    """Named in conf/config.yaml; Hydra calls it: before and after the sweep, and around each run, where that runs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Counts the runs, which nobody else knows."""
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

        from synergy_runs.run_record import read_record

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
        from synergy_runs.filing import command_of
        from synergy_runs.report.write import write_comparison
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
