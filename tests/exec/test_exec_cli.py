"""The executor from the command line: whole runs, broken off and killed ones, job files, and what people ask."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from exec.controllers_backend import TaskBackend, settings_values

from synergy_core.errors import InputError
from synergy_exec import __main__ as program
from synergy_exec.client import client_for
from synergy_exec.commands import _asking as commands
from synergy_exec.controller import processes
from synergy_exec.controller.journal import Journal, RunRow
from synergy_exec.job_file import job_of, read_job_file
from synergy_exec.losses import write_losses, write_metrics
from synergy_exec.run import execute_all
from synergy_exec.settings import Settings
from synergy_exec.workload import arrivals_of
from synergy_runs.log import Kind
from synergy_runs.settings import build
from synergy_runs.stored import read_run

GOOD = {"class": "a.b:C", "initial_batch": 32, "work": 10}


def trace_of(folder: Path, jobs: int, iterations: int, *, apart_s: float = 0.1) -> Path:
    """Every second job asks for two slots."""
    path = folder / "small.csv"
    rows = [f"{apart_s * number},mlp,{iterations},j{number},{1 + number % 2}" for number in range(jobs)]
    path.write_text("\n".join(["submit_s,model,iterations,job,gpus", *rows]) + "\n")
    return path


def executed(trace: Path, results: Path, policies: list[str], backend: Any, **more: Any) -> list[Path]:
    values = settings_values(trace, results, policies, **more)
    places = execute_all(build(Settings, values), values, results / "small", lambda: backend)
    return [each.results for each in places]


def test_two_policies_end_and_are_filed_as_the_simulators(tmp_path: Path) -> None:
    folders = executed(trace_of(tmp_path, 4, 6), tmp_path / "r", ["fifo", "synergy"], TaskBackend(2))
    assert [folder.name for folder in folders] == ["fifo-0", "synergy-0"]
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (4, 0, 0)
        assert summary["mean_jct_s"] > 0
        found = read_run(folder)
        assert found.jobs("restarts")["restarts"].tolist() == [0, 0, 0, 0] or folder.name != "fifo-0"
        assert (folder / "losses.parquet").is_file()
        assert (folder.with_name(folder.name + ".work") / "jobs" / "0" / "job.json").is_file()


def test_failed_job_is_counted_and_the_others_end(tmp_path: Path) -> None:
    class Failing(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            from exec import controllers_agents

            made = controllers_agents.FakeAgent.__init__

            def failing(agent: Any, *given: Any, **named: Any) -> None:
                made(agent, *given, **named)
                agent.failing.add(1)

            monkey.setattr(controllers_agents.FakeAgent, "__init__", failing)
            await super().start(node, meeting)

    with pytest.MonkeyPatch.context() as monkey:
        (folder,) = executed(trace_of(tmp_path, 3, 5), tmp_path / "r", ["fifo"], Failing(2))
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (3, 1, 0)
    assert summary["jobs_by_end_state"]["failed"] == 1


def test_killed_controller_goes_on_where_it_was(tmp_path: Path) -> None:
    """SIGKILL at several moments, the same command each time; every job ends once, and nobody is left behind."""
    trace, results = trace_of(tmp_path, 6, 25, apart_s=0.3), tmp_path / "r"
    work = results / "small" / "las-0.work"
    script = Path(__file__).with_name("controllers_backend.py")
    command = [sys.executable, str(script), "run", str(trace), str(results), "las"]
    agents: set[tuple[int, int]] = set()
    for after_s in (0.3, 0.9, 1.6):
        process = subprocess.Popen(command)
        try:
            _wait_for(lambda: (work / "controller.json").is_file() and _pid(work) == process.pid)  # noqa: B023
            time.sleep(after_s + 0.7)
            _wait_for(lambda: after_s < 1.6 or _agents(work))  # noqa: B023  # a busy machine takes its time
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        agents |= _agents(work)
    assert subprocess.run(command, timeout=240).returncode == 0
    summary = json.loads((results / "small" / "latest" / "las-0" / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (6, 0, 0)
    facts = Journal(work / "journal.sqlite").facts()
    assert sorted(fact.job for fact in facts if fact.kind == Kind.FINISH) == list(range(6))
    assert sorted(fact.job for fact in facts if fact.kind == Kind.SUBMIT) == list(range(6))
    assert agents
    assert not [each for each in agents if processes.lives(*each)]


def test_interrupted_run_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    trace, results = trace_of(tmp_path, 2, 60), tmp_path / "r"
    work = results / "small" / "fifo-0.work"
    script = Path(__file__).with_name("controllers_backend.py")
    process = subprocess.Popen(
        [sys.executable, str(script), "run", str(trace), str(results), "fifo"], stderr=subprocess.PIPE
    )
    _wait_for(lambda: (work / "controller.json").is_file() and any(each.launched for each in _runs(work)))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode != 0
    journal = Journal(work / "journal.sqlite")
    assert [each.outcome for each in journal.runs()]
    assert {each.outcome for each in journal.runs()} <= {"paused", "dropped"}
    assert journal.meta()["over"] is False
    journal.close()
    with pytest.raises(InputError, match=r"under way with other settings \(restart_s\)"):
        executed(trace, results, ["fifo"], TaskBackend(1, 1), restart_s=9.0)
    elsewhere = {"host": "localhost", "ports": "29500-29501", "retries": 9, "hang_s": 99.0}
    executed(trace, results, ["fifo"], TaskBackend(2), **elsewhere)
    summary = json.loads((results / "small" / "latest" / "fifo-0" / "summary.json").read_text())
    assert (summary["jobs"], summary["jobs_unfinished"]) == (2, 0)


def _runs(work: Path) -> list[RunRow]:
    journal = Journal(work / "journal.sqlite")
    runs = journal.runs()
    journal.close()
    return runs


def _agents(work: Path) -> set[tuple[int, int]]:
    journal = Journal(work / "journal.sqlite")
    agents = {(pid, began) for _, _, pid, began in journal.agents()}
    journal.close()
    return agents


def _pid(work: Path) -> int:
    try:
        return int(json.loads((work / "controller.json").read_text())["pid"])
    except (OSError, ValueError):
        return 0


def _wait_for(true: Any) -> None:
    until_s = time.monotonic() + 120
    while not true():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"wrok": 3}, "Did you mean 'work'"),
        ({"class": "nonsense"}, "package.module:Class"),
        ({"initial_batch": 0}, "initial_batch=0"),
        ({"initial_batch": 2.5}, "a whole number"),
        ({"initial_batch": True}, "a whole number"),
        ({"max_batch": 16}, "max_batch=16 is below initial_batch=32"),
        ({"batch": 16}, "expected 32 to 32"),
        ({"work": 0}, "above 0"),
        ({"work": float("nan")}, "above 0"),
        ({"slots": 0}, "at least 1"),
        ({"slots": 33}, "max_batch=32"),
        ({"arguments": [1]}, "a mapping"),
        ({"name": " "}, "name is empty"),
    ],
)
def test_job_file_with_a_mistake(changed: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        job_of({**GOOD, **changed}, "job.yaml")


def test_job_file_is_read_and_written_alike(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "job.yaml").write_text("class: mine.py:Net\ninitial_batch: 8\nwork: 3\narguments: {width: 4}\n")
    job = read_job_file(tmp_path / "job.yaml")
    assert job.job_class == f"{tmp_path / 'mine.py'}:Net"
    assert (job.name, job.max_batch, job.slots, job.arguments) == ("Net", 8, 1, {"width": 4})
    assert job_of(job.values(), "again") == job or job_of({**job.values()}, "again").work == job.work
    for text, says in (("class: [", "not YAML"), ("class: none.py:Net\ninitial_batch: 8\nwork: 3", "is no file")):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(InputError, match=says):
            read_job_file(tmp_path / "bad.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_job_file(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("line", "says"), [("0,resnet,5,j,1", "unknown model 'resnet'"), ("0,mlp,5,j,900", "slots=900")]
)
def test_trace_that_cannot_be_trained(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(f"submit_s,model,iterations,job,gpus\n{line}\n")
    values = settings_values(tmp_path / "t.csv", tmp_path, ["fifo"])
    with pytest.raises(InputError, match=says):
        arrivals_of(build(Settings, values))


def test_nobody_there_to_ask(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no controller runs below"):
        client_for(tmp_path, None)
    stale = {"url": "http://127.0.0.1:9", "host": os.uname().nodename, "pid": os.getpid(), "began": 1}
    (tmp_path / "controller.json").write_text(json.dumps(stale))
    with pytest.raises(InputError, match="no controller runs below"):
        client_for(tmp_path, None)
    (tmp_path / "token").write_text("t\n")
    (tmp_path / "controller.json").write_text(json.dumps({**stale, "began": processes.began(os.getpid())}))
    with pytest.raises(InputError, match="no controller answers"):
        client_for(tmp_path, None).ask("GET", "/jobs")
    with pytest.raises(InputError, match="the job file cannot be read"):
        commands.main("submit", [str(tmp_path / "none.yaml"), "--dir", str(tmp_path)])


def test_command_line_says_what_to_type(tmp_path: Path) -> None:
    def typed(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "synergy_exec", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert "submit JOB.yaml" in typed("--help").stdout
    wrong = typed(f"results_dir={tmp_path}")
    assert (wrong.returncode, "+trace=demo" in wrong.stderr) == (2, True)
    wrong = typed("serve=true", "backend.name=lokal", f"results_dir={tmp_path}")
    assert (wrong.returncode, "unknown backend 'lokal'" in wrong.stderr) == (2, True)
    wrong = typed("list", "--dir", str(tmp_path))
    assert (wrong.returncode, "no controller runs below" in wrong.stderr) == (2, True)
    wrong = typed("serve=true", "rouds_s=3")
    assert (wrong.returncode, "Did you mean 'round_s'" in wrong.stderr) == (2, True)


def test_losses_count_the_later_run_of_a_step(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "3"
    folder.mkdir(parents=True)
    (folder / "steps.csv").write_text(
        "step,batch,rate,loss,seconds,run\n0,8,1,2.5,.1,0\n1,8,1,2.4,.1,0\n1,8,1,2.3,.1,1\n2,8"
    )
    write_losses(tmp_path / "jobs", tmp_path / "losses.parquet")
    table = pq.read_table(tmp_path / "losses.parquet").to_pydict()
    assert table["loss"] == [2.5, 2.3]
    assert table["job_id"] == [3, 3]


def test_evaluations_are_filed_where_there_are_any(tmp_path: Path) -> None:
    folder = tmp_path / "jobs" / "3"
    folder.mkdir(parents=True)
    write_metrics(tmp_path / "jobs", tmp_path / "metrics.parquet")
    assert not (tmp_path / "metrics.parquet").exists()
    (folder / "evaluations.csv").write_text(
        "step,metric,value,run\n4,loss,2.5,0\n4,loss,2.25,1\n4,loss,9.0,0\n4,f1,0.5,1\n8,lo"
    )
    write_metrics(tmp_path / "jobs", tmp_path / "metrics.parquet")
    table = pq.read_table(tmp_path / "metrics.parquet").to_pydict()
    expected = {"job_id": [3, 3], "step": [4, 4], "metric": ["loss", "f1"], "value": [2.25, 0.5], "run": [1, 1]}
    assert table == expected


def test_without_the_extra_a_sentence_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else name)
    monkeypatch.setattr(sys, "argv", ["synergy_exec", "+trace=demo"])
    with pytest.raises(InputError, match=r"^aiohttp is not installed here; type: pip install -e '\.\[exec\]'"):
        program._main()
