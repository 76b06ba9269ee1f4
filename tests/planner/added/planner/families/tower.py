"""Towers of square products: the smallest family there can be, with nothing but what is asked of one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synergy_core.errors import InputError
from synergy_core.performance.planner.machine import Software
from synergy_core.performance.planner.plan import Plans
from synergy_core.performance.planner.work import Amount, Block, Gemm, Layers, Limits, SavedActivations, Work


@dataclass(frozen=True, slots=True)
class Architecture:
    """depth: products, one after another. width: rows and columns of each. parts: into how many it can be cut."""

    depth: int
    width: int
    parts: int

    def parameters(self) -> Amount:
        """Parameters of the whole model."""
        return float(self.depth * self.width**2)

    def check(self) -> None:
        """Every product has a column for each part."""
        if self.width % self.parts:
            raise InputError(f"parts: {self.parts} do not divide width: {self.width}.")

    def limits(self) -> Limits:
        """Products, and parts of one."""
        return Limits(layers=self.depth, heads=self.parts)


def work(a: Architecture, plans: Plans, software: Software) -> Work:
    """Every product split by columns, its output gathered."""
    columns, rows = a.width / plans.tensor, plans.micro_batch.astype(float)
    activation = software.weight_bytes * rows * a.width
    product = Block(
        name="product",
        gemms=(Gemm(rows, columns, float(a.width)),),
        replicated_bytes=2.0 * activation,
        kernels=1.0,
        tensor_bytes=activation,
        tensor_count=1.0,
        parameters=a.width * columns,
        boundary_bytes=activation,
        saved=SavedActivations(activation),
        live_bytes=2.0 * activation,
    )
    nothing = Block(name="ends")
    return Work(nothing, (Layers(product, np.asarray(float(a.depth))),), nothing)
