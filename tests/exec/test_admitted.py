"""Jobs and plans that are refused, with sentences that say what to change; jobs that cannot be loaded."""

from collections import OrderedDict

import pytest
import torch
from exec.pretended import refuses
from torch import nn
from torch.nn.utils import parametrizations, prune

from synergy_core.performance.planner.plan import Plan
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp, Perceptron
from synergy_exec.training.admitted import Admission
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer


class Odd(Mlp):
    """A small model that is changed, or another one, whose optimizer trains the parameters that are chosen."""

    def __init__(self, change=None, *, model=None, blocks="layers", tensor_plan=None, chosen=list):
        super().__init__(width=8, depth=2, features=4, classes=3)
        self.model = Perceptron(4, 8, 2, 3) if model is None else model
        self.blocks, self.tensor_plan, self.chosen = blocks, tensor_plan or {}, chosen
        if change:
            change(self.model)

    def build_model(self):
        return self.model

    def build_optimizer(self, parameters):
        return super().build_optimizer(self.chosen(list(parameters)))


class Borrowing(Perceptron):
    """A job whose head uses a parameter of another part."""

    def __init__(self, name):
        super().__init__(4, 8, 2, 3)
        self._name = name

    def head(self, hidden):
        return super().head(hidden) + self.get_parameter(self._name).sum()


def share_layer(model):
    model.layers[1].up = model.layers[0].up


def reorder(model):
    model.register_forward_hook(lambda _, __, output: 2 * output)


def add_embedding(**settings):
    return lambda model: model.add_module("words", nn.Embedding(4, 8, **settings))


def add_parameter(value):
    return lambda model: model.register_parameter("own", nn.Parameter(value))


def norm_weights(model):
    parametrizations.weight_norm(model.first)


HEADLESS = nn.Sequential(OrderedDict(layers=nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])))
FOUR_CLASSES = Perceptron(4, 8, 2, 4)
COMPILED = torch.compile(Perceptron(4, 8, 2, 3))
FSDP, PIPELINE, TENSOR = {"data": 2, "zero": 3}, {"pipeline": 2, "accumulation": 2}, {"tensor": 2}
REFUSED = [
    (Mlp(), {"interleave": 2}, "take interleave 1"),
    (Mlp(), {"context": 2}, "context 2 is not built; take context 1"),
    (Mlp(), {"recompute": 2}, "recompute 2 is not built; take recompute 0"),
    (Mlp(), {"data": 2, "zero": 1}, "zero 1 is not built; take zero 0"),
    (Mlp(), {"zero": 3}, "take zero 0, or data 2 or more"),
    (Mlp(), {"data": 2, "tensor": 2}, "take zero 2 or 3"),
    (Mlp(), {"pipeline": 4, "accumulation": 3}, "accumulation 3 leaves stages of pipeline 4"),
    (Mlp(), {"pipeline": 2, "interleave": 2, "accumulation": 3}, "take 4, or interleave 1"),
    (Mlp(depth=3), {"pipeline": 4, "accumulation": 4}, "3 blocks for 4 stages; take at most 3"),
    (Mlp(depth=3), {"pipeline": 2, "interleave": 2, "accumulation": 4}, "3 blocks for 4 stages"),
    (Mlp(width=6), {"tensor": 5}, "tensor 5 does not divide layers.0.up's out_features, 24"),
    (Cnn(), TENSOR, "no tensor_plan: name the layers to split, or take tensor 1"),
    # 32 of a hidden size of 64 divides, two heads of 32 in four parts do not.
    (Gpt(heads=2), {"tensor": 4}, "cannot be split 4 ways: its forward fails on a rank's part"),
    (Odd(chosen=lambda every: every[1:]), PIPELINE, "depending on which other parameters it gets"),
    (Odd(chosen=lambda every: every[:5]), PIPELINE, "depending on which other parameters it gets"),
    (Odd(model=Borrowing("first.bias")), PIPELINE, "embed and head both use first.bias"),
    (Odd(model=Borrowing("layers.0.up.bias")), PIPELINE, "layers.0.up.bias, which belongs to a block"),
    (Odd(reorder), PIPELINE, "differs from head(layers(embed(x)))"),
    (Odd(model=HEADLESS), PIPELINE, "the model has no method `embed`; write it"),
    (Odd(model=COMPILED), PIPELINE, "compile the blocks instead"),
    (Odd(blocks="blocks"), PIPELINE, "the model has no 'blocks'"),
    (Odd(blocks="first"), PIPELINE, "'first' is a Linear"),
    (Odd(blocks=""), PIPELINE, "names no `blocks`"),
    (Odd(tensor_plan={"layers.*.upper": "column"}), TENSOR, "'layers.*.upper' matches no module"),
    (Odd(tensor_plan={"layers.*.up": "rows"}), TENSOR, "is 'rows'; write 'column' or 'row'"),
    (Odd(tensor_plan={"layers.*.norm": "row"}), TENSOR, "layers.0.norm, a LayerNorm; only Linear and Embedding"),
    (Odd(tensor_plan={"layers.*.up": "column"}), TENSOR, "fails on a rank's part"),
    # A head that is left split would give some of the classes' scores, and a wrong loss in silence.
    (Odd(model=FOUR_CLASSES, tensor_plan={"first": "column", "last": "column"}), TENSOR, "fails on a rank's part"),
    (Odd(model=FOUR_CLASSES, tensor_plan={"last": "column"}), TENSOR, "needs a 'row' layer after it"),
    (Odd(norm_weights, tensor_plan={"first": "column"}), TENSOR, "first, whose weight is computed from others"),
    (Odd(share_layer), PIPELINE, "layers.0.up.weight is shared with another block"),
    (Odd(share_layer), FSDP, "layers.0.up.weight is shared with another block"),
    (Odd(add_parameter(torch.zeros(()))), FSDP, "own, which is without dimensions; take zero 0"),
    (Odd(add_parameter(torch.zeros(0, 2))), FSDP, "own, which is empty; take zero 0"),
    (Odd(add_parameter(torch.zeros(4, 8).t())), FSDP, "own, which is not contiguous; take zero 0"),
    (Odd(lambda model: model.layers[1].down.double()), FSDP, "float32 and float64; take zero 0"),
    (Odd(add_embedding(sparse=True)), FSDP, "words has sparse gradients"),
    (Odd(add_embedding(sparse=True)), {"data": 2, "compressor": "q8"}, "words has sparse gradients; take zero 0 and"),
    (Odd(add_embedding(max_norm=1.0)), {"data": 2}, "words has max_norm"),
    (Odd(lambda model: model.last.bias.register_hook(torch.neg)), FSDP, "last.bias has a hook"),
    (Odd(lambda model: prune.identity(model.first, "weight")), PIPELINE, "the model cannot be copied"),
]
ADMITTED = [
    (Odd(chosen=lambda every: [each for each in every if each.dim() > 1]), PIPELINE),
    (Odd(chosen=lambda every: every[1:]), FSDP),
    (Cnn(), {"data": 2, "zero": 2, "pipeline": 3, "accumulation": 5}),
]


@pytest.mark.parametrize(("job", "fields", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_refusal_says_what_to_change(job, fields, says):
    assert says in Admission(job).refusal(Plan(**fields))


@pytest.mark.parametrize(("job", "fields"), ADMITTED)
def test_these_are_admitted(job, fields):
    assert Admission(job).refusal(Plan(**fields)) is None


def test_an_error_of_build_model_is_no_refusal():
    job = Odd()
    job.build_model = lambda: {}["width"]
    for fields in TENSOR, PIPELINE, FSDP:
        with pytest.raises(KeyError):
            Admission(job).refusal(Plan(**fields))


def test_trainer_refuses_what_is_refused_and_a_wrong_number_of_ranks():
    refuses("take zero 0", Trainer, Mlp(), Plan(zero=3))
    refuses("is 2 ranks, but the process group has 1", Trainer, Mlp(), Plan(data=2))


JOB = """
from synergy_exec.training.job import TrainingJob
from synergy_exec.examples.mlp import Mlp

class Mine(Mlp):
    def __init__(self, width: int):
        super().__init__(width=width)

class Half(TrainingJob):
    def build_model(self): ...

class Other: ...
"""


@pytest.mark.parametrize(
    ("job_class", "arguments", "says"),
    [
        ("FILE:Mne", {}, "Did you mean 'Mine'?"),
        ("FILE:Mine", {"wdth": 3}, r"its arguments are \(width: int\)"),
        ("FILE:Half", {}, "lacks batch, build_optimizer, loss"),
        ("FILE:Other", {}, "is no TrainingJob; derive it"),
        ("/nowhere/mine.py:Mine", {}, "there is no file /nowhere/mine.py"),
        ("synergy_exec.examples.rnn:Rnn", {}, "there is no module 'synergy_exec.examples.rnn'"),
        ("nowhere.jobs:Rnn", {}, "no 'nowhere' on the Python path"),
    ],
)
def test_a_job_that_cannot_be_loaded(tmp_path, job_class, arguments, says):
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    refuses(says, load_job, job_class.replace("FILE", str(file)), arguments)
