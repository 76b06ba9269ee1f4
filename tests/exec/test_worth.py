"""What a step of compressed gradients counts: the core's formulas, of the layers that ranks exchange."""

import pytest
import torch
from torch import distributed

from synergy_core.goodput.compressed import GradientErrors
from synergy_core.goodput.compression import Gradients, LayerSizes, compressor_named
from synergy_core.goodput.efficiency import gain
from synergy_core.goodput.offers import uniform
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression.choices import SchemeByLayer
from synergy_exec.training.compression.scheme import GradientLayer
from synergy_exec.training.compression.worth import errors_over_ranks
from synergy_exec.worker.loop import worth_of_step

LAYERS = [GradientLayer("up", 256, 128), GradientLayer("down", 64, 512), GradientLayer("bias", 256, 1)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["none", "bf16", "q4", "topk-0.1", "powersgd-4"])
def test_errors_are_those_of_the_cores_compressor(alone, name):
    choices = SchemeByLayer.named(name)
    found = errors_over_ranks([(each, choices.of(each, 2)) for each in LAYERS], torch.device("cpu"))
    sizes = LayerSizes.of_shapes([(each.rows, each.columns) for each in LAYERS])
    wanted = uniform(compressor_named(name), sizes, Gradients()).errors
    # Schemes send vectors as they are, but for those of 16 bits.
    assert (found.signal, found.noise) == pytest.approx((wanted.signal, wanted.noise), rel=1e-5)
    assert (found.unbiased, found.rounds_sum) == (wanted.unbiased, wanted.rounds_sum)


def test_errors_by_layer_are_between_those_of_its_schemes(alone):
    both = SchemeByLayer.named("powersgd-1,down=none")
    mixed = errors_over_ranks([(each, both.of(each, 2)) for each in LAYERS], torch.device("cpu"))
    whole = SchemeByLayer.named("powersgd-1")
    all_of_it = errors_over_ranks([(each, whole.of(each, 2)) for each in LAYERS], torch.device("cpu"))
    assert 0.0 < mixed.signal < all_of_it.signal
    assert not mixed.unbiased


def test_what_a_step_is_worth():
    plan, known = PlanMessage(data=2, micro_batch=16), (1.0, 3.0)
    assert worth_of_step(plan, None, 8, None) == 1.0
    assert worth_of_step(plan, known, 8, None) == gain(4.0, *known)
    lossy = GradientErrors(0.5, 0.5, False)
    assert worth_of_step(plan, known, 8, lossy) == pytest.approx(0.5 * gain(4.0, *known))
    alone = PlanMessage(data=1, micro_batch=32)
    assert worth_of_step(alone, known, 8, lossy) == pytest.approx(gain(4.0, *known))
    noisy = GradientErrors(0.2, 0.2, True)
    assert 0.5 < worth_of_step(plan, known, 8, noisy) / gain(4.0, *known) < 1.0
