"""What compressors send, lose and cost, against gradients that are really compressed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.goodput.compression import compressor_named, compressors
from synergy_core.performance.goodput.compression._compressor import (
    Gradients,
    LayerSizes,
    Spread,
    codec_s,
    speed_by_sheet,
)

SHAPES = [(512, 256), (256,), (10, 20), (64, 32, 3, 3), (1000, 37), ()]
LAYERS = LayerSizes.of_shapes(SHAPES)
EVERY = [each.name for each in compressors()]
shapes = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=5)


def buckets_of(flat):
    return [flat[at : at + 512] for at in range(0, flat.size, 512)]


def rounded(flat, bits, random):
    """Stochastic rounding between the extremes of every bucket: what comes out, and its bytes."""
    out, size = [], 0
    for bucket in buckets_of(flat):
        low, step = bucket.min(), np.ptp(bucket) / (2**bits - 1)
        # A bucket of one number has no steps.
        codes = np.floor((bucket - low) / (step or 1.0) + random.random(bucket.size)).astype(np.uint8)
        digits = np.unpackbits(codes[:, None], axis=1)[:, 8 - bits :]
        size += len(np.float32(low).tobytes() + np.float32(step).tobytes() + np.packbits(digits).tobytes())
        out.append(low + step * codes)
    return np.concatenate(out), size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("powrsgd-4", "Did you mean 'powersgd-4'"),
        ("q3", "unknown compressor 'q3'"),
        ("powersgd-0", "rank 0"),
        ("powersgd-two", "powersgd-1"),
        ("topk-nan", "between 0 and 1"),
        ("topk-", "topk-0.01"),
    ],
)
def test_a_wrong_name_is_refused_with_what_to_type(name, said):
    with pytest.raises(InputError, match=said):
        compressor_named(name)


def test_layers_without_numbers_are_refused():
    with pytest.raises(InputError, match="below 1"):
        LayerSizes(np.array([0]), np.array([1]), np.array([1]))


@pytest.mark.parametrize("name", EVERY)
def test_answers_have_the_shape_of_replicas_and_layers_and_one_replica_sends_and_encodes_nothing(name):
    each, replicas = compressor_named(name), np.array([[1, 2, 4], [8, 16, 32]])
    sent, work = each.sent_bytes(LAYERS, replicas), each.codec_work(LAYERS, replicas)
    assert sent.shape == work.touched_bytes.shape == work.flops.shape == work.launches.shape == (2, 3, len(SHAPES))
    assert np.array_equal(sent[1, 2], each.sent_bytes(LAYERS, 32))
    assert each.error(LAYERS, Gradients().signal).shape == each.state_bytes(LAYERS).shape == (len(SHAPES),)
    assert not sent[0, 0].any()
    assert not codec_s(each.codec_work(LAYERS, 1), speed_by_sheet(gpu_sheet("a100"))).any()


@pytest.mark.parametrize("name", EVERY)
def test_what_is_not_compressed_is_sent_as_it_is_and_loses_nothing(name):
    each = compressor_named(name)
    left = ~each.compresses(LAYERS)
    assert np.array_equal(each.sent_bytes(LAYERS, 4)[left], compressor_named("none").sent_bytes(LAYERS, 4)[left])
    assert not each.error(LAYERS, Gradients().noise)[left].any()
    assert not each.codec_work(LAYERS, 4).touched_bytes[left].any()
    assert not each.state_bytes(LAYERS)[left].any()
    if name not in ("none", "bf16", "fp16"):
        # Vectors, numbers and small ones are always left; the large matrix never is.
        assert left[[1, 2, 5]].all()
        assert not left[0]


@pytest.mark.parametrize("name", EVERY)
def test_layers_that_are_alike_count_as_often_as_they_are(name):
    each = compressor_named(name)
    together = LayerSizes(np.array([512, 64]), np.array([256, 288]), np.array([3, 2]))
    apart = together.apart()
    for replicas in (2, 16):
        alike = each.sent_bytes(together, replicas).sum(), each.codec_work(together, replicas).launches.sum()
        single = each.sent_bytes(apart, replicas).sum(), each.codec_work(apart, replicas).launches.sum()
        assert alike == pytest.approx(single)
    assert each.state_bytes(together).sum() == each.state_bytes(apart).sum()
    spread = Gradients().signal
    lost = [spread.shares(layers) @ each.error(layers, spread) for layers in (together, apart)]
    assert lost[0] == pytest.approx(lost[1])


@given(shapes, st.integers(2, 64))
def test_more_bits_ranks_and_numbers_send_more_and_lose_less(sizes, replicas):
    layers, spread = LayerSizes.of_shapes(sizes), Gradients().signal
    for names in (
        ("q2", "q4", "q8", "none"),
        ("powersgd-1", "powersgd-2", "powersgd-7", "powersgd-64", "none"),
        ("topk-0.01", "topk-0.1", "topk-0.3"),
    ):
        row = [compressor_named(name) for name in names]
        for less, more in pairwise(row):
            assert np.all(less.sent_bytes(layers, replicas) <= more.sent_bytes(layers, replicas))
            assert np.all(less.error(layers, spread) >= more.error(layers, spread) - 1e-12)


@given(st.integers(1_024, 5_000), st.integers(2, 5), st.sampled_from([8, 4, 2]))
def test_quantised_bytes_are_those_of_buckets_dealt_to_ranks(numbers, replicas, bits):
    layers = LayerSizes(np.array([1]), np.array([numbers]), np.array([1]))
    flat = np.random.default_rng(0).normal(size=numbers)
    sizes = [rounded(bucket, bits, np.random.default_rng(0))[1] for bucket in buckets_of(flat)]
    parts = [sum(each) for each in (sizes[rank::replicas] for rank in range(replicas))]
    # A rank sends every part but its own to be added up, then its own part to every other rank.
    leaving = [sum(parts) - own + (replicas - 1) * own for own in parts]
    sent = compressor_named(f"q{bits}").sent_bytes(layers, replicas)
    assert sent[0] == pytest.approx(np.mean(leaving))


def test_bytes_of_the_other_schemes_on_four_replicas():
    layers = LayerSizes.of_shapes([(512, 256)])
    ring = 2 * 3 / 4
    for name, sent_bytes in (
        ("none", ring * 4 * 512 * 256),
        ("bf16", ring * 2 * 512 * 256),
        ("topk-0.01", 3 * 8 * 1311),  # 1311 values and indices to each of the three others
        ("powersgd-4", ring * 4 * (512 * 4 + 256 * 4)),
    ):
        assert compressor_named(name).sent_bytes(layers, 4)[0] == sent_bytes


def test_a_rank_above_the_matrix_is_cut_to_it_and_one_that_saves_too_little_is_not_used():
    layers = LayerSizes.of_shapes([(4_096, 3), (64, 64)])
    assert compressor_named("powersgd-8").compresses(layers).tolist() == [False, True]
    wide = compressor_named("powersgd-1000")
    assert not wide.compresses(layers).any()
    assert not wide.error(layers, Gradients().signal).any()
    # PyTorch's rule: (64 + 64) · rank · 2 < 64 · 64, that is rank < 16.
    assert compressor_named("powersgd-15").compresses(layers)[1]
    assert not compressor_named("powersgd-16").compresses(layers)[1]


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("law", ["normal", "laplace"])
def test_quantisation_errs_as_much_as_the_range_of_its_buckets_says(bits, law):
    random = np.random.default_rng(3)
    flat = getattr(random, law)(size=512 * 400)
    bucket_range = np.mean([np.ptp(each) ** 2 for each in buckets_of(flat)]) / np.mean(flat**2)
    out, size = rounded(flat, bits, random)
    layers = LayerSizes(np.array([400]), np.array([512]), np.array([1]))
    said = compressor_named(f"q{bits}").error(layers, Spread(1.0, 1.0, bucket_range))[0]
    # 1/6 is the mean over positions within a step; 2 bits have three steps, over which numbers are not spread evenly.
    assert np.sum((out - flat) ** 2) / np.sum(flat**2) == pytest.approx(said, rel=0.02 if bits > 2 else 0.1)
    assert size * 1.5 == compressor_named(f"q{bits}").sent_bytes(layers, 4)[0]


@pytest.mark.parametrize("tail", [0.6, 1.0, 1.8])
@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_top_k_loses_what_the_weibull_tail_says(tail, fraction):
    flat = np.sort(np.random.default_rng(5).weibull(tail, 1_000_000) ** 2)
    kept = round(fraction * flat.size)
    layers = LayerSizes(np.array([1_000]), np.array([1_000]), np.array([1]))
    said = compressor_named(f"topk-{fraction:g}").error(layers, Spread(tail, 1.0, 1.0))[0]
    assert said == pytest.approx(flat[:-kept].sum() / flat.sum(), abs=0.01)


@pytest.mark.parametrize("decay", [0.0, 0.7, 1.0, 2.0])
def test_powersgd_nears_what_the_decay_of_singular_values_says(decay):
    random = np.random.default_rng(7)
    left, right = (np.linalg.qr(random.normal(size=(side, 64)))[0] for side in (128, 64))
    matrix = left * np.arange(1, 65) ** (-decay / 2.0) @ right.T
    query = random.normal(size=(64, 4))
    for _ in range(50):
        basis, _ = np.linalg.qr(matrix @ query)
        query = matrix.T @ basis
    lost = np.sum((matrix - basis @ query.T) ** 2) / np.sum(matrix**2)
    said = compressor_named("powersgd-4").error(LayerSizes.of_shapes([(128, 64)]), Spread(1.0, decay, 1.0))[0]
    assert said - 1e-9 <= lost <= said * 1.02 + 1e-9


def test_16_bits_err_as_numbers_of_all_sizes_do():
    numbers = (2.0 ** np.random.default_rng(9).uniform(-4, 4, 1_000_000)).astype(np.float32)
    layers, spread = LayerSizes.of_shapes([(10, 10)]), Gradients().signal
    half = numbers.astype(np.float16).astype(np.float64)
    # To the nearest of what the upper 16 bits can say.
    brain = ((numbers.view(np.uint32) + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)
    for name, out in (("fp16", half), ("bf16", brain)):
        relative = np.sum((out - numbers) ** 2) / np.sum(numbers.astype(np.float64) ** 2)
        assert compressor_named(name).error(layers, spread)[0] == pytest.approx(relative, rel=0.02)


def test_codec_time_is_the_slower_of_memory_and_arithmetic_and_launches():
    layers, gpu = LayerSizes.of_shapes([(8_192, 8_192)]), gpu_sheet("a100")
    work = compressor_named("powersgd-4").codec_work(layers, 8)
    seconds = codec_s(work, speed_by_sheet(gpu))[0]
    assert seconds > work.touched_bytes[0] / gpu.memory_bandwidth_bytes_per_s
    assert seconds > work.flops[0] / gpu.fp32_flops_per_s
    assert codec_s(work, speed_by_sheet(gpu_sheet("h100")))[0] < seconds


def test_energy_decides_which_layers_count():
    layers = LayerSizes.of_shapes([(64, 64), (64,), (256, 64)])
    spread = Spread(1.0, 1.0, 40.0, energy=np.array([1.0, 8.0, 0.0]))
    assert spread.shares(layers) == pytest.approx([8 / 9, 1 / 9, 0.0])
    lost = spread.shares(layers) @ compressor_named("q4").error(layers, spread)
    assert lost == pytest.approx(8 / 9 * 40.0 / 6.0 / 15.0**2)
