"""Two ranks, each in a network namespace of its own, joined by a link slowed to a given rate.

A bench calls `enter` first of all, which starts it anew as rank 0 in a new namespace. That process starts rank 1, the
same command in another one, and joins both by a veth pair with a token bucket (`tc … tbf`) at either end, so each way
has the rate for itself. Namespaces and links are the kernel's and go with the last process in them: however a run
ends, nothing is left behind. The machine's own network is not touched. Root, or user namespaces, are needed.

The rate is of frames on the wire, as a network's is: of a frame of 1,514 bytes, 1,448 are payload.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from torch import distributed

ENDS = ("slow0", "slow1")
ADDRESSES = ("10.93.0.1", "10.93.0.2")
BURST_BYTES = 128 * 1024
"""A packet as it leaves the sender has up to 64 KiB; what is longer than the burst would be cut up first."""
QUEUE_MS = 50
"""Of what may wait; TCP fills no more than it may send, so nothing is dropped below that."""
PAYLOAD = 1_448 / 1_514
PORT = 29_500
"""Any: nobody else is in a new namespace."""
_RANK = "SLOW_LINK_RANK"
_PARENT_DIES = 1  # PR_SET_PDEATHSIG


def enter(gbps: float) -> int:
    """Which rank this process is, 0 or 1, in its namespace, with the process group there. Does not return at first:
    the process is replaced by one that comes here again. Ends with a sentence where the machine does not allow it.
    """
    if _RANK not in os.environ:
        _replace()
    number = int(os.environ[_RANK])
    peer = _start_peer() if number == 0 else None
    if peer is None:
        _die_with_parent()
        sys.stdin.readline()  # until the link is there
    _configure(number, gbps)
    if peer is not None:
        assert peer.stdin is not None
        peer.stdin.write(b"\n")
        peer.stdin.flush()
    return number


def join(number: int) -> None:
    """Makes the process group of both ranks: gloo over the link."""
    os.environ["GLOO_SOCKET_IFNAME"] = ENDS[number]
    distributed.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=number, world_size=2)


def _unshare() -> list[str]:
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]


def _replace() -> None:
    probe = f"ip link add {ENDS[0]} type veth peer name {ENDS[1]} && tc qdisc add dev {ENDS[0]} root " + " ".join(
        _bucket(1.0)
    )
    missing = [each for each in ("unshare", "ip", "tc") if shutil.which(each) is None]
    if missing:
        raise SystemExit(f"no {missing[0]} here, which a slowed link needs; install util-linux and iproute2.")
    tried = subprocess.run([*_unshare(), "sh", "-c", probe], capture_output=True, text=True)
    if tried.returncode:
        raise SystemExit(
            f"this machine allows no slowed link between network namespaces ({tried.stderr.strip().splitlines()[-1]}); "
            "run it as root, with the kernel's veth and sch_tbf."
        )
    os.environ[_RANK] = "0"
    os.execvp("unshare", [*_unshare(), sys.executable, *sys.argv])


def _start_peer() -> subprocess.Popen[bytes]:
    """Rank 1, in its namespace, with its end of the link there."""
    peer = subprocess.Popen(
        ["unshare", "--net", sys.executable, *sys.argv], env=os.environ | {_RANK: "1"}, stdin=subprocess.PIPE
    )
    own, theirs = Path("/proc/self/ns/net"), Path(f"/proc/{peer.pid}/ns/net")
    while os.readlink(own) == os.readlink(theirs):
        time.sleep(0.01)
    _type("ip", "link", "add", ENDS[0], "type", "veth", "peer", "name", ENDS[1], "netns", str(peer.pid))
    return peer


def _configure(number: int, gbps: float) -> None:
    end = ENDS[number]
    _type("ip", "address", "add", f"{ADDRESSES[number]}/24", "dev", end)
    _type("tc", "qdisc", "add", "dev", end, "root", *_bucket(gbps))
    for each in ("lo", end):
        _type("ip", "link", "set", each, "up")


def _bucket(gbps: float) -> list[str]:
    rate = f"{round(gbps * 1e9)}bit"
    return ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms"]


def _type(*command: str) -> None:
    subprocess.run(command, check=True)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
