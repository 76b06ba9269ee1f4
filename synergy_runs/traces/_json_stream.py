"""Objects of a JSON list one at a time, with the line each starts on; a list of gigabytes needs the memory of one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from synergy_core.errors import InputError

Decode = Callable[[str, int], tuple[object, int]]

CHUNK_CHARACTERS = 1 << 20
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_NEAR_THE_END = 32
"""An error this close to the end of what was read may only mean that the rest has not been read yet."""


def objects(path: Path, stream: TextIO) -> Iterator[tuple[int, object]]:
    """(line, value) of each element of the list that the file holds.

    Raises InputError naming the line where the file is cut off or no JSON list.
    """
    text = _Window(stream)
    if text.next_character() != "[":
        raise InputError(f"{path}: line {text.line}: expected a JSON list, which starts with '['; got {text.peek()!r}.")
    text.skip()
    if text.next_character() == "]":
        text.skip()
    else:
        yield from _elements(path, text)
    if text.next_character():
        raise InputError(f"{path}: line {text.line}: got {text.peek()!r} after the end of the list, expected nothing.")


def _elements(path: Path, text: _Window) -> Iterator[tuple[int, object]]:
    decode = json.JSONDecoder().raw_decode
    while True:
        if not text.next_character():
            raise _cut_off(path, text.line)
        line = text.line
        try:
            value = text.decode(decode)
        except json.JSONDecodeError as error:
            where = line + error.doc.count("\n", text.at, error.pos)
            if len(error.doc) - error.pos <= _NEAR_THE_END or error.msg.startswith("Unterminated string"):
                raise _cut_off(path, line) from None
            raise InputError(
                f"{path}: line {where}: {error.msg} in the object that starts on line {line}; expected JSON."
            ) from None
        except RecursionError:
            raise InputError(
                f"{path}: line {line}: nested too deeply for a job log; expected a list of jobs."
            ) from None
        yield line, value
        mark = text.next_character()
        if mark not in (",", "]"):
            if not mark:
                raise _cut_off(path, line)
            raise InputError(f"{path}: line {text.line}: got {text.peek()!r}, expected ',' or ']' after an object.")
        text.skip()
        if mark == "]":
            return


def _cut_off(path: Path, line: int) -> InputError:
    return InputError(
        f"{path}: the file ends inside the list; the last object starts on line {line}. It is cut off: "
        "fetch it again (python -m synergy_sim.traces download philly resumes)."
    )


class _Window:
    """A moving window on a stream: `at` is the place in it, `line` the 1-based line of that place."""

    __slots__ = ("_ended", "_stream", "_text", "at", "line")

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = ""
        self._ended = False
        self.at = 0
        self.line = 1

    def _read_more(self) -> bool:
        if self._ended:
            return False
        left = self._text[self.at :]
        # Twice as much each time, so that a long object costs no more than a few times its length.
        more = self._stream.read(max(CHUNK_CHARACTERS, len(left)))
        self._ended = not more
        self._text, self.at = left + more, 0
        return bool(more)

    def _move_to(self, place: int) -> None:
        self.line += self._text.count("\n", self.at, place)
        self.at = place

    def next_character(self) -> str:
        """The next character that is no white space, where the window then stands; "" at the end."""
        while True:
            found = _NOT_SPACE.search(self._text, self.at)
            if found:
                self._move_to(found.start())
                return found.group()
            self._move_to(len(self._text))
            if not self._read_more():
                return ""

    def peek(self) -> str:
        """A few characters from here, for errors."""
        return self._text[self.at : self.at + 40].split("\n")[0]

    def skip(self) -> None:
        """Moves the window past one character."""
        self._move_to(self.at + 1)

    def decode(self, decode: Decode) -> object:
        """The JSON value that starts here; the window then stands behind it."""
        while True:
            try:
                value, end = decode(self._text, self.at)
            except json.JSONDecodeError as error:
                near_end = len(self._text) - error.pos <= _NEAR_THE_END
                if (near_end or error.msg.startswith("Unterminated string")) and self._read_more():
                    continue
                raise
            if end == len(self._text) and self._read_more():
                continue  # a number may go on
            self._move_to(end)
            return value
