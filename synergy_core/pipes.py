"""Standard output that nobody reads to its end, as in `… | head`."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

PIPE_CLOSED = 141
"""Exit status where the reader has left: that of a program ended by SIGPIPE."""


def piped(main: Callable[[], Result]) -> Result:
    """Runs `main`; where the reader of standard output has left, ends the process quietly with `PIPE_CLOSED`."""
    try:
        try:
            return main()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_left():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still to be flushed goes there
        sys.exit(PIPE_CLOSED)


def _reader_left() -> bool:
    """Whether it was standard output that broke, and not some other connection."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # no file, or a system without poll
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
