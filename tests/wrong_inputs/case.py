"""A wrong input: the command, the files beside it, and the facts that the message must state."""

from __future__ import annotations

from typing import NamedTuple

File = str | bytes | None
"""A file's content; None: it is a folder."""


class Wrong(NamedTuple):
    """typed: after `python -m`, as in a shell. said: parts of the sentence. files: by name, in its folder."""

    typed: str
    said: tuple[str, ...]
    files: dict[str, File] = {}  # noqa: RUF012 - never changed
