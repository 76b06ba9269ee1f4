"""One command: every policy on every seed, each written as soon as it has ended; then the comparison of all."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError
from synergy_runs.as_logged import as_logged
from synergy_runs.asked import label_of, policies_of
from synergy_runs.carrying import carried_in_words
from synergy_runs.filing import new_run, show, typed_words
from synergy_runs.inputs import check_name
from synergy_runs.log import Run
from synergy_runs.machines import about_cluster
from synergy_runs.results import write_run
from synergy_runs.settings import build
from synergy_runs.terms import in_words, missing, terms_of
from synergy_runs.workload import Workload
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.processes import simulate_each, usable_cores
from synergy_sim.settings import Settings

if TYPE_CHECKING:
    from omegaconf import DictConfig


FIRST = "000"
"""Of a sweep's runs, the one that says what is replayed."""


def run(config: DictConfig) -> None:
    """Simulates what the configuration says, writes the results, prints the table."""
    from omegaconf import OmegaConf

    values: Any = OmegaConf.to_container(config, resolve=True)
    settings = build(Settings, values)
    if str(settings.results_dir) in ("", "."):
        raise InputError("results_dir is empty; expected a folder, such as results.")
    check_name(settings.trace.name)
    sweep = _sweep_job()
    if sweep is not None:  # its runs go on side by side, and say when they are done
        settings = dataclasses.replace(settings, progress=False)
    parent, name = (settings.results_dir / settings.trace.name, None) if sweep is None else sweep
    with new_run(parent, "synergy_sim", typed_words(), name=name) as folder:
        alone = sweep is None  # the runs of a sweep share the cores already
        folders = simulate_all(settings, values, folder, say=alone or name == FIRST, side_by_side=alone)
    if sweep is None:  # whole whatever becomes of the pictures
        show(folders, folder, figures=settings.figures)


def simulate_all(
    settings: Settings, values: Mapping[str, Any], folder: Path, *, say: bool, side_by_side: bool = False
) -> list[Path]:
    """Simulates every policy on every seed; returns the run folders, `<policy>-<seed>` below `folder`.

    say: print the lines that stand above the table. side_by_side: use all cores instead of one.
    """
    settings, added = with_same_information(settings)
    values = {**values, "compared_with": list(settings.policy)}
    prepared = list(prepared_runs(settings))
    if say:
        _say(settings, prepared[0].workload, prepared[0].cluster, added)
    folders: list[Path] = []
    for each in prepared:
        folders.append(folder / f"{each.policy.name}-{each.seed}")
        if each.asked == settings.policy[-1] and (log := _as_logged(settings, each)) is not None:
            folders.append(folder / f"{log.policy}-{log.seed}")
            _write(log, folders[-1], {**values, "policy": log.policy, "seed": log.seed})

    def write(run: PreparedRun, done: Run) -> None:
        own = {**values, "policy": run.asked, "seed": run.seed}
        _write(done, folder / f"{run.policy.name}-{run.seed}", own)

    cores = usable_cores() if side_by_side else 1
    simulate_each(prepared, write, cores=cores, show=settings.progress)
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


def _as_logged(settings: Settings, prepared: PreparedRun) -> Run | None:
    """What the log itself shows of these jobs, where they are all of its jobs, at its own pace, on the log's GPUs."""
    trace = settings.trace
    if settings.cluster.load != 1 or trace.sample != 1 or trace.min_gpus > 1:
        return None
    return as_logged(prepared.workload, prepared.cluster, prepared.seed)


def _write(done: Run, into: Path, values: Mapping[str, Any]) -> None:
    from omegaconf import OmegaConf

    write_run(done, into, OmegaConf.to_yaml(OmegaConf.create(dict(values))))


def _say(settings: Settings, workload: Workload, cluster: Cluster, added: str) -> None:
    """What is replayed on what, and what was left out of it."""
    jobs = int((~workload.carried).sum())
    lines = [f"{jobs:,} job{'s' * (jobs > 1)} from {workload.source}", *carried_in_words(workload), *workload.notes]
    lines += about_cluster(settings.cluster, settings.trace, workload, cluster)
    left_out = [f"{count:,} {reason}" for reason, count in sorted(workload.left_out.items())]
    if left_out:
        lines.append("left out: " + "; ".join(left_out))
    if workload.bad_rows:
        lines.append(f"{workload.bad_rows:,} impossible rows skipped")
    lines += [added] if added else []
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else 10_000
    print("\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines), file=sys.stderr)


def _sweep_job() -> tuple[Path, str] | None:
    """The folder of the sweep (`-m`) that this is a run of, and this run's name in it; None outside a sweep."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        return None
    return Path(hydra.sweep.dir), f"{hydra.job.num:03d}"
