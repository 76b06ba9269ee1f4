"""How runs differ from their stack, each by a hand calculation from the source of its rule."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from planner_setup import asked

from synergy_core.commands._settings import requested_model
from synergy_core.errors import InputError
from synergy_core.performance.planner.communication import all_to_all_s, send_s
from synergy_core.performance.planner.families import architecture_named, mixture, transformer
from synergy_core.performance.planner.machine import Constants, links_for, machine_named, software_named
from synergy_core.performance.planner.memory import memory
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of
from synergy_core.performance.planner.step_time import HOST_COPY_EFFICIENCY, step_time
from synergy_core.performance.planner.tuning import FROZEN_BYTES, OPTIMIZERS, tuned
from synergy_core.performance.planner.work import block_time

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
    assert held(stack).workspace == held(tuned(stack, lora=16)).workspace == stack.memory.workspace_bytes


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


PARAMETERS = MATRICES + TABLES + 65 * 2 * 4096
DEEPSPEED = software_named("deepspeed")
MACHINE = machine_named("a100-80gb")


def seconds_of(software, plan, *, model=LLAMA, pcie_bytes_per_s=MACHINE.gpu.pcie_bytes_per_s):
    plans = plans_of([plan])
    machine = replace(MACHINE, gpu=replace(MACHINE.gpu, pcie_bytes_per_s=pcie_bytes_per_s))
    return step_time(transformer.work(model, plans, software), plans, machine, software, Constants())


def test_offloaded_weights_leave_a_gpu_what_is_gathered():
    """config-json.md: offload_param moves parameters to the host, at stage 3; up to 1e9 stay gathered."""
    stack = tuned(DEEPSPEED, offload="optimizer,parameters")
    found = held(stack, data=8, zero=3, recompute=Recompute.FULL)
    assert found.static == found.workspace
    np.testing.assert_allclose(found.host, (12.0 + 2.0 + 2.0) * PARAMETERS / 8)
    one = held(stack, recompute=Recompute.FULL)  # a single GPU too
    assert one.static == one.workspace
    np.testing.assert_allclose(one.host, (12.0 + 2.0 + 2.0) * PARAMETERS)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 4 * 4096
    np.testing.assert_allclose(one.buffers - one.workspace, 2 * 1e9 + 2 * layer + 2 * 5e8)
    assert stack.supports.zeros == (3,)


@pytest.mark.parametrize(("words", "rate"), [("parameters", 1e8 * HOST_COPY_EFFICIENCY), ("nvme,parameters", 1.6e9)])
def test_each_pass_of_each_micro_batch_reads_a_ranks_part_of_the_weights(words, rate):
    """ZeRO-Infinity (arXiv 2104.07857), section 6.1: every rank reads 1/ranks of the weights, and all-gathers them."""
    fast = 1e8 if words == "parameters" else 25e9
    plan = Plan(data=64, zero=3, accumulation=3)
    found = seconds_of(tuned(DEEPSPEED, offload=words), plan, model=replace(LLAMA, seq_len=1), pcie_bytes_per_s=fast)
    np.testing.assert_allclose(found.compute_s, 3 * 2 * 2.0 * PARAMETERS / 64 / rate, rtol=0.02)


def test_fsdp_reads_its_fp32_shards_from_the_host():
    found = seconds_of(tuned(STACK, offload="optimizer,parameters"), Plan(data=8, zero=3), pcie_bytes_per_s=1e8)
    np.testing.assert_allclose(found.compute_s, 2 * 4.0 * PARAMETERS / 8 / (1e8 * HOST_COPY_EFFICIENCY))
    assert held(tuned(STACK, offload="optimizer,parameters"), data=8, zero=3).host == 16.0 * PARAMETERS / 8


def test_drives_leave_their_buffers_on_the_host():
    """config-json.md: four buffers for states of a sub-group of 1e9 in fp32; five of 1e8 weights, and 1e9 in memory."""
    found = held(tuned(DEEPSPEED, offload="optimizer,parameters,nvme"))
    np.testing.assert_allclose(found.host, 4 * 4 * 1e9 + 2 * (5 * 1e8 + 1e9))


def test_states_on_drives_are_read_and_written_with_their_gradients():
    """ZeRO-Infinity (arXiv 2104.07857), section 4.1: 2 × 16 bytes a parameter, here at 1.6 GB/s (figure 2b)."""
    host, drives = (
        seconds_of(tuned(DEEPSPEED, offload=each), Plan(data=8, zero=3)).optimizer_s
        for each in ("optimizer", "nvme,optimizer")
    )
    np.testing.assert_allclose(drives - host, 32.0 * PARAMETERS / 8 / 1.6e9, rtol=1e-3)


def test_offloaded_activations_leave_two_layers_on_the_gpu():
    plans = plans_of([Plan(micro_batch=4)])
    layer = transformer.work(LLAMA, plans, STACK).layers[0].block.saved.whole_bytes
    stay, leave = held(STACK, micro_batch=4), held(tuned(STACK, offload="activations"), micro_batch=4)
    np.testing.assert_allclose(stay.activations - leave.activations, 30 * layer)
    np.testing.assert_allclose(leave.host, 30 * layer)
    for offloaded, away in ((16, 16), (31, 30)):  # the first layers have left when the last ones come
        some = held(tuned(STACK, offload_layers=offloaded, layers=32), micro_batch=4)
        np.testing.assert_allclose(some.host, away * layer)
    stack, plan = tuned(STACK, offload="activations"), Plan(micro_batch=4)
    more, fewer = (
        seconds_of(stack, plan, model=replace(LLAMA, layers=each), pcie_bytes_per_s=1e8).compute_s for each in (32, 16)
    )
    np.testing.assert_allclose(more - fewer, 2 * 16 * layer / (1e8 * HOST_COPY_EFFICIENCY))
    fast = seconds_of(stack, plan, pcie_bytes_per_s=1e15)  # hidden behind computation
    np.testing.assert_allclose(fast.compute_s, seconds_of(STACK, plan).compute_s)


def test_fsdp_offloads_parameters_and_states_together_and_torchtitan_neither(capsys):
    """torch/distributed/fsdp, CPUOffload: the shards, their gradients and the optimizer's states are on the host."""
    assert set(tuned(software_named("fsdp"), offload="parameters").run.offload) == {"optimizer", "parameters"}
    typed = "plan model=llama-3-8b gpu=h100 gpus=8 offload="
    assert "lacks it" in asked(capsys, f"{typed}optimizer software=torchtitan")[2]
    assert "says where, not what" in asked(capsys, f"{typed}nvme,activations software=deepspeed zero=3")[2]


def test_recomputation_is_tried_where_less_of_it_means_more_to_copy(capsys):
    typed = "plan model=llama-3-8b gpu=h100 gpus=8 batch=8 software=deepspeed offload=activations top=1"
    free, full = (asked(capsys, f"{typed}{more}")[1] for more in ("", " recompute=full"))
    rows = [next(line for line in each.splitlines() if line.startswith("8 ")) for each in (free, full)]
    assert rows[0] == rows[1]


def test_megatron_core_offloads_activations_without_stages_and_recomputation():
    """transformer_config.py: cpu_offloading excludes pipeline parallelism and recomputation."""
    stack = tuned(software_named("megatron-core"), offload="activations")
    assert stack.supports.recomputes == ("none",)
    assert {"pipeline", "interleave"}.isdisjoint(stack.supports.splits)


def test_all_to_alls_send_queries_keys_values_and_outputs_once_a_pass():
    """DeepSpeed-Ulysses (arXiv 2309.14509), section 3.2: four all-to-alls of N h / P elements forward; as many back."""
    a = architecture_named("llama-3-8b")[1]
    stack, plans = tuned(software_named("megatron-core"), cp_comm_type="a2a"), plans_of([Plan(context=8)])
    found = step_time(transformer.work(a, plans, stack), plans, MACHINE, stack, Constants()).context_s
    sent = 2 * a.seq_len / 8 * 128 * (32 + 2 * 8 + 32)
    one = all_to_all_s(sent / 4, 8, 8, links_for(MACHINE))
    np.testing.assert_allclose(found, 32 * 2 * 4 * one)
    (core,) = transformer.work(a, plans, stack).layers[0].block.attention
    assert (core.count, core.queries, core.keys) == (32 / 8, a.seq_len, a.seq_len)
    latent = mixture.work(architecture_named("deepseek-v3")[1], plans, stack).layers[0].block
    np.testing.assert_allclose(latent.context_bytes, 2 * 4096 / 8 * 128 * 2 * (128 + 64 + 128))


def test_keys_and_values_pass_all_other_ranks_beside_attention():
    """Ring Attention (arXiv 2310.01889), section 3: each of n − 1 steps passes on a rank's block while it computes."""
    a = architecture_named("llama-3-8b")[1]
    stack, plans = software_named("megatron-core"), plans_of([Plan(context=8)])
    slow, fast = (replace(Constants(), attention_efficiency=each) for each in (0.4, 1e9))
    hidden, shown = (
        step_time(transformer.work(a, plans, stack), plans, MACHINE, stack, constants).context_s
        for constants in (slow, fast)
    )
    one = send_s(7 * 2 * a.seq_len / 8 * 2 * 8 * 128, True, links_for(MACHINE))
    np.testing.assert_allclose(shown, 32 * 3 * one, rtol=1e-4)
    assert hidden < 0.5 * shown


def test_all_to_alls_split_key_value_heads(capsys):
    typed = "plan model=llama-3-8b gpu=h100 gpus=16 software=megatron-core seq_len=131072 batch=16 cp_comm_type=a2a"
    status, printed, _ = asked(capsys, f"{typed} tensor=1 context=8")
    assert status == 0
    assert "cp_comm_type=a2a" in printed
    _, _, complaint = asked(capsys, f"{typed} tensor=2 context=8")
    assert "tensor × context = 16 does not divide the model's 8 key-value heads" in complaint
    free = asked(capsys, f"{typed} tensor=2 top=20")[1]
    assert "cp4" in free
    assert "cp8" not in free


def test_only_the_last_layers_are_trained():
    """LLaMA-Factory, freeze_trainable_layers: the last n layers; embedding, logits and all other layers are frozen."""
    layer = MATRICES / 32 + 4 * 4096
    for stack, each in ((DEEPSPEED, 2.0), (STACK, 4.0)):
        found = held(tuned(stack, trainable_layers=2, layers=32))
        np.testing.assert_allclose(found.gradients, each * 2 * layer)
        np.testing.assert_allclose(found.optimizer, 12.0 * 2 * layer)
        np.testing.assert_allclose(found.weights, 2.0 * PARAMETERS)
    sharded = held(tuned(STACK, trainable_layers=2, layers=32), data=8, zero=3)
    np.testing.assert_allclose(sharded.weights, 2.0 * (PARAMETERS - 2 * layer) / 8)
    four, eight = (held(tuned(STACK, trainable_layers=each, layers=32), micro_batch=8) for each in (4, 8))
    work = transformer.work(LLAMA, plans_of([Plan(micro_batch=8)]), STACK)
    np.testing.assert_allclose(eight.activations - four.activations, 4 * work.layers[0].block.saved.whole_bytes)


def test_no_backward_pass_runs_through_frozen_first_layers():
    plan = Plan(micro_batch=4)
    eight, sixteen, all_of_them, whole = (
        seconds_of(tuned(STACK, trainable_layers=each, layers=32), plan).compute_s for each in (8, 16, 32, None)
    )
    np.testing.assert_allclose(all_of_them - sixteen, 2 * (sixteen - eight))
    plans = plans_of([plan])
    block = block_time(transformer.work(LLAMA, plans, STACK).layers[0].block, MACHINE, STACK, Constants())
    np.testing.assert_allclose((sixteen - eight) / 8, block.backward_s, rtol=0.05)
    logits = block_time(transformer.work(LLAMA, plans, STACK).after, MACHINE, STACK, Constants())
    np.testing.assert_allclose(whole - all_of_them, logits.weights_s, rtol=1e-3)


def test_a_frozen_vision_tower_has_weights_and_a_forward_pass(tmp_path, capsys):
    """Qwen2-VL: 32 layers of 4 × 1,280² + 2 × 1,280 × 5,120 (configuration_qwen2_vl.py), two norms each."""
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_hidden_layers": 28, "intermediate_size": 18944}
    text |= {"vocab_size": 152064, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    vision = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 3584, "mlp_ratio": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen2_vl", **text, "vision_config": vision}))
    plans, sizes, seconds = plans_of([Plan(micro_batch=2)]), [], []
    for patches in (None, 1024):
        a = requested_model(str(path), None, patches).architecture
        work = transformer.work(a, plans, STACK)
        sizes.append(memory(work, plans, STACK))
        seconds.append(step_time(work, plans, MACHINE, STACK, Constants()).compute_s)
    np.testing.assert_allclose(sizes[1].weights - sizes[0].weights, 2.0 * 32 * (12 * 1280**2 + 4 * 1280))
    assert (sizes[1].gradients, sizes[1].optimizer) == (sizes[0].gradients, sizes[0].optimizer)
    tower = work.tower.block
    flops = 2.0 * 2 * 1024 * 12 * 1280**2 + 2 * 2.0 * 2 * 1024**2 * 1280
    np.testing.assert_allclose(tower.forward_flops, flops)
    np.testing.assert_allclose(
        seconds[1] - seconds[0], 32 * block_time(tower, MACHINE, STACK, Constants()).forward_s, rtol=0.3
    )
    assert "image_tokens" in asked(capsys, "plan model=llama-3-8b gpu=h100 gpus=8 image_tokens=1024")[2]


def test_packed_documents_attend_within_themselves():
    """flash_attn_varlen_func: Σ len² scores in place of seq_len²; with 8 documents of 64 tokens in 512, an eighth."""
    plans = plans_of([Plan(micro_batch=2)])

    def attention_flops(software, model=LLAMA):
        block = transformer.work(model, plans, software).layers[0].block
        return float(np.max(block.forward_flops)) - sum(float(np.max(each.flops)) for each in block.gemms)

    packed = tuned(STACK, mean_len=64)
    np.testing.assert_allclose(attention_flops(packed), attention_flops(STACK) / 8)
    assert attention_flops(tuned(STACK, mean_len=4096)) == attention_flops(STACK)
    unfused = replace(STACK, flash=False)
    assert attention_flops(replace(packed, flash=False)) == attention_flops(unfused)
    near = replace(LLAMA, window=16, windowed=1.0)
    np.testing.assert_allclose(attention_flops(packed, near), attention_flops(STACK, near))
    assert held(packed).total == held(STACK).total


def test_what_cannot_be_is_refused_with_what_to_type():
    for wrong, words in (
        ({"optimizer": "adam8"}, "adamw8bit"),
        ({"quantize": 4}, "lora=16"),
        ({"lora": 8, "quantize": 3}, "4"),
        ({"loss": "fused"}, "chunked"),
        ({"offload": "all"}, "optimizer"),
        ({"offload": "nvme"}, "offload=nvme"),
        ({"offload": "optimizer,nvme"}, "offload=nvme: accelerate-fsdp lacks it"),
        ({"cp_comm_type": "a2a"}, "cp_comm_type=a2a: accelerate-fsdp lacks it"),
        ({"cp_comm_type": "all_gather"}, "a2a, p2p"),
        ({"trainable_layers": 2, "lora": 8, "layers": 32}, "leave one out"),
        ({"trainable_layers": 33, "layers": 32}, "32 layers"),
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


def test_fits_offloads_weights_where_states_alone_do_not_suffice(capsys):
    typed = "fits llama-2-13b gpu=rtx3090 gpus=1 software=deepspeed seq_len=1024 batch=8"
    status, printed, _ = asked(capsys, typed)
    assert status == 1
    assert "offload=optimizer,parameters: " in printed
    assert asked(capsys, f"{typed} offload=parameters,optimizer")[0] == 0


def test_a_file_that_offloads_to_drives_is_predicted(capsys, tmp_path):
    path = tmp_path / "infinity.json"
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
    content = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    path.write_text(json.dumps(content))
    status, printed, _ = asked(capsys, f"plan model=llama-2-70b gpu=a100-80gb gpus=8 plan={path} top=1 seq_len=2048")
    assert status == 0
    assert "offload=nvme,optimizer,parameters" in printed
    assert "not modelled" not in printed


def test_documents_need_a_model_that_reads_tokens(capsys):
    assert "mean_len" in asked(capsys, "plan model=resnet-50 gpu=h100 gpus=8 mean_len=100")[2]


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
