"""The command line as a person uses it: what works, what is refused and how, and what is left behind."""

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from synergy_core import cli as exits
from synergy_core.errors import unknown
from synergy_exec import __main__ as executor
from synergy_exec.settings import EXECUTOR
from synergy_runs.inputs.command_line import prepared, text_asked_for
from synergy_runs.inputs.keys import keys
from synergy_runs.outputs.results import main as main_of_results
from synergy_sim import __main__ as simulator
from synergy_sim.settings import SIMULATOR, SimulatorSettings

POLLUX = "name,time,application,num_replicas,batch_size\n"


def test_results_are_left_where_the_command_was_typed(tmp_path, typed):
    done = typed("+trace=philly", "trace.window=3h", "policy=[fifo,las]", "figures=false")
    assert done.returncode == 0, done.stderr
    assert "fifo" in done.stdout
    assert "not the real trace" in done.stderr
    assert "not a terminal" in done.stderr  # why there is no progress bar
    assert {path.name for path in tmp_path.iterdir()} == {"results"}
    for policy in ("fifo", "las"):
        folder = tmp_path / "results" / "philly" / "latest" / f"{policy}-0"
        names = {path.name for path in folder.iterdir()}
        facts = {"jobs.parquet", "rounds.parquet", "events.parquet", "training.parquet"}
        assert names == {*facts, "summary.json", "config.yaml"}
        assert json.loads((folder / "summary.json").read_text())["policy"] == policy


def test_runs_of_a_sweep_that_can_be_are_collected_though_others_are_refused(tmp_path, typed):
    (tmp_path / "log.csv").write_text("submit_time,duration_s,gpus\n0,100,16\n")
    swept = ("policy=fifo,srtf", "cluster.nodes=2,1", "hydra/launcher=basic")
    done = typed("-m", "+trace=file", "trace.path=log.csv", "figures=false", *swept)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("synergy_sim: 2 of 4 runs were refused; policy=fifo cluster.nodes=1: ")
    table = pq.read_table(next(tmp_path.glob("results/sweeps/*/comparison.parquet")))
    assert table["policy"].to_pylist() == ["fifo", "srtf"]
    assert "collected: " in done.stdout


def test_memory_that_cannot_suffice_is_refused_at_once(tmp_path):
    bytes_ = 500_000_000
    done = subprocess.run(
        [sys.executable, "-m", "synergy_sim", "+trace=philly"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_)),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert {"0.5", "1"} < set(done.stderr.split())
    assert "ulimit -v" in done.stderr
    assert "figures=false" in done.stderr


def lack_memory():
    raise MemoryError


def lack_a_library():
    raise ImportError("libarrow.so: failed to map segment from shared object")


def end_as_openblas_does():
    os._exit(1)


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("fault", [lack_memory, lack_a_library, end_as_openblas_does, be_killed])
def test_too_little_memory_for_a_policy_ends_with_a_sentence(fault, typed, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("synergy_sim.run.simulate", lambda *_, **more: fault())
    done = typed("+trace=philly", "trace.window=1h", "policy=[fifo,las]", "figures=false")
    assert done.returncode == 2
    assert "too little memory" in done.stderr.splitlines()[-1]


def test_settings_of_a_run_are_shown_without_starting_it(tmp_path, typed):
    done = typed("+trace=philly", "cluster.nodes=7", "testbed.restart_s=5", "--cfg=job")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["trace"]["name"], shown["cluster"]["nodes"], shown["restart_s"]) == ("philly", 7, 5)
    assert not list(tmp_path.iterdir())


def test_help_names_every_key(typed):
    done = typed("--help")
    assert done.returncode == 0
    for each in keys(SimulatorSettings):
        assert each.name in done.stdout
    assert "srtf*" in done.stdout


def test_the_configuration_page_is_what_both_programs_print():
    """To write it: (python -m synergy_sim --help=markdown; python -m synergy_exec --help=markdown) > PAGE"""
    stored = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
    printed = [
        text_asked_for(program, ["--help=markdown"], each.usage, each.page)
        for program, each in ((SIMULATOR, simulator), (EXECUTOR, executor))
    ]
    assert stored.read_text(encoding="utf-8") == "".join(printed)


def test_trace_works_with_and_without_a_plus():
    assert prepared(["trace=philly"], SIMULATOR) == prepared(["+trace=philly"], SIMULATOR) == ["+trace=philly"]


def test_impossible_rows_of_both_kinds_stop_the_run_together_or_are_skipped_and_counted(tmp_path, typed):
    log = tmp_path / "log.csv"
    log.write_text("submit_time,duration_s,gpus,gpu_type\n0,100,99,v100\n5,-1,1,v100\n20,50,1,h100\n30,9,2,v100\n")
    common = ("+trace=file", f"trace.path={log}", "cluster.nodes=2", "policy=fifo", "figures=false")
    stopped = typed(*common)
    assert stopped.returncode == 2
    for said in (
        "3 impossible rows",
        "line 2: requests 99 v100; this cluster has 16",
        "line 3, duration_s",
        "line 4: requests 1 h100; this cluster has none",
        "h100 (1 jobs)",
        "node_types",
        "trace.bad_rows=skip",
    ):
        assert said in stopped.stderr
    assert not list(tmp_path.rglob("summary.json"))
    skipped = typed(*common, "trace.bad_rows=skip", "cluster.ignore_gpu_types=true")
    assert skipped.returncode == 0, skipped.stderr
    summary = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert (summary["jobs"], summary["bad_rows"]) == (2, 2)


def test_interrupt_leaves_whole_results_only(tmp_path, capsys):
    typed = ("experiment=classical", "trace.window=30d", "figures=false", f"results_dir={tmp_path}")
    process = subprocess.Popen(
        [sys.executable, "-m", "synergy_sim", *typed, "policy=[fifo,themis]"],  # which takes ten times as long
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"},
        # Shells start background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("philly_classical/*/[!.]*/summary.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "interrupted" in said
    assert "Traceback" not in said
    (whole,) = tmp_path.rglob("summary.json")
    (folder,) = (tmp_path / "philly_classical").iterdir()
    assert {path.name for path in folder.iterdir()} == {"run.yaml", whole.parent.name}
    assert main_of_results([str(tmp_path)]) == 0
    assert "incomplete (ended early)" in capsys.readouterr().out


def test_job_list_of_training_jobs_runs_under_policies_that_tune_and_those_that_do_not(tmp_path, typed):
    log = tmp_path / "jobs.csv"
    log.write_text(POLLUX + "a,0,cifar10,2,512\nb,0,ncf,1,1024\nc,90,cifar10,4,1024\n")
    done = typed(
        *("experiment=sia_sosp23", f"trace.path={log}", "policy=[fifo,optimus,gavel,sia,synergy]"),
        *("cluster=homogeneous", "same_information=false", "figures=false"),
    )
    assert done.returncode == 0, done.stderr
    summaries = [json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")]
    assert {each["policy"] for each in summaries} == {"fifo", "optimus", "gavel", "sia", "synergy"}
    assert {each["jobs"] for each in summaries} == {3}


def test_any_log_runs_under_a_policy_that_reads_goodput(typed):
    common = ("trace.window=2017-10-09/6h", "trace.sample=0.2", "figures=false")
    done = typed("+trace=philly", "policy=[srtf,synergy]", "information=own", *common)
    assert done.returncode == 0, done.stderr
    assert all(model in done.stdout for model in ("cifar10", "bert", "yolov3"))


@pytest.mark.parametrize(
    ("typed", "unbuffered"),
    [("synergy_sim --help", ()), ("synergy_sim --help", ("-u",)), ("synergy_sim.traces list", ("-u",)),
     ("synergy_sim.explain --help", ()), ("synergy_core --help", ()), ("synergy_exec --help", ()),
     ("synergy_sim.generators --help", ())],
)  # fmt: skip
def test_output_that_nobody_reads_ends_without_a_traceback(typed, unbuffered, tmp_path):
    """As after `| head`, once it has seen enough. argparse, where it prints itself, takes no offence."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, *unbuffered, "-m", *typed.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    os.close(writer)
    assert done.stderr == ""
    assert done.returncode == 141 or (done.returncode == 0 and typed.endswith("--help"))


@pytest.mark.parametrize(("program", "encoding"), [("synergy_sim", "ascii"), ("synergy_exec", "cp1252")])
def test_help_is_readable_without_utf8(program, encoding, tmp_path):
    command = [sys.executable, "-m", program, "--help"]
    done = subprocess.run(
        command, capture_output=True, cwd=tmp_path, env={**os.environ, "PYTHONIOENCODING": encoding}, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert "synergy" in done.stdout.decode(encoding)


def test_an_error_lists_no_more_names_than_can_be_read():
    message = str(unknown("job", "job-7x", [f"job-{each}" for each in range(5_000)]))
    assert "'job-7'" in message
    assert len(message) < 2_000


@pytest.mark.parametrize(
    ("text", "encoding", "expected"),
    [("99 ρ ≥ 2 × 8 · é", "ascii", b"99 rho >= 2 x 8 - e"), ("2 × 8 · ρ…", "cp1252", b"2 \xd7 8 \xb7 rho\x85"),
     ("σ² 中", "ascii", b"sigma2 ?"), ("σ²", "utf-8", "σ²".encode())],
)  # fmt: skip
def test_signs_that_a_terminal_lacks_are_spelt(text, encoding, expected, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, write_through=True))
    exits.run("program", lambda: print(text, end=""), interrupted="")
    assert raw.getvalue() == expected
