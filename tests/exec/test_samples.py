"""Batches of a job that loads its samples: the same whoever makes them, each sample once an epoch."""

import os

import pytest
import torch
from exec.pretended import refuses

from synergy_core.performance.planner.plan import Plan
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


def test_every_epoch_takes_each_sample_once_in_an_order_of_its_own():
    """Steps of 4 of 6 samples, so that batches reach over the ends of epochs."""
    found = rows_taken(Supply(Numbers()), range(9), 4)
    epochs, numbers = zip(*found, strict=True)
    assert list(epochs) == sorted(6 * list(range(6)))
    orders = {numbers[at : at + 6] for at in range(0, 36, 6)}
    assert len(orders) > 1
    assert all(sorted(each) == list(range(6)) for each in orders)


def test_batches_are_the_same_whoever_makes_them(descriptor):
    """Also where loaders and batch change on the way, steps begin late, and each replica makes its own rows alone."""
    plain, loaded = Supply(Numbers()), Supply(Numbers(), loaders=3, cache=Cache(descriptor))
    for loaders, first, end, size in ((3, 5, 9, 4), (1, 9, 11, 4), (1, 11, 14, 3), (0, 14, 15, 3)):
        loaded.loaders = loaders
        assert rows_taken(loaded, range(first, end), size) == rows_taken(plain, range(first, end), size)
    first, second = (rows_taken(Supply(Numbers(), loaders=1), range(1), 4, at, at + 2) for at in (0, 2))
    assert first + second == rows_taken(plain, range(1), 4)


def test_error_in_a_loader_is_the_errors_own():
    with pytest.raises(OSError, match="no item 3"):
        rows_taken(Supply(Unreadable(), loaders=1), range(9), 4)


def test_models_draw_the_same_numbers_with_loaders_and_without():
    """Torch's generator is as a step left it, whether loaders began in that step or not."""
    job, states = Pictures(pictures=16), []
    for loaders in (0, 1):
        Trainer(job, Plan(micro_batch=4), supply=Supply(job, loaders=loaders)).step(0)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


# Memory for data that processes share: what is in it stays, and how much that is

MOST = 10
ROOM = MOST + 8
"""Bytes that an item takes: its length is kept beside it."""


@pytest.fixture
def descriptor():
    made = Cache.create(3 * ROOM)
    yield made
    os.close(made)


def item(number):
    """Makes an item of 5 to 10 bytes."""
    return bytes([number]) * (5 + number % 6)


def test_an_epoch_reads_what_has_no_room_and_a_lower_limit_frees_memory(descriptor):
    cache, read = Cache(descriptor), []

    def epoch(*numbers):
        """The numbers of the items that had to be read."""
        read.clear()
        found = [cache.item(each, lambda at: read.append(at) or item(at), most_bytes=MOST) for each in numbers]
        assert found == [item(each) for each in numbers]
        return sorted(read)

    assert epoch(4, 0, 3, 1, 2) == [0, 1, 2, 3, 4]
    assert epoch(2, 4, 1, 0, 3) == [3, 4]
    before = os.fstat(descriptor).st_size
    cache.limit(1 * ROOM)
    assert os.fstat(descriptor).st_size == before - 2 * ROOM
    assert epoch(0, 1, 2, 3) == [1, 2, 3]
    cache.limit(4 * ROOM)  # what is there is kept
    assert epoch(0, 1, 2, 3) == [1, 2, 3]
    assert epoch(0, 1, 2, 3) == []


def test_item_that_is_longer_than_the_job_says_is_named(descriptor):
    refuses("item 1 has 6 bytes; .* more than 5", Cache(descriptor).item, 1, item, most_bytes=5)
