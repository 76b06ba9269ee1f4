"""Text for terminals: tables of jobs, and users' text made safe, because it could contain control characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST_SHOWN = 200
"""Maximum characters of a name or value that an error repeats."""


def plain(text: str, most: int | None = None) -> str:
    """The text on one line, what cannot be seen written as Python does (`\\x1b`); cut beyond `most` characters."""
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def plain_lines(text: str) -> str:
    """`plain` for each line."""
    return "\n".join(map(plain, text.split("\n")))


HEADINGS = (
    "job",
    "name",
    "state",
    "slots",
    "plan",
    "compressor",
    "batch",
    "step",
    "done",
    "goodput",
    "loss",
    "restarts",
)


def cells_of(job: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table of jobs. job: from the controller's API."""
    goodput, loss = job["goodput"], job["loss"]
    done = 1.0 if job["state"] == "done" else min(1.0, job["work"] / job["work_total"])  # a command may end sooner
    return (
        str(job["job"]),
        plain(job["name"]),
        job["state"],
        f"{job['slots']} of {job['slots_asked']}",
        job["plan"] or "-",
        job["compressor"] or "-",
        str(job["batch"] or "-"),
        str(job["step"]),
        f"{done:.0%}",
        "-" if goodput is None else f"{goodput:.1f}/s",
        "-" if loss is None else f"{loss:.4g}",
        str(job["restarts"]),
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
