"""A policy's folder: written beside its place and renamed when whole, so that what has a name is complete.

`python -m synergy_sim.results DIR` prints what is below DIR (docs/results.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.errors import InputError, unknown
from synergy_core.parser import Parser
from synergy_runs.atomic import atomic_folder
from synergy_runs.log import Decisions, Events, Run, Shares
from synergy_runs.metrics import NO_NAME, JobColumns, Summary, job_table, summarise
from synergy_runs.timeline import holdings
from synergy_runs.traces.rows import END_STATES

if TYPE_CHECKING:
    import pyarrow as pa

    from synergy_runs.comparison import Comparison
    from synergy_runs.stored import RunFolder, StoredRun


def write_run(run: Run, folder: Path, config_yaml: str) -> Summary:
    """Writes a run's files as `folder`, in place of an older result there, and returns its summary.

    Raises InputError where the disk refuses. Whatever goes wrong, Ctrl-C included, `folder` is as it was before.
    """
    held = holdings(run.events)
    jobs = job_table(run, held)
    summary = summarise(run, jobs, held)
    with atomic_folder(folder) as partial:
        _write_parquet(_job_rows(run, jobs), partial / "jobs.parquet")
        _write_parquet(_columns(run.decisions), partial / "rounds.parquet")
        _write_parquet(_columns(run.events), partial / "events.parquet")
        if run.shares is not None:
            _write_parquet(_columns(run.shares), partial / "shares.parquet")
        (partial / "config.yaml").write_text(config_yaml, encoding="utf-8")
        (partial / "summary.json").write_text(strict_json(summary), encoding="utf-8")
    return summary


def strict_json(value: Any) -> str:
    """JSON that every reader takes: null where a number is not finite."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(facts: Events | Decisions | Shares | JobColumns) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}


def _job_rows(run: Run, jobs: JobColumns) -> dict[str, Any]:
    """The job table with the names that its codes stand for."""
    import pyarrow as pa

    workload = run.workload

    def named(code: Any, names: tuple[str, ...]) -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(code), pa.array([name or NO_NAME for name in names]))

    columns = _columns(jobs)
    return {
        "job_id": columns.pop("job_id"),
        "job_name": pa.array(workload.job_name, type=pa.string()),
        "virtual_cluster": named(workload.virtual_cluster_code, workload.virtual_clusters),
        "user": named(workload.user_code, workload.users),
        "partition": named(workload.partition_code, workload.partitions),
        "gpu_type": named(workload.gpu_type_code, workload.gpu_types),
        "model": named(workload.model_code, workload.models),
        "end_state": named(workload.end_state_code.astype("int32"), END_STATES),
        **columns,
    }


def _write_parquet(columns: dict[str, Any], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table(columns)
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    others = [field.name for field in table.schema if field.name not in floats]
    # Bytes of like rank together: times and other smooth floats then compress to about half.
    pq.write_table(
        table, path, compression="zstd", use_dictionary=others, use_byte_stream_split=floats, write_statistics=False
    )


_MOST_KEYS = 3
"""So many settings that vary still make columns; more make a table for each group."""


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison of the results below a folder; of several runs, what they are first."""
    import sys

    from synergy_runs.comparison import collect, compare
    from synergy_runs.exports import latex, markdown, write_csv
    from synergy_runs.listing import print_listing
    from synergy_runs.stored import run_folders

    chosen = _parser().parse_args(arguments)
    try:
        folders = run_folders(chosen.folder)
        runs = _chosen_runs(folders, chosen)
        comparison = compare(runs)
        written = []
        if chosen.csv:
            written.append(write_csv(comparison, chosen.csv))
        if chosen.parquet:
            written.append(collect(chosen.parquet, runs))
        if chosen.report:
            written.append(_report(folders, runs, chosen.folder))
        if chosen.markdown or chosen.latex:
            print((markdown if chosen.markdown else latex)(comparison))
        else:
            if len(folders) > 1:
                print_listing(folders, chosen.folder)
            elif (record := folders[0].record) is not None and record.state:
                print(f"{folders[0].path}: not whole: {record.state}; what it has:")
            _print_groups(comparison)
        _say_what_is_left_out(runs, comparison)
        for path in written:
            print(f"wrote {path}", file=sys.stderr)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m synergy_sim.results", description=main.__doc__)
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="a run's folder, `latest`, or one with runs somewhere below it"
    )
    parser.add_argument("--first", metavar="POLICY", help="the policy that ratios refer to")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write every figure there, unrounded, a row per row")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="the same with a row per run, and all its figures")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--markdown", action="store_true", help="print the table as Markdown, with all columns")
    printed.add_argument("--latex", action="store_true", help="print it for LaTeX, with the package booktabs")
    parser.add_argument("--report", action="store_true", help="make figures and report.html as well, in a new folder")
    return parser


def _chosen_runs(folders: Sequence[RunFolder], chosen: argparse.Namespace) -> list[StoredRun]:
    from synergy_runs.stored import in_order, shown_runs

    runs = shown_runs(folders)
    if not runs:
        why = "no run is whole" if len(folders) > 1 else "no policy had ended when the run did"
        raise InputError(f"{chosen.folder}: {why}: {', '.join(str(each.path) for each in folders)}.")
    if chosen.first:
        names = [run.policy for run in runs]
        if chosen.first not in names:
            raise unknown("policy", chosen.first, set(names))
        runs = in_order(runs, [chosen.first])
    return runs


def _print_groups(comparison: Comparison) -> None:
    """One table where few settings vary; else one for each group, under what differs."""
    from synergy_runs.comparison import compare
    from synergy_runs.tables import print_comparison
    from synergy_runs.unequal import words

    if len(comparison.settings[0]) <= _MOST_KEYS:
        print_comparison(comparison)
        return
    for number, setting in enumerate(comparison.settings):
        print("\n" * bool(number) + words(setting))
        print_comparison(compare([run for row in comparison.of(setting) for run in row.runs]))


def _say_what_is_left_out(runs: Sequence[StoredRun], comparison: Comparison) -> None:
    import sys

    from synergy_runs.as_logged import AS_LOGGED

    shown = {run.folder for row in comparison.rows for run in row.runs}
    others = [run for run in runs if run.policy != AS_LOGGED]  # every run of a sweep has the log's
    if left := [str(run.folder) for run in others if run.folder not in shown]:
        print(
            f"left out: {len(left)} of {len(others)}, repetitions of newer runs above (policy, seed and settings are "
            f"the same); name one alone to see it, such as {left[0]}",
            file=sys.stderr,
        )


def _report(folders: Sequence[RunFolder], runs: Sequence[StoredRun], folder: Path) -> Path:
    """Figures and report: in the run's own folder where it has none yet, else in a new one."""
    from datetime import datetime

    from synergy_runs.filing import STAMP, claimed
    from synergy_runs.report.write import write_comparison
    from synergy_runs.stored import followed

    into = followed(folder)
    if len(folders) > 1 or (into / "report.html").exists():
        into = claimed(into, f"report-{datetime.now().strftime(STAMP)}")
    commands = {run.record.command: None for run in runs if run.record is not None}
    return write_comparison(runs, into, command="\n".join(commands))
