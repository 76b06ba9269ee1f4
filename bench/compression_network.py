"""Two replicas over a link of 1 Gb/s: seconds of a step under every compressor, beside what the model says.

    python bench/compression_network.py [steps] [--gbps 1] [--rounds 16] [--json FILE]     # minutes: 4
    python bench/compression_network.py collectives                                        # minutes: 1

Two ranks in network namespaces (`slow_link.py`), one thread each, train the shipped GPT at a size at which gradients
weigh: --hidden, --depth, --tokens, --micro-batch. A round is one step of each way in turn, so that what else the
machine does falls on all of them alike; the rounds that count are those in which others used at most a quarter of a
core, else the quietest. Steps in which noise statistics are measured are left out. Of every other round the model is
told what a task would know: a step without replicas (the same two processes, that do not talk), how much longer it is
when they meet at its end, a step without a compressor, and the codec's time as the executor reports it. It says

    step alone + T_sync(c),   T_sync(c) = collectives · L + (T_sync − L) · sent(c)/sent(none) + codec(c)

with T_sync = uncompressed step − step alone, and bytes by the core's formulas (`goodput/exchange.py`). L is what an
all-reduce of one number adds to a step: mostly waiting for the other rank, ten times what it takes by itself. That is
put beside the medians of the other rounds.

`collectives` prints how long gloo takes to give so many bytes to the other rank, beside what the link carries: its own
all-to-all, and in pieces as `training/compression/wire.py` sends them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import slow_link
import torch
from cpu_shares import busy, own
from torch import distributed

from synergy_core.goodput.compression import compressor_named
from synergy_core.goodput.compression._compressor import LayerSizes
from synergy_core.goodput.efficiency import ExchangeTerms, compressed_sync
from synergy_core.planner.plan import Plan
from synergy_exec.examples.gpt import Gpt
from synergy_exec.training.compression.exchange import FIRST_MEASURED, MEASURED_EVERY
from synergy_exec.training.compression.wire import Wire
from synergy_exec.training.trainer import Trainer

RANKS = 2
COMPRESSORS = ["none", "bf16", "q8", "q4", "powersgd-4", "topk-0.01"]
ALONE, MEETING = "alone", "meeting"
QUIET_CPUS = 0.25
TRIES = 12
"""As many rounds as asked for, times this, are tried for quiet ones."""
SIZES = [2**14, 2**18, 2**20, 2**22, 2**24]


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of one, bytes that left this rank, seconds of encoding and decoding."""

    step_s: float
    sent_bytes: float = 0.0
    codec_s: float = 0.0


def steps_of(trainer: Trainer, *, meet: bool = False) -> Callable[[int], Step]:
    """Takes a step of that number, begun together. meet: then adds up a number with the other rank."""

    def step(number: int) -> Step:
        distributed.barrier()
        began = time.perf_counter()
        exchanged = trainer.step(number).exchanged
        if meet:
            distributed.all_reduce(torch.zeros(1))
        took_s = time.perf_counter() - began
        return Step(took_s) if exchanged is None else Step(took_s, exchanged.sent_bytes, exchanged.codec_s)

    return step


def median_s(work: Callable[[], object], times: int) -> float:
    """Of something that both ranks do, begun together."""
    taken = []
    for _ in range(times):
        distributed.barrier()
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def rounds(ways: dict[str, Callable[[int], Step]], wanted: int, warm: int) -> tuple[list[dict[str, Step]], float]:
    """As many as wanted, in order, the quietest of those tried; CPUs that others used in the least quiet of them."""
    for number in range(warm):
        for step in ways.values():
            step(number)
    tried: list[tuple[float, int, dict[str, Step]]] = []
    number = warm
    while sum(others <= QUIET_CPUS for others, _, _ in tried) < wanted and len(tried) < TRIES * wanted:
        number += 2 if (number + 1) % MEASURED_EVERY == 0 else 1
        busy_s, own_s, began_s = busy(), own(), time.monotonic()
        found = {name: step(number) for name, step in ways.items()}
        others = torch.tensor((busy() - busy_s - (own() - own_s)) / (time.monotonic() - began_s))
        distributed.broadcast(others, 0)  # rank 1 did not start rank 0, and takes it for another
        tried.append((float(others), number, found))
    quietest = sorted(tried, key=lambda each: each[:2])[:wanted]
    return [found for _, _, found in sorted(quietest, key=lambda each: each[1])], quietest[-1][0]


def measure(rank: int, options: Any) -> dict[str, Any]:
    """What `predict` and `show` take."""
    job = Gpt(hidden=options.hidden, depth=options.depth, tokens=options.tokens)
    alone = Trainer(job, Plan(micro_batch=options.micro_batch))
    slow_link.join(rank)
    ways = {ALONE: steps_of(alone), MEETING: steps_of(alone, meet=True)}
    for name in COMPRESSORS:
        plan = Plan(data=RANKS, micro_batch=options.micro_batch, compressor=name)
        ways[name] = steps_of(Trainer(job, plan))
    found, others = rounds(ways, options.rounds, FIRST_MEASURED + options.warm)
    return {
        "others_cpus": others,
        "all_reduce_s": median_s(lambda: distributed.all_reduce(torch.zeros(1)), 200),
        "shapes": [list(each.shape) for each in job.build_model().parameters()],
        "told": {name: asdict(middle([each[name] for each in found[::2]])) for name in ways},
        "seen": {name: asdict(middle([each[name] for each in found[1::2]])) for name in ways},
    }


def middle(steps: Sequence[Step]) -> Step:
    """Medians."""
    return Step(*(statistics.median(getattr(each, name) for each in steps) for name in Step.__slots__))


def predict(found: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step by compressor."""
    layers, told = LayerSizes.of_shapes(found["shapes"]), found["told"]
    whole = compressor_named("none").sent_bytes(layers, RANKS).sum()
    alone_s = told[ALONE]["step_s"]
    latency_s = max(told[MEETING]["step_s"] - alone_s, found["all_reduce_s"])
    sync_s = max(told["none"]["step_s"] - alone_s, 0.0)
    said = {"none": alone_s + sync_s}
    for each in map(compressor_named, COMPRESSORS[1:]):
        sent = float(each.sent_bytes(layers, RANKS).sum() / whole)
        terms = ExchangeTerms(each.collectives, latency_s, sent, told[each.name]["codec_s"])
        said[each.name] = alone_s + float(compressed_sync(sync_s, terms))
    return said


def show(found: dict[str, Any], said: dict[str, float], gbps: float) -> None:
    """The table."""
    told, seen = found["told"], found["seen"]
    sync_s = told["none"]["step_s"] - told[ALONE]["step_s"]
    print(
        f"step alone {1e3 * told[ALONE]['step_s']:.1f} ms, exchange {1e3 * sync_s:.1f} ms: "
        f"{8e-9 * told['none']['sent_bytes'] / sync_s:.2f} Gb/s, of {gbps * slow_link.PAYLOAD:.2f} that the link "
        f"carries; meeting {1e3 * (told[MEETING]['step_s'] - told[ALONE]['step_s']):.1f} ms, an all-reduce of one "
        f"number by itself {1e3 * found['all_reduce_s']:.2f} ms; others used {found['others_cpus']:.2f} CPUs at most"
    )
    print(f"| compressor | bytes | codec, ms | step, ms | predicted | off |\n|{'---|' * 6}")
    for name in COMPRESSORS:
        own_s = seen[name]["step_s"]
        print(
            f"| {name} | {seen[name]['sent_bytes']:,.0f} | {1e3 * seen[name]['codec_s']:.1f} | {1e3 * own_s:.1f} "
            f"| {1e3 * said[name]:.1f} | {said[name] / own_s - 1:+.1%} |"
        )


def steps(rank: int, options: Any) -> dict[str, Any]:
    """Measures, predicts, shows."""
    found = measure(rank, options)
    found["predicted_s"] = predict(found)
    if rank == 0:
        show(found, found["predicted_s"], options.gbps)
    return found


def collectives(rank: int, options: Any) -> dict[str, Any]:
    """Milliseconds by bytes that leave a rank."""
    slow_link.join(rank)
    assert distributed.group.WORLD is not None
    wire = Wire(distributed.group.WORLD, torch.device("cpu"))
    if rank == 0:
        print(f"| bytes | the link carries, ms | all-to-all | in pieces |\n|{'---|' * 4}")
    found = []
    for size in options.sizes:
        given = torch.zeros(RANKS, size, dtype=torch.uint8)
        taken = torch.empty_like(given)
        whole_s = median_s(lambda given=given, taken=taken: distributed.all_to_all_single(taken, given), 15)
        pieces_s = median_s(lambda given=given: wire.swap(given), 15)
        link_s = 8 * size / (options.gbps * 1e9 * slow_link.PAYLOAD)
        found.append({"sent_bytes": size, "link_s": link_s, "whole_s": whole_s, "pieces_s": pieces_s})
        if rank == 0:
            print(f"| {size:,} | {1e3 * link_s:.2f} | {1e3 * whole_s:.2f} | {1e3 * pieces_s:.2f} |", flush=True)
    return {"collectives": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="steps", choices=("steps", "collectives"))
    parser.add_argument("--gbps", type=float, default=1.0)
    sizes = {"rounds": 16, "warm": 60, "hidden": 256, "depth": 6, "tokens": 32, "micro-batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes, for collectives")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rank = slow_link.enter(options.gbps)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    found = {"steps": steps, "collectives": collectives}[options.what](rank, options)
    if rank == 0 and options.json:
        options.json.write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
