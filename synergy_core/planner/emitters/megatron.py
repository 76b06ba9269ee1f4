"""Arguments of Megatron-LM, one per line: `pretrain_gpt.py $(cat FILE) …`.

Names and rules: NVIDIA/Megatron-LM, megatron/training/arguments.py (Megatron Core 0.15) and the configurations of
Megatron Core 0.16.1. ZeRO 1 is its distributed optimizer, 2 and 3 are its FSDP. Uneven stages are written layer by
layer.
"""

from __future__ import annotations

import argparse
import re
import shlex
from itertools import groupby, pairwise
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.planner.emitters import (
    PlannedLaunch,
    Stated,
    accumulated,
    not_modelled,
    optimizer_in,
    replicas,
    stages,
    whole_plan,
)
from synergy_core.planner.families import mixture, transformer
from synergy_core.planner.machine import GRADIENT_BYTES
from synergy_core.planner.plan import Plan, Recompute

SUMMARY = "arguments of Megatron-LM, one a line"
SOFTWARE = ("megatron-core", "megatron-core-fp8", "megatron")
_PRECISION_AWARE = "use-precision-aware-optimizer"
_MOMENTS = ("exp-avg-dtype", "exp-avg-sq-dtype")
_OPTIMIZERS = {"fp32": {}, "bf16": {"optimizer": "adamw_bf16"}, "fp8": {"optimizer": "adamw8bit"}}
"""The setting `optimizer` by the format of both moments (NVIDIA/Megatron-LM, megatron/training/arguments.py)."""
_DEGREES = {
    "tensor": "tensor-model-parallel-size",
    "pipeline": "pipeline-model-parallel-size",
    "micro_batch": "micro-batch-size",
    "context": "context-parallel-size",
    "expert": "expert-model-parallel-size",
}
_KINDS = {None: Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
"""Recomputation mode by value of --recompute-granularity, if there is no --recompute-modules."""
CORE = "core_attn"
_MODULES = ("mlp", "layernorm", "moe_act", "shared_experts", "mla_up_proj")
"""Values of --recompute-modules for Recompute.MODULES; only modules that the model has are written."""
_SHARDED = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of the ZeRO stages in Megatron FSDP, by stage."""
YOURS = "data, tokenizer, optimizer, learning rate, norms, activation and rotary settings are yours to add"
ONE_CONNECTION = "CUDA_DEVICE_MAX_CONNECTIONS"
VOCABULARY_UNIT = 128
"""Token tables are padded to a multiple of this × tensor parallelism, by default in Megatron and in the planner."""


def emit(launch: PlannedLaunch) -> str:
    """Writes the arguments. Raises InputError for plans and models that Megatron-LM does not run."""
    a, plan, precision = launch.architecture, launch.plan, launch.software.precision
    if not isinstance(a, transformer.Architecture) or not a.causal:
        raise InputError(f"--emit megatron: pretrain_gpt.py trains decoders; {launch.model} is not one.")
    mixed = a if isinstance(a, mixture.Architecture) and a.experts > 1 else None
    refusals = (
        (
            mixed and plan.tensor > 1 and not plan.sequence,
            "experts under tensor parallelism need sequence parallelism; fix sequence=1 or tensor=1.",
        ),
        (mixed and mixed.gshard_group, "Megatron-LM dispatches rows to experts, not groups by matrix products."),
        (a.windowed, "layers with sliding-window attention cannot be written."),
        (
            plan.context > 1 and a.seq_len % (2 * plan.context),
            f"{a.seq_len} tokens are not a multiple of 2 × context={plan.context}.",
        ),
        (
            plan.expert > 1 and not launch.software.whole_experts,
            "only Megatron Core spreads experts; fix expert=1, or type software=megatron-core.",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise InputError(f"--emit megatron: {reason}")
    lines = _model(a, dispatcher="flex" if plan.expert > 1 and launch.software.sends_once else "alltoall")
    lines += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(precision, [])
    lines += ["--grad-reduce-in-bf16"] if launch.software.gradient_bytes == GRADIENT_BYTES["bf16"] else []
    lines += ["--optimizer-cpu-offload"] if launch.software.offload else []
    lines += [] if launch.software.dropout else ["--attention-dropout 0.0", "--hidden-dropout 0.0"]
    for degree, name in _DEGREES.items():
        if degree == "context":
            lines.append(f"--global-batch-size {plan.global_batch}")
        value = getattr(plan, degree)
        lines += [f"--{name} {value}"] if value > 1 or degree not in ("context", "expert") else []
    lines += ["--sequence-parallel"] if plan.sequence else []
    if launch.software.whole_experts and plan.expert > 1 and plan.tensor > 1:
        lines.append("--expert-tensor-parallel-size 1")
    if a.layers % (plan.pipeline * plan.interleave):
        # Megatron's notation of stages, with embedding E, layers t, loss L: `Et*3|t*2|t*2L`.
        layout = "|".join(f"t*{count}" if count else "" for count in stages(int(a.layers), plan))
        lines.append(f"--pipeline-model-parallel-layout E{layout}L")
    elif plan.interleave > 1:
        lines.append(f"--num-virtual-stages-per-pipeline-rank {plan.interleave}")
    if plan.data * plan.context > 1:  # The planner assumes that gradients are sent during the backward pass.
        lines.append("--overlap-grad-reduce")
    if plan.zero >= 1:
        lines += ["--use-distributed-optimizer", "--overlap-param-gather"]
    if plan.zero >= 2:
        sharding = f"--data-parallel-sharding-strategy {_SHARDED[plan.zero]}"
        lines += ["--use-megatron-fsdp", sharding, "--ckpt-format fsdp_dtensor"]
    if plan.recompute:
        granularity = "full" if plan.recompute == Recompute.FULL else "selective"
        lines.append(f"--recompute-granularity {granularity}")
    if plan.recompute == Recompute.MODULES:
        modules = _modules(a) + ([] if launch.software.flash else [CORE])
        lines.append(f"--recompute-modules {' '.join(modules)}")
        # With these modules, Megatron Core does not support delayed scaling, its default.
        lines += ["--fp8-recipe tensorwise"] if precision == "fp8" else []
    if plan.recompute == Recompute.FULL:
        lines += ["--recompute-method uniform", "--recompute-num-layers 1"]
    return "\n".join(lines) + "\n"


def beside(launch: PlannedLaunch) -> str:
    """Says what the user has to add to the arguments."""
    return f"{YOURS}; before Blackwell export {ONE_CONNECTION}=1" if one_connection(launch.plan) else YOURS


def one_connection(plan: Plan) -> bool:
    """Whether communication overlaps on GPUs before Blackwell only if kernels start in the order of their launch."""
    return (plan.tensor > 1 or plan.context > 1) and plan.zero < 2


def recognises(text: str) -> bool:
    """Whether a text has Megatron-LM's arguments, and not as items of a YAML list."""
    return bool(re.search(r"^(?!\s*- )[^#\n]*--(micro-batch-size|tensor-model-parallel-size)[ =]", text, re.MULTILINE))


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads the plan from arguments or a launch script."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for degree, name in _DEGREES.items():
        parser.add_argument(f"--{name}", dest=degree, type=_whole, default=1)
    for name in (
        *("global-batch-size", "num-layers", "expert-tensor-parallel-size", "seq-length"),
        *("num-layers-per-virtual-pipeline-stage", "num-virtual-stages-per-pipeline-rank"),
    ):
        parser.add_argument(f"--{name}", type=_whole)
    for name in ("pipeline-model-parallel-layout", "recompute-granularity", "fp8-format"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--data-parallel-sharding-strategy", default="no_shard")
    parser.add_argument("--recompute-modules", nargs="*", default=[])
    for name in ("sequence-parallel", "use-distributed-optimizer", "use-megatron-fsdp", "recompute-activations"):
        parser.add_argument(f"--{name}", action="store_true")
    try:
        words = shlex.split(_expanded(text).replace("\\\n", " "), comments=True)
        # Unquoted, an array's elements are split again: DTYPE_ARGS=("--fp8-format hybrid").
        words = [part for word in words for part in (word.split() if word.startswith("--") else [word])]
        given, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise InputError(f"Megatron-LM's arguments: {error}.") from None
    except ValueError as error:
        raise InputError(f"is not a script ({error}).") from None
    tensor, pipeline, context = given.tensor, given.pipeline, given.context
    data = replicas(gpus, tensor * pipeline * context, f"tensor {tensor} × pipeline {pipeline} × context {context}")
    granularity = "selective" if given.recompute_activations else given.recompute_granularity
    if granularity not in _KINDS:
        raise InputError(f"--recompute-granularity {granularity}: expected selective or full.")
    recompute = _KINDS[granularity]
    if granularity == "selective" and (modules := set(given.recompute_modules) - {CORE}):
        if modules - set(_MODULES):
            asked = " ".join(given.recompute_modules)
            raise InputError(f"--recompute-modules {asked}: expected some of {CORE}, {', '.join(_MODULES)}.")
        recompute = Recompute.MODULES
    strategy, zero = given.data_parallel_sharding_strategy, int(given.use_distributed_optimizer)
    if given.use_megatron_fsdp:
        if strategy not in _SHARDED:
            raise InputError(f"--data-parallel-sharding-strategy {strategy}: expected {', '.join(_SHARDED)}.")
        zero = _SHARDED.index(strategy)
    if given.expert > 1 and tensor > 1 and given.expert_tensor_parallel_size != 1:
        raise InputError(
            "experts split over tensor-parallel ranks, Megatron-LM's default, are not planned; expected "
            "--expert-tensor-parallel-size 1."
        )
    # Launch scripts often set ZeRO and sequence parallelism whatever the degrees; without ranks, they do nothing.
    plan = Plan(
        **{degree: getattr(given, degree) for degree in _DEGREES},
        data=data,
        interleave=_interleave(given),
        accumulation=accumulated(given.global_batch_size or given.micro_batch * data, data, given.micro_batch),
        zero=zero if data * context > 1 else 0,
        recompute=recompute.value,
        sequence=given.sequence_parallel and tensor > 1,
    )
    options: dict[str, str | bool] = {}
    for word, after in pairwise([*others, ")"]):
        if re.match(r"--\w[^()]*$", word):  # not a pattern of `case`
            name, equals, value = word[2:].partition("=")
            options[name] = value if equals else after == ")" or after.startswith("--") or after
    reduced, again, layers = options.pop("grad-reduce-in-bf16", None), None, str(options.get("recompute-num-layers"))
    if recompute == Recompute.FULL and options.get("recompute-method") == "block" and layers.isdecimal():
        del options["recompute-method"], options["recompute-num-layers"]
        again = int(layers) * pipeline * plan.interleave  # as many of each chunk
        again = min(again, given.num_layers or again)
    optimizer = optimizer_in(options, "optimizer")
    first, second = (str(options.get(name, "fp32")) for name in _MOMENTS)
    if _PRECISION_AWARE in options and not optimizer and first == second and first in _OPTIMIZERS:
        options = {name: value for name, value in options.items() if name not in (*_MOMENTS, _PRECISION_AWARE)}
        optimizer = _OPTIMIZERS[first]
    of_all = str(options.get("optimizer-offload-fraction", 1)) in ("1", "1.0")
    if is_offloaded := "optimizer-cpu-offload" in options and of_all:
        del options["optimizer-cpu-offload"]
        options.pop("optimizer-offload-fraction", None)
    return whole_plan(
        plan,
        "megatron-core-fp8" if given.fp8_format else "",
        tuple(each.removesuffix(" True") for each in not_modelled(options, "megatron", words="--{} {}")),
        seq_len=given.seq_length,
        gradients="bf16" if reduced else None,
        recompute_layers=again,
        offload="optimizer" if is_offloaded else None,
        **optimizer,
    )


def _modules(a: transformer.Architecture) -> list[str]:
    """Those of `_MODULES` that the model has. In dense layers the norm is fused into a product, so it is no module."""
    mixed = a if isinstance(a, mixture.Architecture) and a.experts > 1 else None
    latent = isinstance(a, mixture.Architecture) and bool(a.key_value_rank)
    has = {
        "mlp": mixed is None or not all(mixed.has_experts(each) for each in range(int(a.layers))),
        "layernorm": mixed is not None or latent,
        "moe_act": mixed is not None,
        "shared_experts": mixed is not None and bool(mixed.shared_experts),
        "mla_up_proj": latent,
    }
    return [name for name in _MODULES if has[name]]


def _model(a: transformer.Architecture, *, dispatcher: str) -> list[str]:
    """Arguments for the model's sizes. dispatcher: how tokens get to experts: `alltoall`, or `flex` with DeepEP."""
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
    # Models with gated MLPs have no biases, and experts under tensor parallelism cannot have any.
    if a.gated or (isinstance(a, mixture.Architecture) and a.experts > 1):
        lines.append("--disable-bias-linear")
    lines += [] if a.tied else ["--untie-embeddings-and-output-weights"]
    latent = isinstance(a, mixture.Architecture) and a.key_value_rank
    if a.head_width and not latent:
        lines.append(f"--kv-channels {a.head_width}")
    if isinstance(a, mixture.Architecture) and a.experts > 1:
        lines += [f"--num-experts {a.experts}", f"--moe-router-topk {a.topk}", f"--moe-ffn-hidden-size {a.expert_ffn}"]
        if a.expert_groups > 1:
            lines.append(f"--moe-router-num-groups {a.expert_groups} --moe-router-group-topk {a.groups_per_token}")
        lines += ["--moe-grouped-gemm", f"--moe-token-dispatcher-type {dispatcher}"]
        lines += ["--moe-enable-deepep"] if dispatcher == "flex" else []
        sparse = [int(bool(a.has_experts(each))) for each in range(int(a.layers))]
        if not all(sparse):  # Megatron's notation of layers with experts: `[0]*3+[1]*58`.
            runs = [(kind, len(list(run))) for kind, run in groupby(sparse)]
            lines.append(f"--moe-layer-freq {'+'.join(f'[{kind}]*{length}' for kind, length in runs)}")
        if a.shared_experts:
            lines.append(f"--moe-shared-expert-intermediate-size {a.shared_experts * a.expert_ffn}")
        if a.capacity:
            lines.append(f"--moe-expert-capacity-factor {a.capacity:g}")
    if isinstance(a, mixture.Architecture) and a.key_value_rank:
        lines += [
            "--multi-latent-attention",
            *([f"--q-lora-rank {a.query_rank}"] if a.query_rank else []),
            f"--kv-lora-rank {a.key_value_rank}",
            f"--qk-head-dim {int(a.width)}",
            f"--qk-pos-emb-head-dim {a.rotary_width}",
            f"--v-head-dim {a.value_width}",
        ]
    return lines


def _interleave(given: argparse.Namespace) -> int:
    """Stages per GPU, from any of the three arguments that set the number. Raises InputError for a fraction."""
    pipeline = given.pipeline
    if given.pipeline_model_parallel_layout is not None:
        layout = given.pipeline_model_parallel_layout
        parts = layout.count("|") + 1
        if re.search(r"[()]", layout) or parts % pipeline:
            raise InputError(
                f"--pipeline-model-parallel-layout {layout}: expected stages without brackets, a multiple of "
                f"{pipeline} of them."
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


def _expanded(script: str) -> str:
    """A script with plain values of its variables in place of `$NAME`, `${NAME}` and `${NAME:-value}`.

    An array's elements are read where it is defined, so `${NAME[@]}` is replaced by `)`, the end of an array."""
    script = re.sub(r"\$\{\w+\[[@*]\]\}", ")", script)
    assigned = r"^\s*(?:export\s+)?(\w+)=(?:\$\{\w+:-)?[\"']?([^\s\"'()$}]+)"
    values = dict(re.findall(assigned, script, re.MULTILINE))
    return re.sub(r"\$\{?(\w+)(?::-([^}\n]*))?\}?", lambda found: values.get(found[1]) or found[2] or found[0], script)


def _whole(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text}; expected a whole number from 1")
    return int(text)
