"""How much a sample is worth in a large batch: gradient noise, gain, statistical efficiency, learning-rate factors.

Pollux (OSDI 2021, section 3.1) after McCandlish et al. (2018) and AdaScale (Johnson et al., ICML 2020). With
grad_sqr = |E g|² and grad_var = the variance of g, both of a gradient over the initial batch B₀:

    φ = B₀·grad_var / grad_sqr                 the noise scale referred to B₀, samples
    gain(B) = (grad_var + grad_sqr) / (grad_var·B₀/B + grad_sqr)
    efficiency(B) = gain(B)·B₀/B = (φ + B₀) / (φ + B)

An iteration at batch B is worth gain(B) iterations at B₀. All functions broadcast; batches in samples, B ≥ B₀;
grad_sqr and grad_var are ≥ 0 and not both 0. `batch.best_batch`, which asks for thousands of candidates at once, has
the gain multiplied out.
"""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats


def noise_scale(grad_sqr: ArrayLike, grad_var: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """φ = B₀·grad_var/grad_sqr, samples: batches well below it lose little; inf where grad_sqr is 0."""
    numerator = np.multiply(initial_batch, grad_var, dtype=np.float64)
    with np.errstate(divide="ignore"):
        result: Floats = np.divide(numerator, grad_sqr)
    return result


@overload
def gain(scale: float, grad_sqr: float, grad_var: float) -> float: ...
@overload
def gain(scale: float | Floats, grad_sqr: float | Floats, grad_var: float | Floats) -> float | Floats: ...
def gain(scale: float | Floats, grad_sqr: float | Floats, grad_var: float | Floats) -> float | Floats:
    """Iterations at the initial batch that one at `scale` = B/B₀ ≥ 1 times that batch is worth; from 1 to `scale`.

    Numbers or arrays. Pollux (OSDI 2021), section 3; either statistic may be 0, not both.
    """
    return (grad_var + grad_sqr) / (grad_var / scale + grad_sqr)


def statistical_efficiency(total_batch: ArrayLike, noise_scale: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """Progress per sample relative to the initial batch, (φ + B₀)/(φ + B); in (0, 1], 1 where φ is inf."""
    surplus = np.subtract(total_batch, initial_batch, dtype=np.float64)
    # (φ + B₀)/(φ + B) = 1 − (B − B₀)/(φ + B), which stays defined at φ = ∞.
    result: Floats = 1.0 - surplus / np.add(noise_scale, total_batch, dtype=np.float64)
    return result


def adascale_factor(
    total_batch: ArrayLike, noise_scale: ArrayLike, initial_batch: ArrayLike, *, exponent: float = 1.0
) -> Floats:
    """What to multiply the initial batch's learning rate by: its gain.

    AdaScale (Johnson et al., ICML 2020, algorithm 1):  r = E[σ² + μ²] / E[σ²/S + μ²] = (B/B₀)·efficiency(B), for SGD.
    exponent: 0.5 for Adam-like optimisers, whose step does not grow with the gradient.
    """
    scale = np.divide(total_batch, initial_batch)
    worth = scale * statistical_efficiency(total_batch, noise_scale, initial_batch)
    result: Floats = np.power(worth, exponent)
    return result


def square_root_factor(total_batch: ArrayLike, initial_batch: ArrayLike) -> Floats:
    """What to multiply the learning rate by, whatever the noise: √(B/B₀).

    It keeps the variance of a step's weight change (Krizhevsky 2014, section 5; for Adam: Malladi et al. 2022).
    """
    result: Floats = np.sqrt(np.divide(total_batch, initial_batch))
    return result
