"""Step time on N nodes and M GPUs by Pollux's model (OSDI 2021, section 3.2), and by forms of it with more constants.

`theta` is an array (..., 7) in the order of `PARAMETERS`:

    T_grad(b)    = α_c + β_c·b
    T_sync(N, M) = α_n + β_n·max(M − 2, ε)   if N > 1
                   α_r + β_r·max(M − 2, ε)   if N = 1 and M > 1
                   ε + ε·ε                   if M = 1
    T_opt        = (T_grad^γ + T_sync^γ)^(1/γ)
    T_iter       = (a − 1)·T_grad + T_opt

with b samples per GPU and micro-batch, a micro-batches per step (accumulation) and ε = 1e-8; α and β are in seconds.
If γ is 1, computing and all-reduce do not overlap. At its maximum, 10, a step is hardly longer than the longer of both.

All functions broadcast `theta`'s leading axes against the other arguments, and return seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError, unknown
from synergy_core.units import Bools, Floats, Ints, rows_at

ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA, FLOOR, RHO_N, RHO_R, PAIR, SLOWEST = range(12)
CARD, CROWD, NODES = range(12, 15)
"""Index of each constant in `theta`."""

PARAMETERS = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
TINY = 1e-8
"""ε: the lower bound of every α and β in seconds, which also makes T_sync of one GPU positive."""
GAMMA_MIN, GAMMA_MAX = 1.0, 10.0


def evenly(nodes: ArrayLike, gpus: ArrayLike) -> Floats:
    """GPUs on the most crowded node if they are spread as evenly as possible: GPUs ÷ nodes, rounded up."""
    return np.ceil(np.asarray(gpus, dtype=np.float64) / np.maximum(nodes, 1))


def gradient_time(theta: ArrayLike, local_batch: ArrayLike) -> Floats:
    """T_grad, the time of the forward and backward pass of a micro-batch of `local_batch` samples on one GPU."""
    theta = np.asarray(theta, dtype=np.float64)
    result: Floats = theta[..., ALPHA_C] + theta[..., BETA_C] * np.asarray(local_batch, dtype=np.float64)
    return result


def sync_time(theta: ArrayLike, nodes: ArrayLike, gpus: ArrayLike) -> Floats:
    """T_sync, the time of the gradients' all-reduce over `gpus` GPUs on `nodes` nodes, without overlap."""
    theta = np.asarray(theta, dtype=np.float64)
    nodes, gpus = np.asarray(nodes), np.asarray(gpus)
    beyond_two = np.maximum(np.asarray(gpus, dtype=np.float64) - 2.0, TINY)
    across = theta[..., ALPHA_N] + theta[..., BETA_N] * beyond_two
    within = theta[..., ALPHA_R] + theta[..., BETA_R] * beyond_two
    return np.where(nodes > 1, across, np.where(gpus > 1, within, TINY + TINY * TINY))


def step_terms(theta: ArrayLike, nodes: ArrayLike, gpus: ArrayLike) -> tuple[Floats, Floats, Floats, Floats]:
    """α_c, β_c, γ and T_sync: all of the model that a step's time depends on besides its batch."""
    theta = np.asarray(theta, dtype=np.float64)
    return theta[..., ALPHA_C], theta[..., BETA_C], theta[..., GAMMA], sync_time(theta, nodes, gpus)


def overlapped(gradient_time_s: ArrayLike, sync_time_s: ArrayLike, gamma: ArrayLike) -> Floats:
    """(T_grad^γ + T_sync^γ)^(1/γ), with the larger term factored out so that no power under- or overflows."""
    first, second = np.asarray(gradient_time_s, dtype=np.float64), np.asarray(sync_time_s, dtype=np.float64)
    larger = np.maximum(first, second)
    ratio = np.minimum(first, second) / larger
    gamma = np.asarray(gamma, dtype=np.float64)
    result: Floats = larger * np.power(1.0 + np.power(ratio, gamma), 1.0 / gamma)
    return result


def exchange_time(step_time_s: ArrayLike, gradient_time_s: ArrayLike, gamma: ArrayLike) -> Floats:
    """The T_sync for which `overlapped` returns this step time; 0 where the step is no longer than computing."""
    step, compute = np.asarray(step_time_s, dtype=np.float64), np.asarray(gradient_time_s, dtype=np.float64)
    gamma = np.asarray(gamma, dtype=np.float64)
    ratio = np.minimum(compute / step, 1.0)
    result: Floats = step * np.power(1.0 - np.power(ratio, gamma), 1.0 / gamma)
    return result


def step_time(theta: ArrayLike, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike) -> Floats:
    """T_opt, the time of the last micro-batch of a step and the all-reduce that overlaps it."""
    theta = np.asarray(theta, dtype=np.float64)
    return overlapped(gradient_time(theta, local_batch), sync_time(theta, nodes, gpus), theta[..., GAMMA])


# Three functional forms of the throughput model: `POLLUX`, `SATURATING` and `CROWDED`.
#
# All have the seven constants of `PARAMETERS` and  T_opt = (T_grad^γ + T_sync^γ)^(1/γ).  `SATURATING` was developed on
# held-out placements, node counts and batch sizes (docs/accuracy.md, Fits). It changes four things:
#
# - An all-reduce grows with its GPUs by a bandwidth term that saturates, like a ring's (M − 1)/M, and by a logarithmic
#   term for latency and stragglers (trees are log M deep, the slowest of M lags by about log M). Across or within nodes
#       T_sync = α + ρ·(1 − 2/M) + β·log₂(M/2)         instead of α + β·(M − 2); at M = 2 it is α.
# - Two nodes exchange over a single pair of links, more nodes over several. If N = 2, π·log₂(M/N) is added to T_sync.
# - The time of small batches is bounded below by kernel launches: T_grad = ((α_c + β_c·b)³ + φ³)^(1/3).
# - Where samples differ in length or size (speech, multi-scale images), all GPUs wait for the slowest: T_grad is
#   multiplied by 1 + σ·(M − 1)/(M + 1), which grows like the expected largest of M uniform draws.
#
# A further term in M − 2, for the latency of long rings, made predictions of held-out clusters worse (7 % → 10 %).
#
# `CROWDED` is for machines where T_sync depends on the *crowd* C, the largest number of the job's GPUs on one node,
# because these share the node's network cards. It differs from `SATURATING` across nodes only:
#       T_sync = α + β·log₂(M/2) + ρ·(1 − 1/C) + κ·(C − 1) + λ·log₂C + π·log₂C (if N = 2) + ν·log₂(N/2)
# The term in κ describes a network card of fixed bandwidth through which every GPU of a node sends its own data. The
# terms in ρ, κ and λ together fit any growth with C that slows down. `calibration.saved_by_crowd` compares both forms.


FLOOR_SHARPNESS = 3.0


def slowest_of(gpus: ArrayLike) -> Floats:
    """Lag of the slowest of M GPUs behind a single GPU, as a fraction of the largest possible lag: (M − 1)/(M + 1)."""
    several = np.asarray(gpus, dtype=np.float64)
    return (several - 1.0) / (several + 1.0)


@dataclass(frozen=True, eq=False)
class Form:
    """A functional form of the throughput model.

    parameters: names, in the order of theta's last axis. floor: whether it has `SATURATING`'s constants. crowd: whether
    it has `CROWDED`'s. ratios: index of a slope → index of its constant; the fit's prior favours small slope/constant.
    """

    name: str
    parameters: tuple[str, ...]
    floor: bool
    ratios: dict[int, int]
    crowd: bool = False

    @cached_property
    def lower(self) -> Floats:
        bound = np.full(len(self.parameters), TINY)
        bound[GAMMA] = GAMMA_MIN
        return bound

    @cached_property
    def upper(self) -> Floats:
        bound = np.full(len(self.parameters), np.inf)
        bound[GAMMA] = GAMMA_MAX
        return bound

    @cached_property
    def slopes(self) -> Ints:
        """(R,) indices of the slopes in `ratios`; `constants` has the indices of their constants."""
        return np.array(list(self.ratios), dtype=np.int64)

    @cached_property
    def constants(self) -> Ints:
        return np.array(list(self.ratios.values()), dtype=np.int64)

    @cached_property
    def ratio_signs(self) -> Floats:
        """(R, P): 1 at the slope of a ratio, −1 at its constant, else 0."""
        signs = np.zeros((len(self.ratios), len(self.parameters)))
        each = np.arange(len(self.ratios))
        signs[each, self.slopes], signs[each, self.constants] = 1.0, -1.0
        return signs

    def design(self, nodes: Floats, gpus: Floats, crowd: Floats) -> Floats:
        """Coefficient of each parameter in T_sync, (P, …) for arguments (…); 0 for parameters that T_sync lacks."""
        result = np.zeros((len(self.parameters), *np.shape(gpus)))
        across = nodes > 1
        within = (nodes <= 1) & (gpus > 1)
        result[ALPHA_N], result[ALPHA_R] = across, within
        if not self.floor:
            growth = np.maximum(gpus - 2.0, TINY)
            result[BETA_N], result[BETA_R] = across * growth, within * growth
            return result
        several = np.maximum(gpus, 2.0)
        depth, ring = np.log2(several / 2.0), 1.0 - 2.0 / several
        result[BETA_N], result[BETA_R] = across * depth, within * depth
        result[RHO_N], result[RHO_R] = across * ring, within * ring
        result[PAIR] = (nodes == 2) * np.log2(np.maximum(gpus / nodes, 1.0))
        if self.crowd:
            result[RHO_N] = across * (1.0 - 1.0 / crowd)
            result[CARD] = across * (crowd - 1.0)
            result[CROWD] = across * np.log2(crowd)
            result[PAIR] = (nodes == 2) * np.log2(crowd)
            result[NODES] = across * np.log2(np.maximum(nodes, 2.0) / 2.0)
        return result

    def lines(self, nodes: Floats, gpus: Floats, crowd: Floats, batch: Floats) -> tuple[Floats, Floats]:
        """α_c + β_c·b and T_sync as linear functions of the parameters: coefficients (F, 2, P, K), and the terms that
        do not depend on parameters, (F, 2, K). Arguments: (F, K).
        """
        linear = np.zeros((len(gpus), 2, len(self.parameters), gpus.shape[1]))
        linear[:, 0, ALPHA_C], linear[:, 0, BETA_C] = 1.0, batch
        linear[:, 1] = self.design(nodes, gpus, crowd).swapaxes(0, 1)
        alone = np.zeros((len(gpus), 2, gpus.shape[1]))
        alone[:, 1] = np.where(gpus > 1, 0.0, TINY + TINY * TINY)
        return linear, alone

    def gradient_time(self, theta: Floats, local_batch: ArrayLike, gpus: ArrayLike) -> Floats:
        """T_grad of the slowest of `gpus` GPUs in seconds; theta: (P,), the other arguments broadcast."""
        grad_s: Floats = theta[ALPHA_C] + theta[BETA_C] * np.asarray(local_batch, dtype=np.float64)
        if self.floor:
            grad_s = np.cbrt(grad_s**FLOOR_SHARPNESS + theta[FLOOR] ** FLOOR_SHARPNESS)
            grad_s = grad_s * (1.0 + theta[SLOWEST] * slowest_of(gpus))
        return grad_s

    def sync_time(self, theta: Floats, nodes: ArrayLike, gpus: ArrayLike, crowd: ArrayLike | None = None) -> Floats:
        """T_sync in seconds; theta: (P,). crowd: None if GPUs are spread evenly."""
        most = evenly(nodes, gpus) if crowd is None else crowd
        n, m, c = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (nodes, gpus, most)))
        design = self.design(n, m, c)
        alone = np.where(m > 1, 0.0, TINY + TINY * TINY)
        return np.tensordot(theta, design, axes=1) + alone

    def step_time(
        self, theta: Floats, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike, crowd: ArrayLike | None = None
    ) -> Floats:
        """T_opt in seconds; theta: (P,). crowd: None if GPUs are spread evenly."""
        return overlapped(
            self.gradient_time(theta, local_batch, gpus), self.sync_time(theta, nodes, gpus, crowd), theta[GAMMA]
        )


POLLUX = Form("pollux", PARAMETERS, floor=False, ratios={BETA_N: ALPHA_N, BETA_R: ALPHA_R})
SATURATING = Form(
    "saturating",
    (*PARAMETERS, "floor", "rho_n", "rho_r", "pair", "slowest"),
    floor=True,
    ratios={**POLLUX.ratios, RHO_N: ALPHA_N, RHO_R: ALPHA_R, PAIR: ALPHA_N},
)
CROWDED = Form(
    "crowded",
    (*SATURATING.parameters, "card", "crowd", "nodes"),
    floor=True,
    ratios={**SATURATING.ratios, CARD: ALPHA_N, CROWD: ALPHA_N, NODES: ALPHA_N},
    crowd=True,
)
FORMS = {each.name: each for each in (POLLUX, SATURATING, CROWDED)}


def form_named(name: str) -> Form:
    """The form called `name`. Raises InputError for an unknown name, with the nearest match."""
    if name not in FORMS:
        raise unknown("form", name, FORMS)
    return FORMS[name]


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Measurements of one job, or of all jobs of one application on one GPU type; arrays (rows,), one row per shape.

    local_batch: samples per GPU and micro-batch. step_time_s: the whole step; sync_time_s: its all-reduce. crowd: the
    largest number of GPUs on one node; None if spread evenly (`evenly`).
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
    """One profile with the rows of all profiles, without duplicates.

    If rows differ only in the crowd, the one with the largest crowd is kept. Files that only count nodes are read as an
    even spread, which has the smallest crowd, so files with exact placements correct them.
    """
    *measured, crowd = (
        np.concatenate([np.asarray(getattr(each, name), dtype=np.float64) for each in profiles])
        for name in ObservedSteps.__slots__
    )
    _, first, same = np.unique(np.stack(measured), axis=1, return_index=True, return_inverse=True)
    most = np.zeros(len(first))
    np.maximum.at(most, same.reshape(-1), crowd)
    order = np.argsort(first)
    nodes, gpus, batch, step, sync = (column[first[order]] for column in measured)
    return ObservedSteps(nodes, gpus, batch, step, sync, most[order])


@dataclass(frozen=True, slots=True)
class PaddedSteps:
    """F profiles padded to K rows each: arrays (F, K). design, alone: the two results of `Form.lines`.

    weight: sums to 1 per profile, 0 in the padding. log_factor: logarithm of a factor that corrects the form's T_grad.
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
        return (self.nodes > 1) & (self.weight > 0)

    @property
    def within(self) -> Bools:
        """Rows on several GPUs of one node."""
        return (self.nodes <= 1) & (self.gpus > 1) & (self.weight > 0)

    def take(self, profiles: Ints) -> PaddedSteps:
        return rows_at(self, profiles)

    def weighted(self, weight: Floats) -> PaddedSteps:
        """The rows with these weights (F, K), scaled to sum to 1 per profile."""
        return replace(self, weight=weight / weight.sum(axis=1, keepdims=True))


def padded(observations: Sequence[ObservedSteps], form: Form, *, min_rows: int = 1) -> PaddedSteps:
    """Pads one or more profiles to equal length. Raises InputError for a profile of fewer than `min_rows` rows."""
    lengths = [len(each) for each in observations]
    if min(lengths) < min_rows:
        index = int(np.argmin(lengths))
        raise InputError(f"profile {index} has {lengths[index]} rows; a fit needs at least {min_rows}.")
    longest = max(lengths)
    filled = np.ones((6, len(observations), longest))
    filled[4] = 0.5
    weight = np.zeros(filled.shape[1:])
    for index, (each, length) in enumerate(zip(observations, lengths, strict=True)):
        for column, name in enumerate(ObservedSteps.__slots__):
            filled[column, index, :length] = getattr(each, name)
        weight[index, :length] = 1.0 / length
    nodes, gpus, batch, step, sync, crowd = filled
    lines = form.lines(nodes, gpus, crowd, batch)
    return PaddedSteps(
        nodes, gpus, crowd, batch, *lines, np.log(step - sync), np.log(step), np.zeros_like(step), weight
    )
