"""PyTorch's own DDP hooks for compression beside ours, on one model: seconds, error, whether replicas stay equal.

    python bench/compression_hooks.py [--width 1024] [--depth 4] [--steps 10]

Two gloo ranks of one thread each. exchange ms: the backward pass with the hook less one without any exchange, median.
error: of the exchanged gradient, relative to the exact mean, root mean square over the steps. bias: of the mean of the
exchanged gradients over the steps, all of which have the same samples: an unbiased compressor's falls with their
number, and so does one's that carries on what it held back. Each hook has processes of its own, since some die.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from synergy_core.planner.plan import Plan
from synergy_exec.training.compression.exchange import Exchange

RANKS = 2
TORCH: dict[str, Callable[[DistributedDataParallel], None]] = {
    "torch none": lambda module: None,
    "torch fp16": lambda module: module.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "torch bf16": lambda module: module.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "torch powersgd-4": lambda module: module.register_comm_hook(
        powerSGD_hook.PowerSGDState(None, 4, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook
    ),
    "torch 8 bits, per tensor": lambda module: module.register_comm_hook(
        distributed.group.WORLD, quantization_hooks.quantization_pertensor_hook
    ),
    "torch 8 bits, per 512": lambda module: module.register_comm_hook(
        distributed.group.WORLD, quantization_hooks.quantization_perchannel_hook
    ),
}
OURS = ["none", "fp16", "bf16", "q8", "q4", "q2", "topk-0.01", "powersgd-4"]


def ours(compressor: str) -> Callable[[DistributedDataParallel], None]:
    def register(module: DistributedDataParallel) -> None:
        assert distributed.group.WORLD is not None
        plan = Plan(data=RANKS, compressor=compressor)
        Exchange(module, plan, distributed.group.WORLD, torch.device("cpu"), seed=0)

    return register


HOOKS = TORCH | {f"ours {each}": ours(each) for each in OURS}


def measured(register: Callable[[DistributedDataParallel], None], width: int, depth: int, steps: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(*(each for _ in range(depth) for each in (nn.Linear(width, width), nn.Tanh())))
    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    try:
        register(module)
    except Exception as error:
        return f"refused: {str(error).splitlines()[0]}"
    inputs = torch.randn(8, width, generator=torch.Generator().manual_seed(distributed.get_rank()))

    def backward(exchanged: bool) -> tuple[float, Tensor]:
        module.zero_grad()
        began = time.perf_counter()
        if exchanged:
            module(inputs).square().mean().backward()
        else:
            with module.no_sync():
                module(inputs).square().mean().backward()
        took = time.perf_counter() - began
        return took, torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])

    alone, exact = zip(*(backward(False) for _ in range(steps)), strict=True)
    mean = exact[0].clone()
    distributed.all_reduce(mean)
    mean /= RANKS
    # The first steps of torch's hooks are others: buckets are made anew, PowerSGD waits.
    for _ in range(3):
        backward(True)
    together, found = zip(*(backward(True) for _ in range(steps)), strict=True)
    errors = [float((each - mean).norm() / mean.norm()) for each in found]
    bias = float((torch.stack(found).mean(0) - mean).norm() / mean.norm())
    other = found[-1].clone()
    distributed.broadcast(other, 0)
    equal = torch.tensor(float(torch.equal(other, found[-1])))
    distributed.all_reduce(equal, distributed.ReduceOp.MIN)
    exchange_s = statistics.median(together) - statistics.median(alone)
    error = statistics.mean(each**2 for each in errors) ** 0.5
    return f"{1000 * exchange_s:.1f} | {error:.4f} | {bias:.4f} | {'yes' if equal else 'no'}"


def rank(number: int, store: str, name: str, options: Any) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=RANKS)
    line = measured(HOOKS[name], options.width, options.depth, options.steps)
    if number == 0:
        print(f"| {name} | {line} |", flush=True)
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1024), ("depth", 4), ("steps", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"| hook | exchange ms | error | bias | replicas equal |\n|{'---|' * 5}", flush=True)
    for name in HOOKS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                # This process has run nothing of torch's: a fork of it need not import it again.
                multiprocessing.start_processes(
                    rank, (f"{folder}/store", name, options), nprocs=RANKS, start_method="fork"
                )
            except (ProcessExitedException, ProcessRaisedException) as error:
                lines = str(error).strip().splitlines()
                reason = next((line for line in reversed(lines) if "Error" in line), lines[0])
                print(f"| {name} | dies: {reason} |", flush=True)


if __name__ == "__main__":
    main()
