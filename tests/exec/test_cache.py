"""Memory for data that processes share: what is in it stays, and how much that is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_exec.training.cache import Cache

MOST = 10
ROOM = MOST + 8
"""Bytes that an item takes: its length is kept beside it."""


class Storage:
    """Items 0, 1, … of 5 to 10 bytes. read: the numbers of those that were read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __call__(self, number: int) -> bytes:
        self.read.append(number)
        return bytes([number]) * (5 + number % 6)


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = Cache.create(3 * ROOM)
    yield made
    os.close(made)


def test_an_epoch_reads_what_does_not_fit_and_nothing_else(descriptor: int) -> None:
    cache, storage = Cache(descriptor), Storage()
    for order in ([4, 0, 3, 1, 2], [2, 4, 1, 0, 3], [0, 1, 2, 3, 4]):
        assert [cache.item(each, storage, most_bytes=MOST) for each in order] == [Storage()(each) for each in order]
    assert sorted(storage.read) == [0, 1, 2, 3, 3, 3, 4, 4, 4]


def test_processes_share_what_one_of_them_has_read(descriptor: int) -> None:
    if not (child := os.fork()):
        Cache(descriptor).item(1, Storage(), most_bytes=MOST)
        os._exit(0)
    os.waitpid(child, 0)
    storage = Storage()
    assert Cache(descriptor).item(1, storage, most_bytes=MOST) == Storage()(1)
    assert storage.read == []


def test_lower_limit_frees_memory_and_higher_one_keeps_what_is_there(descriptor: int) -> None:
    cache, storage = Cache(descriptor), Storage()

    def epoch() -> list[int]:
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


def test_item_that_is_longer_than_the_job_says_is_named(descriptor: int) -> None:
    with pytest.raises(InputError, match="item 1 has 6 bytes; the job says that none has more than 5"):
        Cache(descriptor).item(1, Storage(), most_bytes=5)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=60))
def test_items_are_always_what_storage_holds(asked: list[tuple[int, int]]) -> None:
    """Whatever the limit, in items, was before."""
    descriptor = Cache.create()
    cache = Cache(descriptor)
    for number, items in asked:
        cache.limit(items * ROOM)
        assert cache.item(number, Storage(), most_bytes=MOST) == Storage()(number)
    os.close(descriptor)
