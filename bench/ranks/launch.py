"""Runs a function on two ranks, each on one thread, with the machine's own speed between them or over a slowed link.

A slowed link is the loopback of a network namespace of its own with a token bucket (`tc … tbf`), which disappears with
the ranks. Both directions share the bucket, so it has twice the rate: ranks exchange gradients in both directions at
once. The machine's own network is not touched. Root, or user namespaces, are needed.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RANKS = 2
BURST_BYTES = 256 * 1024
"""Loopback packets have up to 64 KiB; longer ones than the burst would be split first."""
QUEUE_MS = 50
"""Limit of the queue. TCP fills no more than its window, so nothing is dropped below that."""


def on_two_ranks(target: str, gbps: float | None = None, **arguments: Any) -> dict[str, Any]:
    """Calls `module:function(rank, **arguments)` on both ranks of a gloo group, and returns what rank 0 returned.

    gbps: rate of the link in each direction; None for no limit. Raises RuntimeError if a rank fails, or if the machine
    does not allow a slowed link.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = "from ranks import launch; launch.main()"
        command = [sys.executable, "-c", start, folder, target, json.dumps(arguments)]
        if gbps is not None:
            bucket = f"rate {round(RANKS * gbps * 1e9)}bit burst {BURST_BYTES} latency {QUEUE_MS}ms"
            link = f'ip link set lo up && tc qdisc add dev lo root tbf {bucket} && exec "$@"'
            own = [] if os.geteuid() == 0 else ["--map-root-user"]
            command = ["unshare", "--net", *own, "sh", "-c", link, "sh", *command]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": "lo"}
        done = subprocess.run(command, env=os.environ | path, capture_output=True, text=True)
        if done.returncode:
            needs = "" if gbps is None else " over a slowed link (it needs root, util-linux, iproute2 and sch_tbf)"
            raise RuntimeError(f"two ranks did not run{needs}: {done.stderr[-2000:]}")
        return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))


def main() -> None:
    from torch import multiprocessing

    multiprocessing.spawn(_rank, tuple(sys.argv[1:]), nprocs=RANKS)


def _rank(number: int, folder: str, target: str, arguments: str) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=RANKS)
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(number, **json.loads(arguments))
    if number == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result), encoding="utf-8")
    distributed.destroy_process_group()
