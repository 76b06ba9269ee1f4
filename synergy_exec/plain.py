"""Makes users' text safe for terminals, because it could contain control characters."""

from __future__ import annotations

MOST_SHOWN = 200
"""Maximum characters of a name or value that an error repeats."""


def plain(text: str, most: int | None = None) -> str:
    """The text on one line: unprintable characters are escaped as in Python (`\\x1b`); at most `most` characters."""
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def plain_lines(text: str) -> str:
    """The text with unprintable characters escaped as by `plain`, but with its line breaks kept."""
    return "\n".join(map(plain, text.split("\n")))
