"""`python -m synergy_core plan`: what it prints and writes, and what it says to bad input."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import numpy as np
import pytest
from planner_setup import CONSTANTS, asked

from synergy_core.__main__ import main
from synergy_core.commands import plan as _machines
from synergy_core.commands._settings import default_batch
from synergy_core.commands.plan_report import model_flops, schedule, seconds
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import Software, machine_named, running_on, software_named


@pytest.fixture(autouse=True)
def _same_constants(monkeypatch):
    monkeypatch.setattr(_machines, "constants_for", lambda machine, software: CONSTANTS)


def test_plans_with_reasons(capsys, tmp_path):
    out = tmp_path / "plans.json"
    status, printed, _ = asked(capsys, f"plan model=gpt-6.7b gpu=a100-80gb gpus=32 batch=512 top=3 --json {out}")
    assert status == 0
    assert printed.count(" slower: ") == printed.count(" as fast\n") == 1
    assert "0.0%" not in printed.partition("  32: ")[2]
    (found,) = json.loads(out.read_text())["gpu_types"]
    best, *others = found["plans"]
    assert [each["rank"] for each in found["plans"]] == [0, 1, 2]
    assert "why" not in best
    assert all(" +" in each["why"] for each in others)
    for each in found["plans"]:
        assert sum(each["parts"].values()) == pytest.approx(each["step_time_s"])
        plan = each["plan"]
        assert plan["tensor"] * plan["pipeline"] * plan["context"] * plan["data"] == 32
        assert 0.1 < each["mfu"] < 1.0
        assert each["memory_bytes"] < 90e9


def test_many_counts_and_types_and_the_picture(capsys, tmp_path):
    out = tmp_path / "plans.svg"
    status, printed, _ = asked(
        capsys, f"plan model=gpt-1.3b gpu=a100,v100 gpus=8..16,29,64 batch=96 top=1 --picture {out}"
    )
    assert status == 0
    assert "A100" in printed
    assert "V100" in printed
    assert "no plan on 29 GPUs, batch" in printed
    words = " ".join(each.text or "" for each in ElementTree.parse(out).iter())
    assert "stage 1" in words
    assert "V100" in words


def test_a_model_that_fits_no_plan(capsys):
    status, printed, _ = asked(capsys, "plan model=gpt-175b gpu=a100-80gb gpus=8 batch=1536")
    assert status == 1
    assert "memory: the leanest plan (tp8" in printed
    assert "GPUs, the fewest among powers of two of nodes: " in printed


def test_fixed_settings_stand_in_the_leanest_plan_and_offloading_is_named(capsys):
    _, printed, _ = asked(capsys, "plan model=llama-3-70b gpu=a100-80gb gpus=16 recompute=0 zero=1")
    lean = printed.partition("the leanest plan (")[2].partition(")")[0]
    assert "zero1" in lean
    assert "full" not in lean
    offloaded = printed.partition("offloaded to the host")[2].partition("\n")[0]
    assert "16 GPUs suffice: " in offloaded
    assert "zero1" in offloaded
    _, printed, _ = asked(capsys, "plan model=llama-3-70b gpu=a100-80gb gpus=8 zero=1")  # too little even so
    assert "offloaded" not in printed


@pytest.mark.parametrize(
    ("settings", "free"),
    [
        ("tensor=1 sequence=1", "free sequence or tensor,"),
        ("pipeline=4 zero=3 data=4", "free pipeline or zero,"),
        ("zero=1 data=1 pipeline=8 tensor=2", "free pipeline or tensor or zero,"),
    ],
)
def test_settings_that_rule_each_other_out_are_named(capsys, settings, free):
    status, printed, _ = asked(capsys, f"plan model=llama-3-8b gpu=a100-80gb gpus=16 {settings}")
    assert status == 1
    assert free in printed


@pytest.mark.parametrize(
    ("software", "allowed"),
    [
        ("fsdp", lambda plan: plan["tensor"] == plan["pipeline"] == plan["context"] == 1 != plan["zero"]),
        ("torchtitan", lambda plan: plan["zero"] in (2, 3) or plan["data"] * plan["context"] == 1),
        ("nanotron", lambda plan: plan["context"] == plan["interleave"] == 1 and plan["zero"] in (0, 1)),
        ("alpa", lambda plan: plan["context"] == plan["interleave"] == 1 and plan["zero"] in (0, 2)),
        ("megatron-v3", lambda plan: plan["context"] == 1 and plan["zero"] in (0, 1)),
        ("megatron-deepspeed", lambda plan: plan["context"] == plan["interleave"] == 1),
    ],
)
def test_no_plan_is_proposed_that_the_software_does_not_have(capsys, tmp_path, software, allowed):
    out = tmp_path / "plans.json"
    asked(capsys, f"plan model=llama-3-8b gpu=h100 gpus=16,64 software={software} top=50 --json {out}")
    (found,) = json.loads(out.read_text())["gpu_types"]
    assert len(found["plans"]) > 5
    assert all(allowed(each["plan"]) for each in found["plans"])


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ("gpu=h100 software=fsdp tensor=2", "tensor=2: fsdp supports replicas only"),
        ("gpu=h100 software=nanotron context=2", "context=2: nanotron supports tensor, pipeline, expert"),
        ("gpu=h100 software=torchtitan zero=1", "zero=1: torchtitan supports 2, 3"),
        ("gpu=a100 software=megatron-core-fp8", "type software=megatron-core."),
        ("gpu=h100 gradients=fp16", "gradients=fp16: megatron-core supports fp32 and bf16"),
        ("gpu=h100 software=torchtitan gradients=bf16", "gradients=bf16: torchtitan supports no other precision"),
    ],
)
def test_what_software_or_gpus_do_not_have_is_refused(capsys, settings, fact):
    status, _, error = asked(capsys, f"plan model=llama-3-8b gpus=16 {settings}")
    assert status == 2
    assert fact in error


@pytest.mark.parametrize(("software", "gpus", "is_said"), [("torchtitan", "1,2", True), ("deepspeed", "1", False)])
def test_one_replica_of_software_that_always_shards_is_said_to_hold_whole_weights(capsys, software, gpus, is_said):
    settings = "model=gpt-1.3b gpu=h100 tensor=1 pipeline=1 context=1 top=1"
    _, printed, _ = asked(capsys, f"plan {settings} gpus={gpus} software={software}")
    assert ("one replica (gpus=1)" in printed) == is_said


def test_measured_plans_that_do_not_fit_with_gradients_in_fp32_fit_with_gradients_in_bf16(capsys, tmp_path):
    """DeepSeek-V3 on 1,024 H100 without recomputation; Megatron Core must then be told to reduce in 16 bits."""
    out = tmp_path / "arguments.txt"
    measured = (
        "plan model=deepseek-v3 gpu=h100 gpus=1024 software=megatron-core-fp8 batch=8192 seq_len=4096 tensor=2 "
        f"pipeline=8 interleave=4 data=64 expert=64 micro_batch=1 zero=1 recompute=0 sequence=1 --emit megatron {out}"
    )
    status, printed, _ = asked(capsys, measured)
    assert status == 1
    assert "With gradients=bf16, 1024 GPUs suffice: " in printed
    status, printed, _ = asked(capsys, f"{measured} gradients=bf16")
    assert status == 0
    assert "gradients in bf16" in printed
    assert "--grad-reduce-in-bf16" in out.read_text().splitlines()
    asked(capsys, measured.replace("recompute=0", "recompute=4"))
    assert "--grad-reduce-in-bf16" not in out.read_text().splitlines()


def test_attention_is_not_fused_on_gpus_without_flash_attention(capsys):
    stack = software_named("megatron-core")
    fused = {name: running_on(stack, machine_named(name).gpu).flash for name in ("p100", "v100", "t4", "a100", "h100")}
    assert fused == {"p100": False, "v100": False, "t4": False, "a100": True, "h100": True}
    _, printed, _ = asked(capsys, "plan model=gpt-125m gpu=v100,a100 gpus=2 batch=8")
    assert printed.count("attention is not fused") == 1


def test_settings_may_stand_behind_an_option(capsys, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    asked(capsys, f"plan model=gpt-1.3b gpu=a100 gpus=8 --emit megatron {one}")
    assert asked(capsys, f"plan model=gpt-1.3b --emit megatron {other} gpu=a100 gpus=8")[0] == 0
    assert one.read_text() == other.read_text()
    with pytest.raises(SystemExit):
        asked(capsys, f"plan model=gpt-1.3b --emit megatron {other} gpu=a100 eight")


def test_default_batch_is_of_the_size_that_is_usual():
    batches = {"gpt-1.3b": 512, "gpt-175b": 2048, "resnet-50": 1024}
    assert {name: default_batch(architecture_named(name)[1]) for name in batches} == batches


def test_model_flops_are_six_per_parameter_and_token():
    family, architecture = architecture_named("gpt-175b")
    per_token = model_flops(family, architecture, Software("test")) / architecture.seq_len
    assert per_token == pytest.approx(6 * 175e9, rel=0.02)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 5), (4, 1), (4, 8), (8, 3)])
def test_the_drawn_schedule_is_1f1b(stages, micro_batches):
    forward, backward = schedule(stages, micro_batches)
    assert np.isfinite(forward).all()
    assert (np.diff(forward, axis=0) >= 1).all()
    assert (-np.diff(backward, axis=0) >= 2).all()
    for stage in range(stages):
        spans = sorted([(each, each + 1) for each in forward[stage]] + [(each, each + 2) for each in backward[stage]])
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
    assert backward.max() + 2 == 3 * (micro_batches + stages - 1)


@pytest.mark.parametrize(("gpu", "precision"), [("v100", "fp16"), ("a100", "bf16")])
def test_gpus_without_bf16_run_fp16(capsys, tmp_path, gpu, precision):
    out = tmp_path / "plans.json"
    _, printed, _ = asked(capsys, f"plan model=gpt-125m gpu={gpu} gpus=2 batch=8 --json {out}")
    (found,) = json.loads(out.read_text())["gpu_types"]
    assert found["precision"] == precision
    assert f", {precision}\n" in printed
    assert all(0.0 < each["mfu"] < 1.0 for each in found["plans"])


def test_fixed_degrees_are_blamed_for_what_they_rule_out(capsys):
    """Groups of three do not fill nodes of eight, so nine GPUs have no plan, but six within a node do."""
    question = "plan model=gpt-125m gpu=h100 tensor=3 gpus="
    status, printed, _ = asked(capsys, f"{question}8")
    assert status == 1
    assert "degrees: tensor=3 needs a multiple of 3 GPUs; use gpus=6, or free a degree" in printed
    assert [asked(capsys, f"{question}{gpus}")[0] for gpus in (6, 9)] == [0, 1]


def test_seconds():
    printed = {0.085: "85.0 ms", 4.1: "4.10 s", 1234.0: "1234 s", 1e-5: "0.01 ms"}
    assert {value: seconds(value) for value in printed} == printed


def test_memory_has_one_meaning(capsys):
    """What a plan needs never exceeds what is said to be usable of the card's 80 GiB."""
    _, printed, _ = asked(capsys, "plan model=gpt-1.3b gpu=h100 gpus=8 batch=512")
    assert "75.6 GiB usable of 80" in printed
    shown = [float(each.rsplit(maxsplit=1)[-1]) for each in printed.split(" GiB")[1:-1]]
    assert shown
    assert max(shown) <= 75.6


@pytest.mark.parametrize(
    ("typed", "ours"),
    [
        ("tp=2 pp=2 dp=2 mbs=1 gbs=64 seq=2048", "tensor=2 pipeline=2 data=2 micro_batch=1 batch=64 seq_len=2048"),
        ("cp=2 tensor_model_parallel_size=2 seqlen=8192 gbs=64", "context=2 tensor=2 seq_len=8192 batch=64"),
        ("micro_bs=1 global_batch_size=64 zero_stage=1", "micro_batch=1 batch=64 zero=1"),
        ("per-device-train-batch-size=1 SEQ_LENGTH=2048 train_batch_size=64", "micro_batch=1 seq_len=2048 batch=64"),
    ],
)
def test_names_of_other_tools_are_ours(capsys, typed, ours):
    printed = [asked(capsys, f"plan model=llama-3-8b gpu=h100 gpus=8 top=1 {words}") for words in (typed, ours)]
    assert printed[0] == printed[1]
    assert printed[0][0] == 0


@pytest.mark.parametrize(
    ("typed", "says", "never"),
    [
        ("bs=8", ("bs=8", "batch=", "micro_batch="), "Did you mean"),
        ("nodes=2", ("gpus=16",), "Did you mean"),
        ("gradient_accumulation_steps=4", ("batch=",), "Did you mean"),
        ("tp=2 tensor=4", ("tensor=2", "tensor=4"), "top"),
        ("--model llama-3-8b", ("--model", "no dashes", "model="), "'--help'"),
        ("--micro-batch=2", ("micro_batch=2",), "Did you mean"),
    ],
)
def test_a_name_that_means_nothing_or_two_things_is_met_with_what_to_type(capsys, typed, says, never):
    try:
        status = main(f"plan model=llama-3-8b gpu=h100 gpus=8 {typed}".split())
    except SystemExit as left:
        status = left.code
    told = capsys.readouterr().err
    assert status == 2
    assert all(each in told for each in says), told
    assert never not in told


def test_mfu_is_said_to_be_and_also_counts_causal_attention_whole(capsys, tmp_path):
    """PaLM (arXiv 2204.02311, appendix B): 6 N + 12 layers × heads × width × tokens FLOPs a token; ours is 6 N + 6 …"""
    out = tmp_path / "out.json"
    _, printed, _ = asked(capsys, f"plan model=llama-3-8b gpu=h100 gpus=8 batch=64 top=1 --json {out}")
    assert "MFU: FLOPs of the model without recomputation" in printed
    assert "PaLM" in printed
    family, a = architecture_named("llama-3-8b")
    half = model_flops(family, a, Software("test"))
    whole = model_flops(family, a, Software("test"), causal_share=1.0)
    assert whole - half == pytest.approx(6.0 * a.layers * a.hidden * a.seq_len * a.seq_len, rel=1e-6)
    (plan,) = json.loads(out.read_text())["gpu_types"][0]["plans"]
    assert plan["mfu_with_whole_attention"] / plan["mfu"] == pytest.approx(whole / half)
    assert f"{plan['mfu']:.1%}  {plan['mfu_with_whole_attention']:.1%}" in printed
    _, printed, _ = asked(capsys, "plan model=bert-large gpu=h100 gpus=8 batch=64 top=1")  # its attention is not causal
    assert "PaLM" not in printed


def test_an_offloaded_optimizer_is_offered_only_if_the_hosts_hold_it(capsys):
    """llama-3-405b has 12 × 406e9 bytes of states, 4.9 TB; a DGX H100 has 2 TB."""
    status, printed, _ = asked(capsys, "plan model=llama-3-405b gpu=h100 gpus=8")
    assert status == 1
    assert "offloaded" not in printed
    _, printed, _ = asked(capsys, "plan model=llama-2-13b gpu=a100-80gb gpus=1 software=deepspeed batch=16")
    (line,) = [each for each in printed.splitlines() if "offloaded to the host" in each]
    assert "1 GPU suffices: " in line
    assert "182 GB of 2,000 GB on each node's host" in line  # 12 bytes of states and 2 of gradients, 13.0e9 times
    small = "plan model=llama-2-13b gpu=a100-80gb gpus=1 gpus_per_node=1 software=deepspeed batch=16"
    assert "182 GB (its size is unknown) on each node's host" in asked(capsys, small)[1]


def test_fits_offers_no_offloading_that_the_hosts_cannot_hold(capsys):
    _, printed, _ = asked(capsys, "fits llama-3-405b gpu=h100 gpus=8")
    assert "offloaded" not in printed
    _, printed, _ = asked(capsys, "fits llama-2-13b gpu=a100-80gb gpus=1 software=deepspeed batch=16")
    assert "GB of 2,000 GB on each node's host" in printed
