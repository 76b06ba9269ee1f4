"""Operators of model families on one GPU: closed forms, published counts, and conservation over plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from synergy_core.errors import InputError
from synergy_core.performance.planner.families import architecture_named, architecture_names, card_named, family_named
from synergy_core.performance.planner.families.mixture import Architecture as Mixture
from synergy_core.performance.planner.families.transformer import Architecture as Dense
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import RISING, Plan, plans_of

FLASH = Software("test")
UNFUSED = Software("test", flash=False, dropout=True)
MIXTURES = [name for name in architecture_names() if card_named(name).family is family_named("mixture")]
TRANSFORMERS = ["gpt-1.7b", "llama-3-70b", "arena-bert-1.3b", "mpt-7b"]


def worked(name, plan, software=FLASH, **changes):
    family, architecture = architecture_named(name)
    return family.work(replace(architecture, **changes), plans_of([plan]), software)


def blocks(work):
    """Each block with how often it occurs."""
    return [(work.before, 1.0), *((each.block, np.asarray(each.count)) for each in work.layers), (work.after, 1.0)]


def total(work, amount):
    """Sum of an amount over all blocks. amount: a field, or a function of a block."""
    of = amount if callable(amount) else lambda block: np.asarray(getattr(block, amount))
    return np.asarray(sum(of(block) * count for block, count in blocks(work))).item()


def gemm_flops(block):
    return sum(np.asarray(each.flops) for each in block.gemms)


def score_flops(block):
    """FLOPs of attention without halving causal scores."""
    return sum(2.0 * a.count * a.queries * a.keys * (a.width + np.asarray(a.value_width)) for a in block.attention)


def held(block):
    return np.asarray(block.parameters) + np.asarray(block.expert_parameters)


@pytest.mark.parametrize("name", architecture_names())
def test_parameters_are_those_published_and_blocks_hold_them(name):
    """Within 2 %, or the same number when rounded as it was printed: billions, or tenths of them."""
    card, work = card_named(name), worked(name, Plan())
    counted, published = float(card.architecture.parameters()), card.published_parameters
    digits = 0 if published % 1e9 == 0 else 1
    rounded = published >= 1e9 and round(counted / 1e9, digits) == pytest.approx(published / 1e9)
    assert rounded or counted == pytest.approx(published, rel=0.02)
    # Norms' shifts, padding of the vocabulary, a second norm per latent: small beside the model.
    assert total(work, held) == pytest.approx(counted, rel=0.01)
    assert card.architecture.limits().layers == np.max(work.layer_count)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_dense_flops_follow_the_closed_form(name):
    a = card_named(name).architecture
    work = worked(name, Plan(micro_batch=2))
    tokens, width = 2.0 * a.seq_len, float(a.width)
    layer = 2.0 * a.hidden * width * (a.heads + float(a.groups)) + (3 if a.gated else 2) * a.hidden * a.ffn
    padded = np.ceil(a.vocab / 128) * 128
    expected = tokens * (a.layers * (2.0 * layer + 4.0 * a.seq_len * a.heads * width) + 2.0 * a.hidden * padded)
    assert total(work, lambda block: gemm_flops(block) + score_flops(block)) == pytest.approx(expected)


def test_gpt_flops_are_those_of_narayanan_et_al():
    a = Dense(layers=24, hidden=2304, heads=24, ffn=9216, vocab=51200, seq_len=2048)
    work = family_named("transformer").work(a, plans_of([Plan(micro_batch=4)]), FLASH)
    b, s, layers, h, v = 4, 2048, 24, 2304, 51200
    # Equation 3 of arXiv 2104.04473 without recomputation: a third is the forward pass.
    expected = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h)) / 3
    assert total(work, lambda block: gemm_flops(block) + score_flops(block)) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["llama-3-70b", "qwen3-30b-a3b", "deepseek-v3", "arena-moe-1.3b"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_tensor_parallelism_divides_matrices_with_heads_or_widths(name, tensor):
    plan = Plan(micro_batch=2, sequence=True)
    one, many = worked(name, plan), worked(name, replace(plan, tensor=tensor))
    padding = 0.01
    assert total(many, gemm_flops) * tensor == pytest.approx(total(one, gemm_flops), rel=padding)
    assert total(many, score_flops) * tensor == pytest.approx(total(one, score_flops))
    for amount in ("split_bytes", "replicated_bytes"):
        assert total(many, amount) * tensor == pytest.approx(total(one, amount), rel=padding)


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-30b-a3b", "arena-moe-1.3b", "deepseek-v3", "resnet-50"])
def test_without_a_split_sequence_some_traffic_is_repeated(name):
    one, many = worked(name, Plan(micro_batch=2)), worked(name, Plan(micro_batch=2, tensor=4))
    assert total(many, "replicated_bytes") == pytest.approx(total(one, "replicated_bytes"))
    saved = [total(each, lambda block: np.asarray(block.saved.whole_bytes)) for each in (many, one)]
    assert saved[0] < saved[1]


@pytest.mark.parametrize("name", [*TRANSFORMERS, *MIXTURES, "arena-wresnet-1b"])
@pytest.mark.parametrize("software", [FLASH, UNFUSED])
def test_less_is_kept_the_more_is_computed_again(name, software):
    for block, _ in blocks(worked(name, Plan(micro_batch=2), software)):
        none, selective, _, modules, full = (np.asarray(block.saved.under(each)) for each in RISING)
        assert np.all(none >= selective)
        assert np.all(selective >= modules)
        assert np.all(modules >= full)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("expert", [2, 8])
def test_expert_parallelism_conserves_parameters_and_work(name, expert):
    one, many = worked(name, Plan(data=8)), worked(name, Plan(data=8, expert=expert))
    assert total(many, "expert_parameters") * expert == pytest.approx(total(one, "expert_parameters"))
    assert total(many, "parameters") == pytest.approx(total(one, "parameters"))
    # The busiest of several ranks has a few rows more than its share.
    share = total(many, gemm_flops) / total(one, gemm_flops)
    assert np.all((share >= 1.0 - 1e-12) & (share < 1.05))


@pytest.mark.parametrize("name", MIXTURES)
def test_active_flops_of_a_mixture(name):
    """Two per parameter that a token meets and, in GShard, the products that dispatch and combine."""
    a = card_named(name).architecture
    work = worked(name, Plan(micro_batch=2))
    tokens = 2.0 * a.seq_len
    met = np.asarray(a.layers) * a.attention_parameters()
    met += (a.layers - a.expert_layers) * a.mlp_parameters()
    met += a.expert_layers * (a.expert_parameters() * (a.topk + a.shared_experts) + a.experts * a.hidden)
    met += a.embedding_parameters()
    extra = a.expert_layers * 4.0 * a.topk * a.gshard_group * a.hidden
    assert total(work, gemm_flops) == pytest.approx(tokens * (2.0 * met + extra), rel=1e-3)


def test_every_layer_of_a_mixture_is_counted_in_its_place():
    family, a = architecture_named("arena-moe-1.3b")
    work = family.work(a, plans_of([Plan()]), FLASH)
    assert np.asarray(work.layer_count).item() == 16
    names = [each.block.name for each in work.layers]
    assert names == ["expert layer", "dense layer"] * 8
    deep = [(each.block.name, np.asarray(each.count).item()) for each in worked("deepseek-v3", Plan()).layers]
    assert deep == [("dense layer", 3), ("expert layer", 58)]


def test_models_as_columns_are_the_models_one_by_one():
    """Rows of a file: other models in the same call."""
    family = family_named("mixture")
    small, large = (card_named(f"arena-moe-{size}").architecture for size in ("690m", "27b"))
    names = ("layers", "hidden", "ffn", "expert_ffn", "experts")
    both = replace(small, **{name: np.array([getattr(small, name), getattr(large, name)]) for name in names})
    plans = plans_of([Plan(micro_batch=2), Plan(micro_batch=4)])
    flops = sum(gemm_flops(block) * count for block, count in blocks(family.work(both, plans, FLASH)))
    for at, each in enumerate((small, large)):
        alone = family.work(each, plans.take(np.array([at])), FLASH)
        assert flops[at] == pytest.approx(total(alone, gemm_flops))


def test_more_ranks_are_less_even_unless_rows_are_capped():
    def busiest(name: str, experts_over: int) -> float:
        """Rows of the busiest rank ÷ those of one that has its even share."""
        block = worked(name, Plan(data=64, expert=experts_over)).layers[-1].block
        rows = [gemm.m * gemm.count for gemm in block.gemms[-2:]]
        assert rows[0] == rows[1]
        whole = worked(name, Plan(data=64)).layers[-1].block.gemms[-1]
        return (rows[0] / (whole.m * whole.count)).item()

    few, many = (busiest("qwen3-30b-a3b", each) for each in (2, 64))
    assert 1.0 < few < many < 1.05


def test_rows_that_are_sent_to_experts():
    a = card_named("qwen3-30b-a3b").architecture
    block = worked("qwen3-30b-a3b", Plan(data=8, expert=8)).layers[0].block
    assert np.asarray(block.all_to_all.sent_bytes).item() == 2.0 * a.seq_len * 8 * a.hidden
    up = block.gemms[3]
    assert np.asarray(up.count).item() == 16
    assert np.asarray(up.m).item() == pytest.approx(a.seq_len * 8 * 8 / 128, rel=0.02)  # and what the busiest has more


def test_a_window_cuts_the_scores_of_half_the_layers():
    full = worked("gpt-oss-20b", Plan(), windowed=0.0)
    near = worked("gpt-oss-20b", Plan())
    s = card_named("gpt-oss-20b").architecture.seq_len
    assert total(near, score_flops) / total(full, score_flops) == pytest.approx(0.5 + 0.5 * 128 / s)
    assert total(near, gemm_flops) == total(full, gemm_flops)


def test_an_expert_for_every_token_is_a_plain_transformer():
    shared = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 51200, "seq_len": 256, "ffn": 2048}
    plans = plans_of([Plan(micro_batch=2)])
    dense = family_named("transformer").work(Dense(**shared), plans, FLASH)
    sparse = family_named("mixture").work(Mixture(**shared, experts=1, topk=1, expert_ffn=2048), plans, FLASH)
    router = 2.0 * 2 * 256 * 512 * 4
    assert total(sparse, gemm_flops) - router == pytest.approx(total(dense, gemm_flops))
    assert total(sparse, held) - 4 * 512 == pytest.approx(total(dense, held))


def test_resnet_50_costs_8_gflop_per_image():
    work = worked("resnet-50", Plan(micro_batch=16))
    assert total(work, gemm_flops) / 16 == pytest.approx(8.2e9, rel=0.03)
    assert np.asarray(work.layer_count).item() == 16

    # The first stage: 56 × 56 pixels through 64, 64 and 256 channels.
    other = worked("resnet-50", Plan()).layers[1].block
    assert gemm_flops(other) == pytest.approx(2 * 56**2 * (256 * 64 + 9 * 64 * 64 + 64 * 256))


@pytest.mark.parametrize("tensor", [2, 8])
def test_tensor_parallelism_of_a_resnet_divides_its_bottlenecks(tensor):
    one, many = worked("arena-wresnet-1b", Plan()), worked("arena-wresnet-1b", Plan(tensor=tensor))
    for whole, part in zip(one.layers, many.layers, strict=True):
        assert gemm_flops(part.block) * tensor == pytest.approx(gemm_flops(whole.block))
        assert np.asarray(part.block.parameters) * tensor == pytest.approx(np.asarray(whole.block.parameters), rel=0.05)


def test_resnet_activations_are_as_wide_as_the_precision():
    half = worked("resnet-50", Plan(), FLASH)
    full = worked("resnet-50", Plan(), Software("test", precision="tf32"))
    assert total(full, "boundary_bytes") == 2 * total(half, "boundary_bytes")


def test_images_with_channels_first_are_transposed_for_tensor_cores_alone():
    def moved(precision, channels_last):
        work = worked("resnet-50", Plan(), Software("test", precision=precision, channels_last=channels_last))
        return total(work, lambda block: np.asarray(block.replicated_bytes) + block.split_bytes)

    assert moved("tf32", False) > 1.5 * moved("tf32", True)
    assert moved("fp32", False) == moved("fp32", True) == moved("tf32", True)


def test_what_a_resnet_cannot_do():
    with pytest.raises(InputError, match="neither a sequence nor experts"):
        worked("resnet-50", Plan(context=2))
    with pytest.raises(InputError, match="depth 49; expected one of 50, 101, 152"):
        worked("resnet-50", Plan(), depth=49)


def test_a_token_cannot_go_to_more_groups_than_there_are_and_names_are_checked():
    with pytest.raises(InputError, match="groups_per_token: 9 of expert_groups: 8"):
        replace(architecture_named("deepseek-v3")[1], groups_per_token=9).check()
    with pytest.raises(InputError, match="Did you mean 'llama-2-70b'"):
        architecture_named("llama2-70b")
    with pytest.raises(InputError, match="Did you mean 'resnet'"):
        family_named("resnets")


@pytest.mark.parametrize("name", architecture_names())
def test_matrices_are_the_parameters_but_for_a_few_vectors(name):
    """What compressors take apart: right operands of products and tables hold all but norms and biases."""
    card = card_named(name)
    split = [Plan(), Plan(tensor=2), Plan(pipeline=2, data=2)]
    work = card.family.work(card.architecture, plans_of(split), FLASH)
    vectors = np.zeros(3)
    for block, count in blocks(work):
        dense, expert = np.zeros(3), np.zeros(3)
        for each in block.gemms:
            held = each.n * each.k * (each.count if each.stored is None else each.stored)
            dense, expert = (dense, expert + held) if each.expert else (dense + held, expert)
        dense = dense + sum(rows * columns for rows, columns in block.tables)
        assert expert == pytest.approx(block.expert_parameters)
        assert (block.parameters - dense >= -1e-6 * np.asarray(block.parameters)).all()
        vectors += (block.parameters - dense) * count
    assert (vectors <= 0.005 * card.architecture.parameters()).all()
