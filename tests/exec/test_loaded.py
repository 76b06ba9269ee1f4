"""Batches of a job that loads its samples: the same whoever makes them, each sample once an epoch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from synergy_exec.examples.pictures import Pictures
from synergy_exec.messages import PlanMessage
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import LoadedJob
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer

# Tests may have more loaders than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(LoadedJob):
    """Samples are their number and epoch."""

    samples, item_bytes = 6, 8

    def item(self, number: int) -> bytes:
        return str(number).encode()

    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([int(item)]), torch.tensor([epoch])

    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        raise NotImplementedError


class Unreadable(Numbers):
    """One of its items is gone."""

    def item(self, number: int) -> bytes:
        if number == 3:
            raise OSError("no item 3")
        return super().item(number)


@pytest.fixture
def cache() -> Iterator[Cache]:
    descriptor = Cache.create(1e6)
    yield Cache(descriptor)
    os.close(descriptor)


def taken(supply: Supply, steps: range, size: int, first: int = 0, end: int | None = None) -> list[tuple[int, int]]:
    """(epoch, number) of the samples of these steps."""
    found = []
    for step in steps:
        numbers, epochs = supply.rows(step, size, first, size if end is None else end)
        found += list(zip(epochs.flatten().tolist(), numbers.flatten().tolist(), strict=True))
    return found


@pytest.mark.parametrize("loaders", [0, 1, 3])
def test_every_epoch_takes_each_sample_once_in_an_order_of_its_own(loaders: int) -> None:
    """Steps of 4 of 6 samples, so that batches reach over the ends of epochs."""
    found = taken(Supply(Numbers(), loaders=loaders), range(9), 4)
    assert Counter(found) == {(epoch, number): 1 for epoch in range(6) for number in range(6)}
    orders = [tuple(number for epoch, number in found if epoch == each) for each in range(6)]
    assert len(set(orders)) > 1
    assert [epoch for epoch, _ in found] == sorted(epoch for epoch, _ in found)


def test_batches_are_the_same_whoever_makes_them(cache: Cache) -> None:
    """Also where loaders and batch change on the way, and steps begin late, as after a checkpoint."""
    plain, loaded = Supply(Numbers()), Supply(Numbers(), loaders=2, cache=cache)
    for loaders, steps, size in (
        (2, range(5, 9), 4),
        (1, range(9, 11), 4),
        (1, range(11, 14), 3),
        (0, range(14, 15), 3),
    ):
        loaded.loaders = loaders
        assert taken(loaded, steps, size) == taken(plain, steps, size)


class Named(Numbers):
    """Inputs by name."""

    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Any, Any]:
        inputs, targets = super().sample(item, number, epoch)
        return {"number": inputs, "more": (inputs * 2,)}, [targets]


@pytest.mark.parametrize("loaders", [0, 2])
def test_samples_may_be_nested(loaders: int) -> None:
    supply = Supply(Named(), loaders=loaders)
    for step in range(3):
        inputs, (epochs,) = supply.rows(step, 4, 1, 3)
        assert inputs["number"].shape == epochs.shape == (2, 1)
        assert torch.equal(inputs["more"][0], 2 * inputs["number"])
        pairs = list(zip(epochs.flatten().tolist(), inputs["number"].flatten().tolist(), strict=True))
        assert pairs == taken(Supply(Numbers()), range(step, step + 1), 4, 1, 3)


def test_replicas_make_their_own_rows_alone() -> None:
    whole = taken(Supply(Numbers()), range(3), 4)
    parts = [taken(Supply(Numbers(), loaders=1), range(3), 4, first, first + 2) for first in (0, 2)]
    assert [parts[row % 4 // 2][2 * (row // 4) + row % 2] for row in range(12)] == whole


def test_error_in_a_loader_is_the_errors_own() -> None:
    with pytest.raises(OSError, match="no item 3"):
        taken(Supply(Unreadable(), loaders=1), range(9), 4)


def test_models_draw_the_same_numbers_with_loaders_and_without() -> None:
    """Torch's generator is as a step left it, whether loaders began in that step or not."""
    states = []
    for loaders in (0, 1):
        job = Pictures(pictures=16)
        trainer = Trainer(job, PlanMessage(micro_batch=4), supply=Supply(job, loaders=loaders))
        trainer.step(0)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_pictures_are_the_same_from_files_and_as_made(tmp_path: Path) -> None:
    made, read = Pictures(pictures=5), Pictures(pictures=5)
    (tmp_path / "data.partial").mkdir()
    read.make_data(tmp_path / "data")
    read.make_data(tmp_path / "data")
    assert [each.name for each in tmp_path.iterdir()] == ["data"]
    assert sorted(each.name for each in (tmp_path / "data").iterdir()) == [f"{number}.z" for number in range(5)]
    assert [read.item(each) for each in range(5)] == [made.item(each) for each in range(5)]
    assert max(len(made.item(each)) for each in range(5)) <= made.item_bytes
