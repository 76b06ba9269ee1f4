"""The number format in which a job computes: what a GPU offers, casts between formats, and the loss scale of float16.

Weights, optimizer states, reduced gradients and losses are float32 in every format. Under FSDP the weights are gathered
in the low format (`parallel.share_out`). Under every plan autocast casts what is still float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from synergy_core.errors import InputError
from synergy_exec.training import trees

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The formats of 16 bits. `tf32` and `fp32` keep every tensor in float32."""


def chosen(precision: str, device: torch.device) -> str:
    """Resolves the setting `precision` on this device: `auto` is bf16 on GPUs that compute in bf16, else fp32.

    Raises InputError for bf16 on a GPU that only emulates it.
    """
    gpu = device.type == "cuda"
    has_bf16 = gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if precision == "auto":
        return "bf16" if has_bf16 else "fp32"
    if precision == "bf16" and gpu and not has_bf16:
        raise InputError(
            f"precision=bf16: {torch.cuda.get_device_name(device)} only emulates bfloat16, slowly; GPUs from NVIDIA's "
            "Ampere on compute in it. Set precision to fp16 or fp32."
        )
    return precision


def allow_tf32(precision: str) -> None:
    """Says whether GPUs may round the inputs of float32 products to TF32: in both matrix products and convolutions
    under `tf32`, in neither under `fp32`, and in convolutions alone, as torch does by default, under 16 bits.
    """
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision != "fp32"


def compute_in(part: nn.Module, low: torch.dtype, device: torch.device, *, last: bool) -> None:
    """Makes the part compute in a format of 16 bits. Call it once.

    last: whether the part gives the model's output, which is then float32; a stage sends 16 bits to the next.
    """
    forward: Callable[..., Any] = part.forward

    def cast(*inputs: Any, **named: Any) -> Any:
        # Casts made under no_grad have no gradient; the cache would reuse them in training.
        with torch.autocast(device.type, low, cache_enabled=torch.is_grad_enabled()):
            output = forward(*inputs, **named)
        return trees.floats(output) if last else output.to(low)

    part.forward = cast


@contextmanager
def weights_cast_once() -> Iterator[None]:
    """Within it autocast casts a weight once, however many micro-batches use it, and keeps one copy of it
    (a compiled block casts its own).
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()


GROWTH, GROWTH_STEPS, MIN_SCALE = 2.0, 2_000, 2.0**-24
"""The scale grows by this factor after so many finite steps in a row, and shrinks by it after one that is not finite
(torch.amp.GradScaler's defaults). Below the minimum, which float16 cannot tell from 0, scaling is not what is wrong."""


@dataclass(slots=True)
class LossScale:
    """Factor of the loss that keeps gradients within float16's range (Micikevicius et al. 2018, section 3.2).

    finite_steps: steps since the scale last changed.
    """

    value: float = 2.0**16
    finite_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Call after each step. finite: whether every gradient was. Raises InputError if no scale helps."""
        self.finite_steps = self.finite_steps + 1 if finite else 0
        if not finite:
            self.value /= GROWTH
        elif self.finite_steps == GROWTH_STEPS:
            self.value, self.finite_steps = self.value * GROWTH, 0
        if self.value < MIN_SCALE:
            raise InputError(
                f"precision=fp16: gradients were not finite at any loss scale down to {self.value:.0e}; the training "
                "diverges, or the model needs numbers beyond 65,504. Set precision to bf16 or fp32."
            )
