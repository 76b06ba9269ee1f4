"""Two ranks, each in a network namespace of its own, joined by a link with a limited rate.

A veth pair with a token bucket (`tc … tbf`) at either end joins the namespaces, so each direction has the whole rate.
Namespaces and links disappear with the last process in them. The machine's own network is not touched. Root, or user
namespaces, are needed. The rate is of frames on the wire; of a frame of 1,514 bytes, 1,448 are payload.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed

ENDS = ("slow0", "slow1")
ADDRESSES = ("10.93.0.1", "10.93.0.2")
BURST_BYTES = 128 * 1024
"""A packet as it leaves the sender has up to 64 KiB; packets longer than the burst would be split first."""
QUEUE_MS = 50
"""Limit of the queue; TCP fills no more than its window, so nothing is dropped below that."""
PARENT_DIES = 1  # PR_SET_PDEATHSIG


def run(target: str, gbps: float, **arguments: Any) -> Any:
    """Calls `module:function(rank, **arguments)` on both ranks of a gloo group, and returns what rank 0 returned.

    Raises RuntimeError if the machine does not allow it, or if a rank fails.
    """
    if missing := [each for each in ("unshare", "ip", "tc") if shutil.which(each) is None]:
        raise RuntimeError(f"a slowed link needs {missing[0]}; install util-linux and iproute2.")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        own = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
        words = [target, str(gbps), json.dumps(arguments), str(out)]
        done = subprocess.run([*own, *_python(0), *words], env=_environment(), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"no run over a slowed link (as root, with veth and sch_tbf?): {done.stderr[-2000:]}")
        return json.loads(out.read_text(encoding="utf-8"))


def _python(number: int) -> list[str]:
    return [sys.executable, "-c", f"from ranks import slow_link; slow_link.rank({number})"]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}


def rank(number: int) -> None:
    """One of the two processes. Rank 0 starts the other one, in another namespace, and makes the link."""
    target, gbps, arguments, out = sys.argv[1:]
    torch.set_num_threads(1)
    peer = _started_peer() if number == 0 else None
    if peer is None:
        ctypes.CDLL(None).prctl(PARENT_DIES, signal.SIGKILL)
        sys.stdin.readline()  # until the link is there
    bucket = ["rate", f"{round(float(gbps) * 1e9)}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]
    _type("ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", ENDS[number])
    _type("tc", "qdisc", "add", "dev", ENDS[number], "root", "tbf", *bucket)
    for each in ("lo", ENDS[number]):
        _type("ip", "link", "set", each, "up")
    if peer is not None:
        assert peer.stdin is not None
        peer.stdin.write(b"\n")
        peer.stdin.flush()
    os.environ["GLOO_SOCKET_IFNAME"] = ENDS[number]
    distributed.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:29500", rank=number, world_size=2)
    module, _, name = target.partition(":")
    result = getattr(importlib.import_module(module), name)(number, **json.loads(arguments))
    if number == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")
    distributed.destroy_process_group()


def _started_peer() -> subprocess.Popen[bytes]:
    """Rank 1, in its namespace, with its end of the link there."""
    peer = subprocess.Popen(["unshare", "--net", *_python(1), *sys.argv[1:]], stdin=subprocess.PIPE)
    own, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{peer.pid}/ns/net")
    while os.readlink(own) == os.readlink(theirs):
        time.sleep(0.01)
    _type("ip", "link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1], "netns", str(peer.pid))
    return peer


def _type(*command: str) -> None:
    subprocess.run(command, check=True)
