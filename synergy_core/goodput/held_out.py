"""Which form a table of measurements calls for: the one that foretells placements it was not fitted to.

How well a form fits says little of what it foretells beyond its rows, for a richer one always fits better. So the
placements across nodes are dealt into five parts; each form is fitted to four and scored on the fifth, in turn. The
crowded form must win by a margin: where both do equally well, as on most tables measured so far (bench/fit.py --forms),
the simpler one foretells larger clusters better.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from synergy_core.arrays import Floats, Ints
from synergy_core.goodput.fit import fit_rows
from synergy_core.goodput.forms import CROWDED, SATURATING, Form
from synergy_core.goodput.minimise import residuals
from synergy_core.goodput.observations import PaddedSteps

LEAST_PLACEMENTS = 12
"""Fewer placements across nodes than these say nothing."""
LEAST_GAIN = 0.02
"""The fraction of the error that the crowded form must save. Where all-reduces are planted to depend on all GPUs it
saves less, by chance, and mostly loses; where on the crowd, more (tests/test_crowd.py)."""
_PARTS = 5


def calls_for_crowd(rows: PaddedSteps) -> bool:
    """Whether the crowded form foretells held-out placements of this one profile better than the saturating one."""
    return saved_by_crowd(rows) > LEAST_GAIN


def saved_by_crowd(rows: PaddedSteps) -> float:
    """Which fraction of the saturating form's error on held-out placements the crowded one saves; 0 for few of them.

    Each placement counts alike, however many batch sizes were measured on it.
    """
    placement = placements_across(rows)
    several = placement >= 0
    count = int(placement.max()) + 1
    if count < LEAST_PLACEMENTS:
        return 0.0
    plain, crowded = (
        np.bincount(placement[several], held_out_error(rows, form, placement)[several], count)
        / np.bincount(placement[several], minlength=count)
        for form in (SATURATING, CROWDED)
    )
    return float(1.0 - crowded.mean() / plain.mean())


def held_out_error(rows: PaddedSteps, form: Form, placement: Ints) -> Floats:
    """|log(predicted/measured)| of each row's step, (K,), by a fit to the parts that it is not in.

    placement: (K,), numbers that rows of one placement share; negative ones are fitted to each time, and never scored.
    """
    part = np.where(placement >= 0, _dealt(int(placement.max()) + 1)[placement], -1)
    out = part == np.arange(_PARTS)[:, None]
    design = form.design(rows.nodes, rows.gpus, rows.crowd).swapaxes(0, 1)
    folds = replace(rows, design=design).take(np.zeros(_PARTS, dtype=np.int64))
    folds = folds.weighted(np.where(out | (folds.weight == 0.0), 0.0, 1.0))
    off = np.abs(residuals(fit_rows(folds, form).theta, folds, form)[1])
    result: Floats = np.where(out, off, 0.0).sum(axis=0)
    return result


def placements_across(rows: PaddedSteps) -> Ints:
    """A number for each different (N, M, C) across nodes, (K,); -1 for rows on one node."""
    shapes = np.stack([rows.nodes[0], rows.gpus[0], rows.crowd[0]])
    across = rows.across[0]
    result = np.full(shapes.shape[1], -1)
    if across.any():
        result[across] = np.unique(shapes[:, across], axis=1, return_inverse=True)[1].reshape(-1)
    return result


def _dealt(count: int) -> Ints:
    """Which part each placement is in, (count,): equal parts, at random but always the same."""
    result: Ints = np.random.default_rng(0).permutation(count) % _PARTS
    return result
