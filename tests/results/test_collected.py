"""What `results` makes of several runs: groups by settings, seeds averaged, warnings, tables for elsewhere."""

import csv
import shutil
import subprocess
from dataclasses import replace

import pytest
import yaml
from filed_runs import filed, tree
from small_runs import cluster, drawn_workload, policies
from test_columns import assigned
from test_results import CONFIG

from synergy_runs.outputs import stored as run_record
from synergy_runs.outputs.comparison import Comparison, compare
from synergy_runs.outputs.exports import PAPER_COLUMNS, escaped, latex, markdown
from synergy_runs.outputs.notes import notes
from synergy_runs.outputs.numbers import Ratio
from synergy_runs.outputs.results import main as results_main
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import commit, find_runs

pytestmark = pytest.mark.usefixtures("unpictured")


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """So wide a screen that no cell is broken."""
    monkeypatch.setenv("COLUMNS", "250")


def test_seeds_of_several_commands_are_one_group_and_other_settings_another(tmp_path, capsys):
    filed(tmp_path, (0, 1))
    filed(tmp_path, (2,))
    filed(tmp_path, (0, 1, 2), load=1.2)
    comparison = compare(find_runs(tmp_path))
    assert {dict(row.setting)["cluster.load"]: [run.seed for run in row.runs] for row in comparison.rows} == {
        "1.0": [0, 1, 2], "1.2": [0, 1, 2]
    }  # fmt: skip
    assert results_main([str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "3 runs, the newest first" in said.out
    assert "mean over seeds 0, 1, 2" in said.out
    assert "different seeds" not in said.out
    assert "left out" not in said.err


def test_of_repetitions_the_newest_counts(tmp_path, monkeypatch, capsys):
    for minute in (10, 12, 11):
        monkeypatch.setattr(run_record, "now", lambda minute=minute: f"2026-11-23T05:{minute}:00+00:00")
        filed(tmp_path, only=["fifo"])
    (row,) = compare(find_runs(tmp_path)).rows
    assert [run.folder.parent.name for run in row.runs] == ["2026-11-23_05-12-00"]
    assert results_main([str(tmp_path)]) == 0
    assert "left out: 2 of 3 runs" in capsys.readouterr().err


def test_many_settings_that_vary_make_a_table_each(tmp_path, capsys):
    for number in range(4):
        folder = filed(tmp_path / str(number), only=["fifo", "small"])
        # Two bits vary on their own, and four keys of one value each with them.
        varying = {f"bit{bit}": number >> bit & 1 for bit in range(2)} | {f"is{at}": number == at for at in range(4)}
        for config in folder.glob("*/config.yaml"):
            config.write_text(config.read_text() + yaml.safe_dump(varying | {"copy_of_bit0": number & 1}))
    keys = [key for key, _ in compare(find_runs(tmp_path)).settings[0]]
    assert len(keys) == 6
    assert "copy_of_bit0" not in keys  # what varies alike is told once
    assert results_main([str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.count("fifo: the mean JCT") + said.count("lowest mean JCT") >= 4  # a sentence for each setting
    assert "bit0=1" in said


def test_rows_over_other_seeds_or_jobs_are_told(tmp_path):
    filed(tmp_path, (0, 1, 2), only=["fifo", "small"])
    filed(tmp_path, (0,), only=["sjf"])
    told = notes(compare(find_runs(tmp_path)))
    assert any(line.startswith("sjf* has seed 0, but fifo has seeds 0, 1, 2: ") for line in told)
    assert not [line for line in told if line.startswith("small has")]
    filed(tmp_path / "others", jobs=50, only=["round_robin"])
    (line,) = [line for line in notes(compare(find_runs(tmp_path))) if line.startswith("round_robin cannot")]
    assert "(seed 0: 50 jobs and 60 jobs)" in line
    filed(tmp_path, (0,), load=1.2)
    (line,) = [line for line in notes(compare(find_runs(tmp_path))) if "different seeds" in line]
    assert all(each in line for each in ("seeds 0, 1, 2: cluster.load=1.0", "seed 0: cluster.load=1.2"))


def test_results_of_before_are_read_beside_new_ones(tmp_path, capsys):
    for run in policies(drawn_workload(60), cluster(4)):
        write_run(run, tmp_path / f"{run.policy}-0", CONFIG.format(seed=0, load=1.0))
    before = tree(tmp_path)
    filed(tmp_path, (1,))
    assert [len(row.runs) for row in compare(find_runs(tmp_path)).rows] == [2] * 4
    assert results_main([str(tmp_path)]) == 0
    assert "unknown (no run.yaml)" in " ".join(capsys.readouterr().out.split())
    assert before.items() <= tree(tmp_path).items()


def test_csv_has_every_figure_to_the_last_bit_and_how_it_was_made(tmp_path):
    filed(tmp_path, (0, 1), words=["cluster.nodes=4"])
    assert results_main([str(tmp_path / "latest"), "--csv", str(tmp_path / "table.csv")]) == 0
    with (tmp_path / "table.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    comparison = compare(find_runs(tmp_path))
    assert [row["policy"] for row in rows] == [row.policy for row in comparison.rows]
    for row, shown in zip(rows, comparison.rows, strict=True):
        assert float(row["mean_jct_s"]) == shown.mean("mean_jct_s")
        assert float(row["mean_jct_ratio"]) == shown.ratio.value
        assert row["seeds"] == "0 1"
        assert row["command"] == "python -m synergy_sim +trace=drawn cluster.load=1.0 cluster.nodes=4"
        assert row["commit"] == (commit() or "")
        assert "latest" not in row["folder"]


def test_markdown_and_latex_are_the_table_on_the_screen(tmp_path, capsys):
    folder = filed(tmp_path)
    comparison = compare(find_runs(folder))
    text = markdown(comparison, ["all"])
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4
    assert len({line.replace("\\|", "").count("|") for line in rows}) == 1
    assert "| policy | mean JCT (" in rows[0]
    assert "| sjf\\* |" in rows[3]
    assert sum(line.count("**") for line in rows) > 0
    assert (
        f"made by `python -m synergy_sim +trace=drawn cluster.load=1.0` with synergy {run_record.__version__}" in text
    )
    assert results_main([str(folder), "--latex", "--columns", "all"]) == 0
    printed = capsys.readouterr().out
    assert printed.rstrip("\n") == latex(comparison, ["all"])
    for each in (r"\toprule", r"\midrule", r"\bottomrule", r"\caption{", r"$\rho$", r"$>$", r"\%"):
        assert each in printed
    body = [line for line in printed.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in body} == {rows[0].count("|") - 2}
    assert printed.startswith("% made by python -m synergy_sim")
    assert escaped("a_b & 50 % ~ {x}\\") == r"a\_b \& 50 \% \textasciitilde{} \{x\}\textbackslash{}"


@pytest.fixture
def for_a_paper(tmp_path):
    """The folder of two policies, of which one may change jobs, at two loads."""
    for load in ("0.8", "1.2"):
        for run in (assigned("fifo"), assigned("synergy", 2, "declared work that is the true run time")):
            write_run(run, tmp_path / load / run.policy, CONFIG.format(seed=0, load=load))
    return tmp_path


def test_latex_has_few_columns_the_groups_in_rows_of_their_own_and_the_assumptions_in_its_caption(for_a_paper):
    comparison = compare(find_runs(for_a_paper))
    comparison.runs[0].summary["assumptions"] = ["A restart costs 30 s & more."]
    lines = latex(comparison).splitlines()
    rows = [line for line in lines if line.endswith(r"\\") and "multicolumn" not in line]
    assert {line.count("&") for line in rows} == {len(PAPER_COLUMNS) + 1}  # and the load and the policy
    assert sum(line.lstrip().startswith(r"\multicolumn{7}{") for line in lines) == 4
    (caption,) = [line for line in lines if r"\caption" in line]
    assert r"A restart costs 30 s \& more." in caption
    visible = [line for line in lines if not line.startswith("%")]
    assert all(line.isascii() for line in visible)
    assert any("no real scheduler knows" in line for line in visible)  # what the star means


def test_columns_are_chosen_by_name_for_every_form_of_the_table(for_a_paper, tmp_path, capsys):
    path = tmp_path / "table.csv"
    asked = ("--columns", "p99_jct_s,mean_jct_ratio,knows", "--csv", str(path))
    assert results_main([str(for_a_paper), *asked]) == 0
    head = capsys.readouterr().out
    assert "p99 JCT" in head
    assert "mean wait" not in head.partition("cluster.load 0.8")[0]
    ends = ["mean_jct_ratio", "mean_jct_ratio_low", "mean_jct_ratio_high"]
    with path.open() as file:
        assert next(csv.reader(file)) == ["cluster.load", "policy", "p99_jct_s", *ends, "knows"]
    assert results_main([str(for_a_paper), "--markdown", *asked[:2]]) == 0
    (head,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| load")]
    assert [each.strip() for each in head.strip("|").split("|")][:2] == ["load", "policy"]
    assert head.count("|") == 6
    assert results_main([str(for_a_paper), "--latex", "--columns", "mean_jct"]) == 2
    assert "Did you mean 'mean_jct_s'" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs: LaTeX")
@pytest.mark.parametrize("ratio", [None, Ratio(0.31, 0.074, 1.28, 5)], ids=["no interval", "intervals"])
def test_latex_compiles_and_fits_a_column_of_text(for_a_paper, tmp_path, ratio):
    comparison = compare(find_runs(for_a_paper))
    comparison = Comparison(tuple(replace(row, ratio=ratio or row.ratio) for row in comparison.rows))
    paper = tmp_path / "paper.tex"
    paper.write_text(
        "\\documentclass[twocolumn]{article}\\usepackage{booktabs}\\usepackage[margin=0.75in]{geometry}\n"
        f"\\begin{{document}}\n{latex(comparison)}\n\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", paper.name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "Overfull" not in done.stdout


def test_report_of_several_runs_has_a_folder_of_its_own(tmp_path, capsys):
    first = filed(tmp_path, only=["fifo", "small"])
    filed(tmp_path, load=1.2, only=["fifo", "small"])
    before = tree(first)
    for _ in range(2):
        assert results_main([str(tmp_path), "--report"]) == 0
    assert len(list(tmp_path.glob("report-*/report.html"))) == 2
    assert tree(first) == before
    assert results_main([str(first), "--report"]) == 0
    assert (first / "report.html").is_file()
    made = tree(first)
    assert results_main([str(first), "--report"]) == 0
    assert {name: text for name, text in tree(first).items() if not name.startswith("report-")} == made
