"""Chooses a compressor for each layer: fewest bytes with the sum of squared errors within a budget (after L-GreCo).

This is a multiple-choice knapsack. Both functions use the lower convex hull of each layer's choices:

- `frontier` takes the hull steps of all layers in order of falling slope (bytes saved ÷ error added), which gives the
  whole curve of bytes against errors. Its points are optimal. For a budget between two points, the optimum saves at
  most the bytes of the step between them.
- `least_bytes` solves one budget by dynamic programming over a grid of errors, as published: 10,000 buckets, errors
  rounded up so that the budget is kept. It first drops every choice whose reduced cost, at the curve's slope at the
  budget, lifts the Lagrangian bound above the best known answer: no better answer contains it. Only the rounding is
  inexact: if n layers are undecided, no choice that stays n buckets below the budget sends fewer bytes than the answer.
  A bucket is 1/10,000 of the budget minus all layers' least open errors. `LayerChoice.bound` bounds every choice.

L-GreCo (Markov et al., MLSys 2024) adds up norms instead of squared norms; but only squared norms are additive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from synergy_core.units import Bools, Floats, Ints

BUCKETS = 10_000
_NEAR = 1e-12
"""Relative rounding tolerance of sums of errors and bytes."""
_TINY = 1e-300
FIRST_LAYERS = 16
"""Number of layers in a first, quick run of the dynamic programme; 16 was faster than 12, 32, 64 and 128."""


@dataclass(frozen=True, eq=False)
class LayerChoice:
    """One choice per layer.

    choice: (L,), indices. sent_bytes, error: sums of bytes and of squared errors. met: whether the error is within the
    budget, up to rounding; if it is not, this choice has the least error of all. bound: no choice within the budget
    sends fewer bytes.
    """

    choice: Ints
    sent_bytes: float
    error: float
    met: bool
    bound: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """The best choices for all budgets, from least error to fewest bytes: K steps between K + 1 points.

    start: (L,), the choices at the first point. layer, choice: (K,), the layer that each step changes, and its new
    choice. errors, sent_bytes: (K + 1,), at each point; errors rise, bytes fall.
    """

    start: Ints
    layer: Ints
    choice: Ints
    errors: Floats
    sent_bytes: Floats

    def choices(self, point: int) -> Ints:
        """The choice of each layer at a point of the curve, (L,)."""
        result = self.start.copy()
        # The steps of each layer are in order, and numpy keeps the last of several assignments to one element.
        result[self.layer[:point]] = self.choice[:point]
        return result

    def within(self, budget: float) -> int:
        """The index of the last point whose error is within the budget; 0 if there is none."""
        within = int(np.searchsorted(self.errors, budget * (1.0 + _NEAR), side="right"))
        return max(within - 1, 0)


def least_of_slowest(curves: Sequence[Frontier], counts: Sequence[int], budgets: Sequence[float]) -> list[list[int]]:
    """Chooses a point of each curve for each error budget, for pipeline stages that exchange gradients simultaneously.

    The points minimise the bytes of the stage that sends most, with the stages' total error within the budget. Each
    stage has the least error that these bytes allow. counts: number of equal stages of each curve. budgets: of total
    error; a budget that is too small for any points gets those of least error.
    """
    caps = np.unique(np.concatenate([each.sent_bytes for each in curves]))
    # Bytes fall along a curve, so this is the first point that sends no more than the cap.
    points = np.stack([(-each.sent_bytes).searchsorted(-caps) for each in curves])
    lengths = np.array([each.errors.size for each in curves])
    possible = (points < lengths[:, None]).all(axis=0)
    points = np.minimum(points, lengths[:, None] - 1)
    errors = np.stack([each.errors[at] for each, at in zip(curves, points, strict=True)])
    errors = np.where(possible, np.asarray(counts, dtype=np.float64) @ errors, np.inf)
    within = errors <= np.asarray(budgets, dtype=np.float64)[:, None] * (1.0 + _NEAR)
    return [points[:, row.argmax() if row.any() else -1].tolist() for row in within]


def least_bytes(sizes: Floats, errors: Floats, budget: float, *, buckets: int = BUCKETS) -> LayerChoice:
    """The choice of fewest bytes whose squared errors add up to at most `budget`.

    sizes, errors: (L, C), inf in both where a layer lacks a choice. Layers of zeros have errors of 0 and use no budget.
    """
    curve = frontier(sizes, errors)
    # Sums of the same errors in another order differ by rounding.
    allowed = budget * (1.0 + _NEAR)
    point = curve.within(budget)
    chosen = curve.choices(point)
    met = bool(curve.errors[0] <= allowed)
    if not met or point == curve.layer.size:
        bound = float(curve.sent_bytes[point])
        return LayerChoice(chosen, _total(sizes, chosen), _total(errors, chosen), met, bound)
    saved = curve.sent_bytes[point] - curve.sent_bytes[point + 1]
    slope = saved / (curve.errors[point + 1] - curve.errors[point])
    # Lagrangian bound: no choice within the budget sends fewer bytes than the line through both points at its error.
    bound = float(curve.sent_bytes[point] - slope * (allowed - curve.errors[point]))
    chosen = _filled(sizes, errors, chosen, allowed)
    reduced = _reduced(sizes, errors, slope)
    # First run: layers whose best other choice is nearest to the slope. Its better answer lets the second drop more.
    changed = np.abs(sizes - sizes[np.arange(chosen.size), chosen][:, None])
    with np.errstate(invalid="ignore", divide="ignore"):
        doubtful = np.argsort(np.where(changed > 0.0, reduced / changed, np.inf).min(axis=1))
    for some in (doubtful[:FIRST_LAYERS], doubtful):
        gap = _total(sizes, chosen) - bound + _NEAR * abs(bound)
        open_choices = np.zeros(reduced.shape, dtype=np.bool_)
        open_choices[np.arange(chosen.size), chosen] = True
        open_choices[some] = reduced[some] <= gap
        better = _programme(sizes, errors, open_choices, allowed, buckets)
        if better is not None and _total(sizes, better) < _total(sizes, chosen):
            chosen = better
    return LayerChoice(chosen, _total(sizes, chosen), _total(errors, chosen), met, bound)


def frontier(sizes: Floats, errors: Floats) -> Frontier:
    """The curve of fewest bytes against error; sizes, errors as in `least_bytes`.

    It merges the lower hulls of all layers by slope. A hull starts at the layer's least error, with the fewest bytes.
    """
    layers = np.arange(sizes.shape[0])
    least = errors == errors.min(axis=1, keepdims=True)
    current = np.where(least, sizes, np.inf).argmin(axis=1)
    start = current.copy()
    steps: list[tuple[Floats, Ints, Ints, Floats, Floats]] = []
    for _ in range(sizes.shape[1] - 1):
        saved = sizes[layers, current][:, None] - sizes
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            added = errors - errors[layers, current][:, None]
            slopes = np.where((saved > 0.0) & np.isfinite(sizes), saved / added, -1.0)
        steepest = slopes.max(axis=1)
        # Among equal slopes, take the nearest point, so that the curve has as many points as possible.
        following = np.where(slopes == steepest[:, None], added, np.inf).argmin(axis=1)
        moving = np.flatnonzero(steepest > 0.0)
        if not moving.size:
            break
        new = following[moving]
        steps.append((steepest[moving], moving, new, added[moving, new], saved[moving, new]))
        current[moving] = new
    first_error, first_bytes = errors[layers, start].sum(), sizes[layers, start].sum()
    if not steps:
        nothing = np.empty(0, dtype=np.int64)
        return Frontier(start, nothing, nothing, np.array([first_error]), np.array([first_bytes]))
    slope, layer, choice, added, saved = (np.concatenate(each) for each in zip(*steps, strict=True))
    # A stable sort keeps the order of a layer's steps, whose slopes never rise.
    order = np.argsort(-slope, kind="stable")
    along_errors = np.concatenate([[first_error], first_error + np.cumsum(added[order])])
    along_bytes = np.concatenate([[first_bytes], first_bytes - np.cumsum(saved[order])])
    return Frontier(start, layer[order], choice[order], along_errors, along_bytes)


def _filled(sizes: Floats, errors: Floats, chosen: Ints, allowed: float) -> Ints:
    """Spends the rest of the budget greedily: makes the change that saves most bytes, until no change saves any."""
    result, layers = chosen.copy(), np.arange(chosen.size)
    while True:
        with np.errstate(invalid="ignore"):
            added = errors - errors[layers, result][:, None]
        left = allowed - _total(errors, result)
        saved = np.where(added <= left, sizes[layers, result][:, None] - sizes, 0.0)
        layer, choice = np.unravel_index(saved.argmax(), saved.shape)
        if not saved[layer, choice] > 0.0:
            return result
        result[layer] = choice


def _reduced(sizes: Floats, errors: Floats, slope: float) -> Floats:
    """Bytes, (L, C), by which each choice lifts the Lagrangian bound; inf for choices that another one dominates."""
    cost = sizes + np.where(np.isfinite(errors), slope * errors, np.inf)
    reduced: Floats = cost - cost.min(axis=1, keepdims=True)
    # Of identical choices the first is kept.
    for other in range(sizes.shape[1]):
        no_worse = (sizes[:, [other]] <= sizes) & (errors[:, [other]] <= errors)
        is_better = (sizes[:, [other]] < sizes) | (errors[:, [other]] < errors)
        reduced[no_worse & (is_better | (np.arange(sizes.shape[1]) > other))] = np.inf
    return reduced


def _programme(sizes: Floats, errors: Floats, open_choices: Bools, allowed: float, buckets: int) -> Ints | None:
    """The open choices of fewest bytes, (L,), by dynamic programming; None if none are within `allowed`.

    Every layer's least open error is subtracted from the budget first, so that only the excess is rounded up.
    """
    open_errors = np.where(open_choices, errors, np.inf)
    chosen: Ints = open_errors.argmin(axis=1)
    layers = np.arange(chosen.size)
    left = allowed - float(errors[layers, chosen].sum())
    if left < 0.0:
        return None
    # Counts bytes relative to the choice of least error: these numbers are small, so that sums stay exact.
    extra = sizes - sizes[layers, chosen][:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        beyond = (open_errors - errors[layers, chosen][:, None]) * (buckets / max(left, _TINY))
    rows = [np.zeros(buckets + 1)]
    scratch = np.empty(buckets + 1)
    decided: list[tuple[Ints, list[tuple[int, int, float]]]] = []
    for group in _groups(sizes, errors, open_choices):
        taken, more_bytes = beyond[group[0]] * group.size, extra[group[0]] * group.size
        # (choice, buckets, bytes) for the whole group
        ways = [
            (int(choice), int(np.ceil(taken[choice])), float(more_bytes[choice]))
            for choice in np.flatnonzero(taken <= buckets)
        ]
        # The choice of least error adds no error and no bytes, so the row starts as a copy of the previous one.
        before, row = rows[-1], rows[-1].copy()
        for _, cells, more in ways:
            part = scratch[: buckets + 1 - cells]
            np.add(before[: buckets + 1 - cells], more, out=part)
            np.minimum(row[cells:], part, out=row[cells:])
        rows.append(row)
        decided.append((group, ways))
    cell = buckets
    for (group, ways), before, row in zip(reversed(decided), reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        choice, cells, _ = next(way for way in ways if way[1] <= cell and before[cell - way[1]] + way[2] == row[cell])
        chosen[group] = choice
        cell -= cells
    return chosen


def _groups(sizes: Floats, errors: Floats, open_choices: Bools) -> list[Ints]:
    """Groups the layers with several open choices: a group has identical layers, which all get the same choice.

    For identical layers, only the number of layers with each choice matters. With two open choices, groups of 1, 2, 4,
    … and a remainder reach every number; with more than two, each group is one layer.
    """
    several = np.flatnonzero(open_choices.sum(axis=1) > 1)
    if not several.size:
        return []
    columns = np.concatenate([sizes[several], errors[several], open_choices[several]], axis=1)
    _, group_of = np.unique(columns, axis=0, return_inverse=True)
    order = np.argsort(group_of.ravel(), kind="stable")
    groups: list[Ints] = []
    for identical in np.split(several[order], np.flatnonzero(np.diff(group_of.ravel()[order])) + 1):
        has_two = open_choices[identical[0]].sum() == 2
        size, start = 1, 0
        while start < identical.size:
            groups.append(identical[start : start + size])
            start += size
            size *= 2 if has_two else 1
    return groups


def _total(values: Floats, chosen: Ints) -> float:
    """The sum of all layers' values for their choices. values: (L, C)."""
    return float(values[np.arange(chosen.size), chosen].sum())
