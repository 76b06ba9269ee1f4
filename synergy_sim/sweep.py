"""What happens when a sweep (`-m`) has ended: all its runs in one table and one Parquet."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Collect(Callback):
    """Named in conf/config.yaml; Hydra calls it."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Prints the comparison of everything in the sweep's folder and writes comparison.parquet there."""
        from synergy_runs.comparison import collect, compare
        from synergy_runs.stored import find_runs
        from synergy_runs.tables import print_comparison

        folder = Path(config.hydra.sweep.dir)
        runs = find_runs(folder)
        print_comparison(compare(runs))
        if config.figures:
            from synergy_runs.report.write import write_comparison

            command = shlex.join(["python", "-m", "synergy_sim", *sys.argv[1:]])
            print(f"report: {write_comparison(runs, folder, command=command)}")
        print(f"collected: {collect(folder, runs)}")
