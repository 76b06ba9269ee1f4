"""How every program prints and ends: a user's mistake is a sentence and not a traceback, and so is Ctrl-C; signs that
the terminal cannot show are written in others; a reader who leaves early, as in `… | head`, ends the program quietly.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import unicodedata
from collections.abc import Callable

from synergy_core.errors import InputError

USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""Exit status when the reader of standard output has left: that of a program ended by SIGPIPE."""
_SPELT = {
    **{"·": "-", "–": "-", "—": "-", "−": "-", "×": "x", "÷": "/", "≥": ">=", "≤": "<=", "≠": "!=", "≈": "~"},
    **{"→": "->", "←": "<-", "±": "+-", "∞": "inf", "√": "sqrt ", "μ": "u", "µ": "u", "°": " deg"},
    **{"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "─": "-", "━": "-", "│": "|", "█": "#"},
}
"""What is written in place of a sign that the encoding of a terminal or file lacks."""


def run(program: str, main: Callable[[], int | None], *, interrupted: str) -> None:
    """Runs a command line, whose exit status `main` returns, None for 0.

    program: the name before each message. interrupted: what Ctrl-C leaves behind.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_spelt.__name__)
    try:
        status = _until_reader_leaves(main)
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        status = USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        status = INTERRUPTED
    if status:
        sys.exit(status)


def _spelt(error: UnicodeError) -> tuple[str, int]:
    """An error handler for encoding: `ρ` is written `rho`, `é` is written `e`, and what has no such form `?`."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(_in_ascii, error.object[error.start : error.end])), error.end


def _in_ascii(sign: str) -> str:
    if sign in _SPELT:
        return _SPELT[sign]
    name = unicodedata.name(sign, "").lower()
    if name.startswith("greek"):
        return name.split()[-1]
    return unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode("ascii") or "?"


codecs.register_error(_spelt.__name__, _spelt)


def _until_reader_leaves(main: Callable[[], int | None]) -> int | None:
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
