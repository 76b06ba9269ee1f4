"""Numbers → Markdown: ratios paired by seed, their intervals, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.experiment import Results, Task

NONE = "–"


@dataclass(frozen=True)
class Ratios:
    """Ratios of a policy to another on several files, each under several seeds.

    files: the ratio of means per file. half: per file, half its 95 % interval over seeds.
    mean: of the files. mean_half: half its 95 % interval over seeds. files_half: half the one over files.
    """

    files: list[float]
    half: list[float]
    mean: float
    mean_half: float
    files_half: float

    def said(self) -> str:
        """The mean with its interval."""
        return with_half(self.mean, self.mean_half)


def paired(
    results: Results, tops: Sequence[Sequence[Task]], bottoms: Sequence[Sequence[Task]], figure: str = "mean_jct_s"
) -> Ratios:
    """Ratios of a figure of runs to that of other runs: per file a list with one run for each seed."""
    return ratios(
        [
            [(results[a][figure], results[b][figure]) for a, b in zip(top, bottom, strict=True)]
            for top, bottom in zip(tops, bottoms, strict=True)
        ]
    )


def ratios(pairs: Sequence[Sequence[tuple[float, float]]]) -> Ratios:
    """Ratios from (value, value of the other) per file and seed.

    The spread between seeds is taken to be alike on all files and pooled, so that a file with two seeds has an
    interval of use; Student's t with the pooled degrees of freedom. Over files: Student's t of the files' ratios.
    """
    per_file = [np.array([a / b for a, b in each]) for each in pairs]
    files = [sum(a for a, _ in each) / sum(b for _, b in each) for each in pairs]
    free = sum(len(each) - 1 for each in per_file)
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in per_file)
    factor = student(free) * np.sqrt(squares / free) if free else np.nan
    half = [float(factor / np.sqrt(len(each))) for each in per_file]
    count = len(files)
    error = np.sqrt(sum(1 / len(each) for each in per_file)) / count
    spread = student(count - 1) * float(np.std(files, ddof=1)) / np.sqrt(count) if count > 1 else np.nan
    return Ratios(files, half, float(np.mean(files)), float(factor * error), spread)


def mean_half(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half its 95 % interval by Student's t."""
    spread = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.nan
    return float(np.mean(values)), float(student(len(values) - 1) * spread)


def student(free: int) -> float:
    """Student's t quantile of 97.5 %."""
    from scipy.special import stdtrit

    return float(stdtrit(free, 0.975)) if free else np.nan


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Formats a Markdown table; the first `left` columns hold words."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join(["---"] * left + ["---:"] * (len(header) - left)) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float | None, digits: int = 2) -> str:
    """Formats a number with this many decimals; an unknown one as a dash."""
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


def error_table(scores: Iterable[Mapping[str, Any]], **names: str) -> str:
    """Makes a table of accuracies. names: titles of the other columns, with their keys."""
    rows = ([*(each[key] for key in names.values()), *errors(each)] for each in scores)
    return table((*names, *ERRORS), rows, len(names))


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
