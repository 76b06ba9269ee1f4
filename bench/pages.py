"""Makes the figures of README, docs/ and notebooks/ again, and says which are out of date.

    python bench/pages.py --stale          # sections that are out of date, in seconds
    SYNERGY_DATA=… python bench/pages.py   # makes them again
    python bench/pages.py policies         # all of a page, out of date or not; or NAME of one section

A section is an experiment, declared in bench/experiments/; its text and the places of its tables are in the page. Its
results are kept in results/bench/ and used again as long as nothing they depend on has changed (`runner.dependencies`).
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import blocks, dependencies
from runner.carry_out import carry_out, kept
from runner.experiment import ROOT, Experiment, experiments

MAIN_COMMAND = ("-m", "synergy_sim", "+trace=philly")
"""Notebooks read the results of the README's first command."""


@dataclass(frozen=True)
class Section:
    """An experiment on a page, or a notebook. cpu_s: what it took when it was made."""

    name: str
    page: Path
    digest: str
    made_from: str
    cpu_s: float
    experiment: Experiment | None = None

    @property
    def is_stale(self) -> bool:
        return self.digest != self.made_from


def sections() -> list[Section]:
    """All sections, page by page. Raises SystemExit if a page names an experiment that is not declared."""
    declared, found = experiments(), []
    for name, made in blocks.made().items():
        if name not in declared:
            raise SystemExit(f"{made.page}: no experiment is called {name}; declared: {', '.join(sorted(declared))}.")
        digest = dependencies.of_experiment(declared[name])
        found.append(Section(name, made.page, digest, made.digest, made.cpu_s, declared[name]))
    return found + [_notebook(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def make(asked: Sequence[Section], workers: int, *, again: bool, only_print: bool) -> list[str]:
    """Runs what is missing and replaces blocks; returns the names of those that failed."""
    wanted = [each.experiment for each in asked if each.experiment is not None]
    failed = carry_out(wanted, workers, again=again)
    for experiment in wanted:
        if experiment.name not in failed:
            _write(experiment, only_print=only_print)
    notebooks = [each for each in asked if each.experiment is None]
    if notebooks and not only_print:
        _execute_notebooks([each.page for each in notebooks])
    return sorted(failed)


def _write(experiment: Experiment, *, only_print: bool) -> None:
    records = {task: kept(task, experiment) for task in experiment.tasks()}
    tables = experiment.tables({task: record["result"] for task, record in records.items()})
    tables["made"] = _made(experiment, list(records.values()))
    if only_print:
        print(*(f"{experiment.name}.{name}\n\n{text}\n" for name, text in tables.items()), sep="\n")
        return
    page = blocks.made()[experiment.name].page
    cpu_s = sum(record["cpu_s"] for record in records.values())
    digest = dependencies.of_experiment(experiment)
    text = blocks.replaced(page.read_text("utf-8"), experiment.name, tables, digest=digest, cpu_s=cpu_s)
    _write_atomically(page, text)
    print(f"{page.relative_to(ROOT)}: {experiment.name}", flush=True)


def _made(experiment: Experiment, records: Sequence[dict[str, Any]]) -> str:
    """The sentence above a section."""
    cpu_s = sum(record["cpu_s"] for record in records)
    minutes = max(1, math.ceil(cpu_s / 60 / (1 if any(each.is_timed for each in experiment.tasks()) else 2)))
    needs = f"needs: {', '.join(experiment.needs)}; " if experiment.needs else ""
    dates = sorted({record["date"] for record in records})
    facts = [
        " to ".join(dict.fromkeys((dates[0], dates[-1]))),
        " and ".join(sorted({record["machine"] for record in records})),
        f"version {', '.join(sorted({record['version'] for record in records}))}",
        f"{len(records):,} run{'s' if len(records) > 1 else ''}, {cpu_s:,.0f} CPU s",
    ]
    return f"`python bench/pages.py {experiment.name}` ({needs}minutes: {minutes}); {'; '.join(facts)}."


def _notebook(path: Path) -> Section:
    """Reads a notebook; its metadata say which policies and files it depends on, and what it was made from."""
    import json

    stored = json.loads(path.read_text("utf-8"))["metadata"].get("synergy", {})
    depends = [dependencies.of_policy(each) for each in stored.get("policies", ())]
    depends += [dependencies.of_file(each) for each in stored.get("reads", ())]
    digest = dependencies.digest(depends)
    return Section(f"notebook {path.stem}", path, digest, stored.get("digest", ""), float(stored.get("cpu_s", 0)))


def _execute_notebooks(paths: Sequence[Path]) -> None:
    """Runs all cells and keeps their outputs. Raises CellExecutionError if a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("SYNERGY_DATA", None)
    subprocess.run([sys.executable, *MAIN_COMMAND], cwd=ROOT, env=environment, check=True)
    os.environ["SYNERGY_RESULTS"] = str(ROOT / "results/philly/latest")
    for path in paths:
        before = os.times()
        cells = nbformat.read(path, as_version=4)
        NotebookClient(cells, timeout=3600, kernel_name="python3", record_timing=False).execute(cwd=str(path.parent))
        after = os.times()
        spent_s = sum(after[:4]) - sum(before[:4])
        cells.metadata.setdefault("synergy", {}).update(digest=_notebook(path).digest, cpu_s=round(spent_s))
        _write_atomically(path, nbformat.writes(cells) + "\n")
        print(path.relative_to(ROOT), flush=True)


def _write_atomically(path: Path, text: str) -> None:
    from synergy_runs.files import atomic_file

    with atomic_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def print_stale(found: Sequence[Section]) -> None:
    """Prints a line for each section that is out of date, and the time to make them."""
    stale = [each for each in found if each.is_stale]
    for each in stale:
        print(f"{each.cpu_s:8,.0f} CPU s  {each.page.relative_to(ROOT)}: {each.name}")
    total_s, stale_s = sum(each.cpu_s for each in found), sum(each.cpu_s for each in stale)
    print(f"{len(stale)} of {len(found)} sections are out of date: {stale_s:,.0f} of {total_s:,.0f} CPU s")


def mark_stale(found: Sequence[Section]) -> None:
    """Adds a warning to the sections that are out of date, and removes it from the others."""
    for path in {each.page for each in found if each.experiment is not None}:
        text = before = path.read_text("utf-8")
        for each in found:
            if each.page == path:
                text = blocks.marked(text, each.name, is_stale=each.is_stale)
        if text != before:
            _write_atomically(path, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="pages (such as accuracy or notebooks) or sections;"
                        " default: every section that is out of date")  # fmt: skip
    parser.add_argument("--stale", action="store_true", help="print which sections are out of date, and make nothing")
    parser.add_argument("--mark", action="store_true", help="write into the pages which sections are out of date")
    parser.add_argument("--list", action="store_true", help="print all sections, with CPU seconds")
    parser.add_argument("--again", action="store_true", help="use no kept result")
    parser.add_argument("--print", action="store_true", help="print the tables in place of writing them into the page")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    chosen = parser.parse_args(arguments)
    found = sections()
    if chosen.list:
        print(*(f"{each.cpu_s:8,.0f} CPU s  {each.page.relative_to(ROOT)}: {each.name}" for each in found), sep="\n")
    if chosen.stale:
        print_stale(found)
    if chosen.mark:
        mark_stale(found)
    if chosen.list or chosen.stale or chosen.mark:
        return 0
    known = {name for each in found for name in (each.name, each.page.stem, each.page.parent.name)}
    if unknown := [name for name in chosen.names if name not in known]:
        parser.error(f"no such page or section: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    asked = [
        each
        for each in found
        if (each.is_stale and not chosen.names) or {each.name, each.page.stem, each.page.parent.name} & {*chosen.names}
    ]
    began_s = time.monotonic()
    failed = make(asked, chosen.workers, again=chosen.again, only_print=chosen.print)
    print(
        f"{len(asked)} sections in {time.monotonic() - began_s:,.0f} s",
        *(f"failed: {name}" for name in failed),
        sep="\n",
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
