"""What is refused, and that the sentence says what to change; jobs that cannot be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synergy_core.errors import InputError
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.examples.mlp import Mlp, Perceptron
from synergy_exec.messages import PlanMessage
from synergy_exec.profiling.grid import plans
from synergy_exec.training.admitted import Admission, refusal
from synergy_exec.training.asked import admit
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer

REFUSED = [
    (Mlp(), {"data": 0}, "data is 0; write a whole number from 1"),
    (Mlp(), {"micro_batch": 0}, "micro_batch is 0"),
    (Mlp(), {"schedule": "zbv"}, "no schedule 'zbv'; write 1f1b or gpipe"),
    (Mlp(), {"interleave": 2}, "take interleave 1"),
    (Mlp(), {"pipeline": 2, "interleave": 2, "accumulation": 2, "schedule": "gpipe"}, "or schedule 1f1b"),
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


@pytest.mark.parametrize(("job", "fields", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
def test_refusal_says_what_to_change(job: TrainingJob, fields: dict[str, Any], says: str) -> None:
    reason = refusal(job, PlanMessage(**fields))
    assert reason is not None
    assert says in reason


ADMITTED = [
    (Cnn(), {"data": 2, "zero": 2, "pipeline": 3, "accumulation": 5}),
    (Gpt(), {"data": 2, "zero": 3, "tensor": 4, "pipeline": 2, "interleave": 2, "accumulation": 4}),
    (Mlp(), {"tensor": 2, "pipeline": 2, "accumulation": 2, "schedule": "gpipe"}),
    (Mlp(), {"data": 8, "micro_batch": 3, "accumulation": 7}),
]


@pytest.mark.parametrize(("job", "fields"), ADMITTED)
def test_these_are_admitted(job: TrainingJob, fields: dict[str, Any]) -> None:
    assert refusal(job, PlanMessage(**fields)) is None


class Tied(Perceptron):
    """Its head uses a weight of its embedding."""

    def head(self, hidden: Tensor) -> Tensor:
        return super().head(hidden) + self.first.bias.sum()


class Reordered(Perceptron):
    """Its forward pass is not head(blocks(embed(x)))."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Headless(nn.Module):
    """It has blocks, and no methods around them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Odd(Mlp):
    """An Mlp with another model, names of blocks and layers."""

    def __init__(self, model: nn.Module, blocks: str = "layers", tensor_plan: Any = None) -> None:
        super().__init__(width=8, depth=2, features=4, classes=3)
        self.model = model
        self.blocks = blocks  # type: ignore[misc]
        self.tensor_plan = tensor_plan or {}  # type: ignore[misc]

    def build_model(self) -> nn.Module:
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


@pytest.mark.parametrize(("job", "says"), ODD, ids=[says for _, says in ODD])
def test_a_model_that_a_pipeline_cannot_cut_is_refused(job: TrainingJob, says: str) -> None:
    reason = refusal(job, PlanMessage(pipeline=2, accumulation=2))
    assert reason is not None
    assert says in reason


def test_replicas_that_share_out_need_the_blocks_they_name() -> None:
    reason = refusal(Odd(PERCEPTRON, blocks="blocks"), PlanMessage(data=2, zero=3))
    assert reason is not None
    assert "the model has no 'blocks'" in reason
    assert refusal(Odd(PERCEPTRON, blocks="blocks"), PlanMessage(data=2)) is None


class Short(Mlp):
    """It forgets a sample."""

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        return super().batch(step, size - 1)


def test_a_batch_of_another_size_is_an_error() -> None:
    with pytest.raises(InputError, match=r"Short.batch\(4, 8\) gave 7 inputs and 7 targets; give 8 of each"):
        Trainer(Short(), PlanMessage(micro_batch=8)).step(4)


UNSPLIT = [
    ({"layers.*.upper": "column"}, "'layers.*.upper' matches no module"),
    ({"layers.*.up": "rows"}, "is 'rows'; write 'column' or 'row'"),
    ({"layers.*.norm": "row"}, "layers.0.norm, a LayerNorm; only Linear and Embedding"),
    ({"layers.*.up": "column"}, "fails on a rank's part"),
    # A head that is left split would give some of the classes' scores, and a wrong loss in silence.
    ({"first": "column", "last": "column"}, "fails on a rank's part"),
    ({"last": "column"}, "needs a 'row' layer after it"),
]


@pytest.mark.parametrize(("plan", "says"), UNSPLIT, ids=[says for _, says in UNSPLIT])
def test_a_tensor_plan_that_does_not_work_is_refused(plan: dict[str, str], says: str) -> None:
    reason = refusal(Odd(Perceptron(4, 8, 2, 4), tensor_plan=plan), PlanMessage(tensor=2))
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize("kind", [Mlp, Gpt, Cnn])
def test_all_plans_are_judged_as_each_alone_from_one_model(kind: type[TrainingJob]) -> None:
    built = []

    class Counting(kind):  # type: ignore[misc,valid-type]
        def build_model(self) -> nn.Module:
            built.append(1)
            return super().build_model()

    asked: list[PlanMessage] = []
    plans(8, [16, 32], lambda plan: asked.append(plan))
    admission = Admission(Counting())
    found = [admission.refusal(plan) for plan in asked]
    assert len(built) == 1
    one_each = {(plan.tensor, plan.pipeline, plan.interleave, plan.zero, plan.accumulation): plan for plan in asked}
    assert len(one_each) > 20
    for plan in one_each.values():
        assert found[asked.index(plan)] == refusal(kind(), plan)


def test_asking_draws_nothing_from_the_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    refusal(Gpt(), PlanMessage(tensor=2, pipeline=2, accumulation=2))
    assert torch.equal(torch.rand(3), expected)


class Watched(Perceptron):
    """Notes that it is run."""

    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Watched.runs += 1
        return super().forward(x)


class OfWatched(Mlp):
    """An Mlp of it."""

    def __init__(self, width: int) -> None:
        super().__init__(width=width, depth=2, features=4, classes=3)

    def build_model(self) -> nn.Module:
        return Watched(self.features, self.width, self.depth, self.classes)


@pytest.mark.parametrize("plan", [PlanMessage(tensor=2), PlanMessage(pipeline=2, accumulation=2)])
def test_a_model_is_run_once_to_admit_a_plan_and_not_again_for_later_runs(tmp_path: Path, plan: PlanMessage) -> None:
    kept = tmp_path / "form.json"
    Watched.runs = 0
    first = admit(OfWatched(8), plan, kept)
    runs = Watched.runs
    assert runs > 0
    again = admit(OfWatched(8), plan, kept)
    assert again.answers == first.answers
    assert Watched.runs == runs
    admit(OfWatched(16), plan, kept)  # it has another form
    assert Watched.runs > runs
    kept.write_text("no JSON")
    assert admit(OfWatched(8), plan, kept).answers == first.answers


def test_a_refused_plan_is_asked_for_again(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(InputError, match="take at most 3"):
            admit(Mlp(depth=3), PlanMessage(pipeline=4, accumulation=4), tmp_path / "form.json")


def test_trainer_refuses_what_is_refused_and_a_wrong_number_of_ranks() -> None:
    with pytest.raises(InputError, match="take zero 0"):
        Trainer(Mlp(), PlanMessage(zero=3))
    with pytest.raises(InputError, match=r"is 2 ranks, but the process group has 1; start 2"):
        Trainer(Mlp(), PlanMessage(data=2))
    trainer = Trainer(Mlp(), PlanMessage())
    with pytest.raises(InputError, match="micro_batch is 0"):
        trainer.retune(0, 1)


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


def test_a_job_is_loaded_from_a_module_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    assert isinstance(load_job("synergy_exec.examples.gpt:Gpt", {"hidden": 32}), Gpt)
    job = load_job(f"{file}:Mine", {"width": 24})
    assert isinstance(job, Mlp)
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
def test_a_job_that_cannot_be_loaded(tmp_path: Path, job_class: str, arguments: dict[str, Any], says: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(JOB)
    with pytest.raises(InputError, match=says):
        load_job(job_class.replace("FILE", str(file)), arguments)
