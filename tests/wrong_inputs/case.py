"""A wrong input: what is typed, the files beside it, and what must be said."""

from __future__ import annotations

from typing import NamedTuple

File = str | bytes | None
"""Its content; None: it is a folder."""


class Wrong(NamedTuple):
    """typed: after `python -m`, as in a shell. said: parts of the sentence. files: by name, in its folder."""

    typed: str
    said: tuple[str, ...]
    files: dict[str, File] = {}  # noqa: RUF012 - never changed
