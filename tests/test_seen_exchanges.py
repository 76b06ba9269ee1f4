"""What jobs show of compressed exchanges corrects what formulas say of them."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.performance.goodput.compression._compressor import CodecSpeed, LayerSizes
from synergy_core.performance.goodput.efficiency import MEASURED_ERROR_WEIGHT, mixed_error
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.beliefs import Beliefs
from synergy_core.scheduling.jobs.exchange import Compression, before_layers, exchange_of
from synergy_core.scheduling.jobs.reports import (
    MAX_RATIO,
    MAX_REPORTS,
    MIN_CHANGE_FACTOR,
    ExchangeReport,
    RatioOf,
    SeenExchanges,
)
from synergy_core.scheduling.jobs.spec import JobSpec, Shape, StepReport
from synergy_core.scheduling.jobs.task import SynergyTask

Q8 = RatioOf("codec", "q8", "cpu")
LAYERS = LayerSizes.of_shapes([(1024, 1024), (4096, 1024), (1024,)])
CODECS = {"cpu": {each: CodecSpeed(1e10, 1e12, 1e-6) for each in ("half", "powersgd", "quantised", "topk")}}
PAIR, ALONE = Shape("cpu", 1, 2), Shape("cpu", 1, 1)


def task_of() -> tuple[Beliefs, SynergyTask]:
    exchange = exchange_of(LAYERS, "coadaptive", "q8", codecs=CODECS)
    spec = JobSpec("a", 32, 256, 32, 2, {"cpu": (1, 256)}, {"cpu": 1.0}, exchange=exchange)
    beliefs = Beliefs(("cpu",))
    task = beliefs.task(spec)
    assert isinstance(task, SynergyTask)
    return beliefs, task


def informed(*, sync_s: float = 0.4, tells: bool = True) -> tuple[Beliefs, SynergyTask]:
    """A task that saw that an uncompressed exchange takes `sync_s`, or (tells) only what whole steps took, and that
    computing takes 0.01 s a sample.
    """
    beliefs, task = task_of()
    for batch in (16, 32):
        task.observe(StepReport(ALONE, Plan(micro_batch=batch), 0.01 * batch, *((0.0,) if tells else ())))
    beliefs.refresh([task])
    for batch in (16, 32):
        known = (sync_s,) if tells else ()
        task.observe(StepReport(PAIR, Plan(data=2, micro_batch=batch), 0.01 * batch + sync_s, *known))
    task.report((1.0, 8.0))
    beliefs.refresh([task])
    return beliefs, task


def test_the_mean_of_ratios_is_believed_once_it_has_moved_by_enough() -> None:
    seen = SeenExchanges()
    assert seen.ratio(Q8) == 1.0
    assert seen.add(Q8, 3.0, 1.0)
    assert seen.ratio(Q8) == 3.0
    assert not seen.add(Q8, 3.4, 1.0)  # the mean is 3.2, within a tenth
    assert seen.ratio(Q8) == 3.0
    assert seen.add(Q8, 5.0, 1.0)  # (3 + 3.4 + 5) / 3
    assert seen.ratio(Q8) == pytest.approx(3.8)
    assert seen.ratio(Q8._replace(compressor="q4")) == 1.0


@given(ratios=st.lists(st.floats(0.02, 50.0), min_size=1, max_size=MAX_REPORTS))
def test_what_is_believed_is_within_a_step_of_the_mean(ratios: list[float]) -> None:
    seen = SeenExchanges()
    for each in ratios:
        seen.add(Q8, each * 7.0, 7.0)
    assert 1 / MIN_CHANGE_FACTOR - 1e-9 <= np.mean(ratios) / seen.ratio(Q8) <= MIN_CHANGE_FACTOR + 1e-9


def test_a_change_is_followed_in_as_many_reports_as_a_mean_has() -> None:
    seen = SeenExchanges()
    for measured in (*[1.0] * 500, *[2.0] * 3 * MAX_REPORTS):
        seen.add(Q8, measured, 1.0)
    assert 2.0 / MIN_CHANGE_FACTOR < seen.ratio(Q8) <= 2.0


def test_what_is_no_number_says_nothing_and_what_is_absurd_is_bounded() -> None:
    seen = SeenExchanges()
    for measured, predicted in ((nan, 1.0), (inf, 1.0), (-1.0, 1.0), (1.0, 0.0), (1.0, nan), (1.0, inf)):
        assert not seen.add(Q8, measured, predicted)
    assert not seen
    seen.add(Q8, 1e9, 1.0)
    assert seen.ratio(Q8) == MAX_RATIO
    seen.add(Q8._replace(compressor="q4"), 0.0, 1.0)
    assert seen.ratio(Q8._replace(compressor="q4")) == 1 / MAX_RATIO


def test_bytes_and_codec_of_that_compressor_and_kind_of_exchange_are_corrected() -> None:
    _, task = informed()
    before, offer = task.exchange.offered.terms("q8", *PAIR), task.exchange.offered.offer("q8")
    sent, codec_s = float(offer.sent_bytes(2)), task.exchange.offered.codec_s("q8", "cpu", 2)
    task.observe_exchange(ExchangeReport(PAIR, Plan(data=2, micro_batch=16, compressor="q8"), 1.5 * sent, 4 * codec_s))
    after = task.exchange.terms("q8", PAIR)
    assert after.sent == pytest.approx(1.5 * before.sent)
    assert after.codec_s == pytest.approx(4 * before.codec_s)
    assert (after.collectives, after.latency_s) == (before.collectives, before.latency_s)
    for name, shape in (("q4", PAIR), ("q8", Shape("cpu", 2, 2))):
        assert vars(task.exchange.terms(name, shape)) == vars(task.exchange.offered.terms(name, *shape))


@pytest.mark.parametrize(
    ("compressor", "weight"), [("powersgd-4", MEASURED_ERROR_WEIGHT), ("topk-0.01", MEASURED_ERROR_WEIGHT), ("q2", 1)]
)
def test_errors_are_corrected_for_what_was_measured_at_the_jobs_noise(compressor: str, weight: float) -> None:
    """What is left out of gradients with what was held back counts for less than what is left out of gradients."""
    _, task = informed()
    errors, plan = task.exchange.offered.offer(compressor).errors, Plan(data=2, micro_batch=16, compressor=compressor)
    predicted = float(mixed_error(errors.signal, errors.noise, 32 * 8.0, 16))
    task.observe_exchange(ExchangeReport(PAIR, plan, nan, nan, 0.25 * predicted))
    at = [each.name for each in task.exchange.offered.offers].index(compressor)
    assert np.asarray(task.exchange.errors.signal)[at] == pytest.approx(0.25 * weight * errors.signal)
    assert np.asarray(task.exchange.errors.noise)[at] == pytest.approx(0.25 * weight * errors.noise)
    if compressor == "powersgd-4":  # no more is believed lost than there is
        task.observe_exchange(ExchangeReport(PAIR, plan, nan, nan, 50.0))
        assert np.asarray(task.exchange.errors.signal)[at] == 1.0


def test_a_compressor_that_takes_too_long_is_given_up_for_another_and_then_for_none() -> None:
    beliefs, task = informed()
    tried = []
    while (plan := task.train_on(PAIR)).compressor != "none":
        tried.append(plan.compressor)
        assert len(tried) == len(set(tried)) <= len(task.exchange.offered.offers)
        codec_s = task.exchange.offered.codec_s(plan.compressor, "cpu", 2)
        task.observe_exchange(ExchangeReport(PAIR, plan, nan, MAX_RATIO * max(codec_s, 1.0)))
        beliefs.refresh([task])
    assert tried


def test_what_is_held_stays_unless_another_promises_more() -> None:
    _, task = informed()
    names = [each.name for each in task.exchange.offered.offers]
    best = task.train_on(PAIR).compressor
    kept = {name: task.train_on(PAIR, Plan(data=2, compressor=name)).compressor for name in names}
    assert kept[best] == kept["none"] == best != "none"
    assert {to for name, to in kept.items() if to != name} == {best}


def test_nobody_compresses_before_layers_are_known_and_everybody_may_then() -> None:
    _, task = informed()
    exchange = task.exchange.offered
    for told, compresses in ((before_layers("coadaptive"), False), (exchange, True)):
        assert told is not None
        task.may_exchange(told)
        assert (task.train_on(PAIR).compressor != "none") == compresses
    modes: tuple[Compression, ...] = ("none", "uniform", "lgreco", "naive", "coadaptive")
    found = [before_layers(mode) for mode in modes]
    assert [each and each.keeps_batch for each in found] == [None, True, True, False, False]


@pytest.mark.parametrize("tells", [True, False])
def test_what_a_compressed_step_would_take_is_no_longer_than_what_was_seen(tells: bool) -> None:
    """Also where steps do not tell their exchange, which then caps nothing."""
    _, task = informed(tells=tells)
    assert task.train_on(PAIR).compressor != "none"
    step = StepReport(
        PAIR, Plan(data=2, micro_batch=24, compressor="powersgd-1"), 0.24 + 0.1, *([0.1] if tells else [])
    )
    seen = task.observe(step)
    assert seen is not None
    assert seen.sync_s <= 0.4 * 1.05  # and not 0.1 ÷ what powersgd-1 sends of it


def test_what_is_recalled_is_what_was_observed() -> None:
    beliefs, task = informed()
    _, again = task_of()
    for (nodes, gpus, batch), (step_s, sync_s) in task.pool._steps["cpu"].items():
        again.recall(Shape("cpu", nodes, gpus), batch, step_s, sync_s)
    again.report((1.0, 8.0))
    beliefs.refresh([again])
    assert again.train_on(PAIR) == task.train_on(PAIR)
