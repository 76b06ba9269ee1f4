"""Models and plans that forms of a plan are tried with."""

from dataclasses import fields, replace
from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch, emitted, emitter_named
from synergy_core.performance.planner.families import architecture_named, mixture, transformer
from synergy_core.performance.planner.machine import software_named
from synergy_core.performance.planner.plan import Plan, Recompute

DENSE = transformer.Architecture(
    layers=12, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000, seq_len=4096, gated=True, tied=False
)
SPARSE = mixture.Architecture(
    *(12, 1024, 16, 4096, 32000, 4096), gated=True, experts=8, topk=2, expert_ffn=512, shared_experts=1, dense_layers=2
)
LATENT = architecture_named("deepseek-v3")[1]
READERS = {
    "megatron": ("megatron-core", "megatron-core-fp8"),
    "torchtitan": ("torchtitan",),
    "trainjob": ("megatron-core", "torchtitan"),
    "deepspeed": ("deepspeed", "deepspeed-fp16"),
    "accelerate": ("accelerate-fsdp", "deepspeed", "deepspeed-fp16", "fsdp-bf16", "fsdp"),
}
BY_SCRIPT = {"deepspeed": ("recompute",), "accelerate": ("micro_batch", "batch", "recompute")}
"""What the training script sets, and so the user types, by form."""


def launch(plan, software="megatron-core", model=DENSE, per_node=8):
    return PlannedLaunch(plan, "mine", model, software_named(software), per_node)


def examples(name, software=None):
    """Plans of every kind that a form can say, of three models."""
    software = software or READERS[name][0]
    found = []
    for model in (DENSE, SPARSE, LATENT):
        for at, plan in enumerate(
            (
                Plan(),
                Plan(tensor=2, data=4, zero=1, sequence=True, accumulation=2),
                Plan(tensor=2, data=4, zero=2, sequence=True, recompute=Recompute.FULL),
                Plan(context=2, data=4, zero=3, micro_batch=2),
                Plan(pipeline=4, interleave=2, accumulation=8),
                Plan(pipeline=5, tensor=2, sequence=True, accumulation=4),
                Plan(pipeline=4, interleave=3, accumulation=8),
                Plan(data=8, zero=3, recompute=Recompute.OPERATORS),
                Plan(data=8, zero=1, recompute=Recompute.SELECTIVE),
                Plan(data=8, zero=1, recompute=Recompute.MODULES),
            )
        ):
            ranks = plan.data * plan.context * (plan.tensor if name == "megatron" and plan.sequence else 1)
            expert = (8 if ranks >= 8 else 4) if isinstance(model, mixture.Architecture) and ranks >= 4 else 1
            try:
                chosen = launch(replace(plan, expert=expert), software, model)
                found.append((at, chosen, emitted(name, chosen)))
            except InputError:
                continue
    assert len({at for at, _, _ in found}) >= 5
    return found


def stated(name, text, gpus=8, folder=Path()):
    return emitter_named(name).read(text, gpus, folder)


def read(name, text, gpus=8, **typed):
    """The plan that a text and typed settings state."""
    found = stated(name, text, gpus).completed(typed, gpus)
    data = gpus // (found.get("tensor", 1) * found.get("pipeline", 1) * found.get("context", 1))
    steps = found["batch"] // (found["micro_batch"] * data)
    known = {each.name: found[each.name] for each in fields(Plan)[:-2] if each.name in found}
    return Plan(**known | {"data": data, "accumulation": steps, "sequence": bool(found.get("sequence"))})
