"""One command: every policy on every seed, one after another, each written as soon as it has ended."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_runs.carrying import carried_in_words
from synergy_runs.filing import make_room, remove_report, say_if_replaced, show
from synergy_runs.invariants import check
from synergy_runs.results import write_run
from synergy_runs.settings import build
from synergy_runs.workload import Workload
from synergy_sim.console import progress_bar
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.settings import Settings
from synergy_sim.simulate import simulate

if TYPE_CHECKING:
    from omegaconf import DictConfig


def run(config: DictConfig) -> None:
    """Simulates what the configuration says, writes the results, prints the table."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    settings = build(Settings, values)
    if str(settings.results_dir) in ("", "."):
        raise InputError("results_dir is empty; expected a folder, such as results.")
    sweep = _sweep_job()
    folder = (sweep[0] if sweep else settings.results_dir) / settings.trace.name
    make_room(folder)
    folders = simulate_all(settings, values, folder, say=sweep is None or sweep[1] == 0)
    if sweep is None:
        show(folders, folder, program="synergy_sim", figures=settings.figures)


def simulate_all(settings: Settings, values: Mapping[str, Any], folder: Path, *, say: bool) -> list[Path]:
    """Every policy on every seed; returns the run folders, `<policy>-<seed>` below `folder`."""
    values = {**values, "compared_with": list(settings.policy)}
    folders: list[Path] = []
    remove_report(folder)
    for prepared in prepared_runs(settings):
        if say and not folders:
            _say(settings, prepared.workload, prepared.cluster)
        into = folder / f"{prepared.policy.name}-{prepared.seed}"
        _simulate_one(settings, values, prepared, into)
        folders.append(into)
    return folders


def _simulate_one(settings: Settings, values: Mapping[str, Any], what: PreparedRun, into: Path) -> None:
    from omegaconf import OmegaConf

    own = {**values, "policy": what.policy.name, "seed": what.seed}
    say_if_replaced(into, own)
    with progress_bar(what.policy.name, len(what.workload), show=settings.progress) as progress:
        done = simulate(
            what.workload,
            what.cluster,
            what.policy,
            what.execution,
            truth=what.truth,
            seed=what.seed,
            progress=progress,
        )
    check(done)
    write_run(done, into, OmegaConf.to_yaml(OmegaConf.create(own)))


def _say(settings: Settings, workload: Workload, cluster: Cluster) -> None:
    """What is replayed on what, and what was left out of it."""
    jobs = int((~workload.carried).sum())
    lines = [f"{jobs:,} job{'s' * (jobs > 1)} from {workload.source}", *carried_in_words(workload), *workload.notes]
    if settings.trace.path and settings.cluster.nodes is None and settings.cluster.node_types is None:
        lines.append(f"cluster assumed: {cluster.describe()}; give yours with cluster.nodes=N")
    left_out = [f"{count:,} {reason}" for reason, count in sorted(workload.left_out.items())]
    if left_out:
        lines.append("left out: " + "; ".join(left_out))
    if workload.bad_rows:
        lines.append(f"{workload.bad_rows:,} impossible rows skipped")
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 10_000
    print("\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines), file=sys.stderr)


def _sweep_job() -> tuple[Path, int] | None:
    """The folder of this job of a sweep (`-m`), and its number; None outside a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    return Path(hydra.sweep.dir) / f"{hydra.job.num:03d}", hydra.job.num
