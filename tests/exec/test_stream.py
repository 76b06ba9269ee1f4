"""One order of samples, whatever the sizes of batches and pieces, and across checkpoints at any step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from users_cases import Streamed

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage
from synergy_exec.training import checkpoint
from synergy_exec.training.progress import Progress
from synergy_exec.training.stream import Stream
from synergy_exec.training.trainer import Trainer


class Shuffled(Streamed):
    """A data set of 11 numbers, in pieces of 2, shuffled each epoch; noise drawn beside each."""

    def loader(self) -> Any:
        return Shuffling()


class Shuffling:
    def __init__(self) -> None:
        self.begun = 0

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(11)
        for first in range(self.begun, 11, 2):
            self.begun = first + 2
            numbers = order[first : first + 2]
            yield numbers, torch.rand(len(numbers))
        self.begun = 0

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self.begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.begun = state_dict["begun"]


def taken(stream: Stream, sizes: list[int]) -> list[int]:
    return [number for size in sizes for number in stream.take(size)[0].tolist()]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_samples_come_in_one_order_whatever_the_batches_and_restarts(sizes: list[int], data: Any) -> None:
    whole = taken(Stream(Shuffled()), [sum(sizes)])
    stream, found = Stream(Shuffled()), []
    for size in sizes:
        found += taken(stream, [size])
        if data.draw(st.booleans()):
            state = stream.state()
            stream = Stream(Shuffled())
            torch.manual_seed(data.draw(st.integers(0, 5)))  # what models draw is not what loaders draw
            stream.go_on_from(state)
    assert found == whole
    for epoch in range(len(whole) // 11):
        assert sorted(whole[11 * epoch : 11 * (epoch + 1)]) == list(range(11))
    assert whole[:11] != whole[11:22]


def test_models_draw_as_if_there_were_no_loader() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    Stream(Shuffled()).take(30)
    assert torch.equal(torch.rand(2), expected)


class Plain(Streamed):
    """A list has no state."""

    def loader(self) -> Any:
        return [torch.zeros(2, 4)]


class Empty(Shuffling):
    def __iter__(self) -> Iterator[Any]:
        yield from ()


class Nothing(Streamed):
    """Its epochs have no samples."""

    def loader(self) -> Any:
        return Empty()


class Single(Shuffling):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(2, 4)


class Unpaired(Streamed):
    """Inputs without targets."""

    def loader(self) -> Any:
        return Single()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (Plain, r"Plain.loader\(\) gave a list, which has no state_dict: .* Give torchdata's StatefulDataLoader"),
        (Nothing, r"Nothing.loader\(\) gave no samples in an epoch"),
        (Unpaired, r"Unpaired.loader\(\) gave a Tensor; expected inputs and targets, a pair"),
    ],
)
def test_what_is_no_loader_is_said(job: type[Streamed], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Stream(job()).take(4)


def test_a_checkpoint_without_a_place_in_the_stream_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(Streamed(), PlanMessage(micro_batch=4))
    trainer.step(0)
    checkpoint.save(tmp_path, trainer.parts, trainer.optimizers, Progress(step=1))
    with pytest.raises(InputError, match="does not say where the job's loader was"):
        Trainer(Streamed(), PlanMessage(micro_batch=4)).load(tmp_path)


def test_a_checkpoint_on_its_way_to_disk_holds_the_place_of_its_step(tmp_path: Path) -> None:
    trainer = Trainer(Streamed(), PlanMessage(micro_batch=4))
    losses = [trainer.step(number).loss for number in range(3)]
    saving = trainer.save_later(tmp_path, Progress(step=3))
    losses += [trainer.step(number).loss for number in range(3, 9)]
    saving.wait()
    again = Trainer(Streamed(), PlanMessage(micro_batch=4))
    assert again.load(tmp_path) == Progress(step=3)
    assert [again.step(number).loss for number in range(3, 9)] == losses[3:]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    """torchdata's own, shuffled, with workers that prepare ahead; three epochs of 10 samples, stopped in each."""
    loading = pytest.importorskip("torchdata.stateful_dataloader")

    class Loaded(Streamed):
        def loader(self) -> Any:
            samples = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10) * 2)
            return loading.StatefulDataLoader(samples, batch_size=3, shuffle=True, num_workers=workers)

    whole = taken(Stream(Loaded()), [30])
    assert [sorted(whole[at : at + 10]) for at in (0, 10, 20)] == [list(range(10))] * 3
    assert whole[:10] != whole[10:20]
    stream, found = Stream(Loaded()), []
    for size in (4, 2, 3, 5, 6, 10):
        found += taken(stream, [size])
        state = stream.state()
        stream = Stream(Loaded())
        stream.go_on_from(state)
    assert found == whole
