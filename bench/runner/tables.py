"""Numbers → Markdown for docs/accuracy.md: ratios paired by seed, their intervals, tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NONE = "–"


@dataclass(frozen=True)
class Ratios:
    """Ratios of a policy to another on several files, each under the seeds that both have.

    files: the ratio of means per file, NaN where nothing is known. half: per file, half its 95 % interval over seeds.
    mean: of the files. mean_half: half its 95 % interval over seeds. files_half: half the one over files.
    """

    files: list[float]
    half: list[float]
    mean: float
    mean_half: float
    files_half: float

    @property
    def known(self) -> int:
        """How many files there is something of."""
        return sum(np.isfinite(self.files))

    @property
    def complete(self) -> bool:
        """Whether that is all of them."""
        return self.known == len(self.files)

    def said(self) -> str:
        """The mean with its interval, and of how many files if not of all."""
        short = "" if self.complete or not self.known else f" (only {self.known} files)"
        return with_half(self.mean, self.mean_half) + short


def ratios(pairs: Sequence[Sequence[tuple[float, float]]]) -> Ratios:
    """Of (value, value of the other) per file and seed.

    The spread between seeds is taken to be alike on all files and pooled, so that a file with two seeds has an
    interval of use; Student's t with the pooled degrees of freedom. Over files: Student's t of the files' ratios.
    """
    per_file = [np.array([a / b for a, b in each]) for each in pairs]
    files = [sum(a for a, _ in each) / sum(b for _, b in each) if each else np.nan for each in pairs]
    present = [each for each in per_file if len(each)]
    free = sum(len(each) - 1 for each in present)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in present)
    factor = student(free) * np.sqrt(squares / free) if free else np.nan
    half = [float(factor / np.sqrt(len(each))) if len(each) else np.nan for each in per_file]
    known = np.array([value for value in files if np.isfinite(value)])
    count = len(known)
    error = np.sqrt(sum(1 / len(each) for each in present)) / count if count else np.nan
    spread = student(count - 1) * float(known.std(ddof=1)) / np.sqrt(count) if count > 1 else np.nan
    return Ratios(files, half, float(known.mean()) if count else np.nan, float(factor * error), spread)


def student(free: int) -> float:
    """Student's t quantile of 97.5 %."""
    from scipy.special import stdtrit

    return float(stdtrit(free, 0.975)) if free else np.nan


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are words."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join(["---"] * left + ["---:"] * (len(header) - left)) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def wrapped(*sentences: str) -> str:
    """A paragraph, in lines of at most 118 characters."""
    return textwrap.fill(" ".join(sentences), 118, break_long_words=False, break_on_hyphens=False)


def number(value: float | None, digits: int = 2) -> str:
    """With so many decimals; a dash for what is not known."""
    return NONE if value is None or not np.isfinite(value) else f"{value:,.{digits}f}"


def with_half(value: float, half: float, digits: int = 3) -> str:
    """0.812 ± 0.011, without the interval where there is none."""
    if not np.isfinite(value):
        return NONE
    return number(value, digits) if not np.isfinite(half) else f"{value:.{digits}f} ± {half:.{digits}f}"


def met(holds: bool | None) -> str:
    """Whether a goal is met."""
    return {True: "met", False: "**not met**", None: NONE}[holds]


def below(value: float, goal: float) -> bool | None:
    """Whether it is at most the goal; None if it is not known."""
    return bool(value <= goal) if np.isfinite(value) else None


def marked(value: float, limit: float, digits: int = 2) -> str:
    """Bold above the limit."""
    text = number(value, digits)
    return f"**{text}**" if np.isfinite(value) and value > limit else text


def each(values: Iterable[float], form: Callable[[float], str] = number, by: str = " / ") -> str:
    """Several numbers in one cell."""
    return by.join(form(value) for value in values)


def percent(fraction: float | None, digits: int = 1, sign: str = "") -> str:
    """`3.1 %`; a dash for what is not known. sign: `+` to show it always."""
    if fraction is None or not np.isfinite(fraction):
        return NONE
    return f"{100.0 * fraction:{sign}.{digits}f} %"


ERRORS = ("n", "mape", "median", "p90", "max", "bias")
"""Figures of an `Accuracy` in a table."""


def errors(score: Mapping[str, Any]) -> list[str]:
    """The cells of `ERRORS`."""
    shares = (percent(score[name]) for name in ERRORS[1:-1])
    return [str(score["n"]), *shares, percent(score["bias"], sign="+")]


GOAL_HEAD = ("goal", "figure", "found (goal)", "")
"""Header of a table of `goal`s, of which three columns are words."""


def goal(
    what: str, figure: str, value: float | None, limit: float, *, is_least: bool = False, form: Callable = percent
) -> list[str]:
    """A row of a table of goals: the value must be at most the limit, or at least. Unknown values are not judged."""
    if value is None or not np.isfinite(value):
        return [what, figure, NONE, met(None)]
    holds = value >= limit if is_least else value <= limit
    return [what, figure, f"{form(value)} ({'≥' if is_least else '≤'} {form(limit)})", met(bool(holds))]
