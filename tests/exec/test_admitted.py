"""What is refused, and that the sentence says what to change; jobs that cannot be loaded."""

import pytest
import torch
from exec.pretended import refuses
from torch import nn

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp, Perceptron
from synergy_exec.profiling.finder import plans
from synergy_exec.training.admitted import Admission, refusal
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer, admit

REFUSED = [
    (Mlp(), {"data": 0}, "data is 0; write a whole number from 1"),
    (Mlp(), {"micro_batch": 0}, "micro_batch is 0"),
    (Mlp(), {"interleave": 2}, "take interleave 1"),
    (Mlp(), {"context": 2}, "context 2 is not built; take context 1"),
    (Mlp(), {"expert": 2}, "expert 2 is not built"),
    (Mlp(), {"recompute": 2}, "recompute 2 is not built; take recompute 0"),
    (Mlp(), {"sequence": True}, "sequence True is not built; take sequence False"),
    (Mlp(), {"offload": True}, "offload True is not built"),
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


ADMITTED = [
    (Cnn(), {"data": 2, "zero": 2, "pipeline": 3, "accumulation": 5}),
    (Gpt(), {"data": 2, "zero": 3, "tensor": 4, "pipeline": 2, "interleave": 2, "accumulation": 4}),
    (Mlp(), {"data": 8, "micro_batch": 3, "accumulation": 7}),
]


@pytest.mark.parametrize(("job", "fields"), ADMITTED)
def test_these_are_admitted(job, fields):
    assert refusal(job, Plan(**fields)) is None


class Tied(Perceptron):
    """Its head uses a weight of its embedding."""

    def head(self, hidden):
        return super().head(hidden) + self.first.bias.sum()


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


PERCEPTRON = Perceptron(4, 8, 2, 3)
ODD = [
    (Odd(Tied(4, 8, 2, 3)), "embed and head both use first.bias"),
    (Odd(Reordered(4, 8, 2, 3)), "differs from head(layers(embed(x)))"),
    (Odd(Headless()), "the model has no method `embed`; write it"),
    (Odd(PERCEPTRON, blocks="blocks"), "the model has no 'blocks'"),
    (Odd(PERCEPTRON, blocks="first"), "'first' is a Linear"),
    (Odd(PERCEPTRON, blocks=""), "names no `blocks`"),
]


def test_replicas_that_share_out_need_the_blocks_they_name():
    reason = refusal(Odd(PERCEPTRON, blocks="blocks"), Plan(data=2, zero=3))
    assert "the model has no 'blocks'" in reason
    assert refusal(Odd(PERCEPTRON, blocks="blocks"), Plan(data=2)) is None


class Short(Mlp):
    def batch(self, step, size):
        return super().batch(step, size - 1)


def test_a_batch_of_another_size_is_an_error():
    with pytest.raises(InputError, match=r"Short.batch\(4, 8\) gave 7 inputs and 7 targets; give 8 of each"):
        Trainer(Short(), Plan(micro_batch=8)).step(4)


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


@pytest.mark.parametrize(("job", "fields", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_refusal_says_what_to_change(job, fields, says):
    assert says in refusal(job, Plan(**fields))


@pytest.mark.parametrize("kind", [Mlp, Gpt, Cnn])
def test_all_plans_are_judged_as_each_alone_from_one_model(kind):
    built = []

    class Counting(kind):
        def build_model(self):
            built.append(1)
            return super().build_model()

    asked = []
    plans(8, [16, 32], lambda plan: asked.append(plan))
    admission = Admission(Counting())
    found = [admission.refusal(plan) for plan in asked]
    assert len(built) == 1
    one_each = {(plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.accumulation): plan for plan in asked}
    assert len(one_each) > 20
    for plan in one_each.values():
        assert found[asked.index(plan)] == refusal(kind(), plan)


def test_asking_draws_nothing_from_the_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    refusal(Gpt(), Plan(tensor=2, pipeline=2, accumulation=2))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("plan", [Plan(tensor=2), Plan(pipeline=2, accumulation=2)])
def test_a_model_is_run_once_to_admit_a_plan_and_not_again_for_later_runs(tmp_path, monkeypatch, plan):
    kept, runs, forward = tmp_path / "form.json", [], Perceptron.forward
    monkeypatch.setattr(Perceptron, "forward", lambda self, x: runs.append(1) or forward(self, x))

    def admitted(width):
        """The answers, and whether the model was run for them."""
        runs.clear()
        return admit(Mlp(width=width, depth=2, features=4, classes=3), plan, kept).answers, bool(runs)

    answers, ran = admitted(8)
    assert ran
    assert admitted(8) == (answers, False)
    assert admitted(16)[1]  # it has another form
    kept.write_text("no JSON")
    assert admitted(8)[0] == answers


def test_a_refused_plan_is_asked_for_again(tmp_path):
    for _ in range(2):
        refuses("take at most 3", admit, Mlp(depth=3), Plan(pipeline=4, accumulation=4), tmp_path / "form.json")


def test_trainer_refuses_what_is_refused_and_a_wrong_number_of_ranks():
    refuses("take zero 0", Trainer, Mlp(), Plan(zero=3))
    refuses(r"is 2 ranks, but the process group has 1; start 2", Trainer, Mlp(), Plan(data=2))
    trainer = Trainer(Mlp(), Plan())
    refuses("micro_batch is 0", trainer.retune, 0, 1)


JOB = """
from synergy_exec.training.job import TrainingJob
from synergy_exec.examples.mlp import Mlp

class Mine(Mlp):
    def __init__(self, width: int):
        super().__init__(width=width)

class Half(TrainingJob):
    def build_model(self): ...

class Other: ...

class Raising(Mlp):
    def __init__(self):
        raise RuntimeError("no data")
"""


def test_a_job_is_loaded_from_a_module_or_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    assert isinstance(load_job("synergy_exec.examples.gpt:Gpt", {"hidden": 32}), Gpt)
    job = load_job(f"{file}:Mine", {"width": 24})
    assert job.width == 24
    with pytest.raises(RuntimeError, match="no data"):
        load_job(f"{file}:Raising", {})


@pytest.mark.parametrize(
    ("job_class", "arguments", "says"),
    [
        ("Mine", {}, "write package.module:Class or /path/file.py:Class"),
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
