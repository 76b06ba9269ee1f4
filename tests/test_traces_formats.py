"""Job logs of every format, from the small logs in `logs/FORMAT.yaml`, and what all formats have in common.

In such a file `usual` is a row that is read, and `other` is what differs in the row of another job. All other rows name
only what differs from the usual one, or are whole lines. separator, header: how rows are written, unless as CSV.
read: by what it shows, a log (`rows`, or its `text`; lines `before`, columns `without`, files `beside`) and the `jobs`
read from it, by column; a single value holds for all jobs. cluster: the nodes that it shows. notes: a part of each
note. Under `each`, a row is a log. refused: a row, and the error behind its line. left_out: a row, and how the reason
begins. Both stand behind the other job. repeated: the error where a job stands twice.
"""

from __future__ import annotations

import gzip
import json
import math
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from synergy_core.errors import InputError
from synergy_runs.inputs.workload import from_rows
from synergy_runs.traces import formats, read_trace
from synergy_runs.traces.cluster_seen import seen
from synergy_runs.traces.command import lines
from synergy_runs.traces.rows import LOG, TraceRows, epoch_s
from synergy_runs.traces.slurm import elapsed_s

Row = dict[str, Any] | str


class Texts(yaml.SafeLoader):
    """Reads every value as text, but `null`."""

    yaml_implicit_resolvers: ClassVar = {
        "n": [("tag:yaml.org,2002:null", re.compile("null$"))],
        "<": [("tag:yaml.org,2002:merge", re.compile("<<$"))],
    }


FILES = sorted(Path(__file__).with_name("logs").glob("*.yaml"))
LOGS = {path.stem: yaml.load(path.read_text(encoding="utf-8"), Texts) for path in FILES}
READ = [(name, shows, case) for name, log in LOGS.items() for shows, case in log.get("read", {}).items()]
ALONE = [
    (name, {"rows": [row], "jobs": dict(zip(case["columns"], expected, strict=True))})
    for name, _, case in READ
    for row, *expected in case.get("each", ())
]
READ = [each for each in READ if "each" not in each[2]]
REFUSED = [(name, *each) for name, log in LOGS.items() for each in log.get("refused", ())]
LEFT_OUT = [(name, *each) for name, log in LOGS.items() for each in log.get("left_out", ())]


def text_of(
    name: str, *rows: Row, separator: str = "", without: tuple[str, ...] = (), before: tuple[str, ...] = ()
) -> str:
    """A log of that format; rows: what differs from the usual one, or whole lines."""
    log = LOGS[name]
    if name == "philly_json":
        return json.dumps([_job(number, row) for number, row in enumerate(rows)], indent=4)
    whole = [log["usual"] | row if isinstance(row, dict) else row for row in rows]
    known = dict.fromkeys([*log["usual"], *(key for row in whole if isinstance(row, dict) for key in row)])
    columns = [each for each in known if each not in without]
    separator = separator or log.get("separator", ",")
    written = [row if isinstance(row, str) else separator.join(row.get(each, "") for each in columns) for row in whole]
    header = [] if log.get("header") == "no" else [separator.join(columns)]
    return "".join(f"{line}\n" for line in (*before, *header, *written))


def _job(number: int, row: Row) -> object:
    """A job of Philly's log. An attempt is [start, end, GPUs on a machine, on the next, …]."""
    if isinstance(row, str):
        return row
    job = {"jobid": f"application_{number}_1"} | LOGS["philly_json"]["usual"] | row
    if isinstance(job["attempts"], list):
        job["attempts"] = [_attempt(*each) if isinstance(each, list) else each for each in job["attempts"]]
    return job


def _attempt(start: str | None, end: str | None, *gpus: str) -> dict[str, object]:
    detail = [{"ip": f"m{at}", "gpus": [f"gpu{gpu}" for gpu in range(int(each))]} for at, each in enumerate(gpus)]
    return {"start_time": start, "end_time": end, "detail": detail}


def written(folder: Path, text: str, name: str = "log.csv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def read(folder: Path, name: str, *rows: Row, **how: Any) -> TraceRows:
    as_written = {key: how.pop(key) for key in ("separator", "without", "before") if key in how}
    return read_trace(written(folder, text_of(name, *rows, **as_written)), **how)


def values(rows: TraceRows, column: str) -> list[object]:
    """The values of a column, or of a fact of the log."""
    return list(rows.jobs[column] if column in LOG else getattr(rows, column))


def amount(text: str) -> float:
    if text.endswith("GiB"):
        return float(text.removesuffix("GiB")) * 2**30
    try:
        return float(text)
    except ValueError:
        return epoch_s(text)


def holds(rows: TraceRows, case: dict[str, Any]) -> None:
    """The jobs are those of the case, and so are notes and what was left out, where it names them."""
    for column, expected in case["jobs"].items():
        if column == "quotas":
            assert rows.quotas == {tenant: int(gpus) for tenant, gpus in expected.items()}
            continue
        found = values(rows, column)
        expected = expected if isinstance(expected, list) else [expected] * len(found)
        if found and isinstance(found[0], str):
            assert found == expected, column
        else:
            assert found == pytest.approx([amount(each) for each in expected], nan_ok=True), column
    if "cluster" in case:
        nodes = (f"{each.nodes} × {each.gpus_per_node} {each.gpu_type}".strip() for each in seen(rows).nodes)
        assert " + ".join(nodes) == case["cluster"]
    if "notes" in case:
        assert bool(rows.notes) == bool(case["notes"])
        assert [part for part in case["notes"] if not any(part in note for note in rows.notes)] == []
    if "left_out" in case:
        assert [str(count) for count in rows.left_out.values()] == list(case["left_out"].values())
        assert all(map(str.startswith, rows.left_out, case["left_out"]))


def test_every_format_has_logs() -> None:
    assert set(LOGS) == set(formats())


@pytest.mark.parametrize(("name", "shows", "case"), READ, ids=[f"{name}: {shows}" for name, shows, _ in READ])
def test_what_is_read(tmp_path: Path, name: str, shows: str, case: dict[str, Any]) -> None:
    for beside, text in case.get("beside", {}).items():
        written(tmp_path, text, beside)
    how = {key: case[key] for key in ("separator", "without", "before") if key in case}
    path = written(tmp_path, case.get("text") or text_of(name, *case["rows"], **how))
    format_name = name if case.get("refused") else None  # what is refused need not be recognised
    if "refused" in case:
        with pytest.raises(InputError) as error:
            read_trace(path, format_name=format_name)
        assert [part for part in case["refused"] if part not in str(error.value)] == []
        assert case.get("not_said", "\0") not in str(error.value)
    if {"jobs", "left_out", "cluster"} & case.keys():
        bad_rows = "skip" if "refused" in case else "stop"
        rows = read_trace(path, format_name=format_name, bad_rows=bad_rows, **case.get("how", {}))
        assert rows.format_name == name
        holds(rows, {"jobs": {}} | case)
        said = "\n".join(from_rows(rows, name="log").notes)
        assert [part for part in case.get("workload_notes", ()) if part not in said] == []
        assert [part for part in case.get("summary", ()) if part not in "\n".join(lines(rows))] == []


@pytest.mark.parametrize(("name", "case"), ALONE, ids=[f"{name}: {case['rows'][0]}" for name, case in ALONE])
def test_what_is_read_of_one_row(tmp_path: Path, name: str, case: dict[str, Any]) -> None:
    holds(read(tmp_path, name, *case["rows"]), case)


@pytest.mark.parametrize(("name", "row", "says"), REFUSED)
def test_an_impossible_row_is_named_by_the_files_own_columns(tmp_path: Path, name: str, row: Row, says: str) -> None:
    other = LOGS[name].get("other", {})
    line = text_of(name, other).count("\n") + 1
    with pytest.raises(InputError) as error:
        read(tmp_path, name, other, row, format_name=name)
    assert f"{tmp_path}/log.csv" in str(error.value)
    assert f"line {line}, {says}" in str(error.value)
    assert "trace.bad_rows=skip" in str(error.value)
    rows = read(tmp_path, name, other, row, format_name=name, bad_rows="skip")
    assert (len(rows), rows.bad_count) == (1, 1)


@pytest.mark.parametrize(("name", "row", "reason"), LEFT_OUT)
def test_what_never_ran_is_left_out_with_its_reason(tmp_path: Path, name: str, row: Row, reason: str) -> None:
    rows = read(tmp_path, name, LOGS[name].get("other", {}), row)
    ((said, count),) = rows.left_out.items()
    assert (len(rows), rows.bad_count, count) == (1, 0, 1)
    assert said.startswith(reason)
    with pytest.raises(InputError, match=re.escape(f"no job to replay (1 {said})")):
        read(tmp_path, name, row, format_name=name)


@pytest.mark.parametrize("name", [name for name, log in LOGS.items() if "repeated" in log])
def test_two_jobs_under_one_id_are_refused_with_both_lines(tmp_path: Path, name: str) -> None:
    log = {}, LOGS[name]["other"], {}
    first = 1 if LOGS[name].get("header") == "no" else 2
    with pytest.raises(InputError) as error:
        read(tmp_path, name, *log)
    assert f"line {first + 2}, {LOGS[name]['repeated']}, which line {first} has too" in str(error.value)
    rows = read(tmp_path, name, *log, bad_rows="skip")
    assert (len(rows), rows.bad_count) == (2, 1)


def columns(rows: TraceRows) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(each) for name, each in rows.jobs.columns.items()}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_recognised_packed_or_not_and_every_job_has_every_column(tmp_path: Path, name: str) -> None:
    text = text_of(name, {})
    path = written(tmp_path, text, "log")
    assert [each.NAME for each in formats().values() if each.recognises(path, text)] == [name]
    rows = read_trace(path)
    assert {len(each) for each in columns(rows).values()} == {len(rows)} == {1}
    assert all(each > 0 or math.isnan(each) for each in (*rows.jobs["cpus"], *rows.jobs["memory_bytes"]))
    work = from_rows(rows, name="log")
    assert len(work.jobs["cpus"]) == len(work.jobs["memory_bytes"]) == len(work)
    (tmp_path / "log.gz").write_bytes(gzip.compress(text.encode()))
    packed = read_trace(tmp_path / "log.gz")
    assert (packed.format_name, packed.notes) == (name, rows.notes)
    np.testing.assert_equal(columns(packed), columns(rows))


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_cut_off_anywhere_is_read_or_refused_with_its_name(tmp_path: Path, name: str) -> None:
    text = text_of(name, {}, LOGS[name].get("other", {}))
    for length in range(0, len(text), max(3, len(text) // 80)):
        path, refused = written(tmp_path, text[:length]), ""
        try:
            rows = read_trace(path, format_name=name, bad_rows="skip")
        except InputError as error:
            refused = str(error)
        assert str(path) in refused if refused else len(rows)
        assert name != "philly_json" or not length or re.search(r"line \d+|expected a JSON list", refused), refused


def test_a_csv_of_another_kind_is_refused_with_the_columns_to_type(tmp_path: Path) -> None:
    path = written(tmp_path, "job_id,submission_time,duration,num_gpu\n1,2,3,4\n")
    with pytest.raises(
        InputError, match=r"trace\.columns=\{submit_time: submission_time, duration_s: duration, gpus: num_gpu"
    ):
        read_trace(path)
    path = written(tmp_path, "pod,gpus,creationTimestamp,startTime,completionTime\na,1,2,3,4\n")
    with pytest.raises(
        InputError,
        match=r"\{submit_time: creationTimestamp, gpus: gpus, start_time: startTime, end_time: completionTime\}",
    ):
        read_trace(path)
    with pytest.raises(InputError, match="arrival"):
        read_trace(path, columns={"submit_time": "arrival"})


ANY_TEXT = st.text(st.characters(exclude_characters='\0\r\n|;"', exclude_categories=("Cs",)), max_size=12)
TRES = st.builds("{}={},gres/gpu{}=1".format, st.sampled_from(["cpu", "mem", "node", "gres/gpu"]), ANY_TEXT, ANY_TEXT)
SLURM = ("ReqTRES", "AllocTRES", "ReqMem", "ReqCPUS", "NNodes", "Submit", "Elapsed", "Timelimit")


@settings(max_examples=40)
@given(text=ANY_TEXT | TRES, column=st.sampled_from([*SLURM, "cpus", "memory_bytes"]))
def test_any_text_is_read_or_refused_with_file_line_and_column(
    tmp_path_factory: pytest.TempPathFactory, text: str, column: str
) -> None:
    folder, refused = tmp_path_factory.mktemp("any"), ""
    name = "slurm" if column in SLURM else "plain"
    silent = {"ReqTRES": "gres/gpu=4", "AllocTRES": ""} if name == "slurm" and "TRES" not in column else {}
    try:
        read(folder, name, LOGS[name]["other"], silent | {column: text})
    except InputError as error:
        refused = str(error)
    where = rf"{folder}/log.* line 3, ({column}|CPUs|memory|ElapsedRaw|user's estimate|whole row): got "
    assert not refused or re.search(where, refused, re.DOTALL)


def test_a_quote_left_open_and_brackets_without_end_are_refused(tmp_path: Path) -> None:
    quote = text_of("philly_csv", {"cluster": '"vc'}, *[{}] * 6_000)
    for text, says in ((quote, r"line \d+: field larger.*quote"), ("[" * 200_000, "nested too deeply")):
        with pytest.raises(InputError, match=says):
            read_trace(written(tmp_path, text))


MICROSECONDS = st.integers(0, 10**10)
JOBS = st.lists(st.tuples(st.integers(0, 300), MICROSECONDS, st.integers(1, 16), st.sampled_from(["6214e9", "103959"])))


@settings(max_examples=30)
@given(jobs=JOBS.filter(bool))
def test_phillys_log_as_csv_and_as_json_is_the_same_workload(
    tmp_path_factory: pytest.TempPathFactory, jobs: list[tuple[int, int, int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("both")
    in_csv: list[Row] = []
    in_json: list[Row] = []
    for minute, micro, gpus, vc in jobs:
        start, ran_s = datetime(2017, 11, 5) + timedelta(minutes=minute), micro / 1e6
        row = {"timestamp": start, "duration": ran_s, "num_gpus": gpus, "gpu_time": ran_s * gpus, "cluster": vc}
        in_csv.append({name: str(value) for name, value in row.items()})
        ran = [str(start), str(start + timedelta(microseconds=micro)), str(gpus)]
        in_json.append({"vc": vc, "submitted_time": str(start), "attempts": [ran]})
    one, two = (
        from_rows(read(folder, name, *rows), name="philly")
        for name, rows in (("philly_csv", in_csv), ("philly_json", in_json))
    )
    for column in ("submit_time_s", "duration_s", "gpus", "virtual_cluster"):
        assert np.array_equal(one.jobs[column], two.jobs[column]), column
    assert list(one.jobs["virtual_cluster"].categories) == list(two.jobs["virtual_cluster"].categories)
    ties = [np.argsort(np.argsort(each.jobs["line"])) for each in (one, two)]
    assert np.array_equal(*ties)  # they stay in file order


@given(seconds=st.integers(0, 400 * 86_400))
def test_durations_survive_slurms_way_of_writing_them(seconds: int) -> None:
    hours, rest = divmod(seconds, 3_600)
    clock = f"{rest // 60:02}:{rest % 60:02}"
    days, of_day = divmod(hours, 24)
    texts = [f"{days}-{of_day:02}:{clock}", *([] if days else [f"{hours:02}:{clock}"]), *([] if hours else [clock])]
    assert {elapsed_s(text, "Elapsed") for text in texts} == {seconds}


def test_stamps_across_the_change_of_clocks_are_right() -> None:
    assert epoch_s("2017-11-05 01:10:00 PST") - epoch_s("2017-11-05 01:30:00 PDT") == 2_400
    assert epoch_s("2020-01-01 08:00:00+08:00") == epoch_s("2020-01-01T00:00:00Z") == epoch_s("2020-01-01")
    for text in ("0001-01-01 00:00:00+01:00", "0001-01-01 00:00:00 PDT", "today", ""):
        with pytest.raises(ValueError, match=r"range|isoformat"):
            epoch_s(text)
