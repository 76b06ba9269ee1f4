"""How long a worker takes from the agent's asking to its first line, and from its last to its slot's being free.

python bench/forking.py [REPEATS]                         # minutes: 1
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import sys
import time

from synergy_core.planner.plan import Plan
from synergy_exec.agent.forkserver import Forkserver
from synergy_exec.messages import Launch
from synergy_exec.training.cache import Cache
from synergy_exec.worker.start import Descriptors, Heartbeat, Start

LAUNCH = Launch(
    run=0,
    job=0,
    # It says that there is no such class, and leaves.
    job_class="synergy_exec.examples.mlp:None",
    plan=Plan(),
    initial_batch=1,
    work=1.0,
    slots=[0],
    first_rank=0,
    world=1,
    store_host="",
    store_port=0,
    folder="/proc/nowhere",
)


async def forked(forkserver: Forkserver) -> tuple[float, float]:
    """Seconds to the first line, and from the last to the news that the worker has left."""
    loop = asyncio.get_running_loop()
    left: asyncio.Future[int] = loop.create_future()
    agent, theirs = socket.socketpair()
    reading, log = os.pipe()
    descriptors = Descriptors(theirs.fileno(), Heartbeat.create(), log, Cache.create())
    output = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), os.fdopen(reading, "rb"))
    start = Start(LAUNCH, 0, tuple(os.sched_getaffinity(0)), 1.0, None, time.time())
    began_s = time.monotonic()
    await forkserver.fork(start, descriptors, left.set_result)
    theirs.close()
    for each in (descriptors.heartbeat, descriptors.log, descriptors.cache):
        os.close(each)
    await output.readline()
    first_s = time.monotonic()
    await output.read()
    last_s = time.monotonic()
    await left
    agent.close()
    return first_s - began_s, time.monotonic() - last_s


async def main(repeats: int) -> None:
    forkserver = await Forkserver.start()
    took = [await forked(forkserver) for _ in range(repeats)]
    await forkserver.close()
    for name, values in zip(
        ("to the first line", "from the last line to the slot"), zip(*took, strict=True), strict=True
    ):
        ms = sorted(1000 * each for each in values)
        print(f"{name}: median {statistics.median(ms):.1f} ms, {ms[0]:.1f} to {ms[-1]:.1f}, {repeats} times")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
