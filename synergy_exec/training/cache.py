"""Memory for a data set that all ranks of a run on a node share: what is in it stays (MinIO cache; OSDI 2022, 3.3).

An item is kept if its place, by its number, lies below the limit. So an epoch has exactly as many hits as fit, in
whatever order it takes the items and however many processes read; nothing is thrown out to make room. Only a lower
limit frees memory.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

from synergy_core.errors import InputError

_NUMBER = struct.Struct("Q")
_HEADER = 4096


class Cache:
    """A file in memory: the limit, then a place for each item, its length first, 0 while there is none."""

    def __init__(self, descriptor: int) -> None:
        """descriptor: of what `create` made; it is not closed here."""
        self._file = descriptor

    @staticmethod
    def create(limit_bytes: float = 0) -> int:
        """The descriptor of a new one. limit_bytes: the most it may hold."""
        descriptor = os.memfd_create("cache")
        Cache(descriptor).limit(limit_bytes)
        return descriptor

    def limit(self, limit_bytes: float) -> None:
        """At most so much from now on; what lies beyond is dropped."""
        os.pwrite(self._file, _NUMBER.pack(int(limit_bytes)), 0)
        os.truncate(self._file, _HEADER + int(limit_bytes))

    def item(self, number: int, read: Callable[[int], bytes], *, most_bytes: int) -> bytes:
        """Item `number`, from memory or as `read` gives it. most_bytes: of any item of this data set.

        Raises InputError for a longer one.
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
        # Its length last: who reads meanwhile finds all of it, or nothing.
        os.pwrite(self._file, item, place + _NUMBER.size)
        os.pwrite(self._file, _NUMBER.pack(len(item)), place)
        return item
