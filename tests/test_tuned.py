"""Jobs whose users typed the best batch, and arrivals at a stated offered load."""

import csv
import json
import re

import numpy as np
import pytest
from training_jobs import CATALOG, t4s, training

from synergy_core.errors import InputError
from synergy_runs.inputs.requested import policies_of
from synergy_sim.assignment import packed_as_requested, tuned

NAMES = ("cifar10", "ncf", "deepspeech2", "bert", "yolov3", "imagenet")
PLAIN = ("figures=false", "progress=false", "truth.measured=false")


def run(typed, folder, *words):
    """The console output of a run, and its summaries by policy."""
    said = typed(*words, *PLAIN, f"results_dir={folder}")
    assert said.returncode == 0, said.stderr
    paths = sorted(folder.glob("*/latest/*/summary.json"))
    return said.stdout, {path.parent.name.rpartition("-")[0]: json.loads(path.read_text()) for path in paths}


@pytest.fixture
def log(tmp_path):
    """A day of jobs of an hour, one every ten minutes, on 1 to 8 GPUs."""
    path = tmp_path / "jobs.csv"
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["submit_time", "duration_s", "gpus"])
        rows.writerows([600 * at, 3_600, 1 << at % 4] for at in range(144))
    return path


@pytest.mark.parametrize("gpus", [1, 4, 8])
def test_no_other_batch_ends_a_tuned_job_notably_sooner(gpus):
    made = training([(0, gpus, 1_000, name) for name in NAMES], t4s(2, 8))
    best = tuned(made, t4s(2, 8), CATALOG)
    node_gpus, gpu_type = packed_as_requested("", gpus, t4s(2, 8))
    for row, name in enumerate(best.jobs["model"]):
        app = CATALOG.application(name)
        most = min(app.max_batch, gpus * app.local_batches(gpu_type, node_gpus)[1])
        others = np.unique(np.linspace(app.initial_batch, max(most, app.initial_batch), 300).astype(int)).tolist()
        fastest_s = min(CATALOG.requested_run_s(name, gpu_type, node_gpus, each) for each in others)
        assert (
            CATALOG.requested_run_s(name, gpu_type, node_gpus, int(best.jobs["global_batch"][row])) <= 1.02 * fastest_s
        )


def test_a_tuned_row_is_compared_on_the_same_jobs_and_the_gain_is_split(tmp_path, typed, log):
    policies = "policy=[fifo,fifo(batch=tuned),tiresias(batch=tuned),synergy]"
    out, found = run(typed, tmp_path, "+trace=file", f"trace.path={log}", "cluster.nodes=2", policies)
    tuned_run, plain = found["fifo-tuned"], found["fifo"]
    assert tuned_run["trace_sha256"] == plain["trace_sha256"]
    assert tuned_run["run_time_ratio"] < 1.0 == pytest.approx(plain["run_time_ratio"])
    total, *parts = re.search(r"Of these (\d+) points,(.*?)\.\s", " ".join(out.split()), re.DOTALL).groups()
    assert sum(int(each.replace("−", "-")) for each in re.findall(r"(−?\d+) from", parts[0])) == pytest.approx(
        int(total), abs=2
    )


@pytest.mark.parametrize("text", ["synergy(batch=tuned)", "srtf(batch=tuned)", "easy(batch=tuned)", "fifo(batch=big)"])
def test_batches_are_tuned_only_for_policies_that_keep_them_and_read_no_run_time(text):
    with pytest.raises(InputError, match="tuned"):
        policies_of([text], {}, None)


@pytest.mark.parametrize(("text", "round_s"), [("gavel(round_s=60)", 60.0), ("gavel", 360.0)])
def test_brackets_set_the_length_of_a_policy_s_rounds(text, round_s):
    assert policies_of([text], {}, None)[text].round_s == round_s
    assert policies_of(["gavel"], {"gavel": {"round_s": 90.0}}, None)["gavel"].round_s == 90.0
    for wrong in ("gavel(round_s=0)", "fifo(round_s=60)", "gavel(round_s=true)"):
        with pytest.raises(InputError, match="round"):
            policies_of([wrong], {}, None)


@pytest.mark.parametrize("load", [0.3, 1.2])
def test_arrivals_offer_the_stated_load(tmp_path, typed, log, load):
    words = ("policy=fifo", f"cluster.offered_load={load}", "cluster.nodes=2")
    _, found = run(typed, tmp_path, "+trace=file", f"trace.path={log}", *words)
    assert found["fifo"]["offered_load_fraction"] == pytest.approx(load, rel=1e-4)


def test_two_keys_for_one_arrival_rate_are_refused(typed, log):
    said = typed("+trace=file", f"trace.path={log}", "policy=fifo", "cluster.offered_load=1", "cluster.load=2")
    assert said.returncode == 2
    assert {"cluster.load=2", "cluster.offered_load=1"} <= set(re.split(r"[ :]", said.stderr))


def test_of_two_windows_the_first_is_for_a_log_and_the_second_for_drawn_jobs(tmp_path, typed, log):
    windows = "trace.window=2h or 1d"
    _, found = run(
        typed, tmp_path / "log", "+trace=file", f"trace.path={log}", "policy=fifo", "cluster.nodes=2", windows
    )
    assert found["fifo"]["jobs"] == 12
    own = ("+trace=philly", "trace.find=[]", "policy=fifo", "trace.carry_in=false", "trace.models=none")
    drawn = {
        each: run(typed, tmp_path / each, *own, f"trace.window={each}")[1]["fifo"]["jobs"]
        for each in ("2h or 1d", "1d")
    }
    assert len(set(drawn.values())) == 1
