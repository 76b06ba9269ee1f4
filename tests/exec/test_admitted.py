"""What is refused, and that the sentence says what to change; jobs that cannot be loaded."""

import pytest
import torch
from exec.pretended import refuses
from torch import nn
from torch.nn.utils import parametrizations, prune

from synergy_core.planner.plan import Plan
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp, Perceptron
from synergy_exec.training.admitted import Admission
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer

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
    (Cnn(), {"tensor": 2}, "no tensor_plan: name the layers to split, or take tensor 1"),
    # 32 of a hidden size of 64 divides, two heads of 32 in four parts do not.
    (Gpt(heads=2), {"tensor": 4}, "cannot be split 4 ways: its forward fails on a rank's part"),
]


class Choosing(Mlp):
    """Its optimizer trains the parameters that are chosen."""

    def __init__(self, chosen):
        super().__init__(width=8, depth=2, features=4, classes=3)
        self.chosen = chosen

    def build_optimizer(self, parameters):
        return super().build_optimizer(self.chosen(list(parameters)))


REFUSED += [
    (Choosing(chosen), {"pipeline": 2, "accumulation": 2}, "depending on which other parameters it gets")
    for chosen in (lambda every: every[1:], lambda every: every[:5])
]
ADMITTED = [
    (Choosing(lambda every: [each for each in every if each.dim() > 1]), {"pipeline": 2, "accumulation": 2}),
    (Choosing(lambda every: every[1:]), {"data": 2, "zero": 3}),
    (Cnn(), {"data": 2, "zero": 2, "pipeline": 3, "accumulation": 5}),
]


@pytest.mark.parametrize(("job", "fields"), ADMITTED)
def test_these_are_admitted(job, fields):
    assert Admission(job).refusal(Plan(**fields)) is None


class Borrowing(Perceptron):
    """Its head uses a parameter of another part."""

    def __init__(self, name):
        super().__init__(4, 8, 2, 3)
        self._name = name

    def head(self, hidden):
        return super().head(hidden) + self.get_parameter(self._name).sum()


class Reordered(Perceptron):
    """Its forward pass is not head(blocks(embed(x)))."""

    def forward(self, x):
        return 2 * super().forward(x)


class Headless(nn.Module):
    """It has blocks, and no methods around them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Odd(Mlp):
    def __init__(self, model, blocks="layers", tensor_plan=None):
        super().__init__(width=8, depth=2, features=4, classes=3)
        self.model = model
        self.blocks = blocks
        self.tensor_plan = tensor_plan or {}

    def build_model(self):
        return self.model


def changed(change):
    model = Perceptron(4, 8, 2, 3)
    change(model)
    return model


def shared_layer(model):
    model.layers[1].up = model.layers[0].up


def embedding(**settings):
    return lambda model: model.add_module("words", nn.Embedding(4, 8, **settings))


def with_parameter(*shape):
    return lambda model: model.register_parameter("own", nn.Parameter(torch.zeros(shape)))


UNFIT = [
    (shared_layer, {"pipeline": 2, "accumulation": 2}, "layers.0.up.weight is shared with another block"),
    (shared_layer, {"data": 2, "zero": 3}, "layers.0.up.weight is shared with another block"),
    (with_parameter(), {"data": 2, "zero": 2}, "own, which is without dimensions; take zero 0"),
    (with_parameter(0, 2), {"data": 2, "zero": 2}, "own, which is empty; take zero 0"),
    (
        lambda model: model.first.register_parameter("weight", nn.Parameter(torch.zeros(4, 8).t())),
        {"data": 2, "zero": 3},
        "first.weight, which is not contiguous; take zero 0",
    ),
    (lambda model: model.layers[1].down.double(), {"data": 2, "zero": 3}, "float32 and float64; take zero 0"),
    (embedding(sparse=True), {"data": 2, "zero": 3}, "words has sparse gradients"),
    (embedding(sparse=True), {"data": 2, "compressor": "q8"}, "words has sparse gradients; take zero 0 and compressor"),
    (embedding(max_norm=1.0), {"data": 2}, "words has max_norm"),
    (lambda model: model.last.bias.register_hook(torch.neg), {"data": 2, "zero": 3}, "last.bias has a hook"),
    (
        lambda model: prune.identity(model.first, "weight"),
        {"pipeline": 2, "accumulation": 2},
        "the model cannot be copied",
    ),
]
PERCEPTRON = Perceptron(4, 8, 2, 3)
ODD = [
    (Odd(Borrowing("first.bias")), "embed and head both use first.bias"),
    (Odd(Reordered(4, 8, 2, 3)), "differs from head(layers(embed(x)))"),
    (Odd(Headless()), "the model has no method `embed`; write it"),
    (Odd(Borrowing("layers.0.up.bias")), "embed or head uses layers.0.up.bias, which belongs to a block"),
    (Odd(torch.compile(PERCEPTRON)), "compile the blocks instead"),
    (Odd(PERCEPTRON, blocks="blocks"), "the model has no 'blocks'"),
    (Odd(PERCEPTRON, blocks="first"), "'first' is a Linear"),
    (Odd(PERCEPTRON, blocks=""), "names no `blocks`"),
]


UNSPLIT = [
    ({"layers.*.upper": "column"}, "'layers.*.upper' matches no module"),
    ({"layers.*.up": "rows"}, "is 'rows'; write 'column' or 'row'"),
    ({"layers.*.norm": "row"}, "layers.0.norm, a LayerNorm; only Linear and Embedding"),
    ({"layers.*.up": "column"}, "fails on a rank's part"),
    # A head that is left split would give some of the classes' scores, and a wrong loss in silence.
    ({"first": "column", "last": "column"}, "fails on a rank's part"),
    ({"last": "column"}, "needs a 'row' layer after it"),
]
REFUSED += [(job, {"pipeline": 2, "accumulation": 2}, says) for job, says in ODD]
REFUSED += [(Odd(Perceptron(4, 8, 2, 4), tensor_plan=plan), {"tensor": 2}, says) for plan, says in UNSPLIT]
REFUSED += [(Odd(changed(change)), fields, says) for change, fields, says in UNFIT]
NORMED = Odd(changed(lambda model: parametrizations.weight_norm(model.first)), tensor_plan={"first": "column"})
REFUSED += [(NORMED, {"tensor": 2}, "first, whose weight is computed from others")]


@pytest.mark.parametrize(("job", "fields", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_refusal_says_what_to_change(job, fields, says):
    assert says in Admission(job).refusal(Plan(**fields))


def test_an_error_of_build_model_is_no_refusal():
    job = Odd(None)
    job.build_model = lambda: {}["width"]
    for fields in ({"tensor": 2}, {"pipeline": 2, "accumulation": 2}, {"data": 2, "zero": 3}):
        with pytest.raises(KeyError):
            Admission(job).refusal(Plan(**fields))


def test_trainer_refuses_what_is_refused_and_a_wrong_number_of_ranks():
    refuses("take zero 0", Trainer, Mlp(), Plan(zero=3))
    refuses(r"is 2 ranks, but the process group has 1; start 2", Trainer, Mlp(), Plan(data=2))


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
        ("FILE:Imports", {}, "imports sibling, which lies beside it"),
        ("FILE:Other", {}, "is no TrainingJob; derive it"),
        ("/nowhere/mine.py:Mine", {}, "there is no file /nowhere/mine.py"),
        ("synergy_exec.examples.rnn:Rnn", {}, "there is no module 'synergy_exec.examples.rnn'"),
        ("nowhere.jobs:Rnn", {}, "no 'nowhere' on the Python path"),
    ],
)
def test_a_job_that_cannot_be_loaded(tmp_path, job_class, arguments, says):
    file = tmp_path / "mine.py"
    file.write_text(f"import sibling\n{JOB}" if job_class == "FILE:Imports" else JOB)
    (tmp_path / "sibling.py").touch()
    refuses(says, load_job, job_class.replace("FILE", str(file)), arguments)
