"""Arguments of Megatron-LM, one per line: `pretrain_gpt.py $(cat FILE) …`.

Names and rules: NVIDIA/Megatron-LM, megatron/training/arguments.py (Megatron Core 0.15) and the configurations of
Megatron Core 0.16.1. ZeRO 1 is its distributed optimizer, 2 and 3 are its FSDP. Uneven stages are written layer by
layer.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch, stages
from synergy_core.performance.planner.families import mixture, transformer
from synergy_core.performance.planner.machine import GRADIENT_BYTES
from synergy_core.performance.planner.options import Options, Stated, arguments_of, rules, whole_plan
from synergy_core.performance.planner.plan import Plan, Recompute

SUMMARY = "arguments of Megatron-LM, one a line"
SOFTWARE = ("megatron-core", "megatron-core-fp8", "megatron")
_PRECISION_AWARE = "use-precision-aware-optimizer"
_BLOCK = "recompute-num-layers"
_MOMENTS = ("exp-avg-dtype", "exp-avg-sq-dtype")
_OPTIMIZERS = {"fp32": None, "bf16": "adamw_bf16", "fp8": "adamw8bit"}
"""The setting `optimizer` by the format of both moments (NVIDIA/Megatron-LM, megatron/training/arguments.py)."""
_GRANULARITIES = {None: Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}
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
            plan.expert > 1 and not launch.software.communication.whole_experts,
            "only Megatron Core spreads experts; fix expert=1, or type software=megatron-core.",
        ),
    )
    for refused, reason in refusals:
        if refused:
            raise InputError(f"--emit megatron: {reason}")
    lines = _model(a, dispatcher="flex" if plan.expert > 1 and launch.software.communication.sends_once else "alltoall")
    lines += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(precision, [])
    lines += ["--grad-reduce-in-bf16"] if launch.software.gradient_bytes == GRADIENT_BYTES["bf16"] else []
    lines += ["--optimizer-cpu-offload"] if "optimizer" in launch.software.run.offload else []
    if "activations" in launch.software.run.offload:  # at most all but one
        offloaded = min(round(launch.software.run.offloaded_fraction * float(a.layers)), a.layers - 1)
        lines.append(f"--cpu-offloading-num-layers {offloaded}")
    lines += ["--cp-comm-type a2a"] if launch.software.communication.cp_comm_type == "a2a" else []
    lines += [] if launch.software.dropout else ["--attention-dropout 0.0", "--hidden-dropout 0.0"]
    written = {**plan.as_dict(), "batch": plan.global_batch}
    for setting, (name, *_) in rules("megatron")["settings"].items():
        if setting in written and (written[setting] != 1 or setting not in ("context", "expert")):
            lines.append(f"--{name} {written[setting]}")
    lines += ["--sequence-parallel"] if plan.sequence else []
    if launch.software.communication.whole_experts and plan.expert > 1 and plan.tensor > 1:
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
    try:
        words = shlex.split(_expanded(text).replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"is not a script ({error}).") from None
    # Unquoted, an array's elements are split again: DTYPE_ARGS=("--fp8-format hybrid").
    return stated([part for word in words for part in (word.split() if word.startswith("--") else [word])], gpus)


def stated(words: Sequence[str], gpus: int) -> Stated:
    """What the words of a command line say."""
    given = arguments_of(words)
    modules = set(given.pop("recompute-modules", [])) - {CORE}
    options = Options({name: values[0] if values else True for name, values in given.items()}, "megatron")
    settings = options.settings()
    granularity = options.pop("recompute-granularity", None)
    granularity = "selective" if options.pop("recompute-activations", False) else granularity
    if granularity not in _GRANULARITIES:
        raise InputError(f"--recompute-granularity {granularity}: expected selective or full.")
    recompute = _GRANULARITIES[granularity]
    if granularity == "selective" and modules:
        if unknown_modules := modules - set(_MODULES):
            wrong = " ".join(sorted(unknown_modules))
            raise InputError(f"--recompute-modules {wrong}: expected some of {CORE}, {', '.join(_MODULES)}.")
        recompute = Recompute.MODULES
    zero = int(bool(options.pop("use-distributed-optimizer", False)))
    strategy = options.pop("data-parallel-sharding-strategy", _SHARDED[0])
    if options.pop("use-megatron-fsdp", False):
        if strategy not in _SHARDED:
            raise InputError(f"--data-parallel-sharding-strategy {strategy}: expected {', '.join(_SHARDED)}.")
        zero = _SHARDED.index(strategy)
    split = options.whole("expert-tensor-parallel-size") or settings.get("tensor", 1)
    if settings.get("expert", 1) > 1 and split > 1:
        raise InputError(
            "experts split over tensor-parallel ranks, Megatron-LM's default, are not planned; expected "
            "--expert-tensor-parallel-size 1."
        )
    layers, pipeline = options.whole("num-layers"), settings.get("pipeline", 1)
    interleave = _interleave(options, layers, pipeline)
    if recompute == Recompute.FULL and options.get("recompute-method") == "block" and _BLOCK in options:
        del options["recompute-method"]
        again = (options.whole(_BLOCK) or 1) * pipeline * interleave  # as many of each chunk
        settings["recompute_layers"] = min(again, layers or again)
    first, second = (str(options.get(name, "fp32")) for name in _MOMENTS)
    if _PRECISION_AWARE in options and "optimizer" not in settings and first == second and first in _OPTIMIZERS:
        for name in (*_MOMENTS, _PRECISION_AWARE):
            options.pop(name, None)
        settings["optimizer"] = _OPTIMIZERS[first]
    of_all = str(options.get("optimizer-offload-fraction", 1)) in ("1", "1.0")
    offloaded = options.whole("cpu-offloading-num-layers")
    offload = ["activations"] if offloaded else []
    if "optimizer-cpu-offload" in options and of_all:
        del options["optimizer-cpu-offload"]
        options.pop("optimizer-offload-fraction", None)
        offload.append("optimizer")
    settings |= {"offload": ",".join(offload)} if offload else {}
    settings |= {"offload_layers": offloaded} if offloaded else {}
    if options.get("cp-comm-type") == "a2a":
        settings["cp_comm_type"] = "a2a"
    if options.pop("grad-reduce-in-bf16", False):
        settings["gradients"] = "bf16"
    sequence, is_fp8 = (bool(options.pop(name, False)) for name in ("sequence-parallel", "fp8-format"))
    return Stated(
        whole_plan(gpus, **settings, interleave=interleave, zero=zero, recompute=recompute.value, sequence=sequence),
        "megatron-core-fp8" if is_fp8 else "",
        not_modelled=tuple(each.removesuffix(" True") for each in options.not_modelled("--{} {}")),
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
    sizes = rules("megatron")["sizes"]

    def written(section: str) -> list[str]:
        return [f"--{name} {int(value)}" for name, field in sizes[section].items() if (value := getattr(a, field))]

    lines = [*written("all"), f"--make-vocab-size-divisible-by {VOCABULARY_UNIT}"]
    lines.append(f"--position-embedding-type {'learned_absolute' if a.learned_positions else 'rope'}")
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
        lines += written("experts")
        if a.expert_groups > 1:
            lines.append(f"--moe-router-num-groups {a.expert_groups} --moe-router-group-topk {a.groups_per_token}")
        lines += ["--moe-grouped-gemm", f"--moe-token-dispatcher-type {dispatcher}"]
        lines += ["--moe-enable-deepep"] if dispatcher == "flex" else []
        sparse = [int(bool(a.has_experts(each))) for each in range(int(a.layers))]
        if not all(sparse):  # Megatron's notation of layers with experts: `[0]*3+[1]*58`.
            runs = [(has_experts, len(list(run))) for has_experts, run in groupby(sparse)]
            lines.append(f"--moe-layer-freq {'+'.join(f'[{has_experts}]*{length}' for has_experts, length in runs)}")
        if a.shared_experts:
            lines.append(f"--moe-shared-expert-intermediate-size {a.shared_experts * a.expert_ffn}")
        if a.capacity:
            lines.append(f"--moe-expert-capacity-factor {a.capacity:g}")
    if isinstance(a, mixture.Architecture) and a.key_value_rank:
        lines += ["--multi-latent-attention", *written("latent")]
    return lines


def _interleave(options: Options, layers: int | None, pipeline: int) -> int:
    """Takes the stages per GPU from any of the arguments that set the number. Raises InputError for a fraction."""
    layout = options.pop("pipeline-model-parallel-layout", None)
    stages_each, layers_each = map(
        options.whole, ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    )
    if layout is not None:
        parts = str(layout).count("|") + 1
        if re.search(r"[()]", str(layout)) or parts % pipeline:
            raise InputError(
                f"--pipeline-model-parallel-layout {layout}: expected stages without brackets, a multiple of "
                f"{pipeline} of them."
            )
        return parts // pipeline
    if stages_each is None and layers_each is not None:
        if layers is None or layers % (pipeline * layers_each):
            raise InputError(
                f"--num-layers-per-virtual-pipeline-stage {layers_each}: expected a --num-layers that is a multiple of "
                f"{pipeline} × {layers_each}."
            )
        return layers // (pipeline * layers_each)
    return stages_each or 1


def _expanded(script: str) -> str:
    """A script with plain values of its variables in place of `$NAME`, `${NAME}` and `${NAME:-value}`.

    An array's elements are read where it is defined, so `${NAME[@]}` is replaced by `)`, the end of an array."""
    script = re.sub(r"\$\{\w+\[[@*]\]\}", ")", script)
    assigned = r"^\s*(?:export\s+)?(\w+)=(?:\$\{\w+:-)?[\"']?([^\s\"'()$}]+)"
    values = dict(re.findall(assigned, script, re.MULTILINE))
    return re.sub(r"\$\{?(\w+)(?::-([^}\n]*))?\}?", lambda found: values.get(found[1]) or found[2] or found[0], script)
