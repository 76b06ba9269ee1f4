"""Run folders: written beside their place and renamed when whole, so that what has a name is complete.

`python -m synergy_sim.results DIR` prints the comparison of whatever is below DIR.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.errors import InputError, unknown
from synergy_runs.atomic import atomic_folder
from synergy_runs.log import Decisions, Events, Run, Shares
from synergy_runs.metrics import NO_NAME, JobColumns, Summary, job_table, summarise
from synergy_runs.timeline import holdings
from synergy_runs.traces.rows import END_STATES

if TYPE_CHECKING:
    import pyarrow as pa


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


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison of all results below a folder and collects it in comparison.parquet."""
    import argparse
    import sys

    from synergy_runs.comparison import collect, compare
    from synergy_runs.stored import find_runs, in_order
    from synergy_runs.tables import print_comparison

    parser = argparse.ArgumentParser(prog="python -m synergy_sim.results", description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a folder with results somewhere below it")
    parser.add_argument("--report", action="store_true", help="make the figures and report.html again as well")
    parser.add_argument("--first", metavar="POLICY", help="the policy that ratios refer to")
    chosen = parser.parse_args(arguments)
    try:
        runs = find_runs(chosen.folder)
        if chosen.first:
            names = [run.policy for run in runs]
            if chosen.first not in names:
                raise unknown("policy", chosen.first, set(names))
            runs = in_order(runs, [chosen.first])
        comparison = compare(runs)
        print_comparison(comparison)
        shown = {run.folder for row in comparison.rows for run in row.runs}
        for run in runs:
            if run.folder not in shown:
                print(f"{run.folder}: left out, a repetition of a run above; name it alone to see it", file=sys.stderr)
        print(f"wrote {collect(chosen.folder, runs)}")
        if chosen.report:
            from synergy_runs.report.write import write_comparison

            print(f"wrote {write_comparison(runs, chosen.folder)}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
