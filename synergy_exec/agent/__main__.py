"""`python -m synergy_exec.agent`: one per node; backends start them."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from synergy_core.errors import InputError
from synergy_exec.agent.agent import Agent
from synergy_exec.agent.cores import divide, near_gpus, own_cores
from synergy_exec.agent.gpus import UNTYPED, gpus_here, seen_by, type_of_node
from synergy_exec.worker.processes import adopt_orphans, die_with

TOKEN = "SYNERGY_TOKEN"
"""The environment variable that holds the controller's token; other processes can read arguments."""


def main() -> int:
    """Runs the agent; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m synergy_exec.agent", description=__doc__)
    parser.add_argument("--url", required=True, help="of the controller, such as http://127.0.0.1:8080")
    parser.add_argument("--node", type=int, required=True, help="this node's number in the cluster, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many workers can train here at once")
    parser.add_argument("--gpu-type", default="cpu", help="of the slots; cpu: CPU cores; gpu: GPUs of any type")
    parser.add_argument("--cores", help="the CPU cores to divide among the slots, such as 0,1; all that may be used")
    parser.add_argument("--parent", type=int, help="the agent saves its runs and exits when this process ends")
    given = parser.parse_args()
    # If the parent of workers dies, this process adopts its orphans and kills them.
    adopt_orphans()
    if given.parent is not None:
        die_with(given.parent, signal.SIGTERM)
    try:
        # Removed from the environment, because workers inherit it and run users' code.
        token = os.environ.pop(TOKEN)
        cores = [int(core) for core in given.cores.split(",")] if given.cores else own_cores()
        if given.gpu_type != "cpu":
            gpus = gpus_here()
            found = type_of_node(gpus, range(given.slots))
            given.gpu_type = found if given.gpu_type == UNTYPED else given.gpu_type
            os.environ |= seen_by(gpus)  # which workers inherit
            cores = near_gpus(cores, [each.numa for each in gpus[: given.slots]])
        slots = divide(cores, given.slots, gpus=given.gpu_type != "cpu")
        asyncio.run(Agent(given.node, slots, given.gpu_type, cores).serve(given.url.rstrip("/"), token))
    except (InputError, ConnectionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
