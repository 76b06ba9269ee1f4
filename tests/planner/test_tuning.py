"""Optimizers, adapters, losses and offloading, each by a hand calculation from the source of its rule."""

import re
from dataclasses import replace

import numpy as np
import pytest
from planner_setup import asked

from synergy_core.errors import InputError
from synergy_core.planner.families import architecture_named, mixture, transformer
from synergy_core.planner.machine import Constants, machine_named, software_named
from synergy_core.planner.memory import memory
from synergy_core.planner.plan import Plan, Recompute, plans_of
from synergy_core.planner.step_time import step_time
from synergy_core.planner.tuning import FROZEN_BYTES, OPTIMIZERS, tuned

LLAMA = replace(architecture_named("llama-2-7b")[1], seq_len=512)
STACK = software_named("accelerate-fsdp")
LORA_PARAMETERS = 39_976_960
"""What PEFT prints as trainable for Llama-2-7B with rank 16 on all linear layers: per layer 16 × (4 × 8,192 of queries,
keys, values and outputs + 3 × 15,104 of gate, up and down), 32 layers."""
MATRICES = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
TABLES = 2 * 32000 * 4096


def held(software, **plan):
    columns = plans_of([Plan(**plan)])
    return memory(transformer.work(LLAMA, columns, software), columns, software)


def test_an_optimizers_states_replace_those_of_adamw():
    parameters = MATRICES + TABLES + 65 * 2 * 4096  # norms have two vectors here
    for name, optimizer in OPTIMIZERS.items():
        expected = (4.0 + optimizer.state_bytes) * parameters
        np.testing.assert_allclose(held(tuned(STACK, optimizer=name)).optimizer, expected, rtol=1e-3)


def test_8_bit_moments_take_a_byte_and_a_constant_for_256_values():
    assert OPTIMIZERS["adamw8bit"].state_bytes == pytest.approx(2 + 2 * 4 / 256)


def test_states_all_in_bf16_take_no_master_copy_with_them():
    pure = tuned(software_named("fsdp-bf16"), optimizer="sgd_momentum")
    assert pure.optimizer_bytes == 4.0
    assert tuned(software_named("fsdp-bf16"), optimizer="adafactor").optimizer_bytes == 0.0


def test_adapters_have_as_many_parameters_as_peft_prints():
    found = held(tuned(STACK, lora=16))
    np.testing.assert_allclose(found.gradients, 4.0 * LORA_PARAMETERS)
    np.testing.assert_allclose(found.optimizer, 8.0 * LORA_PARAMETERS)


@pytest.mark.parametrize("bits", FROZEN_BYTES)
def test_frozen_matrices_have_their_bits_and_everything_else_16(bits):
    found = held(tuned(STACK, lora=16, quantize=bits))
    frozen = FROZEN_BYTES[bits] * MATRICES + 2.0 * (TABLES + 65 * 2 * 4096)
    np.testing.assert_allclose(found.weights, frozen + 4.0 * LORA_PARAMETERS, rtol=1e-3)


def test_nf4_takes_4_bits_and_0_127_of_doubly_quantized_constants():
    """QLoRA (arXiv 2305.14314), section 3: constants of blocks of 64 in 8 bits, with fp32 ones for 256 of these."""
    assert FROZEN_BYTES[4] == pytest.approx((4 + 8 / 64 + 32 / (64 * 256)) / 8, rel=1e-3)


def test_sharded_adapters_shard_frozen_weights_too():
    one, eight = held(tuned(STACK, lora=16)), held(tuned(STACK, lora=16), data=8, zero=3)
    np.testing.assert_allclose(eight.static - eight.workspace, (one.static - one.workspace) / 8, rtol=1e-6)


def test_frozen_experts_are_shared_out_once():
    """With as many expert-parallel ranks as replicas, each holds its experts whole, and ZeRO 3 splits all else."""
    a = architecture_named("mixtral-8x7b")[1]
    stack = tuned(STACK, lora=16, quantize=4)
    columns = plans_of([Plan(data=8, expert=8, zero=each) for each in (2, 3)])
    work = mixture.work(a, columns, stack)
    whole, split = memory(work, columns, stack).weights
    block = work.layers[0].block
    experts = 32 * (block.stored_bytes(stack, expert=True) + 4.0 * block.adapter_parameters(16, expert=True))[0]
    np.testing.assert_allclose(block.matrix_parameters(expert=True), 3 * 4096 * 14336)
    np.testing.assert_allclose(split - experts, (whole - experts) / 8, rtol=1e-2)


@pytest.mark.parametrize("name", ["alpa-fp32", "deepspeed-tf32"])
def test_no_matrix_is_written_out_where_none_is_quantized(name):
    stack = software_named(name)
    assert held(stack).workspace == held(tuned(stack, lora=16)).workspace == stack.workspace_bytes


def test_naming_adamw_keeps_a_stacks_own_states():
    assert tuned(software_named("fsdp-bf16"), optimizer="adamw") == software_named("fsdp-bf16")


def test_frozen_weights_need_no_products_for_their_gradients():
    plans, machine = plans_of([Plan(micro_batch=4)]), machine_named("a100-80gb")
    whole, adapted = (
        step_time(transformer.work(LLAMA, plans, each), plans, machine, each, Constants()).compute_s
        for each in (STACK, tuned(STACK, lora=16))
    )
    assert 0.6 * whole < adapted < 0.8 * whole  # two products in place of three


def test_gradients_of_adapters_alone_are_exchanged():
    plans, machine = plans_of([Plan(data=16)]), machine_named("a100-80gb")
    constants = Constants(data_overlap=0.0, data_exposed=1.0)
    whole, adapted = (
        step_time(transformer.work(LLAMA, plans, each), plans, machine, each, constants).data_s
        for each in (STACK, tuned(STACK, lora=16))
    )
    assert adapted < 0.03 * whole


def test_a_compiled_loss_keeps_6_bytes_a_logit_and_a_chunked_one_an_eighth():
    plain, compiled, chunked = (
        held(each).logits for each in (STACK, *(tuned(STACK, loss=each) for each in ("compiled", "chunked")))
    )
    logits = 512 * 32000
    np.testing.assert_allclose(plain - compiled, (14 - 6) * logits)
    np.testing.assert_allclose(plain - chunked, 14 * 7 / 8 * logits)


def test_layers_that_do_not_recompute_keep_everything_and_run_once():
    plans = plans_of([Plan(micro_batch=2, recompute=Recompute.FULL)])
    machine = machine_named("a100-80gb")

    def of(layers):
        software = tuned(STACK, recompute_layers=layers, layers=32)
        work = transformer.work(LLAMA, plans, software)
        seconds = step_time(work, plans, machine, software, Constants()).recompute_s
        return memory(work, plans, software).activations, seconds

    (few, quick), (half, slower), (most, slowest) = of(1), of(16), of(32)
    np.testing.assert_allclose(few - half, 15 / 16 * (half - most), rtol=1e-6)
    np.testing.assert_allclose(slower, slowest / 2)
    np.testing.assert_allclose(quick, slowest / 32)


def test_what_cannot_be_is_refused_with_what_to_type():
    for wrong, words in (
        ({"optimizer": "adam8"}, "adamw8bit"),
        ({"quantize": 4}, "lora=16"),
        ({"lora": 8, "quantize": 3}, "4"),
        ({"loss": "fused"}, "chunked"),
        ({"offload": "all"}, "optimizer"),
        ({"recompute_layers": 33, "layers": 32}, "32 layers"),
    ):
        with pytest.raises(InputError, match=words):
            tuned(STACK, **wrong)


def test_a_command_takes_names_and_says_what_it_was_asked(capsys):
    typed = (
        "fits llama-2-7b gpu=rtx3090 gpus=1 software=accelerate-fsdp seq_len=512 batch=16 micro_batch=1 recompute=full"
    )
    status, printed, _ = asked(capsys, f"{typed} lora=64 quantize=4 optimizer=paged_adamw8bit")
    assert status == 0
    assert printed.startswith("fits")
    for words in ("lora=64", "quantize=4", "paged_adamw8bit", "full", "no memory of a model with adapters"):
        assert words in printed
    status, printed, _ = asked(capsys, typed)
    assert status == 1
    assert printed.startswith("does not fit")
    assert "lora=16 quantize=4" in printed


def test_what_an_emitted_file_leaves_to_the_script_is_said(capsys, tmp_path):
    out = tmp_path / "ds.json"
    typed = "plan model=llama-2-7b gpu=h100 gpus=8 top=1 optimizer=adamw8bit offload=optimizer"
    for form, software in (("deepspeed", "deepspeed"), ("megatron", "megatron-core")):
        status, printed, _ = asked(capsys, f"{typed} software={software} --emit {form} {out}")
        assert status == 0
        assert out.is_file()
        said = printed.rpartition("wrote")[2]
        assert "optimizer=adamw8bit" in said
        assert "offload" not in said  # which both forms have


def test_a_plan_whose_degrees_are_fixed_is_not_asked_for_on_more_gpus(capsys):
    status, printed, _ = asked(capsys, "plan model=llama-2-70b gpu=h100 gpus=8 data=8 software=deepspeed batch=8")
    assert status == 1
    assert "power of two" not in printed
    assert "fits" in printed


def test_recomputation_is_known_by_its_name(capsys):
    numbers, names = (
        asked(capsys, f"plan model=gpt-6.7b gpu=a100 gpus=8 top=1 recompute={each}")[1]
        for each in (Recompute.FULL.value, "full")
    )
    assert numbers == names
    _, _, complaint = asked(capsys, "plan model=gpt-6.7b gpu=a100 gpus=8 recompute=ful")
    assert "full" in complaint


def test_fits_advises_what_the_stack_has(capsys):
    typed = "fits llama-2-7b gpu=a100-80gb gpus=1 seq_len=512 batch=16 micro_batch=16"
    for stack, has, lacks in (("accelerate-fsdp", "lora=16", "offload="), ("megatron-core", "offload=", "lora=")):
        status, printed, _ = asked(capsys, f"{typed} software={stack}")
        assert status == 1
        assert has in printed
        assert lacks not in printed


def test_fits_halves_the_micro_batch_only_as_far_as_needed(capsys):
    typed = "fits llama-2-7b gpu=rtx3090 gpus=8 software=deepspeed zero=3 seq_len=1024 batch=128"
    printed = asked(capsys, f"{typed} micro_batch=16")[1]
    (size,) = (int(found) for found in re.findall(r"micro_batch=(\d+):", printed))
    status = {each: asked(capsys, f"{typed} micro_batch={each}")[0] for each in (size, 2 * size)}
    assert status == {size: 0, 2 * size: 1}


def test_fits_refuses_what_only_a_table_of_plans_shows(capsys):
    assert "plan" in asked(capsys, "fits llama-2-7b gpu=h100 gpus=8 price=3")[2]


def test_fits_names_a_host_that_is_too_small(capsys):
    typed = "fits llama-3-405b gpu=h100 gpus=16 software=deepspeed zero=3 offload=optimizer seq_len=1024 batch=16"
    status, printed, _ = asked(capsys, f"{typed} micro_batch=1")
    assert status == 1
    assert printed.startswith("does not fit")
    assert "of 2,000 GB on each node's host" in printed.partition("Changes")[0]
