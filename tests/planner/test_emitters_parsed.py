"""Forms of a plan under the parsers, configurations and schemas of the software that reads them."""

import argparse
import importlib.metadata
import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from emitted_plans import examples

from synergy_core.performance.planner.plan import Recompute

# Those that are emitted, of NVIDIA/Megatron-LM, megatron/training/arguments.py, as of Megatron Core 0.15.
MEGATRON = {
    int: (
        *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length"),
        *("max-position-embeddings", "vocab-size", "make-vocab-size-divisible-by", "num-query-groups", "kv-channels"),
        *("num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"),
        *("moe-router-num-groups", "moe-router-group-topk"),
        *("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"),
        *("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"),
        *("expert-model-parallel-size", "micro-batch-size", "global-batch-size", "recompute-num-layers"),
        *("num-virtual-stages-per-pipeline-rank", "expert-tensor-parallel-size"),
    ),
    float: ("attention-dropout", "hidden-dropout", "moe-expert-capacity-factor"),
    str: ("pipeline-model-parallel-layout", "moe-layer-freq"),
    bool: (
        *("group-query-attention", "swiglu", "untie-embeddings-and-output-weights", "multi-latent-attention"),
        *("bf16", "fp16", "sequence-parallel", "overlap-grad-reduce", "use-distributed-optimizer"),
        *("overlap-param-gather", "use-megatron-fsdp", "disable-bias-linear", "grad-reduce-in-bf16"),
        *("moe-grouped-gemm", "moe-enable-deepep"),
    ),
}
CHOICES = {
    "position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "fp8-format": ("e4m3", "hybrid"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "ckpt-format": ("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise"),
    "moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
}


class Strict(argparse.ArgumentParser):
    def error(self, message):
        raise AssertionError(message)


def parsed(text):
    """The arguments as Megatron-LM would parse them, refusing what it does not know."""
    parser = Strict(allow_abbrev=False)
    for kind, names in MEGATRON.items():
        for name in names:
            parser.add_argument(f"--{name}", **({"action": "store_true"} if kind is bool else {"type": kind}))
    parser.add_argument("--recompute-modules", nargs="*")
    for name, choices in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices)
    return parser.parse_args(shlex.split(text))


def test_megatron_knows_every_argument_and_its_rules_hold():
    """The rules of its validate_args that a plan can break."""
    for _, chosen, text in examples("megatron"):
        given, plan = parsed(text), chosen.plan
        degrees = given.tensor_model_parallel_size * given.pipeline_model_parallel_size
        assert plan.gpus % (degrees * (given.context_parallel_size or 1)) == 0
        assert given.global_batch_size % (given.micro_batch_size * plan.data) == 0
        assert given.seq_length <= given.max_position_embeddings
        assert given.moe_grouped_gemm == (given.num_experts is not None)
        assert given.moe_enable_deepep == (given.moe_token_dispatcher_type == "flex")
        assert plan.expert > 1 or not given.moe_enable_deepep
        # Megatron-LM splits experts as other layers by default; those of the planner are whole where they are spread.
        spread = plan.expert > 1 and plan.tensor > 1
        assert given.expert_tensor_parallel_size == (1 if spread else None)
        # Megatron's parallel_state: experts × what splits each divides the ranks of a stage; 0.15 takes the
        # tensor-parallel degree for the latter where it is not given.
        split = given.expert_tensor_parallel_size or given.tensor_model_parallel_size
        experts = given.expert_model_parallel_size or 1
        assert plan.gpus // given.pipeline_model_parallel_size % (split * experts) == 0
        assert given.disable_bias_linear or not given.swiglu
        virtual, layout = given.num_virtual_stages_per_pipeline_rank, given.pipeline_model_parallel_layout
        assert virtual is None or layout is None
        if layout is None:
            assert given.num_layers % given.pipeline_model_parallel_size == 0
        if given.overlap_param_gather:
            assert given.overlap_grad_reduce
            assert given.use_distributed_optimizer
        if given.use_megatron_fsdp:
            assert given.ckpt_format == "fsdp_dtensor"
        if given.recompute_granularity == "selective":
            assert given.recompute_method is None
        if given.moe_layer_freq:
            assert re.fullmatch(r"[\[\]\d*+]+", given.moe_layer_freq)
            assert len(eval(given.moe_layer_freq)) == given.num_layers


# One process, for each of them imports torch.
PARSERS = """
import dataclasses, json, sys, types, warnings
warnings.simplefilter("ignore")
given_rows = json.load(sys.stdin)
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

for each in given_rows["megatron"]:
    kind = MLATransformerConfig if each.pop("multi_latent_attention") else TransformerConfig
    names = {field.name for field in dataclasses.fields(kind)}
    each["add_bias_linear"] = not each["disable_bias_linear"]
    layout = each.pop("pipeline_model_parallel_layout")
    given = {name: value for name, value in each.items() if name in names and value is not None}
    if layout is not None:
        given["pipeline_model_parallel_layout"] = layout
        parts = PipelineParallelLayerLayout.get_num_stages_from_str(layout) // each["pipeline_model_parallel_size"]
        given["virtual_pipeline_model_parallel_size"] = parts if parts > 1 else None
    elif each["num_virtual_stages_per_pipeline_rank"]:
        given["virtual_pipeline_model_parallel_size"] = each["num_virtual_stages_per_pipeline_rank"]
    if isinstance(given.get("moe_layer_freq"), str):
        given["moe_layer_freq"] = eval(given["moe_layer_freq"])
    made = kind(**given, gated_linear_unit=each["swiglu"], pipeline_dtype="bf16", num_moe_experts=each["num_experts"])
    if layout is not None:
        made.pipeline_model_parallel_layout.validate_layer_layout(made.num_layers, None)
    ours = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    DistributedDataParallelConfig(**{name: value for name, value in each.items() if name in ours and value is not None})

# Only its configuration: the whole package imports Triton, which machines without GPUs lack.
package = types.ModuleType("torchtitan")
package.__path__ = [sys.argv[1]]
sys.modules["torchtitan"] = package
from torchtitan.config.manager import ConfigManager
from torchtitan.distributed.parallel_dims import ParallelDims

for gpus, words in given_rows["torchtitan"]:
    made = ConfigManager().parse_args(words)
    p = made.parallelism
    dims = ParallelDims(
        p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.context_parallel_degree,
        p.tensor_parallel_degree, p.pipeline_parallel_degree, p.expert_parallel_degree,
        p.expert_tensor_parallel_degree, gpus,
    )
    parts = p.module_fqns_per_model_part or [[]]
    print("told", dims.world_size, made.training.global_batch_size, made.activation_checkpoint.mode, len(parts))
"""
INSTALLED = all(map(importlib.util.find_spec, ("megatron", "torchtitan")))


def asked(program, rows, *words):
    """Runs a program with rows as JSON, and returns what it prints."""
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.skipif(not INSTALLED, reason="megatron-core or torchtitan is not installed")
def test_megatron_cores_own_configurations_and_torchtitans_own_parser_accept_it(tmp_path):
    """For torchtitan as a TOML, and as the arguments of a TrainJob."""
    found = examples("torchtitan")
    asked_for = []
    for at, (_, chosen, text) in enumerate(found):
        path = tmp_path / f"{at}.toml"
        path.write_text(text)
        asked_for.append((chosen.plan.gpus, [f"--job.config_file={path}"]))
    jobs = examples("trainjob", "torchtitan")
    for _, chosen, text in jobs:
        asked_for.append((chosen.plan.gpus, yaml.safe_load(text)["spec"]["trainer"]["args"]))
    found = [*found, *jobs]
    folder = str(importlib.metadata.distribution("torchtitan").locate_file("torchtitan"))
    rows = {"megatron": [vars(parsed(text)) for _, _, text in examples("megatron")], "torchtitan": asked_for}
    told = [line.split()[1:] for line in asked(PARSERS, rows, folder) if line.startswith("told ")]
    modes = {Recompute.NONE: "none", Recompute.FULL: "full", Recompute.OPERATORS: "selective"}
    assert told == [
        [str(plan.gpus), str(plan.global_batch), modes[Recompute(plan.recompute)], str(plan.pipeline * plan.interleave)]
        for plan in (chosen.plan for _, chosen, _ in found)
    ]


@pytest.mark.skipif(importlib.util.find_spec("kubeflow_trainer_api") is None, reason="its API is not installed")
def test_kubeflows_own_model_of_a_trainjob_accepts_it():
    program = (
        "import json, sys\n"
        "from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob as Job\n"
        "for each in json.load(sys.stdin):\n"
        "    each['spec']['runtimeRef'] = {'name': 'torch-distributed'}\n"
        "    made = Job.from_dict(each).spec.trainer\n"
        "    print(made.num_nodes * made.num_proc_per_node, len(made.args))\n"
    )
    found = examples("trainjob")
    patches = [yaml.safe_load(text) for _, _, text in found]
    words = asked(program, patches)
    lengths = [len(each["spec"]["trainer"]["args"]) for each in patches]
    assert words == [f"{chosen.plan.gpus} {n}" for (_, chosen, _), n in zip(found, lengths, strict=True)]
