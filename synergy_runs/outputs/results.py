"""Writes, lists, compares and exports results on disk: a folder per command, in it a folder per policy and seed.

`python -m synergy_sim.results DIR` prints the results below DIR (docs/results.md). A folder is written under a
temporary name and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core.cli import Parser
from synergy_core.errors import InputError, unknown
from synergy_runs.files import PARTIAL, atomic_folder
from synergy_runs.inputs.keys import FigureFormat, Figures, cast
from synergy_runs.outputs import stored as run_record
from synergy_runs.outputs.comparison import collect, compare, words
from synergy_runs.outputs.exports import ALL, PAPER_COLUMNS, columns_named, latex, markdown, write_csv
from synergy_runs.outputs.facts import AS_LOGGED, Decisions, Events, Run, Shares, Training
from synergy_runs.outputs.metrics import NO_NAME, JobColumns, Summary, job_table, summarise
from synergy_runs.outputs.report.write import DEFAULT_FORMAT, write_comparison
from synergy_runs.outputs.stored import (
    LATEST,
    NOT_OF_THE_RUN,
    RunFolder,
    RunRecord,
    follow_latest,
    in_order,
    new_record,
    read_record,
    read_run,
    run_folders,
    shown_runs,
    write_record,
)
from synergy_runs.outputs.tables import print_comparison

if TYPE_CHECKING:
    import pyarrow as pa


def write_run(run: Run, folder: Path, config_yaml: str) -> Summary:
    """Writes a run's files to `folder`, replacing an older result, and returns its summary.

    Raises InputError if it cannot be written. On any error or interruption, `folder` remains as it was.
    """
    jobs = job_table(run)
    summary = summarise(run, jobs)
    with atomic_folder(folder) as partial:
        _write_parquet(_job_rows(run, jobs), partial / "jobs.parquet")
        _write_parquet(_columns(run.decisions), partial / "rounds.parquet")
        _write_parquet(_columns(run.events), partial / "events.parquet")
        if run.shares is not None:
            _write_parquet(_columns(run.shares), partial / "shares.parquet")
        if run.training is not None:
            _write_parquet(_training_rows(run.training), partial / "training.parquet")
        (partial / "config.yaml").write_text(config_yaml, encoding="utf-8")
        (partial / "summary.json").write_text(strict_json(summary), encoding="utf-8")
    return summary


def strict_json(value: Any) -> str:
    """Formats a value as standard JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _columns(facts: Events | Decisions | Shares | JobColumns) -> dict[str, Any]:
    return {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}


NAME_COLUMNS = ("virtual_cluster", "user", "partition", "gpu_type", "model", "end_state")
"""Columns of the workload that jobs.parquet has, too."""


def _job_rows(run: Run, jobs: JobColumns) -> dict[str, Any]:
    """The job table as columns, with names in place of codes."""
    import pyarrow as pa

    columns = _columns(jobs)
    names = {key: run.workload.jobs[key] for key in NAME_COLUMNS}
    return {
        "job_id": columns.pop("job_id"),
        "job_name": pa.array(run.workload.jobs["job_name"], type=pa.string()),
        **{
            key: pa.DictionaryArray.from_arrays(
                pa.array(each.codes.astype("int32")), pa.array([name or NO_NAME for name in each.categories])
            )
            for key, each in names.items()
        },
        **columns,
    }


def _training_rows(training: Training) -> dict[str, Any]:
    import pyarrow as pa

    columns = {name: getattr(training, name) for name in ("time_s", "job_id", "global_batch")}
    names = pa.DictionaryArray.from_arrays(pa.array(training.compressor_code), pa.array(training.compressors))
    return {**columns, "compressor": names}


def _write_parquet(columns: dict[str, Any], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table: pa.Table = pa.table(columns)
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    others = [field.name for field in table.schema if field.name not in floats]
    # Byte-stream split compresses times and other smooth floats to about half.
    pq.write_table(
        table, path, compression="zstd", use_dictionary=others, use_byte_stream_split=floats, write_statistics=False
    )


STAMP = "%Y-%m-%d_%H-%M-%S"
MAX_KEYS_IN_COLUMNS = 3
"""Maximum number of varying keys that become columns of one table; more keys make one table per setting."""
MAX_LISTED_POLICIES = 6
_OWN_COLUMNS = ("policy", "seed", "trace")
_NO_RESULTS = (run_record.FILE, "multirun.yaml")
_TRIES = 20


def main(arguments: list[str] | None = None) -> int:
    """Prints the comparison of the results below a folder; if there are several runs, it lists them first."""
    chosen = _parser().parse_args(arguments)
    try:
        folders = run_folders(chosen.folder)
        runs = shown_runs(folders)
        if not runs:
            why = "no run is complete" if len(folders) > 1 else "the run ended before any policy did"
            raise InputError(f"{chosen.folder}: {why}: {', '.join(str(each.path) for each in folders)}.")
        if chosen.first:
            names = {run.policy for run in runs}
            if chosen.first not in names:
                raise unknown("policy", chosen.first, names)
            runs = in_order(runs, [chosen.first])
        comparison = compare(runs)
        written = []
        if chosen.csv:
            written.append(write_csv(comparison, chosen.csv, chosen.columns or [ALL]))
        if chosen.parquet:
            written.append(collect(chosen.parquet, runs))
        if chosen.report or chosen.figures:  # in the run's own folder if it has no report yet, else in a new folder
            into = follow_latest(chosen.folder)
            if len(folders) > 1 or (into / "report.html").exists():
                into = new_folder(into, f"report-{datetime.now().strftime(STAMP)}")
            commands = dict.fromkeys(run.record.command for run in runs if run.record is not None)
            formats = cast((chosen.figures or DEFAULT_FORMAT).split(","), list[FigureFormat], "--figures")
            written.append(write_comparison(runs, into, command="\n".join(commands), figures=formats))
        if chosen.markdown or chosen.latex:
            print((markdown if chosen.markdown else latex)(comparison, chosen.columns or PAPER_COLUMNS))
        else:
            if len(folders) > 1:
                print_listing(folders, chosen.folder)
            elif (record := folders[0].record) is not None and record.state:
                print(f"{folders[0].path}: incomplete ({record.state}). Policies that are finished:")
            groups = {"": comparison}  # one table if few keys vary, else one table per setting
            if len(comparison.settings[0]) > MAX_KEYS_IN_COLUMNS:
                by_setting = {setting: comparison.of(setting) for setting in comparison.settings}
                groups = {
                    words(key): compare([run for row in rows for run in row.runs]) for key, rows in by_setting.items()
                }
            for number, (heading, group) in enumerate(groups.items()):
                if heading:
                    print("\n" * bool(number) + heading)
                print_comparison(group, columns=columns_named(chosen.columns, group) if chosen.columns else None)
        shown = {run.folder for run in comparison.runs}
        others = [run for run in runs if run.policy != AS_LOGGED]  # every run of a sweep repeats the log's schedule
        if left := [str(run.folder) for run in others if run.folder not in shown]:
            print(
                f"left out: {len(left)} of {len(others)} runs, which newer runs above repeat (same policy, seed and "
                f"settings). To see one, type its folder, such as {left[0]}",
                file=sys.stderr,
            )
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
    parser.add_argument(
        "--columns",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="the table's columns, by their names in the CSV, or all; by default --latex and --markdown have few",
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table as CSV, with all columns, unrounded")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write a Parquet file: a row per run, all figures")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    printed.add_argument("--latex", action="store_true", help="print it for LaTeX, with the package booktabs")
    parser.add_argument("--report", action="store_true", help="also make figures and report.html")
    parser.add_argument("--figures", metavar="FORMATS", help="the same with other formats of figures, such as pdf,svg")
    return parser


@contextlib.contextmanager
def new_run(parent: Path, program: str, words: Sequence[str], *, name: str | None = None) -> Iterator[Path]:
    """Makes a folder in `parent` for the results of one command. At the end of the block, the folder is complete, and
    `latest` points to it; an empty folder is removed. Raises InputError if the folder cannot be made.

    name: the folder's name, only for runs of a sweep, which do not change `latest`; by default, the start time."""
    record = new_record(program, words)
    missing = [each for each in (parent, *parent.parents) if not each.exists()]
    folder = new_folder(parent, record.begun_at.strftime(STAMP) if name is None else name, only=name is not None)
    try:
        write_record(record, folder)
        yield folder
        _mark_ended(folder, latest=name is None)
    finally:
        if not _has_results(folder):
            with contextlib.suppress(OSError):
                for each in _NO_RESULTS:
                    (folder / each).unlink(missing_ok=True)
                for path in (folder, *missing):
                    path.rmdir()


@contextlib.contextmanager
def resumed_run(folder: Path) -> Iterator[Path]:
    """Records that this process resumes the run in the folder. At the end of the block, marks the run as complete."""
    mine = new_record("", [])
    here = replace(_record(folder), ended=None, host=mine.host, pid=mine.pid, version=mine.version, commit=mine.commit)
    write_record(here, folder)
    yield folder
    _mark_ended(folder, latest=True)


def is_unended(folder: Path) -> bool:
    """Whether the folder contains an incomplete run."""
    record = read_record(folder)
    return record is not None and record.ended is None


def _has_results(folder: Path) -> bool:
    return folder.is_dir() and any(each.name not in _NO_RESULTS for each in folder.iterdir())


def _record(folder: Path) -> RunRecord:
    record = read_record(folder)
    if record is None:
        raise InputError(f"{folder / run_record.FILE} is gone: it was removed during the run.")
    return record


def _mark_ended(folder: Path, *, latest: bool) -> None:
    """Records that the run in the folder is complete. latest: whether to make `latest` in the parent folder a link to
    the run or, without symbolic links, a file with the folder's name. A folder called `latest` is not replaced.
    """
    if not _has_results(folder):
        return
    write_record(replace(_record(folder), ended=run_record.now()), folder)
    if not latest:
        return
    link = folder.parent / LATEST
    partial = link.parent / PARTIAL.format(name=LATEST, pid=os.getpid())
    try:
        partial.unlink(missing_ok=True)
        try:
            partial.symlink_to(folder.name, target_is_directory=True)
        except (OSError, NotImplementedError):
            partial.write_text(folder.name + "\n", encoding="utf-8")
        partial.replace(link)
    except OSError as error:
        print(f"{link} was not set to {folder.name}: {error.strerror}", file=sys.stderr)
    finally:
        partial.unlink(missing_ok=True)


def same_run(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations are equal except for keys that only affect how results are shown and stored."""
    return {**one, **dict.fromkeys(NOT_OF_THE_RUN)} == {**other, **dict.fromkeys(NOT_OF_THE_RUN)}


def show(folders: Sequence[Path], into: Path, *, figures: Figures) -> None:
    """Writes figures and report, if there is a format for figures, and prints the table. into: the command's folder."""
    runs = [read_run(each) for each in folders]
    try:
        report = write_comparison(runs, into, command=command_of(into), figures=figures) if figures else None
    finally:  # print the table even if the report fails
        print_comparison(compare(runs))
    if report is not None:
        print(f"report: {report}")
    print(f"results: {into}/, and {into.parent / LATEST}/ until the next run")


def command_of(folder: Path) -> str:
    """The command line of the run in the folder; "" if unknown."""
    record = read_record(folder)
    return record.command if record else ""


def new_folder(parent: Path, name: str, *, only: bool = False) -> Path:
    """Makes the first of the folders `name`, `name-2`, … that does not exist. only: whether to allow only `name`."""
    number, tries = 1, _TRIES
    while True:
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()
            return folder
        except OSError as error:
            # Another command, which made the parent and wrote no results, may just have removed it.
            tries -= isinstance(error, FileNotFoundError)
            if only or not tries or not (folder.exists() or isinstance(error, FileNotFoundError)):
                raise InputError(
                    f"results_dir: {folder} cannot be made ({error.strerror}). Name another place with results_dir=DIR."
                ) from error
            number += isinstance(error, FileExistsError)


def print_listing(folders: Sequence[RunFolder], below: Path) -> None:
    """Prints the list of run folders, and which of them the table below leaves out."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    latest: set[Path] = set()  # folders to which `latest` in their parent folder points
    for link in {each.path.parent / LATEST for each in folders}:
        with contextlib.suppress(InputError):
            latest.add(follow_latest(link).resolve())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for heading in ("run", "settings", "policies", "seeds", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "run")
    for each in folders:
        settings, state = "unknown (no run.yaml)", ""
        if each.record is not None:
            typed = {key: value for key, value in each.record.settings.items() if key not in _OWN_COLUMNS}
            settings = " ".join(f"{key}={value}" for key, value in typed.items()) or "defaults"
            state = each.record.state
        names = list(dict.fromkeys(run.label for run in each.runs))
        more = len(names) - MAX_LISTED_POLICIES
        policies = ", ".join(names if more <= 1 else names[:MAX_LISTED_POLICIES]) + f" and {more} more" * (more > 1)
        numbers = sorted({run.seed for run in each.runs})
        consecutive = len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1))
        seeds = f"{numbers[0]}–{numbers[-1]}" if consecutive else ", ".join(map(str, numbers))
        state = state or LATEST * (each.path.resolve() in latest)
        table.add_row(str(each.path.relative_to(follow_latest(below))), settings, policies, seeds, state)
    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(f"{below}: {len(folders)} runs, the newest first\n"))
    console.print(table)
    if incomplete := [str(each.path) for each in folders if not each.whole]:
        note = f"incomplete, so not in the table: {', '.join(incomplete)}. Type its folder to see its finished policies"
        console.print(Text(note, style="dim"))
    console.print()
