"""What steps of running jobs show of how their input is prepared, and what optimistic profiling makes of few runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.performance.goodput.pipeline import ObservedInputs, Pipeline, fit_pipeline, searched_steps
from synergy_core.units import GB

DATA = 200 * GB
STORAGE = 62.5e6
SAMPLES = 128
NOISE = 0.03
PLENTY = 1e4


def reported(truth, cpus, memory_gb, *, gpu_s=0.1, storage=STORAGE, random=None, sigma=NOISE):
    """Steps at these shares, with noise where `random` is given."""
    cpus, memory = np.broadcast_arrays(np.asarray(cpus, dtype=float), np.asarray(memory_gb) * GB)
    waited = SAMPLES * truth.sample_s(cpus, memory, storage_bytes_per_s=storage)
    noise = (
        np.exp(sigma * random.standard_normal((2, *cpus.shape))) if random is not None else np.ones((2, *cpus.shape))
    )
    step_s = np.maximum(gpu_s, waited) * noise[1]
    return ObservedInputs(cpus, memory, storage, 1, SAMPLES, gpu_s * noise[0], step_s)


def constants(found):
    return found.pipeline.cpu_s, found.pipeline.sample_bytes


def test_a_job_that_waited_for_cpus_shows_their_time_exactly_and_nothing_of_storage():
    found = fit_pipeline(reported(Pipeline(0.004, 1e5, DATA), [1, 2, 4, 8], 200), DATA)
    assert constants(found) == pytest.approx((0.004, 0.0))
    assert (found.cpu_s.state, found.cpu_s.steps) == ("measured", 3)
    assert found.cpu_s.lower < 0.004 < found.cpu_s.upper < 1.1 * 0.004
    assert (found.sample_bytes.state, found.sample_bytes.upper) == ("unseen", np.inf)


def test_a_job_that_waited_for_storage_shows_its_bytes_and_a_bound_of_cpu_time():
    found = fit_pipeline(reported(Pipeline(0.004, 1e5, DATA), [8, 16, 24], 50), DATA)
    assert found.sample_bytes.value == pytest.approx(1e5)
    assert found.sample_bytes.steps == 2  # with the fewest CPUs it may have been their doing
    assert found.cpu_s.state == "bounded"
    assert found.cpu_s.value == pytest.approx(8 * 1e5 * 0.75 / STORAGE)


def test_a_job_that_waited_for_both_in_turn_shows_both():
    truth = Pipeline(0.004, 1e5, DATA)
    found = fit_pipeline(reported(truth, [1, 2, 8, 24, 24], [50, 50, 50, 0, 200]), DATA)
    assert constants(found) == pytest.approx((0.004, 1e5))
    assert (found.cpu_s.steps, found.sample_bytes.steps) == (2, 2)


def test_a_job_that_never_waited_at_one_cpu_bounds_its_time_from_above():
    found = fit_pipeline(reported(Pipeline(1e-5, 0.0, DATA), [1, 1, 3, 6], 200), DATA)
    assert (found.cpu_s.state, found.cpu_s.lower) == ("bounded", 0.0)
    assert found.cpu_s.value == pytest.approx(0.1 / SAMPLES)
    assert found.cpu_s.value < found.cpu_s.upper < 1.15 * found.cpu_s.value
    # As it was with one CPU it is told to stay; with fewer, nobody knows better than in proportion.
    told = SAMPLES * found.pipeline.sample_s([1, 0.5], DATA, storage_bytes_per_s=STORAGE)
    assert told == pytest.approx([0.1, 0.2])


def test_one_share_cannot_tell_cpus_from_storage():
    truth = Pipeline(0.004, 1e5, DATA)
    found = fit_pipeline(reported(truth, [2, 2, 2], 50), DATA)
    assert (found.cpu_s.state, found.sample_bytes.state) == ("bounded", "bounded")
    told = float(found.pipeline.sample_s(2, 50 * GB, storage_bytes_per_s=STORAGE))
    assert told == pytest.approx(0.002)
    assert found.cpu_s.value == pytest.approx(0.004)
    assert found.sample_bytes.value == pytest.approx(0.002 * STORAGE / 0.75)


def test_caches_of_gpus_on_one_node_are_one():
    truth = Pipeline(0.0, 1e5, DATA)
    memory = np.array([25, 25]) * GB
    shared = truth.sample_s(24, memory, storage_bytes_per_s=STORAGE, node_gpus=[1, 4])
    steps = ObservedInputs(24, memory, STORAGE, [1, 4], SAMPLES, 0.01, SAMPLES * shared)
    assert fit_pipeline(steps, DATA).sample_bytes.value == pytest.approx(1e5)


def test_nothing_tried_is_nothing_known():
    found = fit_pipeline(ObservedInputs(*[[]] * 7), DATA)
    assert (found.cpu_s.state, found.sample_bytes.state) == ("unseen", "unseen")
    assert found.pipeline == Pipeline(0.0, 0.0, DATA)


shares = st.lists(
    st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.sampled_from([0, 20, 62.5, 125, 250])),
    min_size=1,
    max_size=8,
)


@given(cpu_s=st.floats(1e-5, 0.05), sample_bytes=st.floats(1e3, 1e6), tried=shares, gpu_s=st.floats(0.01, 2.0))
def test_without_noise_what_is_said_to_be_known_is_true(cpu_s, sample_bytes, tried, gpu_s):
    truth = Pipeline(cpu_s, sample_bytes, DATA)
    found = fit_pipeline(reported(truth, *zip(*tried, strict=True), gpu_s=gpu_s), DATA)
    for known, true in ((found.cpu_s, cpu_s), (found.sample_bytes, sample_bytes)):
        assert known.lower <= true <= known.upper
        if known.state == "measured":
            assert known.value == pytest.approx(true, rel=1e-9)
        if known.state == "bounded":
            assert known.value >= true * (1 - 1e-9)


@given(tried=shares, more=shares, gpu_s=st.floats(0.01, 2.0))
def test_without_noise_another_share_never_loosens_a_bound(tried, more, gpu_s):
    truth = Pipeline(0.004, 1e5, DATA)
    few, many = (
        fit_pipeline(reported(truth, *zip(*each, strict=True), gpu_s=gpu_s), DATA) for each in (tried, tried + more)
    )
    for before, after in ((few.cpu_s, many.cpu_s), (few.sample_bytes, many.sample_bytes)):
        if after.state == "bounded" or before.state == "unseen":
            assert after.value <= before.value * (1 + 1e-9) or before.state == "unseen"
        assert not (before.state == "measured" and after.state != "measured")


def test_planted_constants_lie_in_their_intervals_as_often_as_stated():
    random = np.random.default_rng(14)
    held, widths, below = [], [], []
    for _ in range(400):
        truth = Pipeline(10 ** random.uniform(-4, -1.5), 10 ** random.uniform(3, 6), DATA)
        tried = np.repeat(np.arange(random.integers(1, 6)), random.integers(1, 8))
        cpus = random.choice([1, 2, 3, 4, 6, 8, 12], 6)[tried]
        memory = random.choice([20, 62.5, 125, 250], 6)[tried]
        gpu_s = SAMPLES * 10 ** random.uniform(-4, -2)
        found = fit_pipeline(reported(truth, cpus, memory, gpu_s=gpu_s, random=random), DATA)
        for known, true in ((found.cpu_s, truth.cpu_s), (found.sample_bytes, truth.sample_bytes)):
            if known.state == "measured":
                held.append(known.lower <= true <= known.upper)
                widths.append(known.upper / known.lower)
            else:
                below.append(true <= known.upper)
    assert len(held) > 200
    assert 0.92 <= np.mean(held) <= 0.99
    assert np.median(widths) < 1.12
    assert len(below) > 200
    assert np.mean(below) > 0.975


def test_a_few_steps_that_hung_change_little():
    random = np.random.default_rng(3)
    steps = reported(Pipeline(0.004, 0.0, DATA), np.repeat([1, 2, 12], 30), 200, random=random)
    hung = np.where(random.random(90) < 0.05, 4.0, 1.0)
    assert hung.max() == 4.0
    slow = ObservedInputs(steps.cpus, steps.memory_bytes, STORAGE, 1, SAMPLES, steps.gpu_step_s, steps.step_s * hung)
    found = fit_pipeline(slow, DATA)
    assert found.cpu_s.value == pytest.approx(0.004, rel=0.02)
    assert found.cpu_s.upper / found.cpu_s.lower < 1.06


def search(truth, most, *, gpus=1, gpu_s=0.1):
    """The CPU counts tried, and the steps measured, on data in memory."""
    tried = []

    def seconds_of(cpus):
        tried.append(cpus)
        return max(gpu_s, SAMPLES * float(truth.sample_s(cpus / gpus, 1e18, storage_bytes_per_s=STORAGE)))

    return tried, searched_steps(seconds_of, most, gpus=gpus)


@pytest.mark.parametrize(
    ("cpu_s", "most", "gpus", "expected"),
    [
        (0.0, 24, 1, [24, 12, 6, 3, 1]),
        (1.0, 6, 1, [6, 3, 2, 1]),
        (8 * 0.1 / SAMPLES, 24, 1, [24, 12, 6, 5, 4, 3, 2, 1]),
        (1.0, 24, 4, [24, 12, 8, 4]),
        (0.0, 1, 1, [1]),
        (0.0, 3, 4, [3, 1]),
    ],
)
def test_the_search_halves_while_steps_are_alike_and_else_steps_down(cpu_s, most, gpus, expected):
    tried, found = search(Pipeline(cpu_s, 0.0, DATA), most, gpus=gpus)
    assert tried == list(found) == expected


@given(cpu_s=st.floats(0.0, 0.1), most=st.integers(1, 96), gpus=st.integers(1, 8))
def test_the_search_ends_and_never_tries_a_count_twice(cpu_s, most, gpus):
    tried, found = search(Pipeline(cpu_s, 0.0, DATA), most, gpus=gpus)
    assert tried == sorted(set(tried), reverse=True)
    assert tried[0] == most
    assert len(found) <= most


def test_profiles_of_too_little_are_refused():
    with pytest.raises(InputError, match="from 0 CPUs on 1 GPUs"):
        searched_steps(lambda _: 1.0, 0)
    with pytest.raises(InputError, match="with 4 CPUs was measured as 0 s"):
        searched_steps(lambda _: 0.0, 4)
