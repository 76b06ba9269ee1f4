"""What a stored run says of its jobs agrees with the run: order, why they wait or were stopped, what came of them."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from composed import composed_values
from jobs import cluster, random_workload, workload
from training_jobs import CATALOG, random_training, t4s, three_types

from synergy_core.performance.catalog import run_time_ratio
from synergy_core.scheduling.decisions.reasons import Stopped, Waiting
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.inputs.keys import build
from synergy_runs.outputs.facts import Kind
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import read_run
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.explain import Answer, Facts, main
from synergy_sim.run import simulate_all
from synergy_sim.settings import SimulatorSettings
from synergy_sim.simulate import simulate

NINE = ["fifo", "backfill", "easy", "sjf", "srtf", "las", "tiresias", "themis", "qssf"]


def stored(tmp_path, work, machines, name, restart_s=30.0, **parameters):
    """The facts of a run as they lie on disk."""
    policy, execution = get_policy(name).with_parameters(**parameters), ExecutionModel(Costs(restart_s=restart_s))
    write_run(simulate(work, machines, policy, execution), tmp_path / name, "")
    return Facts(read_run(tmp_path / name), policy, machines, execution, timed_on=work.timed_on)


LENT = [f"{name}-lent" for name in ("fifo", "backfill", "easy", "sjf", "las", "themis")]


@pytest.mark.parametrize("name", [*NINE, "mlfq", "tiresias-promoting", "fifo-pooled", "srtf-pooled", *LENT])
def test_after_every_decision_whoever_waits_has_a_reason_and_whoever_started_would_have_none(name, tmp_path):
    name, _, how = name.partition("-")
    quotas = {} if how == "pooled" else {"a": 16, "b": 8, "c": 8}
    jobs = 60
    made = random_workload(6, jobs, sizes=(1, 2, 4, 8), mean_gap_s=120.0)
    rows = list(zip(*(made.jobs[each].tolist() for each in ("submit_time_s", "gpus", "duration_s")), strict=True))
    estimates = [each * (0.02 if i % 6 == 0 else 1.0) for i, each in enumerate(made.jobs["estimate_s"].tolist())]
    work = workload(rows, tenants=["abc"[i % 3] for i in range(jobs)], estimates=estimates)
    parameters = {"promote_knob": 0.3} if how == "promoting" else {}
    facts = stored(tmp_path, work, cluster(4, virtual_clusters=quotas, borrowing=how == "lent"), name, **parameters)
    waited = started = 0
    for time_s in facts.decided_s.tolist():
        after = facts.at(time_s)
        waiting = [job for job in after.jobs if not job.running]
        assert all(after.why(job) for job in waiting), time_s
        waited += len(waiting)
        # As soon as the last to start has stopped, it would start again.
        begun = [
            job
            for job in after.running
            if facts.story(job.job_id)[-1][0] >= time_s and job.instants.first_step_s >= time_s
        ]
        for job in begun[-1:]:
            job.stopped(time_s)
            left = [each for each in after.jobs if each.running or each is job]
            assert not replace(after, jobs=left).why(job), (time_s, job)
            started += 1
    assert waited > jobs / 2
    assert started > jobs / 4


def test_a_job_that_moved_between_gpu_types_is_as_far_as_it_was_in_the_run(tmp_path):
    machines = Cluster((NodeType("slow", "v100", 2, 4), NodeType("fast", "h100", 2, 4)))
    work = replace(random_workload(8, 80, sizes=(1, 2, 4), mean_gap_s=60.0), timed_on="v100")
    facts = stored(tmp_path, work, machines, "srtf")
    rates = {"v100": 1.0, "h100": 1.0 / run_time_ratio("v100", "h100").factor}
    moved = 0
    for job_id, left_s in enumerate(facts.jobs["duration_s"].tolist()):
        seen = set()
        for number, (time_s, kind, row) in enumerate(facts.story(job_id)):
            if kind == Kind.START:
                on = machines.node_type_of[int(facts.events.node[row])].gpu_type
                delay_s = 30.0 if seen else 0.0
                (job,) = [each for each in facts.at(time_s).running if each.job_id == job_id]
                assert job.remaining_s == pytest.approx(delay_s + left_s / rates[on], abs=1e-3), number
                seen.add(on)
                began_s = time_s + delay_s
            elif kind == Kind.STOP:
                left_s -= max(0.0, time_s - began_s) * rates[on]
        moved += len(seen) > 1
    assert moved >= 3


@pytest.mark.parametrize("name", NINE)
def test_every_job_can_be_asked_about_at_any_time_and_a_reason_is_given_where_it_waits(name, tmp_path):
    facts = stored(tmp_path, random_workload(7, 25, sizes=(1, 2, 4, 8), mean_gap_s=40.0), cluster(2), name)
    random = np.random.default_rng(0)
    seen = set()
    for job_id, submit_s in enumerate(facts.jobs["submit_time_s"].tolist()):
        for at_s in (submit_s, submit_s + float(random.integers(1, 20_000))):
            told = Answer(facts, job_id, at_s)
            seen.add(told.state)
            assert (told.state == "waiting") == bool(told.reasons)
            assert (told.state == "running") == bool(told.placed)
            assert all(len(line) <= 80 for line in told.text().splitlines())
            assert json.loads(json.dumps(told.as_dict()))["state"] == told.state
    assert seen == {"waiting", "running", "ended"}


def told_of(tmp_path, rows, name, job_id, at_s, machines=None, *, tenants=None, estimates=None, **parameters):
    work = workload(rows, tenants=tenants, estimates=estimates)
    facts = stored(tmp_path, work, machines or cluster(1), name, 0.0, **parameters)
    return Answer(facts, job_id, at_s)


def test_head_of_a_strict_queue_is_named_and_so_is_who_made_room(tmp_path):
    told = told_of(tmp_path, [(0, 6, 3_600), (60, 8, 3_600), (120, 1, 60)], "fifo", 2, 600.0)
    assert (told.state, told.place, told.of) == ("waiting", 2, 2)
    assert [each.kind for each in told.reasons] == [Waiting.BEHIND_HEAD]
    assert "Job 1 (8 GPUs)" in told.reasons[0].text
    assert told.free == {0: 2}
    assert told.after.text() == "started at 2.00 h on node 0: job 1 (8 GPUs) ended"


NINE_APART = cluster(3, placement="consolidate")
TWO_TENANTS = cluster(2, virtual_clusters={"a": 8, "b": 8})


@pytest.mark.parametrize(
    ("rows", "policy", "machines", "kind", "said"),
    [
        (
            [(0, 6, 3_600), (60, 8, 3_600), (120, 1, 7_200)],
            *("easy", None, Waiting.BEHIND_RESERVATION, ("Job 1 (8 GPUs)", "by 1.00 h", "estimated to run 2.0 h")),
        ),
        ([(0, 6, 3_600), (60, 4, 3_600)], "backfill", None, Waiting.NO_FREE_GPUS, ("are free: 2", "needs 4")),
        (
            [(0, 5, 3_600), (0, 5, 3_600), (0, 5, 3_600), (60, 9, 60)],
            *("backfill", NINE_APART, Waiting.FRAGMENTED, ("9 GPUs, on 3 nodes: 3 + 3 + 3",)),
        ),
        (
            [(0, 6, 3_600), (60, 4, 3_600)],
            *("sjf", TWO_TENANTS, Waiting.QUOTA, ("hold 6 of the 8 GPUs", "(a)", "needs 4")),
        ),
    ],
)
def test_the_last_job_waits_for_a_reason_that_names_its_facts(rows, policy, machines, kind, said, tmp_path):
    told = told_of(tmp_path, rows, policy, len(rows) - 1, 600.0, machines, tenants=["a"] * len(rows))
    ((found, text),) = told.reasons
    assert found == kind
    assert all(fact in text for fact in said)


def test_who_stopped_a_job_is_named_and_its_key_is_in_words(tmp_path):
    told = told_of(tmp_path, [(0, 8, 3_600), (600, 4, 60)], "srtf", 0, 630.0)
    assert (told.state, told.key, told.place) == ("waiting", "remaining 50.0 min", 2)
    stop = told.before[-1]
    assert (stop.why, stop.by) == (Stopped.OUTRANKED, "job 1 (4 GPUs) took its GPUs")
    assert Stopped.OUTRANKED.text in stop.text()
    assert told.as_dict()["before"][-1]["why"] == "OUTRANKED"
    assert [each.kind for each in told.reasons] == [Waiting.OUTRANKED]
    told = told_of(tmp_path, [(0, 8, 7_200), (600, 8, 60)], "tiresias", 0, 610.0)
    assert told.key == "queue 2 of 3 since 0.11 h, attained 1.33 GPU-h"


def test_round_that_decided_is_named_and_a_job_that_came_later_waits_for_the_next(tmp_path):
    rows = [(0, 8, 7_200), (400, 8, 600)]
    ((kind, text),) = told_of(tmp_path, rows, "themis", 1, 500.0).reasons
    assert kind == Waiting.NEXT_DECISION
    assert "the last was made at 0.10 h" in text
    told = told_of(tmp_path, rows, "themis", 0, 1_000.0)
    assert (told.state, told.decided_s) == ("waiting", 720.0)
    assert told.key == "ρ 0.50"  # (720 + 6,480) ÷ (7,200 × 2): two jobs of 8 GPUs on 8
    assert "in the round of 0.20 h" in told.text()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two policies run by the command on a log that is gone afterwards."""
    folder = tmp_path_factory.mktemp("explain")
    log = folder / "jobs.csv"
    times = ["2026-01-05 07:00:00", "2026-01-05 07:01:00", "2026-01-05 07:02:00"]
    rows = [f"{job},{at},{rest},x" for job, at, rest in zip("abc", times, ("3600,6", "3600,8", "60,1"), strict=True)]
    log.write_text("\n".join(["job,submit_time,duration_s,gpus,virtual_cluster", *rows, ""]))
    values = composed_values(
        "+trace=file", f"trace.path={log}", "policy=[fifo,tiresias]", "cluster.nodes=1",
        "cluster.virtual_clusters={x: 8}", "figures=false", "progress=false",
    )  # fmt: skip
    simulate_all(build(SimulatorSettings, values), values, folder / "out", say=False)
    log.unlink()
    return folder / "out"


def test_stored_run_is_explained_without_its_log(results, tmp_path, capsys):
    target = tmp_path / "why.json"
    assert main([str(results / "fifo-0"), "c", "--at", "10m", "--json", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "job 2 (c): 1 GPU, tenant x, submitted at 0.03 h (2026-01-05 07:02:00)" in printed
    assert "started at 2.00 h (2026-01-05 09:00:00) on node 0" in " ".join(printed.split())
    assert json.loads(target.read_text())["state"] == "waiting"
    assert main([str(results / "tiresias-0"), "0", "--at", "30s"]) == 0
    assert "has run since 0.00 h (2026-01-05 07:00:00) on node 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nobody"], "unknown job 'nobody'"),
        (["c", "--at", "1m"], "--at 1m: job c was submitted later, at 120 s."),
        (["c", "--at", "noon"], "expected a time since the start, such as 90s, 30m or 2h"),
        (["c", "--json", "/nowhere/why.json"], "/nowhere/why.json: No such file or directory."),
    ],
)
def test_what_cannot_be_explained_is_said_in_a_sentence(results, arguments, sentence, capsys):
    assert main([str(results / "fifo-0"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert main([str(results), *arguments]) == 2  # the folder of no single run
    assert "expected the folder of a finished run" in capsys.readouterr().err


def test_a_reader_that_leaves_is_not_told_of_a_file(results, capsys, monkeypatch):
    def left(text):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout.write", left)
    with pytest.raises(BrokenPipeError):
        main([str(results / "fifo-0"), "c"])
    assert capsys.readouterr().err == ""


def test_without_an_instant_a_job_s_history_is_printed_with_commands_that_can_be_typed(results, tmp_path, capsys):
    target = tmp_path / "history.json"
    assert main([str(results / "fifo-0"), "c", "--json", str(target)]) == 0
    (command,) = [line for line in capsys.readouterr().out.splitlines() if "--at" in line]
    waited, ran = json.loads(target.read_text())["stretches"]
    assert (waited["start_s"], waited["end_s"], waited["gpus"]) == (120, 7_200, 0)
    assert (ran["end_s"], ran["gpus"], ran["gpu_type"], ran["nodes"]) == (7_260, 1, "v100", [0])
    assert main(shlex.split(command.partition("#")[0])[3:]) == 0
    assert "has waited" in capsys.readouterr().out


def test_two_runs_part_where_only_one_stops_the_job(results, tmp_path, capsys):
    target, folders = tmp_path / "parting.json", [str(results / name) for name in ("fifo-0", "tiresias-0")]
    assert main([*folders, "--job", "c", "--json", str(target)]) == 0
    assert capsys.readouterr().out.count("--at 120s") == 2
    told = json.loads(target.read_text())
    assert told["parts_at_s"] == 120  # tiresias stops a longer job for it
    assert [each["policy"] for each in told["runs"]] == ["fifo", "tiresias"]
    assert main([folders[0], folders[0], "--job", "c", "--json", str(target)]) == 0
    assert json.loads(target.read_text())["parts_at_s"] is None
    assert main([*folders, "--job", "c", "--at", "1h"]) == 2


def simulated(name):
    machines = three_types() if name == "sia" else t4s(placement="consolidate") if name == "synergy" else cluster(4)
    if name in ("sia", "synergy"):
        work = random_training(3, 40, machines)
    else:
        work = random_workload(6, 150, sizes=(1, 2, 4, 8), mean_gap_s=60.0)
    return simulate(work, machines, get_policy(name), ExecutionModel(Costs(restart_s=30.0)), truth=CATALOG)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("srtf", {Stopped.OUTRANKED}),
        ("las", {Stopped.OUTRANKED}),
        ("themis", {Stopped.OUTRANKED}),
        ("sia", {Stopped.RESIZED, Stopped.MOVED}),
        ("synergy", {Stopped.RESIZED, Stopped.MOVED}),
    ],
)
def test_reason_of_a_stop_is_what_its_job_does_at_that_instant(name, expected):
    events = simulated(name).events
    assert not events.reason[events.kind != Kind.STOP].any()
    seen = set()
    for row in np.flatnonzero(events.kind == Kind.STOP):
        own = events.job_id == events.job_id[row]
        begun = events.gpus[own & (events.kind == Kind.START) & (events.time_s == events.time_s[row])]
        if not len(begun):
            assert events.reason[row] == Stopped.OUTRANKED
        else:
            assert events.reason[row] == (Stopped.MOVED if begun[0] == events.gpus[row] else Stopped.RESIZED)
        seen.add(Stopped(events.reason[row]))
    assert seen >= expected


def test_stored_events_have_reasons_and_those_of_an_older_version_none(tmp_path):
    done = simulated("srtf")
    write_run(done, tmp_path / "run", "")
    path = tmp_path / "run" / "events.parquet"
    assert read_run(tmp_path / "run").events().reason.tolist() == done.events.reason.tolist()
    pq.write_table(pq.read_table(path).drop_columns("reason"), path)
    older = read_run(tmp_path / "run").events()
    assert not older.reason.any()
    assert replace(older, reason=done.events.reason).digest() == older.digest() == done.events.digest()
