"""A cache of data items that the ranks of a run share on a node and that evicts nothing (MinIO; OSDI 2022, 3.3).

Each item has a fixed place by its number and is kept if that place lies below the limit. So every epoch has exactly as
many hits as items fit, in whatever order and by however many processes they are read. Only a lower limit frees memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from synergy_core.errors import InputError

_NUMBER = struct.Struct("Q")
_HEADER = 4096


class Cache:
    """A file in memory: the limit, then a place for each item. A place begins with the item's length, 0 if empty."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: from `create`. It is not closed here."""
        self._file = descriptor

    @staticmethod
    def create(limit_bytes: float = 0) -> int:
        """Creates a cache of at most `limit_bytes` and returns its descriptor."""
        descriptor = os.memfd_create("cache")
        Cache(descriptor).limit(limit_bytes)
        return descriptor

    def limit(self, limit_bytes: float) -> None:
        """Sets the limit and drops the items beyond it."""
        os.pwrite(self._file, _NUMBER.pack(int(limit_bytes)), 0)
        os.truncate(self._file, _HEADER + int(limit_bytes))

    def item(self, number: int, read: Callable[[int], bytes], *, most_bytes: int) -> bytes:
        """Returns item `number`, from memory or else from `read`. most_bytes: upper bound of the data set's items.

        Raises InputError for a longer item.
        """
        (limit,) = _NUMBER.unpack(os.pread(self._file, _NUMBER.size, 0))
        room = _NUMBER.size + most_bytes
        if (number + 1) * room > limit:
            return read(number)
        place = _HEADER + number * room
        kept = os.pread(self._file, room, place)
        length = _NUMBER.unpack_from(kept)[0] if len(kept) >= _NUMBER.size else 0
        if length:
            return kept[_NUMBER.size : _NUMBER.size + length]
        item = read(number)
        if len(item) > most_bytes:
            raise InputError(f"item {number} has {len(item)} bytes; the job says that none has more than {most_bytes}.")
        # The length is written last, so that a concurrent reader finds the whole item or nothing.
        os.pwrite(self._file, item, place + _NUMBER.size)
        os.pwrite(self._file, _NUMBER.pack(len(item)), place)
        return item
