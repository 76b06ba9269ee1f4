"""The shapes a throughput model may take: Pollux's, one that saturates as all-reduces do, and one of crowded nodes.

All share the seven constants of `throughput.PARAMETERS` and  T_opt = (T_grad^γ + T_sync^γ)^(1/γ).  `SATURATING` was
found on held-out placements, node counts and batch sizes (bench/fit.py prints the evidence). It changes four things:

- What grows with the GPUs of an all-reduce is a bandwidth term that saturates, as a ring's (M − 1)/M does, and a
  latency and straggler term in the logarithm (trees are log M deep, and the slowest of M lags by about log M):
      T_sync = α + ρ·(1 − 2/M) + β·log₂(M/2)         instead of α + β·(M − 2), in either class; at M = 2 it is α.
- Two nodes exchange over one pair of links, more nodes over several: + π·log₂(M/N) across nodes if N = 2.
- Small batches do not shrink below what launching kernels costs: T_grad = ((α_c + β_c·b)³ + φ³)^(1/3).
- All wait for the slowest: T_grad·(1 + σ·(M − 1)/(M + 1)), as the expected largest of M uniform draws grows, where
  samples differ in length or size (speech, multi-scale images).

A term in M − 2 besides, for the latency of long rings, was tried: held-out clusters got worse (7 % → 10 %).

`CROWDED` is for machines where what counts is the *crowd* C, the job's GPUs on the node that has most of them: they
share its network cards. It differs across nodes only:
      T_sync = α + β·log₂(M/2) + ρ·(1 − 1/C) + κ·(C − 1) + λ·log₂C + π·log₂C (if N = 2) + ν·log₂(N/2)
κ is a card of fixed bandwidth through which every GPU of the node sends by itself; with ρ and λ the three add up to
whatever grows with C less and less. `held_out.calls_for_crowd` says which of the two a table of measurements calls for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats, Ints
from synergy_core.errors import unknown
from synergy_core.goodput.throughput import GAMMA_MAX, GAMMA_MIN, PARAMETERS, TINY, evenly, overlapped

FLOOR_SHARPNESS = 3.0
ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA, FLOOR, RHO_N, RHO_R, PAIR, SLOWEST = range(12)
CARD, CROWD, NODES = range(12, 15)


def slowest_of(gpus: ArrayLike) -> Floats:
    """How far the slowest of M GPUs lags behind one alone, as a part of the most that it can: (M − 1)/(M + 1)."""
    several = np.asarray(gpus, dtype=np.float64)
    result: Floats = (several - 1.0) / (several + 1.0)
    return result


@dataclass(frozen=True)
class Form:
    """One shape of model.

    parameters: names, in the order of theta's last axis. sync: which of them multiply the rows of `design`.
    floor: whether `FLOOR` is among them, crowd: whether `CROWD`. ratios: (slope, constant) pairs whose quotient is held
    small by the fit.
    """

    name: str
    parameters: tuple[str, ...]
    sync: tuple[int, ...]
    floor: bool
    ratios: tuple[tuple[int, int], ...]
    crowd: bool = False

    @cached_property
    def lower(self) -> Floats:
        """The least value of each parameter."""
        bound = np.full(len(self.parameters), TINY)
        bound[GAMMA] = GAMMA_MIN
        return bound

    @cached_property
    def upper(self) -> Floats:
        """The largest value of each parameter."""
        bound = np.full(len(self.parameters), np.inf)
        bound[GAMMA] = GAMMA_MAX
        return bound

    @cached_property
    def slopes(self) -> Ints:
        """The first of each pair of `ratios`."""
        return np.array([slope for slope, _ in self.ratios])

    @cached_property
    def constants(self) -> Ints:
        """The second of each pair of `ratios`."""
        return np.array([constant for _, constant in self.ratios])

    @cached_property
    def sync_at(self) -> Ints:
        """`sync` as an index."""
        return np.array(self.sync)

    def design(self, nodes: Floats, gpus: Floats, crowd: Floats) -> Floats:
        """What each parameter of `sync` is multiplied by: (len(sync), …) for arguments of shape (…)."""
        across = nodes > 1
        within = (nodes <= 1) & (gpus > 1)
        if not self.floor:
            growth = np.maximum(gpus - 2.0, TINY)
            grown: Floats = np.stack([across, across * growth, within, within * growth]).astype(np.float64)
            return grown
        several = np.maximum(gpus, 2.0)
        depth, ring = np.log2(several / 2.0), 1.0 - 2.0 / several
        columns = {
            ALPHA_N: across,
            BETA_N: across * depth,
            ALPHA_R: within,
            BETA_R: within * depth,
            RHO_N: across * ring,
            RHO_R: within * ring,
            PAIR: (nodes == 2) * np.log2(np.maximum(gpus / nodes, 1.0)),
        }
        if self.crowd:
            columns[RHO_N] = across * (1.0 - 1.0 / crowd)
            columns[CARD] = across * (crowd - 1.0)
            columns[CROWD] = across * np.log2(crowd)
            columns[PAIR] = (nodes == 2) * np.log2(crowd)
            columns[NODES] = across * np.log2(np.maximum(nodes, 2.0) / 2.0)
        result: Floats = np.stack([columns[each] for each in self.sync]).astype(np.float64)
        return result

    def gradient_time(self, theta: Floats, local_batch: ArrayLike, gpus: ArrayLike) -> Floats:
        """T_grad in seconds, of the slowest of `gpus`; theta (P,)."""
        line = theta[ALPHA_C] + theta[BETA_C] * np.asarray(local_batch, dtype=np.float64)
        if not self.floor:
            plain: Floats = line
            return plain
        floored = np.cbrt(line**FLOOR_SHARPNESS + theta[FLOOR] ** FLOOR_SHARPNESS)
        result: Floats = floored * (1.0 + theta[SLOWEST] * slowest_of(gpus))
        return result

    def sync_time(self, theta: Floats, nodes: ArrayLike, gpus: ArrayLike, crowd: ArrayLike | None = None) -> Floats:
        """T_sync in seconds; theta (P,)."""
        most = evenly(nodes, gpus) if crowd is None else crowd
        n, m, c = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (nodes, gpus, most)))
        design = self.design(n, m, c)
        alone = np.where(m > 1, 0.0, TINY + TINY * TINY)
        result: Floats = np.tensordot(theta[self.sync_at], design, axes=1) + alone
        return result

    def step_time(
        self,
        theta: Floats,
        nodes: ArrayLike,
        gpus: ArrayLike,
        local_batch: ArrayLike,
        crowd: ArrayLike | None = None,
    ) -> Floats:
        """T_opt in seconds; theta (P,). crowd: None for GPUs that are spread evenly."""
        return overlapped(
            self.gradient_time(theta, local_batch, gpus), self.sync_time(theta, nodes, gpus, crowd), theta[GAMMA]
        )


POLLUX = Form(
    "pollux",
    PARAMETERS,
    (ALPHA_N, BETA_N, ALPHA_R, BETA_R),
    floor=False,
    ratios=((BETA_N, ALPHA_N), (BETA_R, ALPHA_R)),
)
SATURATING = Form(
    "saturating",
    (*PARAMETERS, "floor", "rho_n", "rho_r", "pair", "slowest"),
    (ALPHA_N, BETA_N, ALPHA_R, BETA_R, RHO_N, RHO_R, PAIR),
    floor=True,
    ratios=((BETA_N, ALPHA_N), (BETA_R, ALPHA_R), (RHO_N, ALPHA_N), (RHO_R, ALPHA_R), (PAIR, ALPHA_N)),
)
CROWDED = Form(
    "crowded",
    (*SATURATING.parameters, "card", "crowd", "nodes"),
    (*SATURATING.sync, CARD, CROWD, NODES),
    floor=True,
    ratios=(*SATURATING.ratios, (CARD, ALPHA_N), (CROWD, ALPHA_N), (NODES, ALPHA_N)),
    crowd=True,
)
FORMS = {each.name: each for each in (POLLUX, SATURATING, CROWDED)}


def form_named(name: str) -> Form:
    """The form of that name. Raises InputError with the nearest match otherwise."""
    if name not in FORMS:
        raise unknown("form", name, FORMS)
    return FORMS[name]
