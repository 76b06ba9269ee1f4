"""Decisions carried out over pretended agents: slots, order, losses, failures, remedies, cancellations, resumption."""

from dataclasses import replace
from pathlib import Path

import pytest
from exec.pretended import FakeAgent, execution_of, refuses, staged
from exec.saved import checkpoint_of
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.decisions.reasons import Stopped, Waiting
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.testbed_profiles import (
    NoiseFrom,
    ProfiledCosts,
    ProfiledModel,
    ProfiledRow,
    TestbedProfile,
)
from synergy_exec.controller import api
from synergy_exec.controller.api import history
from synergy_exec.controller.decider import Aside, fitting
from synergy_exec.controller.journal import Journal, retry_in
from synergy_exec.job_file import job_of
from synergy_exec.messages import LOST_PEERS, Launch, Report
from synergy_exec.settings import Settings
from synergy_runs.outputs.facts import Kind

POLICIES = ("fifo", "las", "tiresias", "synergy", "sia", "gavel", "pollux")


@pytest.mark.parametrize("policy", POLICIES)
def test_all_jobs_end_once(tmp_path, policy):
    stage = staged(tmp_path, policy, (2, 2))
    for number in range(8):
        stage.submit(20.0 + 10 * number, slots=1 + number % 3)
        stage.advance(2.0)
    stage.finish()
    assert set(stage.states().values()) == {"done"}
    stage.facts_hold()
    assert stage.finished() == list(range(8))


def test_a_runs_heading_is_in_its_log_before_any_node_is_told_to_launch_it(tmp_path):
    logs = []

    class Reading(FakeAgent):
        def hear(self, message, now_s):
            if isinstance(message, Launch):
                logs.append((Path(message.folder) / "log.txt").read_text())
            return super().hear(message, now_s)

    stage = staged(tmp_path, "fifo", (1, 1), agent=Reading)
    stage.submit(60.0, slots=2)
    stage.decide()
    assert logs == 2 * ["--- run 0\n"]


def test_launch_that_waits_is_superseded(tmp_path):
    stage = staged(tmp_path, "las")
    stage.submit(1e9)
    stage.advance(0.0, 4_000.0)  # it must make room for the next
    (waits,) = stage.submit(10.0)
    stage.decide()
    stage.execution.cancel(waits, stage.now_s)
    stage.advance(1.0, 1.0)
    assert stage.states() == {0: "running", 1: "cancelled"}
    assert stage.agents[0].launched == [0, 0]
    stage.facts_hold()


def test_lost_agent_loses_its_runs_alone_and_gets_no_job_until_it_is_back(tmp_path):
    stage = staged(tmp_path, "fifo", (2, 1))
    stage.submit(60.0, slots=3)
    stage.advance(0.0, 1.0)
    assert stage.states() == {0: "running"}
    gone = stage.lose(1)
    assert not stage.agents[0].runs  # its part was killed
    stage.advance(1.0, 1.0)
    assert stage.states() == {0: "starting"}
    assert stage.agents[0].launched == [0]
    stage.come_back(gone)
    assert stage.agents[0].launched == [0, 0]
    stage.finish()
    assert stage.states() == {0: "done"}
    stage.facts_hold()


def test_reasons_of_stops_are_journaled_and_known_to_the_next_controller(tmp_path):
    stage = staged(tmp_path, "las", (1, 1))
    stage.submit(1e6, 1e6)
    stage.advance(0.0)
    stage.advance(*9 * [600.0])
    stage.submit(1e6)  # it has attained nothing yet
    stage.advance(1.0, 1.0, 1.0)
    (outranked,) = [job for job in stage.execution.jobs.values() if job.stopped_for is not None]
    assert (outranked.stopped_for, outranked.state) == (Stopped.OUTRANKED, "waiting")
    assert [each.kind for each in stage.execution.decider.why_waiting([outranked], stage.now_s)[outranked.job_id]] == [
        Waiting.OUTRANKED
    ]
    (lost,) = [job for job in stage.execution.jobs.values() if job.placement and job.placement[0][0] == 1]
    stage.lose(1)
    assert lost.stopped_for == Stopped.EVICTED
    again = stage.resumed()
    stops = [(fact.job, fact.reason) for fact in again.execution.journal.facts() if fact.kind == Kind.STOP]
    assert stops[:2] == [(outranked.job_id, Stopped.OUTRANKED), (lost.job_id, Stopped.EVICTED)]
    assert again.execution.jobs[outranked.job_id].stopped_for == Stopped.OUTRANKED
    # Runs that a controller leaves behind are lost.
    assert {reason for _, reason in stops[2:]} == {Stopped.CONTROLLER_ENDED}


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_cancelled_wherever_it_is(tmp_path, policy):
    stage = staged(tmp_path, policy)
    running, waiting = stage.submit(1e6, 1e6)
    stage.advance(0.0, 1.0)
    if waiting.state != "waiting":
        running, waiting = waiting, running
    (last,) = stage.submit(20.0)
    for each in (waiting, running):
        stage.execution.cancel(each, stage.now_s)
    stage.deliver()
    refuses("cancelled", stage.execution.cancel, running, stage.now_s)
    stage.finish()
    assert (running.state, waiting.state, last.state) == ("cancelled", "cancelled", "done")
    assert stage.agents[0].launched.count(waiting.job_id) == 0
    stage.facts_hold()


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
def test_a_node_without_an_agent_gets_no_job_until_it_has_one(tmp_path, policy):
    stage = staged(tmp_path, policy, (1, 1))
    execution = stage.execution
    jobs = stage.submit(80.0, 80.0, max_batch=32)
    stage.advance(0.0, 1.0)
    gone = stage.lose(1)
    for _ in range(2):
        execution.leave_out({1}, stage.now_s)
        stage.advance(1.0)
    assert execution.notes == ["node 1 is excluded until its agent connects"]
    assert [job.state for job in jobs].count("waiting") == 1
    assert sum(job.restarts for job in jobs) == 0
    stage.come_back(gone)
    execution.leave_out(set(), stage.now_s)
    stage.finish()
    assert execution.notes[1:] == ["node 1 is used again: its agent has connected"]
    assert stage.states() == {0: "done", 1: "done"}


def test_a_node_whose_device_is_broken_is_left_out_until_its_agent_comes_anew(tmp_path):
    stage = staged(tmp_path, "fifo", (1, 1))
    execution = stage.execution
    stage.submit(80.0, 80.0)
    stage.advance(0.0, 1.0)
    (run,) = stage.agents[1].runs
    stage.ends(1, run, "lost", "uncorrectable ECC error", broken_device=True)
    assert execution.broken_nodes == {1}
    execution.agent_came(1, stage.now_s)
    assert execution.broken_nodes == set()
    assert all(agent.launched for agent in stage.agents.values())
    stage.facts_hold()


def test_a_run_may_be_lost_on_a_node_after_one_that_is_not_used(tmp_path):
    """Failed before, and ended the controller: its place was looked up among the nodes that are left."""
    stage = staged(tmp_path, "fifo", (1, 1))
    execution = stage.execution
    stage.lose(0)
    execution.leave_out({0}, stage.now_s)
    stage.submit(20.0)
    stage.advance(0.0, 1.0)
    (run,) = stage.agents[1].runs
    stage.ends(1, run, "lost", "a peer is gone")
    stage.finish()
    assert stage.states() == {0: "done"}


def test_gpu_types_keep_their_order_and_quotas_fit_into_what_is_left():
    types = NodeType("a", "h100", 1, 2), NodeType("b", "cpu", 1, 2), NodeType("c", "h100", 1, 1)
    aside = Aside(Cluster(types, virtual_clusters={"x": 3, "y": 2}))
    assert len(aside.without({0}, [1])) == 1
    assert aside.cluster.gpu_types == ("h100", "cpu")
    assert aside.placed(((0, 1),)) == ((2, 1),)
    assert aside.cluster.virtual_clusters == {"x": 1, "y": 2}
    assert len(aside.without(set(), [1])) == 1
    assert aside.cluster.virtual_clusters == {"x": 3, "y": 2}
    assert (aside.cluster.gpus, aside.nodes) == (5, frozenset())


def test_what_jobs_ask_for_and_the_last_node_of_a_type_stay():
    cluster = Cluster((NodeType("a", "cpu", 2, 2), NodeType("b", "h100", 1, 1)))
    aside = Aside(cluster)
    assert aside.without({2}, [1]) == []
    assert aside.without({0}, [4]) == []
    assert aside.cluster is cluster
    assert len(aside.without({0, 1}, [2])) == 1
    assert aside.placed(((0, 0b10), (1, 1))) == ((1, 0b10), (2, 1))


# After others, and after thousands


def test_a_job_goes_on_though_one_in_its_after_was_retried_since(tmp_path):
    command = {"command": ["true"]}
    stage = staged(tmp_path, slots=(2,))
    (first,) = stage.submit(1.0, **command)
    stage.advance(0.0, 1.0, 1.0)
    assert first.state == "done"
    (later,) = stage.submit(1e9, after=["0"])
    stage.advance(0.0, 1.0)
    stage.execution.retry(first, stage.now_s, from_start=False)
    (never_started,) = stage.submit(1.0, after=["0"])
    again = stage.resumed()
    assert list(again.execution.held) == [never_started.job_id]
    again.advance(0.0, 1.0)
    assert again.execution.jobs[later.job_id].state == "running"
    again.advance(1.0, 1.0, 1.0)
    assert again.execution.jobs[never_started.job_id].state == "done"


class Unread(dict):
    """Jobs that can be asked for by number alone."""

    def __iter__(self):
        raise AssertionError("every job is looked at")

    keys = values = items = __iter__


def test_jobs_come_and_go_without_a_look_at_those_that_have_ended(tmp_path):
    """Failed before: with 20,000 ended jobs each other one took three times as much of the controller."""
    stage = staged(tmp_path)
    (ended,) = stage.submit(1.0)
    stage.finish()
    stage.execution.jobs = Unread(stage.execution.jobs)
    job = stage.execution.submit("next", replace(ended.file, name="next"), stage.now_s)
    stage.advance(0.0, 1.0, 1.0)
    assert (job.job_id, job.state) == (1, "done")


def test_the_curves_of_an_old_job_are_there_after_many_others(tmp_path, monkeypatch):
    """Failed before: its runs and plans were looked for among the newest of all jobs."""
    monkeypatch.setattr(api, "MAX_FACTS", 6)
    stage = staged(tmp_path)
    for _ in range(5):
        stage.submit(1.0)
        stage.finish()
    told = history(tmp_path, [0])
    assert [batch for _, batch in told["jobs"][0]["batch"]] == [32]
    assert {span["job"] for span in told["spans"]} == {3, 4}


# Losses


def test_lost_without_progress_ends_after_the_retries(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(100.0)
    for losses in range(3):
        stage.decide()
        assert job.state == "starting", losses
        stage.ends(0, job.run, "lost", "rank 0 was killed")
        stage.now_s += 1.0
    assert job.state == "failed"
    assert "3 times" in job.reason
    assert "rank 0 was killed" in job.reason
    assert stage.execution.idle
    stage.facts_hold()


def test_progress_forgives_losses(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(1e9)
    for _ in range(4 * stage.execution.settings.retries):
        assert job.state == "waiting"
        stage.decide()
        stage.advance(1.0, decide=False)
        stage.agents[0].checkpoints[0] = stage.agents[0].runs[job.run].done
        stage.ends(0, job.run, "lost", "rank 0 was killed")
    assert job.state == "waiting"


def test_after_a_loss_steps_and_work_are_those_of_the_checkpoint(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(1e6)
    stage.advance(0.0, 5.0)
    assert job.seen.step > 0
    stage.ends(0, job.run, "lost", "rank 0 was killed")
    assert (job.seen.step, job.seen.samples, job.seen.work) == (0, 0, 0.0)


def test_the_peers_of_a_killed_worker_do_not_hide_why(tmp_path):
    stage = staged(tmp_path, "fifo", (1, 1), settings=Settings(retries=0))
    (job,) = stage.submit(100.0, slots=2)
    stage.advance(0.0)
    number = job.run
    for node, why in ((1, f"rank 1 {LOST_PEERS}"), (0, "rank 0 was killed by signal 9")):
        stage.ends(node, number, "lost", why)
    assert job.state == "failed"
    assert "rank 0 was killed by signal 9" in job.reason


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_lost_agent_counts_against_a_job_that_was_alone_there(tmp_path, jobs):
    """One that takes its agent down ends like any other that is lost too often; in company nobody is to blame."""
    stage = staged(tmp_path, "fifo", (2,), settings=Settings(retries=2))
    stage.submit(*[1e6] * jobs)
    for _ in range(4):
        stage.advance(0.0)
        stage.come_back(stage.lose(0))
    assert set(stage.states().values()) == ({"failed"} if jobs == 1 else {"waiting"})
    if jobs == 1:
        assert "the agent of node 0 was lost" in stage.execution.jobs[0].reason


# Remedies


def test_memory_that_runs_out_halves_the_micro_batch_and_the_job_goes_on(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(20.0, max_batch=32)
    seen = []
    for _ in range(3):
        stage.decide()
        plan = stage.launch().plan
        seen.append((plan.micro_batch, plan.accumulation))
        stage.ends(0, job.run, "failed", "it failed", out_of_memory=True)
        assert job.state == "waiting"
        stage.now_s += 1.0
    assert seen == [(32, 1), (16, 2), (8, 4)]
    assert stage.execution.notes[-1] == "job j0: memory ran out at micro-batch 8: from now on at most 4"
    assert job.losses == 0
    # A controller that takes over knows it too.
    stage.deliver()
    after = execution_of(tmp_path)
    assert after.jobs[0].seen.spared_micro_batch == 4
    after.journal.close()
    stage.finish()
    assert stage.states() == {0: "done"}
    stage.facts_hold()


def test_memory_that_runs_out_with_a_single_sample_ends_the_job(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(20.0, initial_batch=2, max_batch=2)
    for _ in range(2):
        stage.decide()
        stage.ends(0, job.run, "failed", "it failed", out_of_memory=True)
        stage.now_s += 1.0
    assert (job.state, job.reason) == ("failed", "it failed")


def test_parameters_without_a_part_are_told_to_the_next_run_once(tmp_path):
    stage = staged(tmp_path)
    (job,) = stage.submit(20.0)
    stage.decide()
    stage.ends(0, job.run, "failed", "it failed", unused=True)
    assert job.state == "waiting"
    stage.decide()
    assert stage.launch().unused
    stage.ends(0, job.run, "failed", "it failed", unused=True)
    assert job.state == "failed"


@given(st.integers(1, 600), st.integers(1, 8), st.integers(0, 700))
def test_a_batch_is_cut_into_what_fits_and_stays_the_same(micro_batch, accumulation, most):
    cut = fitting(Plan(micro_batch=micro_batch, accumulation=accumulation), most)
    assert cut.micro_batch * cut.accumulation == micro_batch * accumulation
    divisors = [each for each in range(1, min(most or micro_batch, micro_batch) + 1) if micro_batch % each == 0]
    assert cut.micro_batch == max(divisors)


@pytest.mark.parametrize("policy", ["fifo", "las", "synergy"])
@pytest.mark.parametrize("point", ["submitted", "decided", "reserved", "running", "stopping", "done"])
def test_controller_that_vanishes_loses_nothing_acknowledged(tmp_path, point, policy):
    stage = staged(tmp_path, policy, (1, 1))
    jobs = stage.submit(40.0, 40.0, 40.0)
    if point in ("decided", "reserved"):
        stage.execution.decide(0.0)
        if point == "reserved":
            stage.execution.journal.commit()
            node, message = stage.execution.runs.outbox.pop(0)
            for answer in stage.agents[node].hear(message, 0.0):
                stage.execution.heard(node, answer, 0.0)
            stage.execution.journal.commit()  # it has: launched; the message never leaves
    elif point != "submitted":
        stage.advance(0.0, 1.0)
    if point == "stopping":
        stage.execution.cancel(next(job for job in jobs if job.state == "running"), stage.now_s)
    if point == "done":  # the worker is done and has saved; its message never arrives
        for agent in stage.agents.values():
            for number in list(agent.runs):
                agent.runs[number].done = agent.runs[number].launch.file.work
                agent.end(number, "done")
    again = stage.resumed()
    assert len(again.execution.jobs) == 3
    again.finish()
    wanted = ["done", "done", "done"] if point != "stopping" else ["cancelled", "done", "done"]
    assert sorted(again.states().values()) == wanted
    again.facts_hold()
    assert again.finished() == [0, 1, 2]


def test_resumed_controller_believes_what_was_observed(tmp_path):
    stage = staged(tmp_path, "synergy", (2,))
    (before,) = stage.submit(1e5)
    stage.advance(0.0)
    stage.advance(*5 * [1.0])
    again = stage.resumed()
    after = again.execution.jobs[0]
    assert 0 < after.task.done_work <= before.task.done_work  # to the last decision
    assert after.task.believed_statistics == (1.0, 4.0)
    again.advance(0.0)
    assert after.task.pool.models.keys() == {"cpu"}
    assert after.attained_service_gpu_s > 0
    assert after.restarts == 1


@pytest.mark.parametrize(
    ("slots", "of_other", "work", "expected"), [(1, 2, 20, "done"), (2, 1, 20, "done"), (1, 2, 9e6, "waiting")]
)
def test_command_with_little_declared_work_goes_before_one_with_much(tmp_path, slots, of_other, work, expected):
    """Work in seconds is known before the first report; otherwise all commands would be of one size."""

    class Running(FakeAgent):
        def pass_time(self, now_s):
            said = super().pass_time(now_s)
            return [replace(each, grad_sqr=0.0, step_s=1.0) if isinstance(each, Report) else each for each in said]

    stage = staged(tmp_path, "synergy", (2,), agent=Running)
    for name, size, seconds in (("long", slots, 1e5), ("other", of_other, work)):
        file = job_of({"command": ["train"], "slots": size, "work": seconds}, "a test")
        stage.execution.submit(name, file, stage.now_s)
        stage.advance(*60 * [2.0])
    assert stage.states() == {0: "running", 1: expected}


# Jobs that had ended wait again


@pytest.mark.parametrize("policy", POLICIES[:-1])
@pytest.mark.parametrize("runs", [True, False])
def test_cancelled_job_waits_again_whether_or_not_it_ran(tmp_path, policy, runs):
    """Cancelled while it waits, it is in the queue of an ordering policy still when it comes back."""
    stage = staged(tmp_path, policy)
    execution = stage.execution
    jobs = stage.submit(20.0, 20.0)
    stage.advance(0.0)
    (chosen,) = [each for each in jobs if each.running == runs]
    execution.cancel(chosen, stage.now_s)
    if runs:
        refuses("leaving still", execution.retry, chosen, stage.now_s, from_start=False)
        stage.deliver()
    execution.retry(chosen, stage.now_s, from_start=chosen.seen.best_step > 0)
    stage.finish()
    assert stage.states() == {0: "done", 1: "done"}
    stage.facts_hold()
    assert stage.finished() == [0, 1]


def test_what_cannot_be_retried(tmp_path):
    stage = staged(tmp_path)
    done, going = stage.submit(5.0, 1e6)
    while stage.states()[0] != "done":
        stage.advance(1.0)
    stage.advance(1.0)
    for job, says in ((done, "is done"), (going, "has not ended")):
        refuses(f"job {job.name} {says}", stage.execution.retry, job, stage.now_s, from_start=True)


def cancelled(folder):
    """A job that had come to some step without a checkpoint."""
    stage = staged(folder)
    (job,) = stage.submit(1e6)
    stage.advance(1.0, 1.0, 1.0)
    stage.execution.cancel(job, stage.now_s)
    stage.deliver()
    assert job.seen.best_step > 0
    return stage, job


def test_what_a_job_had_trained_is_put_aside_when_it_begins_from_the_start(tmp_path):
    stage, job = cancelled(tmp_path)
    execution = stage.execution
    checkpoint_of(execution.folder_of(job), 2, job.uuid)
    (execution.folder_of(job) / "steps.csv").write_text("step,batch,rate,loss,seconds,run\n")
    execution.retry(job, stage.now_s, from_start=True)
    aside = execution.folder_of(job) / "given-up-1"
    assert sorted(each.name for each in aside.iterdir()) == ["checkpoints", "steps.csv"]
    assert (job.seen.step, job.seen.best_step, job.seen.saved[0]) == (0, 0, 0)
    assert execution.journal.reports() == {}


def test_retry_without_a_controller_is_in_the_journal(tmp_path):
    stage, _ = cancelled(tmp_path)
    stage.execution.journal.set_meta("written", True)
    stage.execution.journal.close()
    refuses("does not know job 9", retry_in, tmp_path, 9, from_start=True)
    retry_in(tmp_path, 0, from_start=True)
    journal = Journal(tmp_path / "journal.sqlite")
    assert ([row.state for row in journal.jobs()], journal.reports()) == (["waiting"], {})
    assert journal.meta()["written"] is False
    assert [fact.kind for fact in journal.facts()] == [Kind.SUBMIT, Kind.START, Kind.STOP]


def row(step_s, micro_batch, **degrees):
    return ProfiledRow("cpu", 1, Plan(micro_batch=micro_batch, **degrees), step_s)


ROWS = (row(0.2, 32), row(0.3, 64), row(0.15, 16, data=2), row(0.2, 32, data=2), row(0.1, 32, pipeline=2))
MODEL = ProfiledModel("mlp", 32, 128, 1e6, (NoiseFrom(0.0, 20.0),), ProfiledCosts(1.0, 2.0, 0.5), ROWS)


def test_another_plan_on_the_same_slots_is_a_stop_and_a_start(tmp_path):
    stage = staged(tmp_path, "synergy", (2,), profile=TestbedProfile({"mlp": MODEL}))
    (job,) = stage.submit(4_000.0, slots=2)
    stage.advance(0.0, 1.0)
    assert job.state == "running"
    placed, before = job.placement, job.run
    plan = stage.execution.decider.plans[0]
    assert (plan.pipeline, plan.data, plan.global_batch) == (2, 1, 32)
    stage.execution.profile.models["mlp"] = replace(MODEL, rows=(*ROWS, row(0.01, 32, data=2)))
    stage.advance(1.0)
    assert job.placement == placed
    assert job.run == before + 1
    assert job.stopped_for == Stopped.REPLANNED
    assert [*stage.agents[0].runs] == [before]  # it saves and leaves before it starts again
    stage.advance(1.0)
    assert [*stage.agents[0].runs] == [before + 1]
    assert stage.launch().plan.data == 2
    stage.finish()
    assert [run.outcome for run in stage.execution.journal.runs()] == ["paused", "done"]
