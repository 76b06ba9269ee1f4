"""The executor from the command line: keys, job files, whole runs, broken off and killed ones, and what people ask."""

import configparser
import contextlib
import json
import os
import re
import shlex
import stat
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from documented import documented
from exec import warm
from exec.pretended import refuses, staged
from exec.real import HERE, JOBS, Service, answer, steps_of, typed, wait_until
from exec.served import settings_values, trace_of

from synergy_core.cli import INTERRUPTED
from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_exec import __main__ as program
from synergy_exec.commands._asking import client_for
from synergy_exec.commands.resume import changed
from synergy_exec.controller.controller import enter, whole_cluster
from synergy_exec.controller.journal import Journal
from synergy_exec.job_file import job_of, read_job_file
from synergy_exec.job_folder import kept_code
from synergy_exec.run import SOME_FAILED, write_recorded
from synergy_exec.settings import CHANGEABLE, EXECUTOR, AgentSettings, Settings
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.processes import began
from synergy_exec.workload import arrivals_of
from synergy_runs.inputs.command_line import prepared
from synergy_runs.inputs.keys import build, defaults, keys
from synergy_runs.outputs.facts import Kind

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(HERE / "served.py")


def test_the_simulators_picture_of_the_executor_says_the_same():
    """It can import nothing of it."""
    pictured = yaml.safe_load((ROOT / "conf" / "testbed" / "executor.yaml").read_text(encoding="utf-8"))
    assert pictured["round_s"] == Settings().round_s


KEYS = [each.name for each in keys(Settings) if not each.name.startswith("trace.")]
SECONDS = [name for name in KEYS if name.endswith("_s") and not name.endswith("_per_s")]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in SECONDS for value in (0, -1.0, float("inf"), float("nan"))),
        *(("retries", -1), ("seed", -1), ("port", -1), ("port", 65_536), ("storage_mb_per_s", 0.0)),
    ],
)
def test_what_is_out_of_bounds_is_said(name, value):
    refuses(rf"^{name}={value}: expected ", build, Settings, {**defaults(Settings), name: value})


def test_typed_keys_take_the_place_of_those_before_but_what_the_run_is_stays():
    assert set(CHANGEABLE) < set(KEYS)
    before = {"host": "127.0.0.1", "seed": 3, "backend": {"name": "local", "options": {"slots": 2, "nodes": 1}}}
    given = ["host=10.0.0.2", "backend.options.slots=4", "memory_gb_per_slot=null"]
    now = {"host": "10.0.0.2", "backend": {"name": "local", "options": {"slots": 4, "nodes": 1}}}
    assert changed(before, given) == {**before, **now, "memory_gb_per_slot": None}
    for given, says in ((["seed=4", "host=a"], "^seed: "), (["host=[a"], "such as host=10.0.0.1")):
        refuses(says, changed, {"seed": 3}, given)


def test_the_systemd_unit_types_what_the_program_takes_and_stops_it_the_way_that_saves():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(ROOT / "docs" / "synergy.service", encoding="utf-8")
    found = parser["Service"]
    name, *arguments = found["ExecStart"].partition(" -m ")[2].split()
    assert name == "synergy_exec"
    given = {key: yaml.safe_load(text) for key, text in (each.split("=", 1) for each in arguments)}
    settings = build(Settings, {**defaults(Settings), **given})
    assert settings.serve
    assert settings.agents.port, "a free port would be another one after each start"
    assert (found["KillSignal"], found["KillMode"], found["Restart"]) == ("SIGINT", "mixed", "on-failure")
    assert int(found["TimeoutStopSec"]) > 2 * AgentSettings().leave_s
    assert found["SuccessExitStatus"] == str(INTERRUPTED)


RUNS = [each.typed.removesuffix(" &") for each in documented(ROOT)]
RUNS = [each for each in RUNS if re.match(r"python -m synergy_exec [^-]\S*=", each)]


@pytest.mark.parametrize("command", RUNS)
def test_documented_commands_are_accepted(command):
    assert len(RUNS) >= 6
    assert prepared(shlex.split(command.replace("$(hostname -f)", "login.cluster"))[3:], EXECUTOR)


def test_the_job_of_the_readme_learns(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(python|yaml)\n# (mine.py|job.yaml)\n(.*?)```", readme, re.DOTALL)
    assert len(blocks) == 2
    for _, name, text in blocks:
        (tmp_path / name).write_text(text, encoding="utf-8")
    file = read_job_file(tmp_path / "job.yaml")
    trainer = Trainer(load_job(file.trained.job_class, file.trained.arguments), Plan(micro_batch=file.initial_batch))
    losses = [trainer.step(number).loss for number in range(60)]
    assert losses[-1] < 0.5 * losses[0]


def test_command_line_says_what_to_type_and_what_is_not_installed(monkeypatch):
    assert "submit JOB.yaml" in typed("--help").stdout
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "aiohttp" else name)
    monkeypatch.setattr(sys, "argv", ["synergy_exec", "+trace=demo"])
    refuses(r"pip install -e '\.\[exec\]'", program._main)


def test_nobody_there_to_ask(tmp_path):
    stale = {"url": "http://127.0.0.1:9", "host": os.uname().nodename, "pid": os.getpid(), "began": 1}
    work = tmp_path / "fifo-0.work"
    work.mkdir()
    (work / "controller.json").write_text(json.dumps(stale))
    refuses("no controller runs below", client_for, tmp_path, None)
    (work / "token").write_text("t\n")
    (work / "controller.json").write_text(json.dumps({**stale, "began": began(os.getpid())}))
    with pytest.raises(InputError, match="no controller answers"):
        client_for(tmp_path, None).ask("GET", "/jobs")


# Job files, and the code that a job is submitted with, which is the code that it trains with


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"wrok": 3}, "Did you mean 'work'"),
        ({"class": "nonsense"}, "package.module:Class"),
        ({"initial_batch": 0}, "initial_batch=0"),
        ({"initial_batch": 2.5}, "a whole number"),
        ({"max_batch": 16}, "max_batch=16 is below initial_batch=32"),
        ({"batch": 16}, "expected 32 to 32"),
        ({"work": 0}, "above 0"),
        ({"slots": 0}, "at least 1"),
        ({"slots": 33}, "max_batch=32"),
        ({"arguments": [1]}, "arguments=.1.: expected"),
        ({"name": " "}, "a name of 1 to 200"),
    ],
)
def test_job_file_with_a_mistake(changed, says):
    refuses(says, job_of, {"class": "a.b:C", "initial_batch": 32, "work": 10, **changed}, "job.yaml")


def test_job_file_is_read_and_written_alike(tmp_path):
    (tmp_path / "mine.py").write_text("")
    text = "class: mine.py:Net\ninitial_batch: 8\nwork: 3\narguments: {width: 4}\n"
    (tmp_path / "job.yaml").write_text(text)
    job = read_job_file(tmp_path / "job.yaml")
    assert job.trained.job_class == f"{tmp_path / 'mine.py'}:Net"
    assert (job.name, job.max_batch, job.slots, job.trained.arguments) == ("Net", 8, 1, {"width": 4})
    assert job_of(job.values(), "again") == job
    for wrong, says in (
        ("class: none.py:Net\ninitial_batch: 8\nwork: 3", "is no file"),
        (f"{text}weights: w.pt", r"weights: .*/w.pt is no file"),
    ):
        (tmp_path / "bad.yaml").write_text(wrong)
        refuses(says, read_job_file, tmp_path / "bad.yaml")
    (tmp_path / "w.pt").touch()
    (tmp_path / "job.yaml").write_text("class: mine.py:Net\ninitial_batch: 8\nwork: 3\nweights: w.pt")
    assert read_job_file(tmp_path / "job.yaml").trained.weights == str(tmp_path / "w.pt")


MINE = """
from synergy_exec.examples.mlp import Mlp

class Mine(Mlp):
    number = 1
    place = __file__
"""


def test_a_jobs_file_is_kept_as_it_was_submitted_and_a_package_has_no_copy(tmp_path):
    mine, folder = tmp_path / "mine.py", tmp_path / "work" / "jobs" / "0"
    mine.write_text(MINE)
    stage = staged(tmp_path / "work", "las", (2,))
    stage.submit(50.0, weights="/w.pt", **{"class": f"{mine}:Mine"})
    stage.submit(50.0)
    mine.write_text(MINE.replace("1", "2"))
    stage.advance(0.0)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    launch, package = (run.launch for run in stage.agents[0].runs.values())
    assert (kept_code(package.file.trained.job_class, Path(package.folder)), launch.file.trained.weights) == (
        None,
        "/w.pt",
    )
    kept = kept_code(launch.file.trained.job_class, Path(launch.folder))
    assert kept == folder / "code" / "mine.py"
    assert launch.file.trained.job_class == f"{mine}:Mine"
    mine.unlink()
    job = load_job(launch.file.trained.job_class, {}, kept)
    assert (type(job).number, type(job).place) == (1, str(mine))
    stage.finish()


def test_a_file_that_the_controller_cannot_read_is_refused_and_no_job_made(tmp_path):
    stage = staged(tmp_path)
    with pytest.raises(InputError, match=r"/nowhere/mine.py cannot be read by the controller on .* \(No such"):
        stage.submit(1.0, **{"class": "/nowhere/mine.py:Mine"})
    assert not stage.execution.jobs
    assert not stage.execution.journal.jobs()


# Whole runs


@pytest.mark.parametrize(
    ("line", "says"), [("0,resnet,5,j,1", "unknown model 'resnet'"), ("0,mlp,5,j,900", "slots=900")]
)
def test_trace_that_cannot_be_trained(tmp_path, line, says):
    (tmp_path / "t.csv").write_text(f"submit_s,model,iterations,job,gpus\n{line}\n")
    settings = build(Settings, settings_values(tmp_path / "t.csv", tmp_path, ["fifo"]))
    refuses(says, arrivals_of, settings.trace, [get_policy("fifo")])


def summary_of(folder):
    found = json.loads((folder / "summary.json").read_text())
    return found["jobs"], found["jobs_failed"], found["jobs_unfinished"]


def read(work, what):
    with contextlib.closing(Journal(work / "journal.sqlite")) as journal:
        return what(journal)


def broken_off(folder, iterations):
    """Results and work folder of a run of two jobs, killed once the first was launched. Agents pretend."""
    results = folder / "r"
    process = warm.Popen([sys.executable, SCRIPT, str(trace_of(folder, 2, iterations)), str(results), "fifo"])
    try:
        work = wait_until(lambda: list(results.glob("small/*/*/controller.json")), 240)[0].parent
        wait_until(lambda: any(each.launched for each in read(work, Journal.runs)), 240)
    finally:
        process.kill()
        process.wait(30)
    return results, work


def test_losses_and_evaluations_count_the_later_run_of_a_step(tmp_path):
    folder, losses, metrics = tmp_path / "jobs" / "3", tmp_path / "losses.parquet", tmp_path / "metrics.parquet"
    folder.mkdir(parents=True)
    rows = "0,8,1,2.5,.1,0\n1,8,1,2.4,.1,0\n1,8,1,2.3,.1,1\n2,8"
    (folder / "steps.csv").write_text("step,batch,rate,loss,seconds,run\n" + rows)
    write_recorded(tmp_path / "jobs", "steps.csv", losses)
    table = pq.read_table(losses).to_pydict()
    assert (table["loss"], table["job_id"]) == ([2.5, 2.3], [3, 3])
    write_recorded(tmp_path / "jobs", "evaluations.csv", metrics)
    assert not metrics.exists()
    rows = "4,loss,2.5,0\n4,loss,2.25,1\n4,loss,9.0,0\n4,f1,0.5,1\n8,lo"
    (folder / "evaluations.csv").write_text("step,metric,value,run\n" + rows)
    write_recorded(tmp_path / "jobs", "evaluations.csv", metrics)
    expected = {"job_id": [3, 3], "step": [4, 4], "metric": ["loss", "f1"], "value": [2.25, 0.5], "run": [1, 1]}
    assert pq.read_table(metrics).to_pydict() == expected


def nodes_of(*slots, gpu_type="cpu"):
    return Cluster(tuple(NodeType(f"{gpu_type}-{at}", gpu_type, 1, each) for at, each in enumerate(slots)))


def test_facts_are_on_nodes_as_large_as_each_ever_was(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite")

    def sizes(*slots):
        enter(journal, nodes_of(*slots))
        return [each.gpus_per_node for each in whole_cluster(journal).node_type_of]

    assert sizes(4) == [4]
    assert sizes(2, 2) == [2, 2]  # nothing was on the node of four yet
    journal.fact(0.0, int(Kind.START), 0, 2, ((0, 0b11),))
    assert sizes(1) == [2, 2]
    assert sizes(3, 1, 1) == [3, 2, 1]
    assert sizes(3) == [3, 2, 1]
    with pytest.raises(InputError, match="node 1 has h100 now, and had cpu"):
        enter(journal, Cluster((*nodes_of(3).node_types, NodeType("h", "h100", 1, 8))))


# With real workers: a failed job and a broken-off run go on where they were, weights come out, the rest goes


def steps(work):
    return [(int(row["step"]), int(row["run"])) for row in steps_of(work / "jobs" / "0")]


def test_a_failed_job_is_retried_its_run_resumed_and_its_weights_exported(tmp_path):
    results, note = tmp_path / "r", tmp_path / "note"
    arguments = {"way": "obey", "at": 12, "pause_s": 0.02, "note": str(note)}
    job = {"class": f"{JOBS}:Breaking", "name": "fickle", "arguments": arguments, "initial_batch": 8, "work": 20}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    serve = ("serve=true", "policy=[fifo]", f"results_dir={results}", "backend.options.slots=1", "figures=false")
    serve += ("round_s=0.2", "checkpoint_interval_s=0.05", "keep_checkpoints=3", "hang_s=200")
    with Service(results) as service:
        service.start(*serve)
        answer("submit", tmp_path / "job.yaml", "--dir", results)
        service.until(lambda: list(results.glob("served/*/fifo-0.work/jobs/0/checkpoints/step-*")))
        note.write_text("fail\n")
        service.until(lambda: service.jobs()["fickle"]["state"] == "failed")
        assert answer("retry", "fickle", "--dir", results) == "job 0 (fickle) is waiting\n"
        service.until(lambda: (job := service.jobs()["fickle"])["state"] == "failed" and job["restarts"] == 1)
        assert service.leave() == SOME_FAILED
        work = results / "served" / "latest" / "fifo-0.work"
        assert {run for step, run in steps(work) if step == 1} == {0}, "it began again from step 0"
        note.write_text("go on\n")
        assert f"python -m synergy_exec resume {work.resolve()}" in answer("retry", "fickle", "--dir", results)
        service.start("resume", "--dir", results)
        service.until(lambda: service.jobs()["fickle"]["state"] == "done")
        assert service.leave() == 0
    trained = steps(work)
    assert {step for step, _ in trained} == set(range(1, 21))
    assert next(step for step, run in trained if run == 2) > 1
    assert summary_of(results / "served" / "latest" / "fifo-0") == (1, 0, 0)
    assert len(list(results.glob("served/*-*_*"))) == 1
    refused = typed("resume", work)
    assert (refused.returncode, "has ended" in refused.stderr) == (2, True)

    out = tmp_path / "fickle.safetensors"
    assert " 2 tensors, 10 numbers, of job fickle at step 20" in answer("export", "fickle", "--dir", work, "--out", out)


def test_a_broken_off_run_is_resumed_without_retyping_the_command(tmp_path):
    """Its trace, its policy and its keys are those that it was started with; only the agents are real ones now."""
    results, work = broken_off(tmp_path, 8)
    ended = typed("resume", "--dir", results, "host=localhost", "retries=9")
    assert ended.returncode == 0, ended.stderr
    settings = read(work, Journal.meta)["settings"]
    assert [settings[each] for each in ("host", "retries", "hang_s")] == ["localhost", 9, 60.0]
    assert summary_of(results / "small" / "latest" / "fifo-0") == (2, 0, 0)
    assert list(results.glob("small/*-*_*/*.work")) == [work]
    assert typed("resume", "--dir", results).returncode == 2
