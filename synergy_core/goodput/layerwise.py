"""Which compressor each layer gets: least bytes with the sum of squared errors within a budget (after L-GreCo).

A multiple-choice knapsack. Two ways, which share the lower convex hull of every layer's choices:

- `frontier`: hull steps of all layers by falling slope (bytes saved ÷ error added; Lagrange), which gives the whole
  curve of bytes against errors at once. At its points nothing is better; between them, nothing by more than a step.
- `least_bytes`: for one budget, a dynamic programme over a grid of errors, as published (10,000 buckets, errors rounded
  up so that the budget is kept), over what bounds leave open: with λ the slope at the budget, a choice whose reduced
  cost lifts the Lagrangian bound above the best known answer is in no better one, and is left out. That takes nothing
  from exactness. The grid does: with n layers left open, the answer sends no more than any choice within a budget that
  is smaller by n buckets. A bucket is 1/10,000 of what the budget leaves beyond these layers' least errors.
  `LayerChoice.bound` says how much better any choice could be.

L-GreCo itself (Markov et al., MLSys 2024) adds up norms, which do not add.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from synergy_core.units import Bools, Floats, Ints

BUCKETS = 10_000
_NEAR = 1e-12
"""Rounding that sums of errors are forgiven, relative to the budget."""
_TINY = 1e-300
FIRST = 16
"""Layers that the programme is run over before it is run over all: of 12, 16, 32, 64, 128 the fastest."""


@dataclass(frozen=True, eq=False)
class LayerChoice:
    """One choice per layer.

    choice: (L,), indices. sent_bytes, error: sums of bytes and of squared errors. met: whether the error is within the
    budget (but for rounding, 1e-12 of it); if not, no choice is, and this is the nearest. bound: no choice within the
    budget sends fewer bytes.
    """

    choice: Ints
    sent_bytes: float
    error: float
    met: bool
    bound: float


@dataclass(frozen=True, eq=False)
class Frontier:
    """Best choices for all budgets, from least error to fewest bytes; K steps, K + 1 points.

    start: (L,), the choices of the first point. layer, choice: (K,), what each step changes, to what. errors and
    sent_bytes: (K + 1,); errors rise, bytes fall.
    """

    start: Ints
    layer: Ints
    choice: Ints
    errors: Floats
    sent_bytes: Floats

    def choices(self, point: int) -> Ints:
        """The choice of each layer at a point of the curve, (L,)."""
        result = self.start.copy()
        # A layer's steps are in their order, and of several assignments to one place the last one counts.
        result[self.layer[:point]] = self.choice[:point]
        return result

    def within(self, budget: float) -> int:
        """The last point whose error is within the budget; the first one where none is."""
        within = int(np.searchsorted(self.errors, budget * (1.0 + _NEAR), side="right"))
        return max(within - 1, 0)


def least_of_slowest(curves: Sequence[Frontier], counts: Sequence[int], budgets: Sequence[float]) -> list[list[int]]:
    """For stages that send at the same time: for each error budget, a point on each stage's curve.

    The most that any stage sends is as little as it can be along the curves with all errors within the budget, and
    below that each stage errs as little as it can. counts: of stages alike. budgets: of errors of all stages together;
    where even the least errors exceed one, those are taken.
    """
    caps = np.unique(np.concatenate([each.sent_bytes for each in curves]))
    # Bytes fall along a curve: the first point that sends no more than the cap.
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

    sizes, errors: (L, C); inf in both where a layer lacks a choice. A layer of zeros has errors of 0 and costs nothing.
    """
    curve = frontier(sizes, errors)
    # Sums of the same errors in another order differ in their last digits.
    allowed = budget * (1.0 + _NEAR)
    point = curve.within(budget)
    chosen = curve.choices(point)
    met = bool(curve.errors[0] <= allowed)
    if not met or point == curve.layer.size:
        bound = float(curve.sent_bytes[point])
        return LayerChoice(chosen, _total(sizes, chosen), _total(errors, chosen), met, bound)
    saved = curve.sent_bytes[point] - curve.sent_bytes[point + 1]
    slope = saved / (curve.errors[point + 1] - curve.errors[point])
    # Lagrange: no choice within the budget sends less than the line through both points does at it.
    bound = float(curve.sent_bytes[point] - slope * (allowed - curve.errors[point]))
    chosen = _filled(sizes, errors, chosen, allowed)
    reduced = _reduced(sizes, errors, slope)
    # First over the layers whose best other choice is nearest to the slope: quick, and it leaves less open for all.
    changed = np.abs(sizes - sizes[np.arange(chosen.size), chosen][:, None])
    with np.errstate(invalid="ignore", divide="ignore"):
        doubtful = np.argsort(np.where(changed > 0.0, reduced / changed, np.inf).min(axis=1))
    for some in (doubtful[:FIRST], doubtful):
        gap = _total(sizes, chosen) - bound + _NEAR * abs(bound)
        open_choices = np.zeros(reduced.shape, dtype=np.bool_)
        open_choices[np.arange(chosen.size), chosen] = True
        open_choices[some] = reduced[some] <= gap
        better = _programme(sizes, errors, open_choices, allowed, buckets)
        if better is not None and _total(sizes, better) < _total(sizes, chosen):
            chosen = better
    return LayerChoice(chosen, _total(sizes, chosen), _total(errors, chosen), met, bound)


def frontier(sizes: Floats, errors: Floats) -> Frontier:
    """The whole curve for L layers × C choices, as of `least_bytes`.

    Every layer's lower hull, from its least error (of those, fewest bytes) on, merged by slope.
    """
    layers = np.arange(sizes.shape[0])
    least = errors == errors.min(axis=1, keepdims=True)
    at = np.where(least, sizes, np.inf).argmin(axis=1)
    start = at.copy()
    steps: list[tuple[Floats, Ints, Ints, Floats, Floats]] = []
    for _ in range(sizes.shape[1] - 1):
        saved = sizes[layers, at][:, None] - sizes
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            added = errors - errors[layers, at][:, None]
            slopes = np.where((saved > 0.0) & np.isfinite(sizes), saved / added, -1.0)
        steepest = slopes.max(axis=1)
        # Among equal slopes, take the nearest point: points then lie as close together as possible.
        following = np.where(slopes == steepest[:, None], added, np.inf).argmin(axis=1)
        going = np.flatnonzero(steepest > 0.0)
        if not going.size:
            break
        to = following[going]
        steps.append((steepest[going], going, to, added[going, to], saved[going, to]))
        at[going] = to
    first_error, first_bytes = errors[layers, start].sum(), sizes[layers, start].sum()
    if not steps:
        nothing = np.empty(0, dtype=np.int64)
        return Frontier(start, nothing, nothing, np.array([first_error]), np.array([first_bytes]))
    slope, layer, choice, added, saved = (np.concatenate(each) for each in zip(*steps, strict=True))
    # Stable: along a layer slopes fall, or stay, in the order of its steps.
    order = np.argsort(-slope, kind="stable")
    along_errors = np.concatenate([[first_error], first_error + np.cumsum(added[order])])
    along_bytes = np.concatenate([[first_bytes], first_bytes - np.cumsum(saved[order])])
    return Frontier(start, layer[order], choice[order], along_errors, along_bytes)


def _filled(sizes: Floats, errors: Floats, chosen: Ints, allowed: float) -> Ints:
    """A choice with what is left of the budget used: one layer after another, each time what saves most bytes."""
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
    """Bytes, (L, C), by which each choice lifts Lagrange's bound; inf where another one has no more of anything."""
    cost = sizes + np.where(np.isfinite(errors), slope * errors, np.inf)
    reduced: Floats = cost - cost.min(axis=1, keepdims=True)
    # Among identical choices, the first stays.
    for other in range(sizes.shape[1]):
        no_worse = (sizes[:, [other]] <= sizes) & (errors[:, [other]] <= errors)
        strictly = (sizes[:, [other]] < sizes) | (errors[:, [other]] < errors)
        reduced[no_worse & (strictly | (np.arange(sizes.shape[1]) > other))] = np.inf
    return reduced


def _programme(sizes: Floats, errors: Floats, open_choices: Bools, allowed: float, buckets: int) -> Ints | None:
    """Fewest bytes over the open choices, (L,), errors on a grid; None where none of them is within what is allowed.

    Every layer's least open error is taken off the budget first, so that only what goes beyond it is rounded up.
    """
    open_errors = np.where(open_choices, errors, np.inf)
    chosen: Ints = open_errors.argmin(axis=1)
    layers = np.arange(chosen.size)
    left = allowed - float(errors[layers, chosen].sum())
    if left < 0.0:
        return None
    # Beyond those of the choice of least error: small numbers, so that sums of bytes stay exact.
    extra = sizes - sizes[layers, chosen][:, None]
    with np.errstate(invalid="ignore", over="ignore"):
        beyond = (open_errors - errors[layers, chosen][:, None]) * (buckets / max(left, _TINY))
    rows = [np.zeros(buckets + 1)]
    scratch = np.empty(buckets + 1)
    tried: list[tuple[Ints, list[tuple[int, int, float]]]] = []
    for alike in _together(sizes, errors, open_choices):
        taken, more_bytes = beyond[alike[0]] * alike.size, extra[alike[0]] * alike.size
        # (choice, buckets, bytes) of all of them
        ways = [
            (int(choice), int(np.ceil(taken[choice])), float(more_bytes[choice]))
            for choice in np.flatnonzero(taken <= buckets)
        ]
        # The choice of least error adds nothing: what was before stays as it is.
        before, row = rows[-1], rows[-1].copy()
        for _, cells, more in ways:
            part = scratch[: buckets + 1 - cells]
            np.add(before[: buckets + 1 - cells], more, out=part)
            np.minimum(row[cells:], part, out=row[cells:])
        rows.append(row)
        tried.append((alike, ways))
    cell = buckets
    for (alike, ways), before, row in zip(reversed(tried), reversed(rows[:-1]), reversed(rows[1:]), strict=True):
        choice, cells, _ = next(way for way in ways if way[1] <= cell and before[cell - way[1]] + way[2] == row[cell])
        chosen[alike] = choice
        cell -= cells
    return chosen


def _together(sizes: Floats, errors: Floats, open_choices: Bools) -> list[Ints]:
    """Layers with several open choices, in groups that choose alike.

    Of layers that are alike only how many choose what counts. Where two choices are open, groups of 1, 2, 4, … and the
    rest reach every number; other layers stand alone.
    """
    several = np.flatnonzero(open_choices.sum(axis=1) > 1)
    if not several.size:
        return []
    columns = np.concatenate([sizes[several], errors[several], open_choices[several]], axis=1)
    _, kind = np.unique(columns, axis=0, return_inverse=True)
    order = np.argsort(kind.ravel(), kind="stable")
    groups: list[Ints] = []
    for alike in np.split(several[order], np.flatnonzero(np.diff(kind.ravel()[order])) + 1):
        doubles = open_choices[alike[0]].sum() == 2
        part, at = 1, 0
        while at < alike.size:
            groups.append(alike[at : at + part])
            at += part
            part *= 2 if doubles else 1
    return groups


def _total(values: Floats, chosen: Ints) -> float:
    """The sum over layers of what each layer's choice has."""
    return float(values[np.arange(chosen.size), chosen].sum())
