"""How long compressed exchanges take, what may be offered, and the batch that goes with it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.performance.catalog import gpu_sheet, gradients_of, layers_of
from synergy_core.performance.goodput.batch import BatchChoice, JobOnShape, best_batch, goodput_of
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.goodput.compression._compressor import Gradients, LayerSizes, codec_s, speed_by_sheet
from synergy_core.performance.goodput.efficiency import (
    ExchangeTerms,
    GradientErrors,
    along_frontier,
    compressed_gain,
    compressed_sync,
    plain_sync,
    uniform,
    within_error_of,
)
from synergy_core.performance.goodput.throughput import exchange_time, overlapped, step_terms
from synergy_core.performance.planner.communication import all_reduce_s
from synergy_core.performance.planner.machine import links_for, machine_named
from synergy_core.scheduling.jobs.exchange import MARGIN, all_reduce_latency_s, exchange_of

LAYERS = layers_of("cifar10")
SPREAD = Gradients()
LOW_RANK = [compressor_named(f"powersgd-{rank}") for rank in (1, 4, 16)]
THETA = np.array([0.02, 1e-4, 0.05, 0.01, 0.01, 1e-3, 1.7])
seconds = st.floats(1e-7, 100.0)


def test_an_exchange_takes_its_latencies_its_bytes_and_its_codec():
    exchange = exchange_of(LAYERS, "uniform", "q8")
    found = exchange.terms("q8", "a100", 2, 8)
    quantised, plain, apart = compressor_named("q8"), compressor_named("none"), LAYERS.apart()
    latency_s = float(all_reduce_s(0.0, 8, 4, links_for(machine_named("a100"))))
    share = quantised.sent_bytes(apart, 8).sum() / plain.sent_bytes(apart, 8).sum()
    codec = float(codec_s(quantised.codec_work(apart, 8), speed_by_sheet(gpu_sheet("a100"))).sum())
    expected = 3 * latency_s + (0.4 - latency_s) * share + codec
    assert float(compressed_sync(0.4, found)) == pytest.approx(expected, rel=1e-12)
    assert latency_s > 0
    assert 0.25 < share < 0.26


def test_a_lone_replica_and_no_compression_leave_it_bit_for_bit():
    exchange = exchange_of(LAYERS, "coadaptive", "q8")
    for name, nodes, gpus in (("q8", 1, 1), ("none", 2, 8)):
        for sync_s in (1e-8, 0.123456789, 3.3):
            assert float(compressed_sync(sync_s, exchange.terms(name, "a100", nodes, gpus))) == sync_s


@given(seconds, st.integers(1, 3), st.floats(1e-6, 1e-2), st.floats(1e-3, 2.0), st.floats(0.0, 1.0))
def test_what_an_exchange_takes_says_what_it_would_take_uncompressed(sync_s, collectives, latency_s, sent, codec):
    made = ExchangeTerms(collectives, latency_s, sent, codec)
    taken_s = float(compressed_sync(sync_s, made))
    assert taken_s >= codec
    # What the codec takes is rounded to its own digits.
    assert float(plain_sync(taken_s, made)) == pytest.approx(sync_s, rel=1e-9, abs=1e-12 / sent)
    assert float(compressed_sync(2 * sync_s, made)) > taken_s
    assert float(plain_sync(0.5 * codec, made)) == 0.0  # less than the codec alone takes


@given(st.floats(1e-3, 10.0), st.floats(0.05, 20.0), st.floats(1.0, 10.0))
def test_overlap_undone(compute_s, ratio, gamma):
    sync_s = compute_s * ratio
    step_s = overlapped(compute_s, sync_s, gamma)
    # At γ = 10 a twentieth is lost below the digits of the step.
    digits = 1e-9 if ratio**gamma > 1e-6 else np.inf
    assert float(exchange_time(step_s, compute_s, gamma)) == pytest.approx(sync_s, rel=digits)


def test_latency_where_no_node_is_known_is_the_stated_one():
    assert all_reduce_latency_s("unheard", 2, 8) == 1e-4
    # Up to 50 Gb/s a node talks TCP, which answers later.
    assert all_reduce_latency_s("a100", 2, 8, 10e9 / 8) > all_reduce_latency_s("a100", 2, 8, 400e9 / 8)


# Offers


def test_one_compressor_for_all_is_that_compressor():
    made, wanted, apart = uniform(compressor_named("q4"), LAYERS, SPREAD), compressor_named("q4"), LAYERS
    assert made.sent_bytes(np.array([2, 8])).tolist() == wanted.sent_bytes(apart, [2, 8]).sum(axis=-1).tolist()
    assert made.errors.signal == pytest.approx(SPREAD.signal.shares(LAYERS) @ wanted.error(LAYERS, SPREAD.signal))
    assert (made.collectives, made.errors.unbiased, made.errors.rounds_sum) == (3, True, True)


@pytest.mark.parametrize("name", ["powersgd-4", "powersgd-20", "q4", "topk-0.1"])
def test_layer_by_layer_sends_no_more_within_the_same_error(name):
    layers = LAYERS.apart()
    same, own = within_error_of(compressor_named(name), layers, SPREAD), uniform(compressor_named(name), layers, SPREAD)
    assert float(same.sent_bytes(2)) <= float(own.sent_bytes(2)) * (1 + 1e-9)
    mean = [0.5 * (each.errors.signal + each.errors.noise) for each in (same, own)]
    assert mean[0] <= mean[1] * (1 + 1e-9)
    assert same.errors.unbiased == own.errors.unbiased


def test_a_mixture_takes_the_bytes_and_time_of_each_layers_own():
    layers = LayerSizes(np.array([64, 64]), np.array([64, 64]), np.array([1, 1]))
    made = along_frontier([compressor_named("powersgd-1")], layers, SPREAD)[-1]
    mixed = type(made)("mixed", layers, SPREAD, made.parts, np.array([0, 1]))
    none, rank = compressor_named("none"), compressor_named("powersgd-1")
    assert float(mixed.sent_bytes(4)) == none.sent_bytes(layers, 4)[0] + rank.sent_bytes(layers, 4)[1]
    assert mixed.errors.signal == pytest.approx(0.5 * rank.error(layers, SPREAD.signal)[1])
    assert not mixed.errors.unbiased


def test_only_what_gains_the_margin_is_taken_and_nothing_unseen():
    exchange = exchange_of(LAYERS, "coadaptive", "q8")
    goodput = np.ones((len(exchange.offers), 3))
    goodput[3, 0], goodput[3, 1] = MARGIN - 1e-6, MARGIN + 1e-6
    assert exchange.best(goodput).tolist() == [0, 3, 0]
    assert exchange.best(goodput, np.array([True, False, True])).tolist() == [0, 0, 0]
    assert exchange_of(LAYERS, "uniform", "q8").best(goodput[:1]).tolist() == [0, 0, 0]


def test_layers_of_models_add_up():
    layers = layers_of("imagenet")
    assert (layers.numbers * layers.count).sum() == pytest.approx(25.5e6, rel=0.01)
    assert layers_of("alexnet") is None
    assert gradients_of("imagenet").noise.decay > 2 * gradients_of("bert").noise.decay


# Batches

errors = st.builds(GradientErrors, st.floats(0.0, 0.9), st.floats(0.0, 0.9), st.booleans(), st.booleans())


@settings(max_examples=50)
@given(errors, st.floats(0.01, 1.0), st.floats(0.1, 100.0), st.sampled_from([(1, 1), (1, 4), (2, 8), (4, 16)]))
def test_a_batch_for_compressed_gradients_is_worth_what_the_formula_says(made, sync_s, var, shape):
    nodes, gpus = shape
    alpha_s, beta_s, gamma, _ = step_terms(THETA, nodes, gpus)
    job = JobOnShape(alpha_s, beta_s, gamma, sync_s, 1.0, var, 128, 8192, 32, 1024, gpus, made)
    one = BatchChoice(*(each.item() for each in best_batch(job)))
    phi = 128 * var
    batch = gpus * one.local_batch * one.accumulation
    distorted = made.distortion(phi, batch / gpus, gpus)
    gained = float(compressed_gain(batch / 128, 1.0, var, gpus, distorted))
    assert one.goodput == pytest.approx(one.throughput * gained / batch, rel=1e-9)
    again = goodput_of(job, one.local_batch, one.accumulation)
    assert (again.goodput, again.throughput) == (one.goodput, one.throughput)


def test_no_errors_and_the_formulas_own_time_change_nothing():
    job = JobOnShape(*step_terms(THETA, 2, 8), 1.0, 20.0, 128, 8192, 32, 1024, 8)
    plain, same = best_batch(job), best_batch(job._replace(errors=GradientErrors(0.0, 0.0, True)))
    assert same[1:3] == plain[1:3]
    assert same.goodput == pytest.approx(plain.goodput, rel=1e-14)


@pytest.mark.parametrize("compressor", ["powersgd-4", "q4", "topk-0.01", "bf16", "none"])
def test_layer_wise_points_are_of_the_named_compressors_scheme_and_send_less_the_more_they_may_lose(compressor):
    found = exchange_of(LAYERS, "coadaptive", compressor)
    names = [each.name for each in found.offers]
    assert len(set(names)) == len(names)
    points = [each for each in found.offers if each.name.startswith("layerwise-")]
    schemes = {type(compressor_named(name)) for name in ("none", compressor)}
    assert {type(part) for each in points for part in each.parts} <= schemes
    for each in points:
        error = 0.5 * (each.errors.signal + each.errors.noise)
        assert error <= float(each.name.rpartition("-")[2])
    sent = [float(each.sent_bytes(2)) for each in points]
    assert sent == sorted(sent, reverse=True)
