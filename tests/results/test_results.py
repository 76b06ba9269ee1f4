import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from small_runs import cluster, drawn_workload, policies, simulate, workload

from synergy_core.errors import InputError
from synergy_runs import files as atomic
from synergy_runs.outputs import results
from synergy_runs.outputs.comparison import collect, compare
from synergy_runs.outputs.facts import Shares
from synergy_runs.outputs.metrics import summarise
from synergy_runs.outputs.notes import notes
from synergy_runs.outputs.numbers import three_digits
from synergy_runs.outputs.results import main, strict_json, write_run
from synergy_runs.outputs.stored import find_runs
from synergy_runs.outputs.tables import FIGURES, caption, cells

CONFIG = "policy: [fifo, sjf, round_robin, small]\nseed: {seed}\ncluster:\n  nodes: 4\n  load: {load}\n"
METRICS_PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def write_policies(into, *, seeds=(0,), load=1.0, jobs=120):
    for seed in seeds:
        for run in policies(drawn_workload(jobs, seed=seed, gap_s=120 / load), cluster(4), seed=seed):
            write_run(run, into / f"{run.policy}-{seed}", CONFIG.format(seed=seed, load=load))
    return into


@pytest.fixture
def small_run():
    return simulate(workload([0, 4], [10, 20], [1, 1]), cluster(1, 1))


def test_written_run_reads_back(tmp_path, small_run):
    written = write_run(small_run, tmp_path / "hand" / "fifo-0", "seed: 0\n")
    (run,) = find_runs(tmp_path)
    assert run.summary == json.loads(strict_json(written))
    assert run.jobs("jct_s", "end_state")["jct_s"].tolist() == [10, 26]
    assert run.jobs("end_state")["end_state"].tolist() == ["completed", "completed"]
    assert run.events().digest() == small_run.events.digest()
    assert run.settings() == {}
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "config.yaml", "events.parquet", "jobs.parquet", "rounds.parquet", "summary.json"
    ]  # fmt: skip


def test_summary_is_strict_json(tmp_path):
    write_run(simulate(workload([0], [0], [1]), cluster(1, 1)), tmp_path / "one", "")
    summary = json.loads((tmp_path / "one" / "summary.json").read_text(), parse_constant=pytest.fail)
    unknown = ("gpu_utilisation_fraction", "mean_finish_time_fairness", "offered_load_fraction")
    assert [summary[name] for name in unknown] == [None] * 3


@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("at", ["_write_parquet", "strict_json", "flush"])
def test_failed_write_leaves_the_older_result_and_nothing_else(tmp_path, small_run, monkeypatch, fault, at):
    folder = tmp_path / "fifo-0"
    write_run(small_run, folder, "old: 1\n")

    def fail(*_):
        raise fault

    monkeypatch.setattr(atomic if at == "flush" else results, at, fail)
    with pytest.raises((InputError, KeyboardInterrupt)) as caught:
        write_run(small_run, folder, "new: 1\n")
    if isinstance(fault, OSError):
        assert "fifo-0" in str(caught.value)
        assert "No space left on device" in str(caught.value)
        assert "results_dir=" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["fifo-0"]
    assert (folder / "config.yaml").read_text() == "old: 1\n"


def test_partial_folders_are_passed_over(tmp_path, small_run):
    write_run(small_run, tmp_path / "fifo-0", "")
    write_run(small_run, tmp_path / ".sjf-0.partial-17", "")
    assert [run.folder.name for run in find_runs(tmp_path)] == ["fifo-0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no summary\.json"):
        find_runs(tmp_path / "empty")


def test_every_column_and_key_stands_on_the_metrics_page(tmp_path, small_run):
    page = METRICS_PAGE.read_text()
    names = set(summarise(small_run))
    write_run(small_run, tmp_path / "run", "")
    for file in ("jobs", "rounds", "events"):
        names |= set(pq.read_schema(tmp_path / "run" / f"{file}.parquet").names)
    names |= {field.name for field in dataclasses.fields(Shares)}
    assert not {name for name in names if f"`{name}`" not in page}


def test_each_run_knows_what_it_was_compared_with(tmp_path):
    order = ["small", "round_robin", "fifo", "sjf"]
    for run in policies(drawn_workload(40), cluster(4)):
        config = f"policy: {run.policy}\ncompared_with: {order}\nseed: 0\n"
        write_run(run, tmp_path / f"{run.policy}-0", config)
    alone = dataclasses.replace(policies(drawn_workload(40), cluster(4))[0], policy="alone")
    write_run(alone, tmp_path / "alone-0", "policy: alone\ncompared_with: [alone]\nseed: 0\n")
    comparison = compare(find_runs(tmp_path))
    assert [row.policy for row in comparison.rows] == [*order, "alone"]
    assert comparison.rows[0].ratio.value == 1
    assert comparison.settings == [()]


def test_what_only_names_or_shows_a_run_does_not_vary_and_nodes_show_as_their_number(tmp_path):
    shown = "figures: {0}\nprogress: {0}\nresults_dir: r{1}\nhydra: {{mode: {1}}}\ncompared_with: [fifo, p{1}]\n"
    trace = "trace: {{find: [a{1}], bad_rows: {2}, name: drawn}}\n"
    for number, (flag, rows) in enumerate([("true", "stop"), ("false", "skip")]):
        run = policies(drawn_workload(20), cluster(4))[number]
        write_run(run, tmp_path / "same" / str(number), (shown + trace).format(flag, number, rows))
    assert compare(find_runs(tmp_path / "same")).settings == [()]
    for nodes, config in ((2, "{gpus_per_node: 8, nodes: null}"), (4, "{gpus_per_node: 8, nodes: 4}")):
        text = f"a: {{with: {nodes}}}\ntrace: {{nodes: {nodes}}}\ncluster: {config}\n"
        write_run(policies(drawn_workload(20), cluster(nodes))[0], tmp_path / "nodes" / str(nodes), text)
    settings = compare(find_runs(tmp_path / "nodes")).settings
    assert settings == [(("cluster.nodes", "2"),), (("cluster.nodes", "4"),)]


def test_seeds_are_averaged_and_paired(tmp_path):
    comparison = compare(find_runs(write_policies(tmp_path, seeds=(0, 1, 2))))
    row = comparison.rows[1]
    _, _, best = cells(FIGURES[0], comparison.rows)
    assert row.oracle
    assert (sum(best), best[1]) == (1, False)  # never an oracle
    assert [run.seed for run in row.runs] == [0, 1, 2]
    assert row.mean("mean_jct_s") == pytest.approx(np.mean([run.summary["mean_jct_s"] for run in row.runs]))
    assert row.ratio.value == pytest.approx(row.mean("mean_jct_s") / comparison.rows[0].mean("mean_jct_s"))
    assert "mean over seeds 0, 1, 2" in caption(comparison)


def test_sweep_is_collected_by_what_varies(tmp_path, capsys):
    for load in (0.8, 1.2):
        write_policies(tmp_path / f"{load}", load=load, jobs=60)
    assert main([str(tmp_path), "--first", "small", "--parquet", str(tmp_path / "all.parquet")]) == 0
    table = pq.read_table(tmp_path / "all.parquet").to_pylist()
    assert len(table) == 8
    assert {row["cluster.load"] for row in table} == {"0.8", "1.2"}
    assert table[0]["policy"] == "small"
    assert table[0]["mean_jct_s_by_size.1"] > 0
    printed = capsys.readouterr().out
    assert "small" in printed.split("policy")[0]  # in the heading of the column of ratios
    assert "true run times (sjf*)" in " ".join(printed.split())
    assert main([str(tmp_path), "--first", "smal"]) == 2
    assert "Did you mean 'small'?" in capsys.readouterr().err


def test_cut_run_is_told_apart(tmp_path, small_run):
    facts = {name: getattr(small_run.events, name)[:4] for name in small_run.events.__slots__}
    write_run(dataclasses.replace(small_run, events=type(small_run.events)(**facts)), tmp_path / "cut", "")
    assert any("1 jobs never finished" in line for line in notes(compare(find_runs(tmp_path))))


def test_collect_refuses_a_full_disk_without_leaving_a_file(tmp_path, small_run, monkeypatch):
    write_run(small_run, tmp_path / "fifo-0", "")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", fail)
    with pytest.raises(InputError, match="No space left"):
        collect(tmp_path / "comparison.parquet", find_runs(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["fifo-0"]


def test_numbers_have_three_digits():
    assert [three_digits(value) for value in (0.0, 0.0654, 0.5, 3.123, 42.13, 1234.5, float("nan"))] == [
        "0", "0.065", "0.50", "3.12", "42.1", "1,234", "–"
    ]  # fmt: skip


def test_table_is_printed_where_the_terminal_knows_no_greek(tmp_path):
    command = [sys.executable, "-m", "synergy_sim.results", str(write_policies(tmp_path))]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "300"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "p99 rho" in done.stdout.decode("ascii")


@pytest.mark.parametrize("mode", [0o555, 0o444], ids=["read only", "not to be entered"])
def test_file_in_a_folder_that_is_read_only_is_an_input_error(tmp_path, mode):
    child = os.fork()
    if not child:
        os.chdir(tmp_path)
        tmp_path.chmod(mode)
        if not os.getuid():  # root may write anywhere
            os.setuid(65534)
        try:
            with atomic.atomic_file(Path("comparison.csv")) as partial:
                partial.write_text("policy\n")
        except InputError as error:
            os._exit(2 if "comparison.csv" in str(error) else 3)
        finally:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
