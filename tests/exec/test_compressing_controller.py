"""Compressors chosen by the controller: layers told by workers, offers as workers read them, reports fed back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from exec.compressing_agents import LAYERS, SPEEDS, ComputingAgent
from exec.controllers_agents import Stage, report
from exec.controllers_jobs import cluster_of, file_of
from exec.test_controller import facts_hold
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.goodput.compression import LayerSizes, compressor_named
from synergy_core.jobs.exchange import exchange_of
from synergy_core.jobs.exchanging import ExchangingTask
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.controller.exchanges import ModelExchange, ModelExchanges
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.journal import Journal
from synergy_exec.controller.resume import resume
from synergy_exec.messages import PlanMessage
from synergy_exec.run import _check, _compressions
from synergy_exec.settings import Settings
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.scheme import GradientLayer
from synergy_runs.inputs import check_compression
from synergy_runs.settings import build


def staged(folder: Path, compression: str = "coadaptive", policy: str = "synergy", **more: object) -> Stage:
    chosen = build(Settings, {"compression": compression, **more})
    journal = Journal(folder / "journal.sqlite")
    execution = Execution(journal, get_policy(policy), cluster_of(2), chosen, folder, Profile())
    return Stage(execution, [ComputingAgent(0, 2, {})])


def told(stage: Stage) -> PlanMessage:
    """Under which plan the one job's workers are."""
    (run,) = stage.agents[0].runs.values()
    return run.launch.plan


def advance(stage: Stage, rounds: int) -> set[str]:
    """The offers that the job trained under meanwhile."""
    found = set()
    for _ in range(rounds):
        stage.advance(2.0)
        found |= {plan.compressor for plan in stage.execution.decider.plans.values()}
    return found


# From offers to what workers read


@pytest.mark.parametrize("mode", ["coadaptive", "uniform", "lgreco"])
@pytest.mark.parametrize("compressor", ["powersgd-4", "q4", "topk-0.01"])
def test_workers_give_each_layer_what_the_offer_gives_it(mode: str, compressor: str) -> None:
    sizes = LayerSizes.of_shapes([(rows, columns) for _, rows, columns in LAYERS])
    exchange = exchange_of(sizes, mode, compressor)  # type: ignore[arg-type]
    assert exchange is not None
    model = ModelExchange(tuple(name for name, _, _ in LAYERS), exchange)
    for offer in exchange.offers:
        choices = SchemeByLayer.named(model.as_told(offer.name))
        sent = 0.0
        for name, rows, columns in LAYERS:
            layer = GradientLayer(name, rows, columns)
            sent += choices.of(layer, 2).sent_bytes(layer, 2)
        assert sent == pytest.approx(float(offer.sent_bytes(2)), rel=0.02)
    assert model.as_told("none") == "none"


@settings(deadline=None)
@given(names=st.lists(st.text("ab,=[]*?!.-", min_size=1, max_size=6), min_size=2, max_size=4, unique=True))
def test_names_that_mean_something_in_patterns_are_still_names(names: list[str]) -> None:
    sizes = LayerSizes.of_shapes([(256, 256)] * len(names))
    exchange = exchange_of(sizes, "lgreco", "q4")
    assert exchange is not None
    (offer,) = exchange.offers
    chosen = ("q2", "q8")
    choice = np.array([0] + [1] * (len(names) - 1))
    mixed = replace(offer, parts=tuple(map(compressor_named, chosen)), choice=choice)
    model = ModelExchange(tuple(names), replace(exchange, offers=(mixed,), _terms={}))
    choices = SchemeByLayer.named(model.as_told(offer.name))
    plain = not any(each in ",=" for name in names for each in name)
    for at, name in enumerate(names):
        found = choices.of(GradientLayer(name, 256, 256), 2).name
        assert found in chosen
        assert not plain or found == chosen[min(at, 1)]


# What a job goes through


def test_a_job_compresses_when_its_layers_are_known_and_gives_it_up_when_encoding_takes_too_long(
    tmp_path: Path,
) -> None:
    stage = staged(tmp_path)
    job = stage.execution.submit("j", file_of(work=1e6, max_batch=64), 0.0)
    assert advance(stage, 1) == {"none"}  # of the layers nobody has told yet
    agent = stage.agents[0]
    assert isinstance(agent, ComputingAgent)
    used = advance(stage, 25)
    offer = stage.execution.decider.plans[0].compressor
    assert job.held_gpus == 2
    assert offer in used - {"none"}
    assert isinstance(job.task, ExchangingTask)
    assert job.task.pool.plain_exchanges  # before, nobody knew what there is to save
    assert told(stage).compressor == job.as_told(stage.execution.decider.plans[0]).compressor
    agent.codec_s = 0.2
    advance(stage, 60)
    assert stage.execution.decider.plans[0].compressor == "none"
    assert told(stage).compressor == "none"
    assert job.restarts <= 1  # from one slot to two; every change of compressor within a run
    facts_hold(stage)
    kept = _compressions(stage.execution.journal, {0: 0})
    assert kept is not None
    assert kept.compressors[0] == "none"
    assert {offer} <= set(kept.compressors)


def test_what_was_left_out_counts_as_it_was_measured(tmp_path: Path) -> None:
    """Of a scheme with error feedback nearly all is lost here; others lose little by formula, and are chosen."""
    stage = staged(tmp_path)
    agent = stage.agents[0]
    assert isinstance(agent, ComputingAgent)
    agent.error = 0.999
    job = stage.execution.submit("j", file_of(work=1e6, max_batch=64), 0.0)
    advance(stage, 60)
    name = stage.execution.decider.plans[0].compressor
    assert isinstance(job.task, ExchangingTask)
    errors = dict(zip([each.name for each in job.task.exchange.offers], job.task._errors.signal, strict=True))  # type: ignore[arg-type]
    tried = {name for name, error in errors.items() if error > 0.9}
    assert tried - {name}
    assert all(error <= 1.0 for name, error in errors.items() if name.startswith(("topk", "powersgd", "layerwise-p")))


@pytest.mark.parametrize(
    ("mode", "expected"), [("uniform", "q4"), ("lgreco", "layerwise-q4"), ("naive", "layerwise-q4")]
)
def test_modes_with_one_offer_take_it_as_soon_as_layers_are_known(tmp_path: Path, mode: str, expected: str) -> None:
    stage = staged(tmp_path, mode, compressor="q4")
    stage.execution.submit("j", file_of(work=1e6, slots=2, max_batch=64), 0.0)
    used = advance(stage, 20)
    assert used == {"none", expected}  # none on one slot, and until then
    if mode != "naive":
        assert told(stage).global_batch == 32


def test_a_policy_without_beliefs_has_the_one_offer_too(tmp_path: Path) -> None:
    stage = staged(tmp_path, "uniform", "las", compressor="bf16")
    stage.execution.submit("j", file_of(work=1e6, slots=2), 0.0)
    advance(stage, 3)
    assert told(stage) == PlanMessage(data=2, micro_batch=16, compressor="bf16")


def test_a_resumed_controller_knows_layers_and_goes_on_compressing(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    stage.execution.submit("j", file_of(work=1e6, max_batch=64), 0.0)
    advance(stage, 25)
    offer = stage.execution.decider.plans[0].compressor
    known = stage.execution.exchanges.known()
    agent = stage.agents[0]
    for number in list(agent.runs):
        agent.end(number, "paused")
    stage.execution.journal.commit()
    stage.execution.journal._connection.close()
    again = staged(tmp_path)
    again.agents[0].checkpoints.update(agent.checkpoints)
    again.now_s = stage.now_s
    resume(again.execution, again.now_s)
    assert again.execution.exchanges.known() == known
    assert known["layers"]
    again.advance(2.0)
    (run,) = again.agents[0].runs.values()
    assert (run.launch.say_layers, run.launch.time_codecs) == (False, False)
    assert offer != "none"
    assert run.launch.plan.compressor != "none"
    facts_hold(again)


def test_reports_of_a_compressor_that_a_job_has_no_more_teach_nothing(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    job = stage.execution.submit("j", file_of(work=1e6, max_batch=64), 0.0)
    advance(stage, 25)
    launch = next(iter(stage.agents[0].runs.values())).launch
    said = replace(report(job.run, launch, 50.0), compressor="powersgd-3", codec_s=9.0, micro_batch=7)
    assert isinstance(job.task, ExchangingTask)
    before = job.task.pool.version
    assert stage.execution.decider.report(job, said) is None
    assert job.task.pool.version == before


def test_without_compression_workers_are_asked_nothing(tmp_path: Path) -> None:
    stage = staged(tmp_path, "none")
    job = stage.execution.submit("j", file_of(work=1e6), 0.0)
    assert advance(stage, 10) == {"none"}
    (run,) = stage.agents[0].runs.values()
    assert (run.launch.say_layers, run.launch.time_codecs) == (False, False)
    assert job.exchange is None
    assert "exchanges" not in stage.execution.journal.meta()
    assert _compressions(stage.execution.journal, {0: 0}) is None


def test_a_model_without_layers_is_left_alone() -> None:
    exchanges = ModelExchanges("coadaptive", "q4", ("cpu",))
    exchanges.learn_codecs("cpu", SPEEDS)
    exchanges.learn_layers("empty", [])
    found = exchanges.of("empty")
    assert found is not None
    assert [each.name for each in found.exchange.offers] == ["none"]


# What cannot be asked for


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"compression": "uniform", "profile": "p.json"}, "profile=p.json .* Type profile=null"),
        ({"compressor": "q5"}, "q5"),
        ({"compressor": "powersgd-0"}, "rank 0"),
    ],
)
def test_what_cannot_be_is_said(given: dict[str, object], says: str) -> None:
    with pytest.raises(InputError, match=says):
        _check(build(Settings, {"serve": True, **given}))


def test_orders_cannot_choose_with_the_batch() -> None:
    with pytest.raises(InputError, match=r"compression=coadaptive: .* las; type policy=synergy"):
        check_compression("coadaptive", [get_policy("las")])
