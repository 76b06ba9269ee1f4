"""Plans as what training software reads: every one comes back as it was, or is refused with what to fix."""

import itertools
import json

import pytest
import yaml
from emitted_plans import BY_SCRIPT, DENSE, READERS, SPARSE, launch, read, stated
from hypothesis import given, settings
from hypothesis import strategies as st

from synergy_core.__main__ import main
from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import emitted, emitter_named, emitter_names, form_names, stages
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.plan import Plan, Recompute

degrees = st.sampled_from((1, 1, 2, 3, 4, 8))
PLANS = st.builds(
    Plan,
    tensor=st.sampled_from((1, 1, 2, 4)),
    pipeline=degrees,
    context=st.sampled_from((1, 1, 1, 2)),
    data=degrees,
    expert=st.sampled_from((1, 1, 2, 4)),
    interleave=st.sampled_from((1, 1, 2, 3)),
    micro_batch=degrees,
    accumulation=st.integers(1, 16),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(tuple(each.value for each in Recompute)),
    sequence=st.booleans(),
)


def test_the_table_of_readers_has_every_form():
    assert set(READERS) == set(emitter_names())


@settings(max_examples=300)
@given(PLANS, st.sampled_from((DENSE, SPARSE)), st.sampled_from([(f, s) for f, all_ in READERS.items() for s in all_]))
def test_what_is_emitted_is_read_back(plan, model, form_and_software):
    """Or refused, with what to fix."""
    name, software = form_and_software
    text = None
    try:
        text = emitted(name, launch(plan, software, model))
    except InputError as error:
        said = str(error)
    if text is None:
        assert said.startswith("--emit ")
        return
    values = {**plan.as_dict(), "batch": plan.global_batch}
    typed = {key: values[key] for key in BY_SCRIPT.get(name, ())}
    assert read(name, text, plan.gpus, **typed) == plan
    assert [each for each in form_names() if emitter_named(each).recognises(text)] == [name]
    assert set(stated(name, text, plan.gpus).not_modelled) <= {"[compile] enable is not true"}


@pytest.mark.parametrize(
    ("name", "software", "plan"),
    [
        ("megatron", "megatron-core", Plan(8, 4, 2, 8, 1, 3, 1, 16, 1, Recompute.SELECTIVE, True)),
        ("megatron", "megatron-core", Plan(tensor=2, data=4, zero=3, recompute=Recompute.FULL, sequence=True)),
        ("megatron", "megatron-core", Plan(pipeline=5, data=2, accumulation=5)),
        ("megatron", "megatron-core-fp8", Plan(data=2, recompute=Recompute.MODULES)),
        ("torchtitan", "torchtitan", Plan(8, 1, 2, 8, 1, 1, 2, 4, 3, Recompute.OPERATORS, True)),
        ("torchtitan", "torchtitan", Plan(data=8, micro_batch=2, zero=2)),
        ("torchtitan", "torchtitan", Plan(micro_batch=2)),
        (
            "torchtitan",
            "torchtitan",
            Plan(tensor=2, pipeline=4, interleave=3, micro_batch=2, accumulation=8, sequence=True),
        ),
        ("trainjob", "megatron-core", Plan(pipeline=8, data=4, accumulation=8, zero=1)),
        ("trainjob", "torchtitan", Plan(data=4, zero=2, recompute=Recompute.FULL)),
    ],
)
def test_these_plans_are_expressed(name, software, plan):
    """The test above could pass by refusing everything."""
    text = emitted(name, launch(plan, software))
    assert read(name, text, plan.gpus) == plan
    assert set(stated(name, text, plan.gpus).not_modelled) <= {"[compile] enable is not true"}


@pytest.mark.parametrize(
    ("name", "software", "plan", "says"),
    [
        ("megatron", "torchtitan", Plan(), "the plan is for torchtitan; .* Type software=megatron-core"),
        ("torchtitan", "megatron-core", Plan(), "Type software=torchtitan"),
        ("megatron", "megatron-core", Plan(recompute=Recompute.OPERATORS), "is no plan of mine under"),
        ("megatron", "megatron-core", Plan(data=2, pipeline=2, zero=3), "is no plan of mine under"),
        ("megatron", "megatron-core", Plan(pipeline=2, interleave=2, accumulation=3), "is no plan of mine under"),
        ("megatron", "megatron-core", Plan(data=2, expert=2), "is no plan of mine under"),
        ("megatron", "megatron-core", Plan(zero=1), "is no plan of mine under"),
        ("megatron", "megatron-core", Plan(compressor="q8"), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(data=2, zero=1), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(data=2, tensor=2, sequence=True), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(data=8, expert=8), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(recompute=Recompute.SELECTIVE), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(recompute=Recompute.MODULES), "is no plan of mine under"),
        ("torchtitan", "torchtitan", Plan(tensor=2), "is no plan of mine under"),
        ("trainjob", "megatron-core", Plan(data=12), "do not fill nodes of 8; use gpus=8 or 16"),
        ("trainjob", "fsdp", Plan(data=8), "this form is read by megatron-core"),
        ("helm", "megatron-core", Plan(), "unknown form of a plan 'helm'"),
    ],
)
def test_what_a_tool_cannot_express_is_refused(name, software, plan, says):
    with pytest.raises(InputError, match=says):
        emitted(name, launch(plan, software))


def test_experts_need_sequence_parallelism_and_images_and_encoders_are_no_decoders():
    with pytest.raises(InputError, match="fix sequence=1 or tensor=1"):
        emitted("megatron", launch(Plan(tensor=2), "megatron", SPARSE))
    with pytest.raises(InputError, match="sliding-window attention cannot be written"):
        emitted("megatron", launch(Plan(), model=architecture_named("gpt-oss-20b")[1]))
    forms = (("megatron", "megatron-core"), ("torchtitan", "torchtitan"))
    for model, (name, software) in itertools.product(("resnet-50", "vit-base", "bert-large", "mt5-large"), forms):
        with pytest.raises(InputError, match="trains decoders; mine is not one"):
            emitted(name, launch(Plan(), software, architecture_named(model)[1]))


def test_stages_are_as_even_as_layers_allow():
    assert stages(12, Plan(pipeline=5)) == [3, 2, 3, 2, 2]
    text = emitted("megatron", launch(Plan(pipeline=5)))
    assert "--pipeline-model-parallel-layout Et*3|t*2|t*3|t*2|t*2L\n" in text


def test_a_trainjob_sets_what_megatron_asks_of_the_device():
    patch = yaml.safe_load(emitted("trainjob", launch(Plan(tensor=8, sequence=True))))
    assert patch["spec"]["trainer"]["env"] == [{"name": "CUDA_DEVICE_MAX_CONNECTIONS", "value": "1"}]
    assert "env" not in yaml.safe_load(emitted("trainjob", launch(Plan(data=8, zero=1))))["spec"]["trainer"]


LAUNCH_SCRIPT = """#!/bin/bash
# our own --micro-batch-size is below
torchrun --nproc-per-node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --num-layers 24 --num-layers-per-virtual-pipeline-stage 6 \\
    --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 \\
    --use-distributed-optimizer --recompute-activations --data-path "a b"
"""


@pytest.mark.parametrize(
    "line",
    [
        "--num-layers 32 --tensor-model-parallel-size 2",
        "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 --micro-batch-size 4",
    ],
)
def test_arguments_on_one_line_are_recognised_by_one_form(line):
    assert [each for each in form_names() if emitter_named(each).recognises(line)] == ["megatron"]


def test_a_launch_script_may_shard_over_a_single_rank_as_megatron_itself_allows():
    words = "--micro-batch-size 1 --global-batch-size 8 --sequence-parallel --use-distributed-optimizer"
    assert read("megatron", f"{words} --tensor-model-parallel-size 8") == Plan(8, accumulation=8, sequence=True)
    assert read("megatron", words) == Plan(data=8, zero=1)


def test_experts_laid_out_unlike_the_planners_are_refused():
    words = "--tensor-model-parallel-size 2 --expert-model-parallel-size 4"
    for degree in ("", " --expert-tensor-parallel-size 2"):
        with pytest.raises(InputError, match="--expert-tensor-parallel-size 1"):
            read("megatron", words + degree)
    assert read("megatron", f"{words} --expert-tensor-parallel-size 1").expert == 4
    assert read("megatron", "--expert-model-parallel-size 4").expert == 4
    with pytest.raises(InputError, match="expert=1"):
        emitted("megatron", launch(Plan(data=4, expert=4), "megatron", SPARSE))
    tables = "[activation_checkpoint]\nmode = 'none'\n[parallelism]\n"
    tables += "tensor_parallel_degree = 2\nexpert_parallel_degree = 4\n"
    with pytest.raises(InputError, match="expert_tensor_parallel_degree = 2"):
        read("torchtitan", tables)
    assert read("torchtitan", f"{tables}expert_tensor_parallel_degree = 2").expert == 4


def test_a_launch_script_of_ones_own_is_read():
    assert emitter_named("megatron").recognises(LAUNCH_SCRIPT)
    assert read("megatron", LAUNCH_SCRIPT, 16) == Plan(2, 2, 1, 4, 1, 2, 2, 8, 1, Recompute.SELECTIVE)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("megatron", "--tensor-model-parallel-size 3", "= 3 GPUs for one replica, which does not divide gpus=8"),
        ("megatron", "--tensor-model-parallel-size two", "two; expected a whole number from 1"),
        ("megatron", "--tensor-model-parallel-size 0", "0; expected a whole number from 1"),
        ("megatron", "--micro-batch-size 1 it's", "is not a script"),
        ("torchtitan", '[training]\nlocal_batch_size = "x"', "local_batch_size: x; expected a whole number"),
        ("torchtitan", "training = 3", "expected a table"),
        ("megatron", "--micro-batch-size 3 --global-batch-size 64", "not a multiple of 8 replicas × 3 .*; use 72"),
        ("megatron", "--micro-batch-size 1 --recompute-granularity some", "expected selective or full"),
        ("torchtitan", "[parallelism]\ntensor_parallel_degree = 3", "3 × .* GPUs, not gpus=8"),
        ("torchtitan", "[parallelism\n", "is not TOML"),
        ("torchtitan", '[activation_checkpoint]\nmode = "selective"', "expected mode none, full"),
        ("torchtitan", "[parallelism]\ntensor_parallel_degree = 1.5", "tensor_parallel_degree: 1.5; expected a whole"),
        ("trainjob", "kind: TrainJob\n", "has no spec.trainer"),
        ("trainjob", "kind: TrainJob\nspec: {trainer: {numNodes: 3}}", "numNodes: 3 × numProcPerNode: 1 is not gpus=8"),
    ],
)
def test_what_no_plan_can_be_read_from(name, text, says):
    with pytest.raises(InputError, match=says):
        read(name, text)


def test_the_command_writes_a_plan_and_reads_it_again(tmp_path, capsys):
    question = ["model=gpt-1.3b", "gpu=a100", "gpus=16", "batch=64"]
    paths = {name: tmp_path / name for name in ("megatron", "trainjob")}
    words = [word for name, path in paths.items() for word in ("--emit", name, str(path))]
    assert main(["plan", *question, "top=1", "--json", str(tmp_path / "one.json"), *words]) == 0
    assert "wrote" in capsys.readouterr().out
    (first,) = json.loads((tmp_path / "one.json").read_text())["gpu_types"]
    for path in paths.values():
        again = ["plan", *question[:3], f"plan={path}", "--json", str(tmp_path / "two.json")]
        assert main(again) == 0
        (second,) = json.loads((tmp_path / "two.json").read_text())["gpu_types"]
        assert second["plans"][0] == first["plans"][0]
    capsys.readouterr()
    for more, says in (
        (["tensor=16", f"plan={paths['megatron']}"], "leave tensor= out"),
        (["batch=8", f"plan={paths['megatron']}"], "already sets batch to 64; leave batch= out"),
        ([f"plan={tmp_path / 'none'}"], "cannot be read"),
        (
            [f"plan={tmp_path / 'one.json'}"],
            "has none of the forms that are read: accelerate, axolotl, deepspeed, megatron, torchtitan",
        ),
    ):
        assert main(["plan", *question[:3], *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["plan", *question[:2], "gpus=8,16", "--emit", "megatron", "-"]) == 2
    assert "give one GPU type in gpu= and one count in gpus=" in capsys.readouterr().err
    assert main(["plan", *question, "--emit", "torchtitan", str(tmp_path / "not")]) == 2
    assert "Type software=torchtitan" in capsys.readouterr().err
    assert not (tmp_path / "not").exists()
