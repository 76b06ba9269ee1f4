"""Batches of a job that loads its samples: the same whoever makes them, each sample once an epoch."""

import os
from collections import Counter

import pytest
import torch

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec.examples.pictures import Pictures
from synergy_exec.training.cache import Cache
from synergy_exec.training.job import LoadedJob
from synergy_exec.training.supply import Supply
from synergy_exec.training.trainer import Trainer

# Tests may have more loaders than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Numbers(LoadedJob):
    samples, item_bytes = 6, 8

    def item(self, number):
        return str(number).encode()

    def sample(self, item, number, epoch):
        return torch.tensor([int(item)]), torch.tensor([epoch])

    build_model = loss = build_optimizer = None  # nothing is trained


class Unreadable(Numbers):
    def item(self, number):
        if number == 3:
            raise OSError("no item 3")
        return super().item(number)


def rows_taken(supply, steps, size, first=0, end=None):
    found = []
    for step in steps:
        numbers, epochs = supply.rows(step, size, first, size if end is None else end)
        found += list(zip(epochs.flatten().tolist(), numbers.flatten().tolist(), strict=True))
    return found


@pytest.mark.parametrize("loaders", [0, 1, 3])
def test_every_epoch_takes_each_sample_once_in_an_order_of_its_own(loaders):
    """Steps of 4 of 6 samples, so that batches reach over the ends of epochs."""
    found = rows_taken(Supply(Numbers(), loaders=loaders), range(9), 4)
    assert Counter(found) == {(epoch, number): 1 for epoch in range(6) for number in range(6)}
    orders = [tuple(number for epoch, number in found if epoch == each) for each in range(6)]
    assert len(set(orders)) > 1
    assert [epoch for epoch, _ in found] == sorted(epoch for epoch, _ in found)


def test_batches_are_the_same_whoever_makes_them(descriptor):
    """Also where loaders and batch change on the way, and steps begin late, as after a checkpoint."""
    plain, loaded = Supply(Numbers()), Supply(Numbers(), loaders=2, cache=Cache(descriptor))
    for loaders, steps, size in (
        (2, range(5, 9), 4),
        (1, range(9, 11), 4),
        (1, range(11, 14), 3),
        (0, range(14, 15), 3),
    ):
        loaded.loaders = loaders
        assert rows_taken(loaded, steps, size) == rows_taken(plain, steps, size)


def test_replicas_make_their_own_rows_alone():
    whole = rows_taken(Supply(Numbers()), range(3), 4)
    parts = [rows_taken(Supply(Numbers(), loaders=1), range(3), 4, first, first + 2) for first in (0, 2)]
    assert [parts[row % 4 // 2][2 * (row // 4) + row % 2] for row in range(12)] == whole


def test_error_in_a_loader_is_the_errors_own():
    with pytest.raises(OSError, match="no item 3"):
        rows_taken(Supply(Unreadable(), loaders=1), range(9), 4)


def test_models_draw_the_same_numbers_with_loaders_and_without():
    """Torch's generator is as a step left it, whether loaders began in that step or not."""
    states = []
    for loaders in (0, 1):
        job = Pictures(pictures=16)
        trainer = Trainer(job, Plan(micro_batch=4), supply=Supply(job, loaders=loaders))
        trainer.step(0)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# Memory for data that processes share: what is in it stays, and how much that is

MOST = 10
ROOM = MOST + 8
"""Bytes that an item takes: its length is kept beside it."""


class Storage:
    """Items 0, 1, … of 5 to 10 bytes. read: the numbers of those that were read."""

    def __init__(self):
        self.read = []

    def __call__(self, number):
        self.read.append(number)
        return bytes([number]) * (5 + number % 6)


@pytest.fixture
def descriptor():
    made = Cache.create(3 * ROOM)
    yield made
    os.close(made)


def test_an_epoch_reads_what_does_not_fit_and_nothing_else(descriptor):
    cache, storage = Cache(descriptor), Storage()
    for order in ([4, 0, 3, 1, 2], [2, 4, 1, 0, 3], [0, 1, 2, 3, 4]):
        assert [cache.item(each, storage, most_bytes=MOST) for each in order] == [Storage()(each) for each in order]
    assert sorted(storage.read) == [0, 1, 2, 3, 3, 3, 4, 4, 4]


def test_lower_limit_frees_memory_and_higher_one_keeps_what_is_there(descriptor):
    cache, storage = Cache(descriptor), Storage()

    def epoch():
        storage.read.clear()
        for number in range(4):
            cache.item(number, storage, most_bytes=MOST)
        return list(storage.read)

    assert epoch() == [0, 1, 2, 3]
    before = os.fstat(descriptor).st_size
    cache.limit(1 * ROOM)
    assert os.fstat(descriptor).st_size == before - 2 * ROOM
    assert epoch() == [1, 2, 3]
    cache.limit(4 * ROOM)
    assert epoch() == [1, 2, 3]
    assert epoch() == []


def test_item_that_is_longer_than_the_job_says_is_named(descriptor):
    with pytest.raises(InputError, match="item 1 has 6 bytes; the job says that none has more than 5"):
        Cache(descriptor).item(1, Storage(), most_bytes=5)
