"""`compare` and `open_run` run and read what the command line does, as tables of pandas."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from synergy_core.errors import InputError
from synergy_core.scheduling import policies
from synergy_core.scheduling.policies import policy_names
from synergy_sim import compare, open_run

LOG = "submit_time,duration_s,gpus,user\n" + "".join(
    f"{60 * at},{900 - 20 * at},{1 + at % 8},u{at % 3}\n" for at in range(24)
)
ON = {"cluster.nodes": 2, "cluster.gpus_per_node": 4, "cluster.placement": "spread"}
JUMP = '''
from synergy_core.scheduling.policies import ordering_policy
from synergy_core.scheduling.jobs.views import JobView

@ordering_policy()
def jump(job: JobView) -> tuple[float]:
    """{summary}"""
    return ({key},)
'''


@pytest.fixture
def log(tmp_path, monkeypatch):
    """A small log in the current folder."""
    monkeypatch.delenv("SYNERGY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("jobs.csv").write_text(LOG, encoding="utf-8")
    return "jobs.csv"


def test_the_command_in_run_yaml_gives_the_same_schedules(log, typed):
    made = compare(trace=log, policies=["fifo", "las(quantum_s=600)"], seeds=[0, 1], settings=ON)
    command = made.comparison.runs[0].record.command
    assert typed(*shlex.split(command)[3:], "results_dir=typed").returncode == 0
    again = open_run("typed/file/latest")
    key = ["policy", "seed", "event_log_sha256"]
    assert made.runs[key].equals(again.runs[key])
    assert made.table["mean_jct_ratio"].equals(again.table["mean_jct_ratio"])
    assert made.folder == open_run(f"{made.folder.parent}/latest").folder


def test_tables_have_a_row_per_policy_run_job_and_decision(log):
    made = compare(log, ["fifo", "srtf"], range(2), ON)
    assert made.table["policy"].tolist() == ["fifo", "srtf"]
    assert made.runs[["policy", "seed"]].values.tolist() == [["fifo", 0], ["fifo", 1], ["srtf", 0], ["srtf", 1]]
    jobs = made.jobs("gpus", "jct_s")
    assert list(jobs.columns) == ["policy", "seed", "gpus", "jct_s"]
    assert len(jobs) == 4 * 24
    assert jobs.groupby("policy")["jct_s"].mean()["fifo"] == pytest.approx(made.table["mean_jct_s"][0])
    assert {"user", "waiting_s", "measured"} <= set(made.jobs().columns)
    counts = made.decisions("queued").groupby(["policy", "seed"]).size()
    assert counts.tolist() == made.runs["decisions"].tolist()
    assert all(name in str(made) for name in ("24 jobs", "fifo", "srtf"))
    with pytest.raises(InputError, match="jct_seconds"):
        made.jobs("jct_seconds")


def test_settings_that_differ_between_commands_become_columns(log):
    for nodes in (2, 3):
        compare(
            Path(log), ["fifo"], settings={**ON, "cluster.nodes": nodes, "figures": nodes == 3, "results_dir": "all"}
        )
    found = open_run("all")
    assert found.table[["cluster.nodes", "policy"]].values.tolist() == [["3", "fifo"], ["2", "fifo"]]
    assert set(found.jobs("jct_s")["cluster.nodes"]) == {"2", "3"}
    assert len(list(Path("all").rglob("report.html"))) == 1


def test_a_policy_of_a_notebook_is_compared_and_may_be_defined_again(log, monkeypatch):
    policy_names()
    monkeypatch.setattr(policies, "_found", dict(policies._found))
    means = []
    for key in ("job.gpus", "-job.gpus"):
        exec(JUMP.format(summary="By size.", key=key), {"__name__": "__main__"})
        means.append(compare(log, ["fifo", "jump"], settings=ON).table["mean_jct_s"][1])
    assert means[0] != means[1]
    with pytest.raises(InputError, match="jump"):
        exec(JUMP.format(summary="", key="0.0"), {"__name__": "somewhere_else"})


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"trace": "phily"}, "philly"),
        ({"trace": "philly", "policies": ["fofi"]}, "fifo"),
        ({"trace": "philly", "settings": {"cluster.node": 3}}, "cluster.nodes"),
        ({}, "trace"),
    ],
)
def test_impossible_settings_are_refused_with_what_to_type(given, fact):
    with pytest.raises(InputError, match=fact):
        compare(**given)


def test_folder_without_results_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"summary\.json"):
        open_run(tmp_path)


def test_the_package_imports_nothing_slow_before_it_is_used():
    code = "import json, sys, synergy_sim; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)
    assert not {"pandas", "hydra", "matplotlib", "simpy"} & set(loaded)
