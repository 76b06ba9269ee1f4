"""How long a step takes on so many nodes and GPUs: Pollux's model (OSDI 2021, section 3.2), in seven constants.

`theta` is an array (..., 7) in the order of `PARAMETERS`:

    T_grad(b)    = α_c + β_c·b
    T_sync(N, M) = α_n + β_n·max(M − 2, ε)   if N > 1
                   α_r + β_r·max(M − 2, ε)   if N = 1 and M > 1
                   ε + ε·ε                   if M = 1
    T_opt        = (T_grad^γ + T_sync^γ)^(1/γ)
    T_iter       = (a − 1)·T_grad + T_opt

with b the samples per GPU and micro-batch, a micro-batches per step (accumulation), N nodes, M GPUs, ε = 1e-8; α and β
in seconds, γ from 1 (no overlap of computing and all-reduce) to 10 (nearly the larger of the two).

All functions broadcast `theta`'s leading axes against the other arguments, and answer in seconds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats

PARAMETERS = ("alpha_c", "beta_c", "alpha_n", "beta_n", "alpha_r", "beta_r", "gamma")
TINY = 1e-8
"""The lower bound of every α and β, and the synchronisation of one GPU with itself."""
GAMMA_MIN, GAMMA_MAX = 1.0, 10.0


def evenly(nodes: ArrayLike, gpus: ArrayLike) -> Floats:
    """GPUs on the most crowded node where they are spread as evenly as can be: GPUs ÷ nodes, rounded up."""
    result: Floats = np.ceil(np.asarray(gpus, dtype=np.float64) / np.maximum(nodes, 1))
    return result


def gradient_time(theta: ArrayLike, local_batch: ArrayLike) -> Floats:
    """T_grad: the forward and backward pass of one micro-batch of `local_batch` samples on one GPU."""
    theta = np.asarray(theta, dtype=np.float64)
    result: Floats = theta[..., 0] + theta[..., 1] * np.asarray(local_batch, dtype=np.float64)
    return result


def sync_time(theta: ArrayLike, nodes: ArrayLike, gpus: ArrayLike) -> Floats:
    """T_sync: the all-reduce of the gradients over `gpus` GPUs on `nodes` nodes, before any overlap."""
    theta = np.asarray(theta, dtype=np.float64)
    nodes, gpus = np.asarray(nodes), np.asarray(gpus)
    beyond_two = np.maximum(np.asarray(gpus, dtype=np.float64) - 2.0, TINY)
    across = theta[..., 2] + theta[..., 3] * beyond_two
    within = theta[..., 4] + theta[..., 5] * beyond_two
    result: Floats = np.where(nodes > 1, across, np.where(gpus > 1, within, TINY + TINY * TINY))
    return result


def overlapped(gradient_time_s: ArrayLike, sync_time_s: ArrayLike, gamma: ArrayLike) -> Floats:
    """(T_grad^γ + T_sync^γ)^(1/γ), with the larger term taken out so that no power under- or overflows."""
    first, second = np.asarray(gradient_time_s, dtype=np.float64), np.asarray(sync_time_s, dtype=np.float64)
    larger = np.maximum(first, second)
    ratio = np.minimum(first, second) / larger
    gamma = np.asarray(gamma, dtype=np.float64)
    result: Floats = larger * np.power(1.0 + np.power(ratio, gamma), 1.0 / gamma)
    return result


def exchange_time(step_time_s: ArrayLike, gradient_time_s: ArrayLike, gamma: ArrayLike) -> Floats:
    """The T_sync with which `overlapped` makes that step; 0 where it is no longer than computing."""
    step, compute = np.asarray(step_time_s, dtype=np.float64), np.asarray(gradient_time_s, dtype=np.float64)
    gamma = np.asarray(gamma, dtype=np.float64)
    ratio = np.minimum(compute / step, 1.0)
    result: Floats = step * np.power(1.0 - np.power(ratio, gamma), 1.0 / gamma)
    return result


def step_time(theta: ArrayLike, nodes: ArrayLike, gpus: ArrayLike, local_batch: ArrayLike) -> Floats:
    """T_opt: the step that synchronises, the last micro-batch and the all-reduce that overlaps it."""
    theta = np.asarray(theta, dtype=np.float64)
    return overlapped(gradient_time(theta, local_batch), sync_time(theta, nodes, gpus), theta[..., 6])
