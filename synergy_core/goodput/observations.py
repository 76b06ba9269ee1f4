"""What jobs measured, checked and padded to one length so that many profiles are fitted at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Bools, Floats, Ints
from synergy_core.errors import InputError
from synergy_core.goodput.forms import Form
from synergy_core.goodput.throughput import TINY, evenly


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """What one job (or all jobs of one application on one GPU type) measured; arrays (rows,), one row per shape.

    local_batch: samples per GPU and micro-batch. step_time_s: the whole step; sync_time_s: its part in all-reduce.
    crowd: GPUs on the node that has most of them; None: spread evenly (`evenly`).
    """

    nodes: ArrayLike
    gpus: ArrayLike
    local_batch: ArrayLike
    step_time_s: ArrayLike
    sync_time_s: ArrayLike
    crowd: ArrayLike | None = None

    def __post_init__(self) -> None:
        if self.crowd is None:
            object.__setattr__(self, "crowd", evenly(self.nodes, self.gpus))

    def __len__(self) -> int:
        return len(np.atleast_1d(self.step_time_s))


def joined(profiles: Sequence[ObservedSteps]) -> ObservedSteps:
    """All rows of these profiles in one; a row that two of them have counts once.

    Of rows alike in all but the crowd the largest stands: a file that only counts nodes takes GPUs to be spread evenly,
    one that names the placement knows better.
    """
    columns = [
        np.concatenate([np.asarray(getattr(each, name), dtype=np.float64) for each in profiles])
        for name in ObservedSteps.__slots__
    ]
    *measured, crowd = columns
    _, first, same = np.unique(np.stack(measured), axis=1, return_index=True, return_inverse=True)
    most = np.zeros(len(first))
    np.maximum.at(most, same.reshape(-1), crowd)
    order = np.argsort(first)
    nodes, gpus, batch, step, sync = (column[first[order]] for column in measured)
    return ObservedSteps(nodes, gpus, batch, step, sync, most[order])


@dataclass(frozen=True, slots=True)
class PaddedSteps:
    """F profiles padded to K rows each: arrays (F, K), `design` (F, synchronisation constants, K).

    weight: 0 in the padding, sums to 1 per profile. log_factor: what T_grad is multiplied by beyond its formula, log.
    """

    nodes: Floats
    gpus: Floats
    crowd: Floats
    batch: Floats
    design: Floats
    alone: Floats
    log_compute: Floats
    log_step: Floats
    log_factor: Floats
    weight: Floats

    @property
    def across(self) -> Bools:
        """Rows on several nodes."""
        return (self.nodes > 1) & (self.weight > 0)

    @property
    def within(self) -> Bools:
        """Rows on several GPUs of one node."""
        return (self.nodes <= 1) & (self.gpus > 1) & (self.weight > 0)

    def take(self, profiles: Ints) -> PaddedSteps:
        """Some of the profiles."""
        return PaddedSteps(*(getattr(self, name)[profiles] for name in PaddedSteps.__slots__))

    def weighted(self, weight: Floats) -> PaddedSteps:
        """The rows with other weights (F, K), scaled to sum to 1 per profile."""
        return replace(self, weight=weight / weight.sum(axis=1, keepdims=True))


def padded(observations: Sequence[ObservedSteps], form: Form, *, least: int = 1) -> PaddedSteps:
    """The profiles as `PaddedSteps`. Raises InputError for what cannot be fitted, naming profile and row.

    least: how many rows each must have.
    """
    if not observations:
        raise InputError("nothing to fit: no profile was given.")
    lengths = [len(each) for each in observations]
    if min(lengths) < least:
        at = int(np.argmin(lengths))
        raise InputError(f"profile {at} has {lengths[at]} rows; a fit needs at least {least}.")
    longest = max(lengths)
    filled = np.ones((6, len(observations), longest))
    filled[4] = 0.5
    weight = np.zeros(filled.shape[1:])
    for at, (each, length) in enumerate(zip(observations, lengths, strict=True)):
        for column, name in enumerate(ObservedSteps.__slots__):
            filled[column, at, :length] = getattr(each, name)
        weight[at, :length] = 1.0 / length
    nodes, gpus, batch, step, sync, crowd = filled
    usable = (sync >= 0.0) & (sync < step) & (step < np.inf) & (nodes >= 1) & (gpus >= nodes) & (batch > 0)
    usable &= (crowd * nodes >= gpus) & (crowd <= gpus - nodes + 1)
    if not usable.all() or not np.isfinite(filled).all():
        _refuse(filled, usable)
    alone = np.where(gpus > 1, 0.0, TINY + TINY * TINY)
    design = form.design(nodes, gpus, crowd).swapaxes(0, 1)
    return PaddedSteps(
        nodes, gpus, crowd, batch, design, alone, np.log(step - sync), np.log(step), np.zeros_like(step), weight
    )


def _refuse(filled: Floats, usable: Bools) -> None:
    """Raises the error for the first row that cannot be used."""
    profile, row = (int(each) for each in np.argwhere(~(usable & np.isfinite(filled).all(axis=0)))[0])
    nodes, gpus, batch, step, sync, crowd = filled[:, profile, row].tolist()
    where = f"profile {profile}, row {row}"
    if not 1 <= nodes <= gpus < np.inf:
        raise InputError(f"{where}: {gpus:g} GPUs on {nodes:g} nodes; expected 1 ≤ nodes ≤ GPUs.")
    if not gpus / nodes <= crowd <= gpus - nodes + 1:
        least, most = np.ceil(gpus / nodes), gpus - nodes + 1
        raise InputError(
            f"{where}: {crowd:g} of {gpus:g} GPUs on the most crowded of {nodes:g} nodes; "
            f"expected {least:g} to {most:g}."
        )
    if not 0 < batch < np.inf:
        raise InputError(f"{where}: local_batch is {batch:g}; expected a positive number of samples.")
    if not 0 < step < np.inf:
        raise InputError(f"{where}: step_time_s is {step:g}; expected a positive number of seconds.")
    raise InputError(f"{where}: sync_time_s is {sync:g}; it is part of step_time_s, expected 0 ≤ sync < {step:g}.")
