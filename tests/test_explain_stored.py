"""What `synergy_sim.explain` says of a stored run agrees with the run: order, reasons, and what came of a job."""

import json
from dataclasses import replace

import numpy as np
import pytest
from jobs import cluster, random_workload, workload

from synergy_core.catalog.transfer import run_time_ratio
from synergy_core.cluster import Cluster, NodeType
from synergy_core.policies import AllocationPolicy, get_policy
from synergy_runs.log import Kind
from synergy_runs.results import write_run
from synergy_runs.stored import read_run
from synergy_sim.answer import answer
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.explain import main
from synergy_sim.facts import COLUMNS, Facts
from synergy_sim.hardware import speeds
from synergy_sim.run import simulate_all
from synergy_sim.simulate import simulate
from synergy_sim.standing import ordered

NINE = ["fifo", "backfill", "easy", "sjf", "srtf", "las", "tiresias", "themis", "qssf"]


def stored(tmp_path, work, machines, name, restart_s=30.0, **parameters):
    """The facts of a run as they lie on disk."""
    policy, costs = get_policy(name).with_parameters(**parameters), Costs(restart_s=restart_s)
    write_run(simulate(work, machines, policy, ExecutionModel(costs)), tmp_path / name, "")
    run = read_run(tmp_path / name)
    decided_s = run.decisions("time_s")["time_s"]
    event_driven = not isinstance(policy, AllocationPolicy)
    jobs = run.jobs(*COLUMNS)
    rates = speeds(machines, np.unique(jobs["gpus"]).tolist(), work.timed_on)
    costs_of = lambda model: costs  # noqa: E731
    return Facts(policy, machines, jobs, run.events(), decided_s, costs_of, event_driven, speeds=rates)


def decisions(facts):
    """(time, rows before it, rows after it) of every decision that started or stopped somebody."""
    events = facts.events
    decides = np.isin(events.kind, (Kind.START, Kind.STOP))
    row = 0
    while row < len(decides):
        last = row
        while last < len(decides) and decides[last] and events.time_s[last] == events.time_s[row]:
            last += 1
        if last > row:
            yield float(events.time_s[row]), row, last
        row = max(last, row + 1)


def who_runs(facts, moment):
    """By a plain walk over the reconstructed order, with GPUs only counted; `job_id`s."""
    policy, order = facts.policy, ordered(facts.policy, facts.cluster, moment)[0]
    capacity = facts.cluster.virtual_clusters or {"": facts.cluster.gpus}
    left = dict(capacity)
    lanes = {job.job_id: job.virtual_cluster if facts.cluster.virtual_clusters else "" for job in order}
    runs = set()
    if not getattr(policy, "preemptive", True):
        for job in moment.running.values():
            left[job.virtual_cluster if facts.cluster.virtual_clusters else ""] -= job.gpus
            runs.add(job.job_id)
    heads = {}
    for job in order:
        lane = lanes[job.job_id]
        head = heads.get(lane)
        if head is not None and (policy.backfill == "none" or not may_fill(job, head, left[lane])):
            continue
        if job.gpus <= left[lane]:
            left[lane] -= job.gpus
            runs.add(job.job_id)
            if head is None:
                continue
            head["extra"] -= job.gpus if job.estimate_s > head["window_s"] else 0
        elif head is None and not getattr(policy, "preemptive", True) and policy.backfill != "greedy":
            heads[lane] = promise(moment, order, runs, job, left[lane], lane, facts)
    return runs


def promise(moment, order, runs, head, free, lane, facts):
    """EASY's shadow time of a head that does not fit, and what is free then beyond its need."""
    mine = [job for job in moment.running.values() if not facts.cluster.virtual_clusters or job.virtual_cluster == lane]
    ends = [(late(job.settled_s + job.estimate_s, moment.now_s), job.gpus) for job in mine]
    fresh = [job for job in order if job.job_id in runs and job not in mine]
    fresh = [job for job in fresh if not facts.cluster.virtual_clusters or job.virtual_cluster == lane]
    ends += [(late(moment.now_s + job.estimate_s, moment.now_s), job.gpus) for job in fresh]
    window_s = 0.0
    for end_s, gpus in sorted(ends):
        if free >= head.gpus and end_s - moment.now_s > window_s:
            break
        free, window_s = free + gpus, max(window_s, end_s - moment.now_s)
    return {"window_s": window_s, "extra": free - head.gpus}


def late(end_s, now_s):
    more_s = 0.0
    while end_s + more_s <= now_s:
        more_s = 2 * more_s or 60.0
    return end_s + more_s


def may_fill(job, head, left):
    return job.gpus <= left and (job.estimate_s <= head["window_s"] or job.gpus <= head["extra"])


@pytest.mark.parametrize("jobs", [60, pytest.param(150, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("quotas", [{}, {"a": 16, "b": 8, "c": 8}])
@pytest.mark.parametrize("name", [*NINE, "mlfq", "tiresias-promoting"])
def test_reconstructed_order_decides_what_the_run_decided_at_every_instant(name, quotas, jobs, tmp_path):
    made = random_workload(6, jobs, sizes=(1, 2, 4, 8), mean_gap_s=120.0)
    rows = list(zip(made.submit_time_s.tolist(), made.gpus.tolist(), made.duration_s.tolist(), strict=True))
    estimates = [each * (0.02 if i % 6 == 0 else 1.0) for i, each in enumerate(made.estimate_s.tolist())]
    work = workload(rows, tenants=["abc"[i % 3] for i in range(jobs)], estimates=estimates)
    parameters = {"promote_knob": 0.3} if name.endswith("-promoting") else {}
    name = name.removesuffix("-promoting")
    facts = stored(tmp_path, work, cluster(4, virtual_clusters=quotas), name, **parameters)
    found = list(decisions(facts))
    assert len(found) > jobs / 2
    for time_s, before, after in found:
        if isinstance(facts.policy, AllocationPolicy):
            before = after  # its decision hangs on no one's running
        assert who_runs(facts, facts.at(time_s, before)) == set(facts.at(time_s, after).running), time_s
    for time_s in facts.decided_s.tolist():
        assert who_runs(facts, facts.at(time_s)) == set(facts.at(time_s).running), time_s


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
                ends_s = facts.at(time_s, row + 1).running[job_id].remaining_s
                assert ends_s == pytest.approx(delay_s + left_s / rates[on], abs=1e-3), number
                seen.add(on)
                began_s = time_s + delay_s
            elif kind == Kind.STOP:
                left_s -= max(0.0, time_s - began_s) * rates[on]
        moved += len(seen) > 1
    assert moved >= 3


@pytest.mark.parametrize("name", NINE)
def test_every_job_can_be_asked_about_at_any_time_and_a_reason_is_given_where_it_waits(name, tmp_path):
    facts = stored(tmp_path, random_workload(7, 60, sizes=(1, 2, 4, 8), mean_gap_s=40.0), cluster(2), name)
    random = np.random.default_rng(0)
    seen = set()
    for job_id in range(60):
        submit_s = float(facts.jobs["submit_time_s"][job_id])
        for at_s in (submit_s, submit_s + float(random.integers(1, 20_000))):
            told = answer(facts, job_id, at_s)
            seen.add(told.state)
            assert (told.state == "waiting") == bool(told.why)
            assert (told.state == "running") == bool(told.placed)
            assert all(len(line) <= 80 for line in told.text().splitlines())
            assert json.loads(json.dumps(told.as_dict()))["state"] == told.state
    assert seen == {"waiting", "running", "ended"}


def told_of(tmp_path, rows, name, job_id, at_s, machines=None, *, tenants=None, estimates=None, **parameters):
    work = workload(rows, tenants=tenants, estimates=estimates)
    facts = stored(tmp_path, work, machines or cluster(1), name, 0.0, **parameters)
    return answer(facts, job_id, at_s)


def test_head_of_a_strict_queue_is_named_and_so_is_who_made_room(tmp_path):
    told = told_of(tmp_path, [(0, 6, 3_600), (60, 8, 3_600), (120, 1, 60)], "fifo", 2, 600.0)
    assert (told.state, told.place, told.of) == ("waiting", 2, 2)
    assert told.why == ("Job 1 (8 GPUs), the first that waits, does not fit, and nobody overtakes it.",)
    assert told.free == {0: 2}
    assert told.after.text() == "started at 2.00 h on node 0: job 1 (8 GPUs) ended"


def test_reservation_that_a_job_would_break_is_named_with_its_time(tmp_path):
    told = told_of(tmp_path, [(0, 6, 3_600), (60, 8, 3_600), (120, 1, 7_200)], "easy", 2, 600.0)
    (why,) = told.why
    assert "Job 1 (8 GPUs), the first that waits, is promised its GPUs by 1.00 h" in why
    assert "declared to run 2.0 h, would still hold GPUs that it needs" in why


def test_too_few_gpus_are_counted(tmp_path):
    told = told_of(tmp_path, [(0, 6, 3_600), (60, 4, 3_600)], "backfill", 1, 600.0)
    assert told.why == ("Too few GPUs are free: 2; it needs 4.",)


def test_gpus_that_lie_apart_are_told_from_too_few(tmp_path):
    rows = [(0, 5, 3_600), (0, 5, 3_600), (0, 5, 3_600), (60, 9, 60)]
    told = told_of(tmp_path, rows, "backfill", 3, 600.0, cluster(3, placement="consolidate"))
    (why,) = told.why
    assert why.startswith("Enough GPUs are free, but they lie apart (9 GPUs, on 3 nodes: 3 + 3 + 3)")


def test_quota_of_its_tenant_is_named(tmp_path):
    machines = cluster(2, virtual_clusters={"a": 8, "b": 8})
    told = told_of(tmp_path, [(0, 6, 3_600), (60, 4, 3_600)], "sjf", 1, 600.0, machines, tenants=["a", "a"])
    assert told.why == ("Quota: of its tenant's 8 GPUs (a), 6 are held by jobs before it; it needs 4.",)


def test_who_stopped_a_job_is_named_and_its_key_is_in_words(tmp_path):
    told = told_of(tmp_path, [(0, 8, 3_600), (600, 4, 60)], "srtf", 0, 630.0)
    assert (told.state, told.key, told.place) == ("waiting", "remaining 50.0 min", 2)
    assert told.before[-1].text() == "stopped at 0.17 h: job 1 (4 GPUs) took its GPUs"
    assert told.why == ("Too few GPUs are left by jobs ahead of it: 4; it needs 8.",)
    told = told_of(tmp_path, [(0, 8, 7_200), (600, 8, 60)], "tiresias", 0, 610.0)
    assert told.key == "queue 2 of 3 since 0.11 h, attained 1.33 GPU-h"


def test_round_that_decided_is_named_and_a_job_that_came_later_waits_for_the_next(tmp_path):
    rows = [(0, 8, 7_200), (400, 8, 600)]
    assert told_of(tmp_path, rows, "themis", 1, 500.0).why == (
        "Decisions are taken once a round; the last was taken at 0.10 h, and it waits for the next.",
    )
    told = told_of(tmp_path, rows, "themis", 0, 1_000.0)
    assert (told.state, told.decided_s) == ("waiting", 720.0)
    assert told.key == "ρ 0.50"  # (720 + 6,480) ÷ (7,200 × 2): two jobs of 8 GPUs on 8
    assert "in the round of 0.20 h" in told.text()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two policies run by the command on a log that is gone afterwards."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from synergy_runs.resources import conf_folder
    from synergy_runs.settings import build
    from synergy_sim.settings import Settings

    folder = tmp_path_factory.mktemp("explain")
    log = folder / "jobs.csv"
    times = ["2026-01-05 07:00:00", "2026-01-05 07:01:00", "2026-01-05 07:02:00"]
    rows = [f"{job},{at},{rest},x" for job, at, rest in zip("abc", times, ("3600,6", "3600,8", "60,1"), strict=True)]
    log.write_text("\n".join(["job,submit_time,duration_s,gpus,virtual_cluster", *rows, ""]))
    overrides = ["+trace=file", f"trace.path={log}", "policy=[fifo,tiresias]", "cluster.nodes=1", "figures=false"]
    quotas = ["cluster.virtual_clusters={x: 8}", "progress=false"]
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        values = OmegaConf.to_container(compose("config", [*overrides, *quotas]), resolve=True)
    simulate_all(build(Settings, values), values, folder / "out", say=False)
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
    assert "runs since 0.00 h (2026-01-05 07:00:00) on node 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nobody"], "unknown job 'nobody'"),
        (["c", "--at", "1m"], "--at 1m: job c was only submitted at 120 s."),
        (["c", "--at", "noon"], "expected a length of time such as 90s, 30m or 2h"),
        (["c", "--json", "/nowhere/why.json"], "/nowhere/why.json: No such file or directory."),
    ],
)
def test_what_cannot_be_explained_is_said_in_a_sentence(results, arguments, sentence, capsys):
    assert main([str(results / "fifo-0"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error


def test_a_reader_that_leaves_is_not_told_of_a_file(results, capsys, monkeypatch):
    def left(text):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout.write", left)
    with pytest.raises(BrokenPipeError):
        main([str(results / "fifo-0"), "c"])
    assert capsys.readouterr().err == ""


def test_folder_without_a_run_is_said_so(tmp_path, capsys):
    assert main([str(tmp_path), "0"]) == 2
    assert "expected the folder of a finished run" in capsys.readouterr().err
