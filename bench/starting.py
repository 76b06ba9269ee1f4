"""What a rank's start costs under plans of each kind: CPU seconds of rank 0.

    python bench/starting.py [REPEATS]                        # minutes: 1

Ranks are forked from a process that has imported everything, as the executor's parent of workers does, and meet over
gloo. Medians.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import socket
import statistics
import sys
import time

import torch
import yaml  # type: ignore[import-untyped]
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from synergy_core.planner.plan import Plan
from synergy_exec.job_file import job_of
from synergy_exec.training.loading import load_job
from synergy_exec.training.trainer import Trainer
from synergy_exec.worker.start import WARM
from synergy_exec.workload import models

CASES = (
    ("gpt", Plan(micro_batch=4)),
    ("gpt", Plan(data=2, micro_batch=4)),
    ("gpt", Plan(pipeline=2, micro_batch=4, accumulation=2)),
    ("mlp", Plan(tensor=2, micro_batch=4)),
    ("mlp", Plan(pipeline=2, micro_batch=4, accumulation=2)),
    ("gpt", Plan(data=2, zero=3, micro_batch=4)),
)
PARTS = ("meeting", "building", "first step", "next step")


def rank(number: int, model: str, plan: Plan, listening: socket.socket, said: int) -> None:
    """One rank's start; rank 0 writes its CPU seconds, by `PARTS`."""
    torch.set_num_threads(1)
    began = [time.process_time()]
    if plan.gpus > 1:
        address, port = listening.getsockname()
        first = number == 0
        store = TCPStore(
            address,
            port,
            plan.gpus,
            is_master=first,
            wait_for_workers=False,
            master_listen_fd=listening.fileno() if first else None,
        )
        distributed.init_process_group("gloo", store=store, rank=number, world_size=plan.gpus)
    began.append(time.process_time())
    path = models()[model]
    file = job_of(yaml.safe_load(path.read_text(encoding="utf-8")) | {"work": 1}, str(path))
    trainer = Trainer(load_job(file.job_class, file.arguments), plan)
    began.append(time.process_time())
    for step in range(2):
        trainer.step(step)
        began.append(time.process_time())
    if number == 0:
        os.write(said, json.dumps([b - a for a, b in itertools.pairwise(began)]).encode())


def started(model: str, plan: Plan) -> list[float]:
    """Rank 0's CPU seconds, by `PARTS`."""
    heard, said = os.pipe()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        children = []
        for number in range(plan.gpus):
            if (child := os.fork()) == 0:
                try:
                    rank(number, model, plan, listening, said)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    os.close(said)
    with os.fdopen(heard, "rb") as answer:
        found: list[float] = json.loads(answer.read())
    return found


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    for module in WARM:
        importlib.import_module(module)
    gc.freeze()
    print(f"{'CPU seconds of rank 0':34}" + "".join(f"{part:>12}" for part in PARTS))
    for model, plan in CASES:
        found = [started(model, plan) for _ in range(repeats)]
        medians = [statistics.median(each) for each in zip(*found, strict=True)]
        print(f"{model} {plan.describe():30}" + "".join(f"{each:12.3f}" for each in medians))
    return 0


if __name__ == "__main__":
    sys.exit(main())
