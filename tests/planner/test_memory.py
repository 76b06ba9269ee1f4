"""Memory of plans: closed forms of the papers, orders that must hold, shares that must add up."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_setup import machine

from synergy_core.performance.planner.families import architecture_named, mixture, transformer
from synergy_core.performance.planner.machine import Software, machine_named, with_settings
from synergy_core.performance.planner.memory import Memory, memory, visible_bytes
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of
from synergy_core.performance.planner.work import Block, Layers, Work

NONE, SELECTIVE, FULL, _, MODULES = Recompute
STACK = with_settings(Software("test"), dropout=True, workspace_bytes=0.0)
UNFUSED = replace(STACK, flash=False)
GPT = transformer.Architecture(layers=24, hidden=2048, heads=16, ffn=8192, vocab=51200, seq_len=1024)
S, H, A, B = 1024, 2048, 16, 2


def of(*plans: Plan, software: Software = STACK, model: transformer.Architecture = GPT, **options: object) -> Memory:
    columns = plans_of(plans)
    return memory(transformer.work(model, columns, software), columns, software, **options)  # type: ignore[arg-type]


def layer(plan: Plan, software: Software = UNFUSED) -> Block:
    return transformer.work(GPT, plans_of([plan]), software).layers[0].block


def test_recomputed_modules_keep_of_an_mlp_its_input_and_of_latent_attention_no_heads_but_the_output() -> None:
    plans = plans_of([Plan(micro_batch=B)])
    attention = transformer.attention_part(GPT, plans, STACK)["saved_bytes"]
    kept = layer(Plan(micro_batch=B), STACK).saved.under(MODULES)
    np.testing.assert_allclose(kept, attention + S * B * H * 3.0)  # with a mask of dropout
    latent = architecture_named("deepseek-v3")[1]
    part = mixture.latent_attention_part(latent, plans, replace(STACK, dropout=False))
    tokens, heads, ranks = 4096 * B, 128, 1536 + 512 + 64
    norms = tokens * 2.0 * (7168 + ranks)
    projected = tokens * heads * 2.0 * (2 * (128 + 64) + 128)
    np.testing.assert_allclose(part["saved_bytes"] - part["module_bytes"], norms + projected)


def test_an_offloaded_optimizer_leaves_weights_and_the_gradients_that_are_not_sharded() -> None:
    parameters = GPT.parameters() + 2.0 * H
    for zero, per_parameter in ((0, 6.0), (1, 6.0), (2, 2.0), (3, 2.0 / 8)):
        held = of(Plan(data=8, zero=zero), software=with_settings(STACK, offload=("optimizer",)))
        np.testing.assert_allclose(held.static, per_parameter * parameters)


@pytest.mark.parametrize(
    ("zero", "per_parameter"), [(0, 18.0), (1, 6.0 + 12.0 / 8), (2, 2.0 + 16.0 / 8), (3, 18.0 / 8)]
)
def test_bytes_per_parameter_by_zero_stage(zero: int, per_parameter: float) -> None:
    held = of(Plan(data=8, zero=zero))
    # The position table and the final norm stand in the family's count too; the model's vocabulary needs no padding.
    parameters = GPT.parameters() + 2.0 * H
    np.testing.assert_allclose(held.static, per_parameter * parameters)


def test_a_master_copy_that_is_gathered_from_saves_the_16_bit_shard() -> None:
    plan = Plan(data=8, zero=3)
    both, master = of(plan), of(plan, software=with_settings(STACK, gathers_from_master=True))
    np.testing.assert_allclose(both.static - master.static, 2.0 * (GPT.parameters() + 2.0 * H) / 8)


def test_zero_3_gathers_prefetched_units() -> None:
    plan = Plan(data=8, zero=3)
    once, twice = (of(plan, software=with_settings(STACK, prefetch=each)) for each in (1, 2))
    work = transformer.work(GPT, plans_of([plan]), STACK)
    largest = np.maximum(work.layers[0].block.parameters, work.before.parameters)
    np.testing.assert_allclose(twice.buffers - once.buffers, 2.0 * largest)


def test_experts_spread_over_tensor_parallel_ranks_are_whole() -> None:
    """With as many expert ranks as data × tensor, no rank has a part of an expert, nor a second copy."""
    model = mixture.Architecture(
        layers=4, hidden=1024, heads=8, ffn=4096, vocab=51200, seq_len=1024, experts=16, topk=2, expert_ffn=1024
    )
    plans = plans_of([Plan(tensor=2, data=8, expert=each, sequence=True) for each in (8, 16)])
    assert plans.expert_tensor().tolist() == [2, 1]
    assert plans.expert_tensor(whole=True).tolist() == [1, 1]
    split, whole = mixture.work(model, plans, STACK).layers[-1].block.expert_parameters
    assert split == pytest.approx(whole)
    assert mixture.work(model, plans, STACK).layers[-1].block.tensor_count == pytest.approx([3.0, 1.0])


def test_experts_are_sharded_over_their_own_replicas_only() -> None:
    work = Work(Block("none"), (Layers(Block("layer", expert_parameters=1e9), 1.0),), Block("none"))
    plans = plans_of([Plan(data=8, context=2, expert=expert, zero=1) for expert in (1, 4, 16)])
    np.testing.assert_allclose(memory(work, plans, STACK).optimizer, 12e9 * np.array([1, 4, 16]) / 16)


def test_products_of_several_experts_have_workspaces_of_their_own() -> None:
    """A single expert's products run in one stream, as do those of a stage without experts."""
    model = mixture.Architecture(
        layers=4, hidden=1024, heads=8, ffn=4096, vocab=51200, seq_len=1024, experts=8, topk=2, expert_ffn=1024
    )
    dense = replace(model, dense_layers=4)
    plans = plans_of([Plan(data=8, expert=4), Plan(data=8, expert=8)])
    for each, expected in ((model, [5e8, 0.0]), (dense, [0.0, 0.0])):
        work = mixture.work(each, plans, STACK)
        plain, grouped = (memory(work, plans, with_settings(STACK, grouped_bytes=size)) for size in (0.0, 5e8))
        np.testing.assert_allclose(grouped.static - plain.static, expected)
        np.testing.assert_allclose(grouped.total - plain.total, expected)


@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_korthikanti_saved_bytes(tensor: int) -> None:
    """Table 2 of arXiv 2205.05198: s b h (10 + 24/t + 5as/(ht)); sequence parallelism makes it 34/t + 5as/(ht)."""
    unit, scores = S * B * H, 5.0 * A * S / H / tensor
    plain = layer(Plan(tensor=tensor, micro_batch=B))
    split = layer(Plan(tensor=tensor, micro_batch=B, sequence=True))
    assert plain.saved.whole_bytes == pytest.approx(unit * (10 + 24 / tensor + scores))
    assert plain.saved.selective_bytes == pytest.approx(unit * (10 + 24 / tensor))
    assert split.saved.whole_bytes == pytest.approx(unit * (34 / tensor + scores))
    assert plain.saved.full_bytes == pytest.approx(2 * unit)


def test_scores_in_four_bytes_are_kept_in_four_bytes() -> None:
    """Softmax's output, and with dropout its mask of one byte and what dropout leaves."""
    scores = B * A * S * S
    for precision, each in (("fp16", 5.0), ("tf32", 9.0)):
        software = replace(UNFUSED, precision=precision)
        saved, core = (layer(Plan(micro_batch=B), replace(software, flash=flash)) for flash in (False, True))
        statistics = 4.0 * B * S * A
        np.testing.assert_allclose(saved.saved.whole_bytes - core.saved.whole_bytes + statistics, each * scores)


def test_products_in_eight_bits_keep_their_inputs_in_eight_bits() -> None:
    """Norms' outputs and the activation, while attention keeps its own output beside the cast one."""
    plan = Plan(micro_batch=B)
    half, eight = (layer(plan, replace(STACK, precision=each)).saved.whole_bytes for each in ("bf16", "fp8"))
    np.testing.assert_allclose(half - eight, B * S * (2.0 * H + 8192 - H))


def test_buckets_stand_beside_the_gradients_under_zero() -> None:
    deepspeed = with_settings(STACK, bucket_elements=1e8)
    plans = [Plan(data=8, zero=zero) for zero in range(4)]
    extra = of(*plans, software=deepspeed).buffers - of(*plans).buffers
    np.testing.assert_allclose(extra, [0.0, 4e8, 4e8, 2e8])  # in the weights' format, in which they are sent


def test_eager_autograd_keeps_more_of_a_gated_layer() -> None:
    """Rotated queries and keys (4), the output laid out anew (2), the activated half (2 · ffn/hidden)."""
    model = replace(GPT, gated=True, learned_positions=False, ffn=2 * H)
    plans = plans_of([Plan(micro_batch=B)])
    fused = replace(STACK, dropout=False)
    lean, eager = (
        transformer.work(model, plans, each).layers[0].block.saved.whole_bytes
        for each in (fused, replace(fused, eager=True))
    )
    np.testing.assert_allclose(eager - lean, S * B * H * (4.0 + 2.0 + 4.0))


def kept(plan: Plan) -> float:
    """Layers' worth of saved activations on the first stage."""
    block = layer(plan, STACK)
    work = transformer.work(GPT, plans_of([plan]), STACK)
    flat = replace(
        work, before=Block("none"), layers=(Layers(replace(block, live_bytes=block.saved.whole_bytes), 24.0),)
    )
    got = memory(flat, plans_of([plan]), STACK, stage="first")
    return float(got.activations[0] / np.asarray(block.saved.whole_bytes).item())


@pytest.mark.parametrize(("stages", "chunks"), [(4, 1), (4, 2), (4, 3), (8, 3), (2, 6)])
def test_layers_in_flight_on_the_first_stage(stages: int, chunks: int) -> None:
    """Korthikanti, 4.2.3: L without interleaving, L (1 + (p − 1)/(p v)) with."""
    expected = 24.0 if chunks == 1 else 24.0 * (1 + (stages - 1) / (stages * chunks))
    assert kept(Plan(pipeline=stages, interleave=chunks, accumulation=64)) == pytest.approx(expected)


def test_no_more_micro_batches_in_flight_than_there_are() -> None:
    assert kept(Plan(pipeline=8, accumulation=2)) == pytest.approx(3 * 2)
    assert kept(Plan(pipeline=4, interleave=3, accumulation=2)) == pytest.approx(6 * 2)


def test_full_recomputation_keeps_inputs_and_one_live_layer() -> None:
    plan = Plan(micro_batch=B, recompute=FULL)
    held, block = of(plan), layer(plan, STACK)
    mask = B * S * H  # Of the embedding's dropout.
    stacked = 24 * 2 * B * S * H + mask
    np.testing.assert_allclose(
        held.activations + held.logits, stacked + np.maximum(block.live_bytes - block.saved.full_bytes, held.logits)
    )


def test_stages_cut_by_compute_give_the_first_more_layers() -> None:
    plan = Plan(pipeline=8, accumulation=8)
    by_layers, by_compute = (
        of(plan, stage="first", software=with_settings(STACK, weighs_logits=each)) for each in (False, True)
    )
    np.testing.assert_allclose(by_compute.weights - by_layers.weights, 2.0 * layer(plan).parameters)


def test_no_stage_needs_more_than_the_worst() -> None:
    for plan in (Plan(pipeline=p, accumulation=8) for p in (1, 2, 3, 5, 7, 8)):
        worst = of(plan).total
        assert worst >= of(plan, stage="first").total
        assert worst >= of(plan, stage="last").total


@pytest.mark.parametrize("runs", [(20.0, 4.0), (4.0, 20.0)])
def test_a_heavy_run_of_layers_is_found_wherever_it_stands(runs: tuple[float, float]) -> None:
    light, heavy = Block("light", parameters=1.0), Block("heavy", parameters=1e6)
    work = Work(Block("none"), (Layers(light, runs[0]), Layers(heavy, runs[1])), Block("none"))
    held = memory(work, plans_of([Plan(pipeline=6)]), STACK)
    np.testing.assert_allclose(held.weights, 2.0 * 4e6)


def test_all_columns_at_once_are_the_plans_one_by_one() -> None:
    plans = [
        Plan(data=8, accumulation=4, zero=3),
        Plan(tensor=2, pipeline=4, interleave=3, micro_batch=2, accumulation=4, zero=1, recompute=1, sequence=True),
        Plan(tensor=8, pipeline=2, data=2, micro_batch=4, accumulation=4, recompute=2, sequence=True),
        Plan(tensor=4, data=2, accumulation=4, zero=2, sequence=True),
    ]
    together, alone = of(*plans), [of(each) for each in plans]
    for each in fields(Memory):
        np.testing.assert_allclose(getattr(together, each.name), [getattr(one, each.name)[0] for one in alone])


DEGREES = st.sampled_from([1, 2, 4, 8])
PLANS = st.builds(
    Plan,
    tensor=DEGREES,
    pipeline=DEGREES,
    data=DEGREES,
    context=st.sampled_from([1, 2]),
    micro_batch=st.integers(1, 8),
    accumulation=st.integers(1, 32),
    zero=st.integers(0, 3),
    recompute=st.integers(0, 2),
    sequence=st.booleans(),
)


@given(PLANS)
def test_parts_are_the_total_and_none_is_negative(plan: Plan) -> None:
    held = of(plan)
    parts = [getattr(held, name) for name in ("weights", "gradients", "optimizer", "activations", "logits", "buffers")]
    assert all((part >= 0).all() for part in parts)
    np.testing.assert_allclose(sum(parts), held.total)
    assert (held.device_total > held.reserved).all()
    assert (held.reserved >= held.total).all()


@settings(max_examples=50)
@given(PLANS, st.sampled_from([STACK, UNFUSED, replace(STACK, eager=True)]))
def test_more_sharing_and_recomputation_never_need_more(plan: Plan, software: Software) -> None:
    def total(**changed: object) -> float:
        return float(of(replace(plan, **changed), software=software).total[0])  # type: ignore[arg-type]

    assert np.all(np.diff([total(zero=each) for each in (0, 1, 2)]) <= 0)
    assert np.all(np.diff([total(recompute=each) for each in (NONE, SELECTIVE, MODULES, FULL)]) <= 0)
    assert np.all(np.diff([total(tensor=each) for each in (1, 2, 4, 8)]) <= 0)
    assert np.all(np.diff([total(micro_batch=each) for each in (1, 2, 4, 8)]) >= 0)
    assert total(sequence=True) <= total(sequence=False)


@given(st.sampled_from([1, 2, 4, 8, 64]), st.integers(0, 3))
def test_data_parallel_shards_add_up(data: int, zero: int) -> None:
    """What the replicas hold together of a sharded part is one whole copy."""
    one, many = of(Plan(zero=zero)), of(Plan(data=data, zero=zero))
    for name, stage in (("optimizer", 1), ("gradients", 2), ("weights", 3)):
        copies = 1 if zero >= stage else data
        np.testing.assert_allclose(data * getattr(many, name), copies * getattr(one, name))


def test_what_fits() -> None:
    """GPT-3 175B on a node never fits; 1.3 B on one GPU does with full recomputation, without it only a small batch."""
    huge = transformer.Architecture(layers=96, hidden=12288, heads=96, ffn=49152, vocab=51200, seq_len=2048)
    assert not of(Plan(tensor=8, recompute=FULL, sequence=True), model=huge).fits(machine()).any()
    got = of(Plan(micro_batch=4, recompute=FULL), Plan(micro_batch=32), Plan(micro_batch=32, recompute=FULL))
    assert got.fits(machine()).tolist() == [True, False, True]
    assert got.fits(machine(memory_bytes=16e9)).tolist() == [False, False, False]


def test_check_bits_of_graphics_memory_take_a_sixteenth() -> None:
    """nvidia-smi shows 15,360 MiB of a T4, 16 GiB, and 46,080 MiB of an A40; HBM has chips of its own for them."""
    for gpu, mib in (("t4", 15360.0), ("a40", 46080.0), ("h100", 81920.0)):
        shown = mib * 2**20
        assert 0.97 * shown < visible_bytes(machine_named(gpu)) < shown
