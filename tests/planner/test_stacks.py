"""What stacks that people run keep in memory, each by a hand calculation from the stack's own documentation."""

from dataclasses import replace

import numpy as np
import pytest

from synergy_core.performance.planner.communication import all_reduce_s, reduce_scatter_s
from synergy_core.performance.planner.families import architecture_named, mixture, transformer
from synergy_core.performance.planner.machine import (
    Constants,
    Software,
    links_for,
    machine_named,
    software_named,
    with_settings,
)
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of
from synergy_core.performance.planner.step_time import step_time

GPT = transformer.Architecture(layers=24, hidden=2048, heads=16, ffn=8192, vocab=51200, seq_len=1024)
PARAMETERS = GPT.parameters() + 2.0 * 2048  # with the final norm
S, H, FFN, HEADS = 1024, 2048, 8192, 16


def held(software, model=GPT, **plan):
    columns = plans_of([Plan(data=8, **plan)])
    return memory(transformer.work(model, columns, software), columns, software)


def test_deepspeed_shards_states_of_16_bytes_a_parameter():
    """Rajbhandari et al. (arXiv 1910.02054), section 3.1: 2 of weights, 2 of gradients, 12 of the optimizer."""
    stack = software_named("deepspeed")
    for zero, each in ((0, 16.0), (1, 4.0 + 12.0 / 8), (2, 2.0 + 14.0 / 8), (3, 16.0 / 8)):
        found = held(stack, zero=zero)
        np.testing.assert_allclose(found.static - found.workspace, each * PARAMETERS)


def test_deepspeeds_buckets_hold_1e9_gradients_and_its_live_weights_at_most_1e9():
    """docs/_pages/config-json.md: reduce_bucket_size 5e8, two or under ZeRO 3 one; stage3_max_live_parameters 1e9."""
    stack = with_settings(software_named("deepspeed"), eager=False, update_bytes=0.0)
    found = held(stack, zero=2)
    np.testing.assert_allclose(found.buffers - found.workspace, 2 * 5e8 * 2)
    large = replace(GPT, layers=96)
    unit = 12 * H * H + 13 * H  # a layer, which is smaller than the table of tokens
    for model, live in ((GPT, min(1e9, float(PARAMETERS))), (large, 1e9)):
        found = held(stack, model, zero=3)
        table = 51200 * H + S * H
        assert table > unit
        np.testing.assert_allclose(found.buffers - found.workspace, 2 * live + 2 * table + 5e8 * 2, rtol=1e-3)


@pytest.mark.parametrize(("zero", "updated"), [(1, "part"), (2, "part"), (3, 1e9)])
def test_deepspeeds_update_copies_gradients_to_fp32_beside_an_eager_adams_array(zero, updated):
    """stage_1_and_2.py copies a rank's part at once, stage3.py a sub-group of sub_group_size, 1e9."""
    huge = replace(GPT, layers=1000)  # 50B, so that a part is larger than a sub-group
    part = float(huge.parameters() + 2.0 * H) / 8
    with_update, without = (
        held(with_settings(software_named("deepspeed"), **changed), huge, zero=zero, recompute=Recompute.FULL)
        for changed in ({}, {"eager": False, "update_bytes": 0.0})
    )
    other = without.activations + without.logits
    buffers = without.buffers - without.workspace - 2 * 5e8 if zero == 3 else 0.0  # what is gathered
    expected = 8.0 * min(part, updated if zero == 3 else part) - other - buffers
    np.testing.assert_allclose(with_update.buffers - without.buffers, np.maximum(expected, 0.0), rtol=0.02)


def test_accumulation_without_synchronising_keeps_whole_gradients():
    """huggingface/accelerate, gradient_accumulation.md: under no_sync only the last micro-batch reduces.

    fully_sharded_data_parallel.py, `MixedPrecision`: until then they have the format of the gathered weights.
    """
    stack = software_named("accelerate-fsdp")
    one, two = (held(stack, zero=3, accumulation=each).gradients for each in (1, 2))
    np.testing.assert_allclose(one, 4.0 * PARAMETERS / 8)
    np.testing.assert_allclose(two, 4.0 * PARAMETERS / 8 + 2.0 * PARAMETERS)


def test_accumulation_without_synchronising_scatters_gradients_once_a_step():
    plans = plans_of([Plan(data=16, zero=3, accumulation=each) for each in (1, 5)])
    machine, constants = machine_named("a100-80gb"), Constants(data_overlap=0.0, data_exposed=1.0)

    def data_s(software):
        return step_time(transformer.work(GPT, plans, software), plans, machine, software, constants).data_s

    once, each = (data_s(with_settings(Software("test"), sums_whole=whole)) for whole in (True, False))
    np.testing.assert_allclose(each[1], 5 * each[0])
    np.testing.assert_allclose(once[0], each[0])
    assert once[1] < each[1]
    # Without a scatter a micro-batch sends only its gathers. Gradients of no bytes still have latency.
    gathers = data_s(Software("test", gradient_bytes=1e-9))[0]
    np.testing.assert_allclose(once[1], each[0] + 4 * gathers, rtol=0.02)


def test_states_in_16_bits_take_8_bytes_a_parameter():
    """benchmark_litgpt.py: weights and gradients in bf16, and AdamW's moments in the type of the weights."""
    found = held(software_named("fsdp-bf16"), zero=3)
    np.testing.assert_allclose(found.static - found.workspace, (2 + 2 + 4) * PARAMETERS / 8)


def test_a_compiled_layer_keeps_no_norms_and_no_activated_products():
    """partitioners.py, min-cut rematerialization: cheap arrays are computed again in the backward pass."""
    plans = plans_of([Plan(micro_batch=2)])
    stack = Software("test", eager=True)
    plain, compiled = (
        transformer.work(GPT, plans, replace(stack, compiled=each)).layers[0].block.saved.whole_bytes
        for each in (False, True)
    )
    tokens = 2 * S
    norms, activated, copied = 2 * 2 * H, 2 * FFN, 2 * H  # bytes a token: two norms, the activation, attention's output
    np.testing.assert_allclose(plain - compiled, tokens * (norms + activated + copied))


def test_a_compiled_layer_keeps_what_tensor_parallel_ranks_gathered():
    """partitioners.py: operators that are no pointwise ones, such as collectives, are not computed again."""
    stack = replace(software_named("torchtitan"), eager=True)
    one, two = (
        transformer.work(GPT, plans_of([Plan(tensor=each, sequence=each > 1)]), stack).layers[0].block.saved.whole_bytes
        for each in (1, 2)
    )
    split = 2 * H * 2 + 2 * (3 * H + H) + 2 * FFN + 4 * HEADS  # residuals, products' outputs, attention's statistics
    np.testing.assert_allclose(one, S * split)
    np.testing.assert_allclose(two, S * (split / 2 + 2 * 2 * H))


def test_recomputed_operators_of_experts_keep_nothing_but_what_attention_keeps():
    """torchtitan's policy saves every second product and attention's output; grouped products are not in its list."""
    a = architecture_named("mixtral-8x7b")[1]
    stack, plans = software_named("torchtitan"), plans_of([Plan(micro_batch=2, recompute=Recompute.OPERATORS)])
    block = mixture.work(a, plans, stack).layers[0].block
    attention = transformer.attention_part(a, plans, stack)["operator_bytes"]
    np.testing.assert_allclose(block.saved.under(Recompute.OPERATORS), attention)


def test_recomputed_operators_of_latent_attention_keep_half_of_the_products_and_the_output():
    a = architecture_named("deepseek-v3")[1]
    plans = plans_of([Plan(micro_batch=1)])
    part = mixture.latent_attention_part(a, plans, software_named("torchtitan"))
    tokens, heads = 4096, 128
    products = 1536 + heads * 192 + (512 + 64) + heads * 256 + 7168
    # Keys' rotary part is one for all heads; in memory each head has its own.
    shared = heads * 64 - 64
    kept = 2 * 7168 + products + shared + 2 * heads * 128 + 4 * heads
    np.testing.assert_allclose(part["operator_bytes"] / tokens, kept, rtol=0.01)


def test_the_host_keeps_what_is_offloaded_of_the_parts_of_a_nodes_gpus():
    """ZeRO-Offload (ATC 2021), section 3: 12 bytes of states a parameter, under ZeRO 2 and 3 also gradients."""
    stack = with_settings(software_named("deepspeed"), offload=("optimizer",))
    of_four, of_eight = (replace(machine_named("a100-80gb"), gpus_per_node=each, host_bytes=20e9) for each in (4, 8))
    for zero, each in ((1, 12.0), (2, 14.0), (3, 14.0)):
        found = held(stack, zero=zero)
        np.testing.assert_allclose(found.host, each * PARAMETERS / 8)
        np.testing.assert_allclose(found.node_host(of_four), found.host * 4)
        assert found.optimizer[0] == 0.0
    assert 12.0 * PARAMETERS < 20e9
    assert held(stack, zero=1).fits_host(of_eight)[0]
    assert not held(stack, zero=0).fits_host(of_eight)[0]  # every replica keeps all states
    assert held(stack, zero=0).fits_host(replace(of_eight, host_bytes=0.0))[0]  # unknown
    assert held(software_named("deepspeed"), zero=0).host[0] == 0.0


@pytest.mark.parametrize(("window", "keys"), [(128, 128), (512, 512), (900, 512), (4096, 512)])
def test_a_window_costs_its_keys_but_no_more_than_causal_attention_without_one(window, keys):
    plans, stack = plans_of([Plan()]), Software("test")
    full, near = (
        transformer.work(replace(GPT, **fields), plans, stack).layers[0].block
        for fields in ({}, {"window": window, "windowed": 0.5})
    )
    products = sum(float(np.max(each.flops)) for each in full.gemms)
    whole = float(np.max(full.forward_flops)) - products
    np.testing.assert_allclose(float(np.max(near.forward_flops)) - products, 0.5 * whole * (1.0 + keys / (S / 2)))


def test_deepspeed_sends_gradients_to_the_host_on_one_gpu_too():
    """stage_1_and_2.py, cpu_offload: gradients leave through the two buckets, whatever the number of ranks."""
    stack = with_settings(software_named("deepspeed"), offload=("optimizer",))
    columns = plans_of([Plan(recompute=Recompute.FULL)])
    found = memory(transformer.work(GPT, columns, stack), columns, stack)
    np.testing.assert_allclose(found.host, (12.0 + 2.0) * PARAMETERS)
    np.testing.assert_allclose(found.gradients, 0.0)
    np.testing.assert_allclose(found.buffers - found.workspace, 2 * 5e8 * 2)


def test_whole_gradients_stay_on_the_gpu_while_the_host_keeps_the_shards():
    """fully_sharded_data_parallel.py, no_sync: gradients that were not reduced are not offloaded."""
    found = held(with_settings(software_named("accelerate-fsdp"), offload=("optimizer",)), zero=3, accumulation=2)
    np.testing.assert_allclose(found.gradients, 2.0 * PARAMETERS)
    np.testing.assert_allclose(found.host, 16.0 * PARAMETERS / 8)


def test_states_that_nodes_hold_alike_are_shared_out_on_each():
    """PyTorch's HSDP: between nodes it sums the gradients of each share, beside the next reduce-scatter."""
    stack, machine, constants = (
        software_named("fsdp"),
        machine_named("a100-80gb"),
        Constants(data_overlap=0.0, data_exposed=1.0),
    )
    one, whole = plans_of([Plan(data=8, zero=3)]), plans_of([Plan(data=32, zero=3)])

    def of(plans, **changed):
        software = with_settings(stack, **changed)
        work = transformer.work(GPT, plans, software)
        needs = memory(work, plans, software)
        return needs.static - needs.workspace, step_time(work, plans, machine, software, constants).data_s

    (of_node, node_s), (of_all, _), (of_groups, hybrid_s) = of(one), of(whole), of(whole, shard_ranks=8)
    np.testing.assert_allclose(of_groups, of_node)
    np.testing.assert_allclose(of_all, of_node / 4)
    np.testing.assert_allclose(of(whole, shard_ranks=32), of(whole))
    unit = 12 * H * H + 13 * H
    shard_bytes = unit * stack.gradient_bytes / 8
    beside = all_reduce_s(shard_bytes, 4, 1, links_for(machine)) / constants.network_efficiency
    scatter = reduce_scatter_s(8 * shard_bytes, 8, 8, links_for(machine)) / constants.network_efficiency
    assert beside > scatter
    np.testing.assert_allclose(hybrid_s - node_s, 24 * (beside - scatter), rtol=1e-3)
