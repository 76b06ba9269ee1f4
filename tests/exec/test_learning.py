"""What jobs report changes decisions: plans that are tried, compressors by layer, CPUs and memory. Agents pretend."""

from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from exec.pretended import FakeAgent, file_of, refuses, staged

from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import LayerSizes
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs import testbed_profiles
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.jobs.exchange import exchange_of
from synergy_core.scheduling.jobs.testbed_profiles import NoiseFrom, ProfiledCosts, ProfiledModel, TestbedProfile
from synergy_core.scheduling.policies import get_policy
from synergy_exec.controller.jobs import ModelExchange
from synergy_exec.messages import ExchangeCost, Hello
from synergy_exec.nodes.agents import cluster_of
from synergy_exec.profiling.machine import keep_profile, known_profile
from synergy_exec.run import run
from synergy_exec.settings import Settings
from synergy_exec.training.compression.layers import CompressorByLayer, GradientLayer
from synergy_runs.inputs.from_settings import read_profile
from synergy_runs.inputs.keys import build

EXCHANGE_S = 0.3
MODEL = {"max_batch": 64, "slots": 2}


def step_s(plan):
    """Replicas exchange for longer than they compute; two stages are the fastest, tensor parallelism hopeless."""
    alone_s = 0.004 * plan.global_batch / plan.gpus
    return alone_s + EXCHANGE_S * (plan.data > 1) + 0.02 * (plan.pipeline > 1) + 0.5 * (plan.tensor > 1)


class TimedAgent(FakeAgent):
    """An agent whose steps take `step_s` seconds. broken: plans that fail when they start."""

    broken: frozenset[str] = frozenset()

    @staticmethod
    def refusal(plan):
        return "no" if plan.zero or plan.interleave > 1 else None

    def pass_time(self, now_s):
        for number, each in list(self.runs.items()):
            if each.launch.plan.degrees in self.broken:
                return [self.end(number, "failed", "rank 0: RuntimeError: it cannot be cut so")]
        return super().pass_time(now_s)

    def measured(self, launch):
        return {"step_s": step_s(launch.plan), "sync_s": EXCHANGE_S if launch.plan.data > 1 else 0.0}


def trying(folder, *, fraction=1.0, profile=None):
    settings = build(Settings, {"results_dir": folder, "explore_fraction": fraction, "restart_s": 2.0})
    known = TestbedProfile({}, "these cores") if profile is None else profile
    return staged(folder, "synergy", (2,), settings=settings, profile=known, agent=TimedAgent)


def degrees(stage):
    """The degrees of the plans of the first job's runs."""
    return [Plan(**each.plan).degrees for each in stage.execution.journal.runs() if each.job == 0]


def test_submitted_job_tries_each_kind_of_plan_once_and_stays_with_the_fastest(tmp_path):
    stage = trying(tmp_path)
    (job,) = stage.submit(4_000.0, **MODEL)
    stage.advance(0.0)
    assert set(degrees(stage)) <= {"1", "dp2"}  # nobody knows yet what else there is
    stage.advance(*200 * [1.0])
    assert (job.state, stage.execution.decider.plans[0].degrees) == ("running", "pp2")
    tried = degrees(stage)
    assert {"dp2", "pp2"} <= set(tried)
    assert tried.count("tp2") <= 1
    assert tried.count("pp2") <= 2
    stage.finish()
    known = read_profile(tmp_path / "profile.json")
    model = known.of("mlp", job.file.application)
    measured = {(row.plan.gpus, row.plan.pipeline): row for row in model.rows if not row.predicted}
    assert measured[2, 2].step_s == pytest.approx(step_s(measured[2, 2].plan))
    # Every step once: each run begins where the one before it had saved.
    outcomes = [each.outcome for each in stage.execution.journal.runs()]
    assert outcomes == ["paused"] * (len(outcomes) - 1) + ["done"]

    after = trying(tmp_path / "next", profile=known)
    after.execution.submit("second", file_of(work=500.0, **MODEL), 0.0)
    assert after.execution.learning.wants(file_of(**MODEL)) == []
    after.advance(0.0)
    assert after.execution.decider.plans[0].degrees == "pp2"
    other = after.execution.submit("third", file_of(work=500.0, arguments={"width": 9}, **MODEL), 0.0)
    # It is learned under another name; failed before: it was begun anew at every report, and no plan was known of it.
    assert after.execution.learning.wants(other.file) == [1, 2]
    after.finish()
    models = read_profile(tmp_path / "next" / "profile.json")
    learned = models.of("mlp", other.file.application)
    assert learned.name in set(models) - {"mlp"}
    alike = after.execution.submit("fourth", other.file, after.now_s)
    assert (alike.spec.architecture, after.execution.learning.wants(other.file)) == (learned.name, [])


@pytest.mark.parametrize("fraction", [0.0, 0.001])
def test_no_more_is_tried_than_the_settings_allow(tmp_path, fraction):
    """Restarts, there and back, would be more than a thousandth of so short a job's time."""
    stage = trying(tmp_path, fraction=fraction)
    (job,) = stage.submit(800.0, **MODEL)
    stage.finish()
    assert set(degrees(stage)) <= {"1", "dp2"}
    assert job.trials == 0


def test_plan_that_fails_when_it_is_tried_is_not_the_jobs_end(tmp_path, monkeypatch):
    monkeypatch.setattr(TimedAgent, "broken", frozenset({"pp2"}))
    stage = trying(tmp_path)
    (job,) = stage.submit(3_000.0, **MODEL)
    stage.finish()
    assert job.state == "done"
    assert degrees(stage).count("pp2") == 1
    (note,) = stage.execution.notes
    assert "pp2" in note
    assert "it cannot be cut so" in note
    assert not [row for row in read_profile(tmp_path / "profile.json")["mlp"].rows if row.plan.pipeline == 2]
    assert stage.finished() == [0]


def test_what_a_job_writes_in_place_of_its_plans_does_no_harm(tmp_path, monkeypatch):
    def write(folder, found):
        (folder / "plans.json").write_text(next(odd))

    odd = cycle(["[]", '{"plans": {"2": [{"data": 2, "zero": "x"}]}}', "no JSON"])
    monkeypatch.setattr("exec.pretended.write_candidates", write)
    stage = trying(tmp_path)
    stage.submit(300.0, 300.0, 300.0, **MODEL)
    stage.finish()
    assert stage.finished() == [0, 1, 2]
    assert "mlp" not in stage.execution.profile


LAYERS = [("token.weight", 256, 128), ("up.weight", 512, 128), ("up.bias", 512, 1), ("down.weight", 128, 512)]
SPEEDS = {each: [1e10, 1e12, 1e-6] for each in ("half", "powersgd", "quantised", "topk")}
COMPUTE_S, SYNC_S = 0.2, 0.08
"""Seconds to compute 32 samples, and of an uncompressed exchange."""


class ComputingAgent(FakeAgent):
    """An agent whose jobs exchange gradients for long, in proportion to the bytes that their compressor sends.

    codec_s: of any compressor, as long as the test likes.
    """

    codec_s = 2e-3

    def started(self, launch):
        told = {
            "layers": LAYERS if launch.reporting.layers else [],
            "codecs": SPEEDS if launch.reporting.codecs else {},
        }
        return super().started(launch) | told

    def measured(self, launch):
        plan = launch.plan
        compute_s = COMPUTE_S * plan.micro_batch / 32 * plan.accumulation
        if plan.data == 1:
            return {"step_s": compute_s, "sync_s": 0.0, "compressor": plan.compressor}
        sent, plain = sent_bytes(plan.compressor, plan.data), sent_bytes("none", plan.data)
        codec_s = 0.0 if CompressorByLayer.named(plan.compressor).is_plain else self.codec_s
        sync_s = SYNC_S * sent / plain + codec_s
        layers = {"up.weight": [1.0, 0.1]} if codec_s else {}
        cost = ExchangeCost(sent_bytes=sent, codec_s=codec_s, layers=layers)
        return {"step_s": compute_s + sync_s, "sync_s": sync_s, "compressor": plan.compressor, "exchange": cost}


def sent_bytes(compressor, replicas):
    choices = CompressorByLayer.named(compressor)
    layers = [GradientLayer(*each) for each in LAYERS]
    return sum(layer.sent_bytes(choices.of(layer, replicas), replicas) for layer in layers)


def compressing(folder, compression="coadaptive"):
    settings = build(Settings, {"retries": 2, "compression": compression})
    return staged(folder, "synergy", (2,), settings=settings, agent=ComputingAgent)


def advance(stage, rounds):
    """The offers that the job trained under meanwhile."""
    found = set()
    for _ in range(rounds):
        stage.advance(2.0)
        found |= {plan.compressor for plan in stage.execution.decider.plans.values()}
    return found


@pytest.mark.parametrize("mode", ["coadaptive", "uniform", "lgreco"])
@pytest.mark.parametrize("compressor", ["powersgd-4", "q4", "topk-0.01"])
def test_workers_give_each_layer_what_the_offer_gives_it(mode, compressor):
    sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in LAYERS])
    exchange = exchange_of(sizes, mode, compressor)
    model = ModelExchange(tuple(name for name, _, _ in LAYERS), exchange)
    for offer in exchange.offers:
        assert sent_bytes(model.as_told(offer.name), 2) == pytest.approx(float(offer.sent_bytes(2)), rel=0.02)
    assert model.as_told("none") == "none"


@pytest.mark.parametrize("name", ["cpu,mem.weight", "a=b.weight", "layer[0].weight"])
def test_a_parameter_whose_name_means_something_in_patterns_gets_its_own_compressor(name):
    exchange = exchange_of(LayerSizes.of_shapes([(256, 256)] * 3), "lgreco", "q4")
    parts = tuple(map(compressor_named, ("q2", "q8")))
    mixed = replace(exchange.offers[0], parts=parts, choice=np.array([0, 1, 1]))
    model = ModelExchange((name, "up.weight", "down.weight"), replace(exchange, offers=(mixed,), _terms={}))
    choices = CompressorByLayer.named(model.as_told(mixed.name))
    assert [choices.of(GradientLayer(each, 256, 256), 2).name for each in model.names] == ["q2", "q8", "q8"]


def test_a_job_compresses_when_its_layers_are_known_and_gives_it_up_when_encoding_takes_too_long(tmp_path):
    """Also under a controller that is resumed, which knows the layers."""
    stage = compressing(tmp_path)
    (job,) = stage.submit(1e6, max_batch=64)
    assert advance(stage, 1) == {"none"}  # of the layers nobody has told yet
    used = advance(stage, 25)
    plan = stage.execution.decider.plans[0]
    assert (job.held_gpus, plan.compressor in used - {"none"}) == (2, True)
    assert job.task.pool.plain_exchanges  # before, nobody knew what there is to save
    assert stage.launch().plan.compressor == job.as_told(plan).compressor
    assert job.restarts <= 1  # from one slot to two; every change of compressor within a run
    again = stage.resumed()
    again.advance(2.0)
    launch = again.launch()
    assert (launch.reporting.layers, launch.reporting.codecs, launch.plan.compressor == "none") == (False, False, False)
    again.agents[0].codec_s = 0.2
    advance(again, 60)
    assert again.execution.decider.plans[0].compressor == again.launch().plan.compressor == "none"
    assert again.execution.jobs[0].restarts == job.restarts + 1
    kept = again.facts_hold().training
    assert kept.compressors[0] == "none"
    assert plan.compressor in kept.compressors


def test_without_compression_workers_are_asked_nothing(tmp_path):
    stage = compressing(tmp_path, "none")
    stage.submit(1e6)
    assert advance(stage, 10) == {"none"}
    assert not stage.launch().reporting.layers
    assert not stage.launch().reporting.codecs
    assert stage.facts_hold().training.with_compression() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [({"compression": "uniform", "profile": "p.json"}, "Type profile=null"), ({"compressor": "q5"}, "q5")],
)
def test_what_cannot_be_is_said(given, says):
    refuses(says, run, {"serve": True, **given})


GB = 1e9


def node(cpus):
    return Cluster((NodeType("cpu-0", "cpu", 1, 2, cpus, 8 * GB, 1e6),))


def model(name, *, cpu_s):
    file = file_of(name=name)
    given = testbed_profiles.ProfiledInput(
        "cpu", 16, cpu_s, 0.16, 1e5, 1e9, (testbed_profiles.StepAtCpus(1.0, 0.2, 0.04, 0.2),)
    )
    noise, costs = (NoiseFrom(0.0, 0.0),), ProfiledCosts(1.0, 1.0, 1.0)
    return ProfiledModel(name, file.initial_batch, file.max_batch, 1.0, noise, costs, (), given)


def shares(stage):
    return {run.launch.job: run.launch.share.cpus for run in stage.agents[0].runs.values()}


def test_shares_are_launched_with_and_change_without_a_restart(tmp_path):
    """Alone the hungry job gets 3.2 CPUs; beside another that wants 1.2 it has what that leaves."""
    profile = TestbedProfile({name: model(name, cpu_s=cpu_s) for name, cpu_s in (("hungry", 0.032), ("modest", 0.012))})
    stage = staged(tmp_path, "fifo+tune", (2,), cluster=node(4.0), profile=profile)
    (hungry,) = stage.submit(200.0, name="hungry")
    stage.advance(1.0)
    assert shares(stage) == {0: pytest.approx(3.2)}
    (modest,) = stage.submit(40.0, name="modest")
    stage.advance(1.0, 1.0)
    assert shares(stage) == {0: pytest.approx(2.8), 1: pytest.approx(1.2)}
    stage.finish()
    assert (hungry.restarts, modest.restarts) == (0, 0)
    told = [each for each in stage.execution.journal.timings() if each.kind == "share"]
    assert [each.run for each in told] == [0, 1, 0, 0]
    assert [each.parts["cpus"] for each in told] == pytest.approx([3.2, 1.2, 2.8, 3.2])
    assert all(each.parts["memory_bytes"] > 0 for each in told)


def test_cluster_of_agents_names_cpus_only_where_they_are_shared_out():
    given = {"host": "h", "pid": 1, "slots": 2, "gpu_type": "cpu"}
    large, small = (Hello(node=node, cpus=cpus, memory_bytes=10**9, **given) for node, cpus in enumerate((8, 4)))
    plain, _ = cluster_of([large, small])
    assert [(each.nodes, each.cpus) for each in plain.node_types] == [(2, 0.0)]
    named, order = cluster_of([large, small], storage_bytes_per_s=1e6)
    assert [(each.nodes, each.cpus, each.memory_bytes) for each in named.node_types] == [(1, 8.0, 1e9), (1, 4.0, 1e9)]
    assert order == [0, 1]


# Learned from what executed jobs report: no profile is needed

GPU_SAMPLE_S = 0.010
CPU_S = {"hungry": 0.060, "modest": 0.002}
"""CPU-seconds of a sample: at 10 ms of its GPU, 6 CPUs and 0.2."""


class LoadingAgent(FakeAgent):
    """An agent whose jobs load 1 GB of samples; the time follows from their CPUs."""

    def measured(self, launch):
        samples, cpus = launch.plan.micro_batch * launch.plan.accumulation, launch.share.cpus
        gpu_s = samples * GPU_SAMPLE_S
        step_s = max(gpu_s, samples * list(CPU_S.values())[launch.job] / cpus)
        return {"step_s": step_s, "sync_s": 0.0, "waited_s": step_s - gpu_s, "cpus": cpus, "data_bytes": GB}


def test_shares_follow_what_jobs_report_and_no_profile_is_needed(tmp_path):
    """Both begin with the proportional 4 CPUs; in the end the modest one has 1, and the hungry one the 6 it needs."""
    policy = get_policy("fifo+tune").with_input("learned")
    stage = staged(tmp_path, policy, (2,), cluster=node(8.0), agent=LoadingAgent)
    jobs = [stage.submit(400.0, name=name)[0] for name in CPU_S]
    seen = []
    for _ in range(8):
        stage.advance(1.0)
        seen.append(list(shares(stage).values()))
        assert sum(seen[-1]) <= 8.0 + 1e-6
    assert seen[0] == [4.0, 4.0]
    assert seen[-1] == [pytest.approx(6.0, rel=0.01), pytest.approx(1.0, rel=0.06)]
    assert [job.restarts for job in jobs] == [0, 0]
    for job, state in zip(jobs, ("measured", "bounded"), strict=True):
        assert job.task.pool.inputs.found.cpu_s.state == state
        # Unprofiled, its rate as requested says nothing: its pace is what its own steps show.
        spec = job.task.spec
        requested_s = spec.requested_gpus / (spec.requested_rate["cpu"] * spec.requested_batch)
        assert job.task.gpu_slowdown == pytest.approx(GPU_SAMPLE_S / requested_s)


def test_a_profile_of_another_machine_is_kept_beside_the_new_one(tmp_path):
    path = tmp_path / "profile.json"
    for where in ("another", "this one", "another"):
        keep_profile({}, where, path)
    assert read_profile(path).machine == "another"
    assert known_profile(path, "this one").date  # an empty profile has none
    assert not known_profile(path, "a third").date
