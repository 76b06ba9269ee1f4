"""Configurations and scripts as people write them, read by plan=FILE."""

import json
import re
from dataclasses import replace

import pytest
from emitted_plans import launch, read, stated

from synergy_core.__main__ import main
from synergy_core.errors import InputError
from synergy_core.performance.catalog import CATALOG, names_in, read_yaml
from synergy_core.performance.planner.emitters import emitted, emitter_named, form_names
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import software_named, with_gradients
from synergy_core.performance.planner.plan import Plan, Recompute
from synergy_core.performance.planner.tuning import tuned

ZERO3 = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto", "sub_group_size": 1e8},
}
FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_offload_params: {offload}
  {strategy}
"""
BEYOND = "fsdp_offload_params: True"
FACTORY = """
model_name_or_path: mine
stage: sft
finetuning_type: lora
lora_rank: 16
lora_target: all
quantization_bit: 4
deepspeed: folder/zero3.json
cutoff_len: 2048
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
warmup_ratio: 0.1
bf16: true
packing: true
optim: paged_adamw_8bit
"""
AXOLOTL = """
base_model: mine
adapter: qlora
load_in_4bit: true
load_in_8bit: false
lora_r: 32
lora_target_linear: true
sequence_len: 4096
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
bf16: auto
gradient_checkpointing: true
wandb_project:
fsdp: [full_shard, auto_wrap]
fsdp_config: {fsdp_offload_params: true, fsdp_state_dict_type: FULL_STATE_DICT}
"""


def test_a_deepspeed_file_states_its_plan_and_leaves_recomputation_to_the_script():
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 2,
            "train_batch_size": 64,
            "fp16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2e8},
        }
    )
    found = stated("deepspeed", text)
    assert found.settings == {"zero": 2, "micro_batch": 2, "batch": 64, "offload": "optimizer"}
    assert (found.software, found.changed, found.not_modelled) == ("deepspeed-fp16", {"bucket_elements": 2e8}, ())
    assert "recompute" in found.assumed
    assert read("deepspeed", text, recompute=2) == Plan(data=8, zero=2, micro_batch=2, accumulation=4, recompute=2)


def test_gradients_summed_in_fp32_are_read_from_a_deepspeed_file_and_take_twice_the_memory():
    """deepspeed/runtime/engine.py, get_data_types: gradients are summed in the model's format unless a file says so."""
    half, whole = (
        stated("deepspeed", json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, **more}))
        for more in ({}, {"data_types": {"grad_accum_dtype": "fp32"}})
    )
    assert (half.settings.get("gradients"), whole.settings["gradients"]) == (None, "fp32")
    assert not whole.not_modelled
    stack = with_gradients(software_named("deepspeed"), "fp32")
    assert stack.sent_gradient_bytes == 2.0  # deepspeed/runtime/engine.py: communication_data_type
    bytes_of = [with_gradients(software_named("deepspeed"), each).gradient_bytes for each in ("bf16", "fp32")]
    assert bytes_of == [2.0, 4.0]


def test_a_batch_alone_is_not_accumulated_as_in_deepspeed():
    assert read("deepspeed", '{"train_batch_size": 64, "zero_optimization": {}}') == Plan(data=8, micro_batch=8)


def test_automatic_values_of_a_deepspeed_file_are_typed_or_are_those_of_the_trainer():
    text = json.dumps(ZERO3)
    with pytest.raises(InputError, match=r"train_micro_batch_size_per_gpu is auto; type micro_batch="):
        read("deepspeed", text)
    assert read("deepspeed", text, micro_batch=2, batch=32) == Plan(data=8, zero=3, micro_batch=2, accumulation=2)
    found = stated("deepspeed", text)
    assert found.changed["update_elements"] == 1e8
    _, llama = architecture_named("llama-3-8b")
    assert found.changed["bucket_elements"](llama) == 4096**2


def test_what_a_deepspeed_file_sets_and_predictions_leave_out_is_named():
    zero = {"stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "gpu"}}
    zero |= {"overlap_comm": False, "zero_quantized_weights": True, "zero_hpz_partition_size": 8}
    found = stated("deepspeed", json.dumps({"zero_optimization": zero, "optimizer": {"type": "OneBitAdam"}}))
    assert found.not_modelled == (
        "zero_optimization.offload_param.device: gpu",
        "zero_optimization.zero_quantized_weights: True",
        "zero_optimization.zero_hpz_partition_size: 8",
        "optimizer.type: OneBitAdam",
        "zero_optimization.overlap_comm: false",
        "fp32, because neither bf16 nor fp16 is enabled",
    )
    assert "offload" not in found.settings


@pytest.mark.parametrize(
    ("states", "weights", "offload"),
    [
        ("cpu", None, "optimizer"),
        ("cpu", "cpu", "optimizer,parameters"),
        (None, "nvme", "nvme,parameters"),
        ("nvme", "nvme", "nvme,optimizer,parameters"),
        ("nvme", "cpu", "nvme,optimizer,parameters"),
    ],
)
def test_a_deepspeed_file_says_what_it_offloads_and_where(states, weights, offload):
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": states},
        "offload_param": {"device": weights, "pin_memory": True},
    }
    found = stated("deepspeed", json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}}))
    assert found.settings["offload"] == offload
    assert bool(found.not_modelled) == ({states, weights} == {"cpu", "nvme"})
    below = stated("deepspeed", json.dumps({"zero_optimization": zero | {"stage": 2, "offload_optimizer": {}}}))
    assert "offload" not in below.settings  # config-json.md: offload_param is valid only with stage 3
    software = tuned(software_named("deepspeed"), offload=offload)
    chosen = replace(launch(Plan(data=8, zero=3)), software=software)
    for form in ("deepspeed", "accelerate"):
        assert stated(form, emitted(form, chosen)).settings["offload"] == offload


@pytest.mark.parametrize(
    ("strategy", "zero"),
    [
        ("fsdp_sharding_strategy: FULL_SHARD", 3),
        ("fsdp_sharding_strategy: 2", 2),
        ("fsdp_sharding_strategy: NO_SHARD", 0),
        ("fsdp_reshard_after_forward: true", 3),
        ("fsdp_reshard_after_forward: SHARD_GRAD_OP", 2),
        ("fsdp_version: 2", 3),
    ],
)
def test_fsdp_under_accelerate_in_old_and_new_spellings(strategy, zero):
    text = FSDP.format(strategy=strategy, offload="false")
    found = stated("accelerate", text)
    assert (found.settings["zero"], found.software, found.not_modelled) == (zero, "accelerate-fsdp", ())
    assert read("accelerate", text, micro_batch=4, batch=64).accumulation == 2


def test_what_accelerate_leaves_to_the_script_and_what_is_not_modelled_is_named():
    text = FSDP.format(strategy="fsdp_sharding_strategy: HYBRID_SHARD", offload="true")
    found = stated("accelerate", text)
    assert (found.not_modelled, found.settings["shards"]) == ((), 8)
    assert found.settings["offload"] == "optimizer,parameters"
    assert found.assumed.keys() == {"micro_batch", "recompute", "batch"}
    with pytest.raises(InputError, match=r"num_processes: 8 is not gpus=4; type gpus=8"):
        stated("accelerate", text, 4)
    with pytest.raises(InputError, match="fsdp_sharding_strategy: SOME; expected FULL_SHARD"):
        stated("accelerate", FSDP.format(strategy="fsdp_sharding_strategy: SOME", offload="false"))
    with pytest.raises(InputError, match="distributed_type: TPU; expected FSDP"):
        stated("accelerate", "distributed_type: TPU")
    assert stated("accelerate", "distributed_type: MULTI_GPU\nmixed_precision: no").not_modelled == (
        "mixed_precision: no",
    )


def test_states_that_nodes_hold_alike_are_read_from_accelerate_and_torchtitan():
    text = FSDP.format(strategy="fsdp_sharding_strategy: HYBRID_SHARD", offload="false")
    found = stated("accelerate", text.replace("num_machines: 1", "num_machines: 2"))
    assert (found.settings["zero"], found.settings["shards"], found.not_modelled) == (3, 4, ())
    second = FSDP.format(strategy="fsdp_sharding_strategy: HYBRID_SHARD\n  fsdp_version: 2", offload="false")
    assert "shards" not in stated("accelerate", second).settings
    assert stated("accelerate", second).not_modelled == ("fsdp_sharding_strategy: HYBRID_SHARD",)
    titan = "parallelism = {data_parallel_replicate_degree = 2}\n[activation_checkpoint]\nmode = 'none'"
    assert {key: stated("torchtitan", titan).settings[key] for key in ("data", "zero", "shards")} == {
        **{"data": 8, "zero": 3, "shards": 4},
    }


def test_accelerate_runs_deepspeed_from_its_own_options_or_a_file(tmp_path):
    text = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config:\n  "
    own = f"{text}zero_stage: 3\n  gradient_accumulation_steps: 4\n  offload_optimizer_device: cpu"
    found = stated("accelerate", own)
    assert found.settings == {"zero": 3, "accumulation": 4, "offload": "optimizer"}
    assert (found.software, found.not_modelled) == ("deepspeed", ())
    (tmp_path / "zero.json").write_text(json.dumps(ZERO3 | {"bf16": {"enabled": True}}))
    named = stated("accelerate", f"{text}deepspeed_config_file: elsewhere/zero.json", folder=tmp_path)
    assert (named.settings["zero"], named.software, named.not_modelled) == (3, "deepspeed", ())
    with pytest.raises(InputError, match=r"names elsewhere/other.json, which is not there; put other.json into"):
        stated("accelerate", f"{text}deepspeed_config_file: elsewhere/other.json", folder=tmp_path)


def test_a_llama_factory_file_fills_in_the_deepspeed_file_that_it_names(tmp_path):
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3))
    found = stated("trainer", FACTORY, folder=tmp_path)
    assert found.settings == {
        **{"micro_batch": 2, "accumulation": 4, "seq_len": 2048, "zero": 3, "recompute": Recompute.FULL},
        **{"lora": 16, "quantize": 4, "optimizer": "paged_adamw8bit"},
    }
    assert (found.software, found.assumed, found.not_modelled) == ("deepspeed", {}, ())
    (tmp_path / "zero3.json").write_text(json.dumps(ZERO3 | {"train_micro_batch_size_per_gpu": 4}))
    with pytest.raises(InputError, match="micro batch is 2 here, but 4 in the file that it names"):
        stated("trainer", FACTORY, folder=tmp_path)
    (tmp_path / "zero3.json").write_text("no table")
    with pytest.raises(InputError, match="neither JSON nor YAML"):
        stated("trainer", FACTORY, folder=tmp_path)


def test_training_arguments_have_the_trainers_defaults():
    given = {"output_dir": "out", "num_train_epochs": 3, "bf16": True, "tf32": True, "fsdp": [], "optim": "adamw_torch"}
    found = stated("trainer", json.dumps(given))
    assert (found.settings["recompute"], found.software) == (Recompute.NONE, "accelerate-fsdp")
    assert read("trainer", json.dumps(given)) == Plan(data=8, micro_batch=8)
    assert read("trainer", json.dumps(given), zero=2).zero == 2
    more = {"fsdp": "shard_grad_op auto_wrap offload", "fp16": True, "bf16": False, "optim": "galore_adamw"}
    found = stated("trainer", json.dumps(given | more | {"torch_compile": True, "gradient_checkpointing": True}))
    assert (found.settings["zero"], found.settings["recompute"]) == (2, Recompute.FULL)
    assert found.not_modelled == ("optim: galore_adamw", "torch_compile: True", "fp16", BEYOND)
    inline = stated("trainer", json.dumps(given | {"deepspeed": ZERO3, "gradient_accumulation_steps": 2}))
    assert (inline.settings["zero"], inline.software, inline.not_modelled) == (3, "deepspeed", ())


def test_llama_factory_freezes_layers_and_towers():
    """src/llamafactory/hparams/finetuning_args.py: two layers by default; a negative number means the first ones."""
    text = FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze\nfreeze_vision_tower: true")
    text = text.replace("quantization_bit: 4\ndeepspeed: folder/zero3.json\n", "").replace("packing", "neat_packing")
    found = stated("trainer", text)
    assert found.settings["trainable_layers"] == 2
    assert {"image_tokens", "mean_len"} <= found.assumed.keys()
    assert found.not_modelled == ()
    assert stated("trainer", f"{text}freeze_trainable_layers: 6\n").settings["trainable_layers"] == 6
    with pytest.raises(InputError, match="freeze_trainable_layers: -2"):
        stated("trainer", f"{text}freeze_trainable_layers: -2\n")


def test_weights_that_fsdp_offloads_are_written_as_read():
    stack = tuned(software_named("accelerate-fsdp"), offload="optimizer,parameters")
    text = emitted("accelerate", replace(launch(Plan(data=8, zero=3)), software=stack))
    assert stated("accelerate", text).settings["offload"] == "optimizer,parameters"


def test_an_axolotl_file_is_read_under_its_own_names():
    found = stated("axolotl", AXOLOTL)
    assert found.settings == {
        **{"micro_batch": 1, "accumulation": 4, "seq_len": 4096, "zero": 3, "recompute": Recompute.FULL},
        **{"lora": 32, "quantize": 4, "optimizer": "adamw8bit", "offload": "optimizer,parameters"},
    }
    assert found.not_modelled == ()
    assert list(found.assumed) == ["mean_len"]
    text = AXOLOTL.replace("sample_packing: true", "sample_packing: false") + "liger_rms_norm: true\n"
    assert stated("axolotl", text).not_modelled == (
        *("liger_rms_norm: True", "samples shorter than seq_len (nothing packs them)"),
    )


MEGATRON = """
TP=${TP:-2}
MBS=1
EXTRA=(
    "--fp8-format hybrid"
    --fp8-param-gather
)
torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size ${MBS} \\
    --global-batch-size 64 --seq-length 4096 --lr 1e-4 --bf16 --grad-reduce-in-bf16 --save $DIR \\
    --recompute-granularity full --recompute-method block --recompute-num-layers 8 --cp-comm-type a2a \\
    --optimizer-cpu-offload --use-precision-aware-optimizer --optimizer muon --cpu-offloading ${EXTRA[@]} \\
    --cpu-offloading-num-layers 8
"""


def test_a_megatron_script_is_read_with_its_variables_and_names_what_is_not_modelled():
    found = stated("megatron", MEGATRON)
    assert read("megatron", MEGATRON) == Plan(tensor=2, data=4, accumulation=16, recompute=Recompute.FULL)
    assert {
        key: found.settings[key] for key in ("seq_len", "gradients", "optimizer", "recompute_layers", "offload")
    } == {
        **{"seq_len": 4096, "gradients": "bf16", "optimizer": "muon", "recompute_layers": 8},
        "offload": "activations,optimizer",
    }
    assert found.software == "megatron-core-fp8"
    staged = stated("megatron", MEGATRON.replace("--lr 1e-4", "--pipeline-model-parallel-size 2 --num-layers 12"))
    assert staged.settings["recompute_layers"] == 12  # 8 of each of two stages, of which there are only six
    uniform = stated("megatron", MEGATRON.replace("method block", "method uniform"))
    assert "--recompute-num-layers 8" in uniform.not_modelled
    assert "recompute_layers" not in uniform.settings
    assert set(found.not_modelled) == {"--fp8-param-gather", "--use-precision-aware-optimizer"}
    assert (found.settings["cp_comm_type"], found.settings["offload_layers"]) == ("a2a", 8)
    other = stated("megatron", MEGATRON.replace("--cp-comm-type a2a", "--cp-comm-type all_gather"))
    assert "--cp-comm-type all_gather" in other.not_modelled
    for layers, written in ((8, 8), (32, 31)):  # transformer_config.py: fewer than all
        tuning = {"offload": "activations", "offload_layers": layers, "cp_comm_type": "a2a", "layers": 32}
        model = architecture_named("llama-3-8b")[1]
        chosen = replace(
            launch(Plan(context=8), model=model), software=tuned(software_named("megatron-core"), **tuning)
        )
        again = stated("megatron", emitted("megatron", chosen)).settings
        assert (again["offload"], again["offload_layers"], again["cp_comm_type"]) == ("activations", written, "a2a")


@pytest.mark.parametrize(
    ("of_moments", "optimizer"),
    [("", None), ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "adamw_bf16"), ("--exp-avg-dtype fp8", "named")],
)
def test_megatrons_precision_aware_optimizer_is_read_by_the_format_of_its_moments(of_moments, optimizer):
    found = stated("megatron", MEGATRON.replace("--optimizer muon", of_moments))
    assert found.settings.get("optimizer") == (None if optimizer == "named" else optimizer)
    is_named = "--use-precision-aware-optimizer" in found.not_modelled
    for fraction, offload in (("1.0", "activations,optimizer"), ("0.5", "activations")):
        part = stated("megatron", MEGATRON.replace("--optimizer muon", f"--optimizer-offload-fraction {fraction}"))
        assert part.settings.get("offload") == offload
    assert is_named == (optimizer == "named")


def test_a_torchtitan_file_names_what_is_not_modelled():
    text = """
[model]
name = "llama3"
converters = ["float8"]
[optimizer]
name = "Lion"
lr = 3e-4
[training]
seq_len = 4096
[parallelism]
tensor_parallel_degree = 2
enable_async_tensor_parallel = true
pipeline_parallel_schedule = "ZBVZeroBubble"
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
    found = stated("torchtitan", text)
    assert (found.software, found.settings["seq_len"]) == ("torchtitan-fp8", 4096)
    assert found.settings["optimizer"] == "lion"
    assert found.not_modelled == (
        *("parallelism.enable_async_tensor_parallel: True", "parallelism.pipeline_parallel_schedule: ZBVZeroBubble"),
    )
    off = stated(
        "torchtitan", text.replace("enable = true", "enable = false\n[quantize.linear.float8]\nemulate = true")
    )
    assert set(off.not_modelled) - set(found.not_modelled) == {
        *("[compile] enable is not true", "quantize.linear.float8.emulate: True"),
    }


BY_FORM = {"limits", "stages", "in_nodes", "instead", "sizes"}
"""Keys that only one form's rules have."""


@pytest.mark.parametrize("name", names_in("options"))
def test_every_list_of_options_says_where_they_are_from_and_is_of_regular_expressions(name):
    content = read_yaml(CATALOG / "options" / f"{name}.yaml")
    assert {"source", "known"} <= content.keys() <= {"source", "known", "like", "tables", "settings", *BY_FORM}
    assert all(re.compile(each) for each in content["known"])
    assert all(isinstance(names, list) for names in content.get("settings", {}).values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("accelerate", FSDP.format(strategy="fsdp_version: 2", offload="false")),
        ("axolotl", AXOLOTL),
        ("deepspeed", json.dumps(ZERO3)),
        ("megatron", MEGATRON),
        ("trainer", FACTORY),
    ],
)
def test_each_file_is_recognised_by_one_form(name, text):
    assert [each for each in form_names() if emitter_named(each).recognises(text)] == [name]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("deepspeed", '{"zero_optimization": {"stage": 4}}', "stage: 4; expected a number from 0 to 3"),
        ("deepspeed", '{"zero_optimization": 3}', "zero_optimization: 3; expected a table"),
        ("deepspeed", '{"zero_optimization": {}, "bf16": true}', "bf16: True; expected a table"),
        ("deepspeed", '{"train_micro_batch_size_per_gpu": "two"}', "two; expected a whole number from 1, or auto"),
        (
            "deepspeed",
            '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "train_batch_size": 64}',
            "2 × 3 accumulated × 8 replicas are a batch of 48, not 64",
        ),
        ("trainer", '{"num_train_epochs": 1, "gradient_accumulation_steps": 0}', "steps: 0; expected a whole number"),
    ],
)
def test_what_cannot_be_read_says_which_key(name, text, says):
    with pytest.raises(InputError, match=says):
        read(name, text)


@pytest.mark.parametrize(
    ("name", "software", "plan", "says"),
    [
        ("deepspeed", "deepspeed", Plan(tensor=2, data=4), "is no plan of mine under"),
        ("deepspeed", "deepspeed", Plan(data=8, recompute=Recompute.SELECTIVE), "is no plan of mine under"),
        ("accelerate", "accelerate-fsdp", Plan(data=8, zero=1), "is no plan of mine under"),
        ("accelerate", "megatron-core", Plan(data=8), "Type software=accelerate-fsdp"),
        ("axolotl", "deepspeed", Plan(data=8), "only read; --emit writes accelerate, deepspeed, megatron"),
    ],
)
def test_what_these_forms_cannot_say_is_refused(name, software, plan, says):
    with pytest.raises(InputError, match=says):
        emitted(name, launch(plan, software))


def test_the_command_chooses_the_software_and_names_what_it_leaves_out(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(ZERO3 | {"elasticity": {"enabled": True}}))
    question = ["model=gpt-1.3b", "gpu=a100", "gpus=8", f"plan={path}"]
    assert main(["plan", *question]) == 2
    assert "type micro_batch=" in capsys.readouterr().err
    assert main(["plan", *question, "micro_batch=2", "recompute=full"]) == 0
    said = capsys.readouterr().out
    assert "software=deepspeed, chosen from mine.json" in said
    assert "gradient_accumulation_steps is not set, and 1 is assumed; batch=… sets it" in said
    assert "not modelled: elasticity.enabled: True" in said
    assert "recompute=…" not in said
    assert main(["plan", *question, "micro_batch=2", "software=deepspeed-fp16"]) == 0
    assert "mine.json is for deepspeed, and predicted under deepspeed-fp16" in capsys.readouterr().out
    assert main(["plan", *question, "micro_batch=2", "software=megatron-core"]) == 2
    assert "type software=deepspeed" in capsys.readouterr().err
    assert main(["plan", *question, "micro_batch=2", "zero=1"]) == 2
    assert "already sets zero to 3; leave zero= out" in capsys.readouterr().err


def test_fits_changes_what_a_file_states_to_find_what_would_fit(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}))
    main(["fits", "llama-3-8b", "gpu=a100", "gpus=8", f"plan={path}", "seq_len=4096"])
    said = capsys.readouterr().out
    assert "not modelled: fp32" in said
    assert "zero=3" in said
