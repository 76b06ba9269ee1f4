"""Arguments of Megatron-LM, one a line: `pretrain_gpt.py $(cat FILE) …`.

Names and rules: NVIDIA/Megatron-LM, megatron/training/arguments.py (Megatron Core 0.15) and the configurations of
Megatron Core 0.16.1. ZeRO 1 is its distributed optimizer, 2 and 3 its FSDP; stages that are not alike are laid out
layer by layer.
"""

from __future__ import annotations

import argparse
import re
import shlex
from typing import Any, NoReturn

import numpy as np

from synergy_core.errors import InputError
from synergy_core.planner.emitters import PlannedLaunch, accumulated, replicas, stages
from synergy_core.planner.families import mixture, transformer
from synergy_core.planner.plan import Plan, Recompute

SUMMARY = "arguments of Megatron-LM, one a line"
SOFTWARE = ("megatron-core", "megatron-core-fp8", "megatron")
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
"""By ZeRO's stage, what Megatron's FSDP calls it."""
YOURS = "data, tokenizer, optimizer, learning rate, norms, activation and rotary settings are yours to add"
ONE_CONNECTION = "CUDA_DEVICE_MAX_CONNECTIONS"
VOCABULARY_UNIT = 128
"""Megatron's default, and the planner's: tables of tokens are padded to a multiple of it × tensor parallelism."""


def emit(launch: PlannedLaunch) -> str:
    """The arguments. Raises InputError for plans and models that Megatron-LM does not run."""
    a, plan = launch.architecture, launch.plan
    if not isinstance(a, transformer.Architecture):
        raise InputError(f"--emit megatron: Megatron-LM trains transformers; {launch.model} is none.")
    lines = [*_model(a), *_precision(launch), *_degrees(plan, int(a.layers)), *_memory(plan)]
    _check(plan, a)
    return "\n".join(lines) + "\n"


def beside(launch: PlannedLaunch) -> str:
    """What these arguments do not say."""
    return f"{YOURS}; before Blackwell export {ONE_CONNECTION}=1" if one_connection(launch.plan) else YOURS


def one_connection(plan: Plan) -> bool:
    """Whether kernels must start in the order in which they are queued, before Blackwell, for exchanges to overlap."""
    return (plan.tensor > 1 or plan.context > 1) and plan.zero < 2


def recognises(text: str) -> bool:
    """Whether a text has arguments of Megatron-LM's, and is no YAML that holds them."""
    return bool(re.search(r"^(?!\s*- )[^#\n]*--(micro-batch-size|tensor-model-parallel-size)[ =]", text, re.MULTILINE))


def read(text: str, gpus: int) -> Plan:
    """The plan of arguments, of a launch script too: what is not of the plan is passed over."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        parser.add_argument(f"--{name}", type=_whole, default=1)
    for name in ("expert-model-parallel-size", "micro-batch-size"):
        parser.add_argument(f"--{name}", type=_whole, default=1)
    for name in ("global-batch-size", "num-layers", "num-layers-per-virtual-pipeline-stage"):
        parser.add_argument(f"--{name}", type=_whole)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=_whole)
    for name in ("pipeline-model-parallel-layout", "recompute-granularity"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    for name in ("sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "recompute-activations"):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"is no script ({error}).") from None
    given, _ = parser.parse_known_args(words)
    tensor, pipeline, context = (
        given.tensor_model_parallel_size,
        given.pipeline_model_parallel_size,
        given.context_parallel_size,
    )
    data = replicas(gpus, tensor * pipeline * context, f"tensor {tensor} × pipeline {pipeline} × context {context}")
    micro_batch = given.micro_batch_size
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    kinds = {None: Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
    if granularity not in kinds:
        raise InputError(f"--recompute-granularity {granularity}: expected selective or full.")
    return Plan(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        expert=given.expert_model_parallel_size,
        interleave=_interleave(given),
        micro_batch=micro_batch,
        accumulation=accumulated(given.global_batch_size or micro_batch * data, data, micro_batch),
        zero=_zero(given),
        recompute=kinds[granularity].value,
        sequence=given.sequence_parallel,
    )


def _check(plan: Plan, a: transformer.Architecture) -> None:
    """Raises InputError for what Megatron-LM refuses when it starts."""
    if plan.recompute == Recompute.OPERATORS:
        raise InputError(
            "--emit megatron: Megatron-LM recomputes attention or whole layers, not every second product; "
            "fix recompute=0, 1 or 2."
        )
    if plan.interleave > 1 and (plan.pipeline == 1 or plan.accumulation % plan.pipeline):
        raise InputError(
            f"--emit megatron: interleaved stages need micro-batches ({plan.accumulation}) that are a multiple of the "
            f"{plan.pipeline} stages, and at least 2 of these; fix interleave=1."
        )
    if plan.zero >= 2 and plan.pipeline > 1:
        raise InputError("--emit megatron: its FSDP goes without pipeline stages; fix zero=1 or pipeline=1.")
    if plan.sequence and plan.tensor == 1:
        raise InputError("--emit megatron: without tensor parallelism Megatron-LM has no sequence parallelism.")
    sparse = isinstance(a, mixture.Architecture) and a.experts > 1
    if sparse and plan.tensor > 1 and not plan.sequence:
        raise InputError(
            "--emit megatron: experts under tensor parallelism need sequence parallelism; fix sequence=1 or tensor=1."
        )
    if plan.expert > 1 and not sparse:
        raise InputError(f"--emit megatron: expert={plan.expert}, but the model has no experts.")
    if isinstance(a, mixture.Architecture) and a.gshard_group:
        raise InputError("--emit megatron: Megatron-LM dispatches rows to experts, not groups by matrix products.")
    if isinstance(a, mixture.Architecture) and a.windowed:
        raise InputError("--emit megatron: layers whose queries see a window of keys are not written.")
    if a.seq_len % (2 * plan.context) and plan.context > 1:
        raise InputError(f"--emit megatron: {a.seq_len} tokens are no multiple of 2 × context={plan.context}.")


def _model(a: transformer.Architecture) -> list[str]:
    """The model's sizes."""
    lines = [
        f"--num-layers {a.layers}",
        f"--hidden-size {a.hidden}",
        f"--ffn-hidden-size {a.ffn}",
        f"--num-attention-heads {a.heads}",
        f"--seq-length {a.seq_len}",
        f"--max-position-embeddings {a.seq_len}",
        f"--vocab-size {a.vocab}",
        f"--make-vocab-size-divisible-by {VOCABULARY_UNIT}",
        f"--position-embedding-type {'learned_absolute' if a.learned_positions else 'rope'}",
    ]
    if int(a.groups) != a.heads:
        lines += ["--group-query-attention", f"--num-query-groups {int(a.groups)}"]
    lines += ["--swiglu"] if a.gated else []
    lines += [] if a.tied else ["--untie-embeddings-and-output-weights"]
    latent = isinstance(a, mixture.Architecture) and a.key_value_rank
    if a.head_width and not latent:
        lines.append(f"--kv-channels {a.head_width}")
    if isinstance(a, mixture.Architecture):
        lines += _experts(a)
        if latent:
            lines += [
                "--multi-latent-attention",
                f"--q-lora-rank {a.query_rank}",
                f"--kv-lora-rank {a.key_value_rank}",
                f"--qk-head-dim {int(a.width)}",
                f"--qk-pos-emb-head-dim {a.rotary_width}",
                f"--v-head-dim {a.value_width}",
            ]
    return lines


def _experts(a: mixture.Architecture) -> list[str]:
    if a.experts == 1:
        return []
    lines = [f"--num-experts {a.experts}", f"--moe-router-topk {a.topk}", f"--moe-ffn-hidden-size {a.expert_ffn}"]
    lines.append("--disable-bias-linear")  # Experts under tensor parallelism cannot have biases.
    sparse = [int(bool(a.has_experts(each))) for each in range(int(a.layers))]
    if not all(sparse):
        lines.append(f"--moe-layer-freq {_pattern(sparse)}")
    if a.shared_experts:
        lines.append(f"--moe-shared-expert-intermediate-size {a.shared_experts * a.expert_ffn}")
    if a.capacity:
        lines.append(f"--moe-expert-capacity-factor {a.capacity:g}")
    return lines


def _pattern(sparse: list[int]) -> str:
    """Layers with experts as Megatron reads them, without spaces: `[0]*3+[1]*58`."""
    changes = np.flatnonzero(np.diff(sparse)) + 1
    runs = np.split(np.array(sparse), changes)
    return "+".join(f"[{each[0]}]*{len(each)}" for each in runs)


def _precision(launch: PlannedLaunch) -> list[str]:
    precision = launch.software.precision
    lines = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(precision, [])
    if not launch.software.dropout:
        lines = [*lines, "--attention-dropout 0.0", "--hidden-dropout 0.0"]
    return lines


def _degrees(plan: Plan, layers: int) -> list[str]:
    lines = [
        f"--tensor-model-parallel-size {plan.tensor}",
        f"--pipeline-model-parallel-size {plan.pipeline}",
        f"--micro-batch-size {plan.micro_batch}",
        f"--global-batch-size {plan.global_batch}",
    ]
    lines += [f"--context-parallel-size {plan.context}"] if plan.context > 1 else []
    lines += [f"--expert-model-parallel-size {plan.expert}"] if plan.expert > 1 else []
    lines += ["--sequence-parallel"] if plan.sequence else []
    if layers % (plan.pipeline * plan.interleave):
        lines.append(f"--pipeline-model-parallel-layout {_layout(stages(layers, plan))}")
    elif plan.interleave > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {plan.interleave}")
    return lines


def _layout(counts: list[int]) -> str:
    """Stages as Megatron reads them: embedding E, layers t, loss L: `Et*3|t*2|t*2L`."""
    inner = ["" if count == 0 else f"t*{count}" for count in counts]
    inner[0], inner[-1] = f"E{inner[0]}", f"{inner[-1]}L"
    return "|".join(inner)


def _memory(plan: Plan) -> list[str]:
    """What is sharded and recomputed. Gradients travel during the backward pass, as the planner takes them to."""
    lines = []
    if plan.data * plan.context > 1:
        lines.append("--overlap-grad-reduce")
    if plan.zero >= 1:
        lines += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if plan.zero >= 2:
        lines += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {_SHARDED[plan.zero]}",
            "--ckpt-format fsdp_dtensor",
        ]
    if plan.recompute == Recompute.SELECTIVE:
        lines.append("--recompute-granularity selective")
    if plan.recompute == Recompute.FULL:
        lines += ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"]
    return lines


def _zero(given: Any) -> int:
    if given.use_megatron_fsdp:
        strategies = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in _SHARDED.items()}}
        if given.data_parallel_sharding_strategy not in strategies:
            raise InputError(
                f"--data-parallel-sharding-strategy {given.data_parallel_sharding_strategy}: expected "
                f"{', '.join(strategies)}."
            )
        return strategies[given.data_parallel_sharding_strategy]
    return 1 if given.use_distributed_optimizer else 0


def _interleave(given: Any) -> int:
    """Stages per GPU, in any of the three ways to say them. Raises InputError where they do not come out even."""
    pipeline = given.pipeline_model_parallel_size
    if given.pipeline_model_parallel_layout is not None:
        parts = given.pipeline_model_parallel_layout.count("|") + 1
        if re.search(r"[()]", given.pipeline_model_parallel_layout) or parts % pipeline:
            raise InputError(
                f"--pipeline-model-parallel-layout {given.pipeline_model_parallel_layout}: expected stages without "
                f"brackets, a multiple of {pipeline} of them."
            )
        return int(parts // pipeline)
    if given.num_virtual_stages_per_pipeline_rank is not None:
        return int(given.num_virtual_stages_per_pipeline_rank)
    each = given.num_layers_per_virtual_pipeline_stage
    if each is None:
        return 1
    if given.num_layers is None or given.num_layers % (pipeline * each):
        raise InputError(
            f"--num-layers-per-virtual-pipeline-stage {each}: expected a --num-layers that is a multiple of "
            f"{pipeline} × {each}."
        )
    return int(given.num_layers // (pipeline * each))


def _whole(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}; expected a whole number from 1")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are InputErrors."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"Megatron-LM's arguments: {message}.")
