"""Runs a job that is a command: any training script, unchanged, once on each of its nodes.

Before it is moved the command gets SIGTERM and `grace_s` seconds to save; it manages its own checkpoints. Its work is
counted in seconds of run time. It may report its progress as lines of JSON in the file that SYNERGY_REPORT names:
`{"step": 120, "loss": 2.31}` (`synergy_exec.reporting.report` writes them).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.messages import PAUSED, Failure, MeansToLeave, Report, Started, Stop
from synergy_exec.worker import processes
from synergy_exec.worker.start import FAILED, AgentConnection, Descriptors, Heartbeat, Start, see_only
from synergy_runs.files import atomic_file

PROGRESS = "progress.json"
"""File in the job's folder with the seconds that the command has run, over all runs."""
_LOOK_S, _TAIL_BYTES = 0.2, 4096
_BEAT_S = 600.0
"""A command never counts as hanging, because it need not report progress."""


def run(start: Start, descriptors: Descriptors) -> int:
    """Runs the command until it ends or is told to stop; returns the exit code."""
    agent, heartbeat = AgentConnection(descriptors.agent), Heartbeat(descriptors.heartbeat)
    told_to_stop = False

    def terminate(*_: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True

    signal.signal(signal.SIGTERM, terminate)
    launch, began_s = start.launch, time.monotonic()
    folder = Path(launch.folder)
    before_s = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        before_s = float(json.loads((folder / PROGRESS).read_text(encoding="utf-8"))["seconds"])
    processes.pin(os.getpid(), start.cores)
    reports, slots = folder / "report.jsonl", str(len(launch.slots))
    if descriptors.store is not None:  # frees the port, at which the command's own ranks will meet
        os.close(descriptors.store)
    try:
        child = subprocess.Popen(
            [word.replace("{slots}", slots).replace("{folder}", launch.folder) for word in launch.command],
            cwd=launch.directory or folder,
            env=_environment(start, reports),
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        agent.say(Failure(run=launch.run, reason=f"{launch.command[0]}: {error.strerror}"))
        return FAILED
    told_s, killed_s = -math.inf, math.inf
    while child.poll() is None:
        heartbeat.beat(_BEAT_S)
        now_s = time.monotonic()
        told_to_stop |= any(isinstance(each, Stop) for each in agent.heard())
        told_to_stop |= heartbeat.unanswered_s() > launch.agent_silence_s
        if told_to_stop and math.isinf(killed_s):
            child.terminate()
            killed_s = now_s + launch.grace_s
        if now_s >= killed_s:
            child.kill()
        if launch.node_rank == 0 and now_s - told_s >= launch.report_s:
            if math.isinf(told_s):
                launch_s = time.time() - start.launched_s
                agent.say(Started(run=launch.run, step=int(before_s), samples=0, work=before_s, launch_s=launch_s))
            _tell(start, agent, before_s + now_s - began_s, reports)
            told_s = now_s
        time.sleep(_LOOK_S)
    if launch.node_rank == 0:
        _tell(start, agent, before_s + time.monotonic() - began_s, reports)
    if told_to_stop or child.returncode == 0:
        code = PAUSED if told_to_stop else 0
        agent.say(MeansToLeave(run=launch.run, code=code))
        return code
    ended = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    # A signal comes from outside, for instance from the kernel when memory runs out, so the job is tried again.
    reason = f"the command ended with {ended}; its output is in its log"
    agent.say(Failure(run=launch.run, reason=reason, unsaved=child.returncode < 0))
    return FAILED


def _tell(start: Start, agent: AgentConnection, seconds: float, reports: Path) -> None:
    launch = start.launch
    with contextlib.suppress(OSError, InputError), atomic_file(Path(launch.folder) / PROGRESS) as partial:
        partial.write_text(json.dumps({"seconds": seconds}) + "\n", encoding="utf-8")
    said = _last_report(reports)
    agent.say(
        Report(
            run=launch.run,
            step=int(said.get("step", seconds)),
            samples=0,
            work=seconds,
            loss=float(said.get("loss", math.nan)),
            micro_batch=launch.plan.micro_batch,
            accumulation=launch.plan.accumulation,
            step_s=1.0,
            steps=int(seconds),
        )
    )


def _last_report(path: Path) -> dict[str, Any]:
    """The numbers in the last complete report of the file; only the file's end is read."""
    try:
        with path.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
            lines = file.read().rpartition(b"\n")[0].splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with contextlib.suppress(ValueError, AttributeError):
            values = json.loads(line)
            return {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {}


def _environment(start: Start, reports: Path) -> dict[str, str]:
    """This process's environment with the variables of the run. torchrun reads its arguments from PET_*."""
    launch, slots = start.launch, len(start.launch.slots)
    port = launch.store_port
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    host = launch.store_host or "127.0.0.1"
    own = {
        "SYNERGY_SLOTS": slots,
        "SYNERGY_FOLDER": launch.folder,
        "SYNERGY_REPORT": reports,
        "PET_NPROC_PER_NODE": slots,
        "PET_NNODES": launch.nodes,
        "PET_NODE_RANK": launch.node_rank,
        **dict.fromkeys(("PET_MASTER_ADDR", "MASTER_ADDR"), host),
        **dict.fromkeys(("PET_MASTER_PORT", "MASTER_PORT"), port),
        "OMP_NUM_THREADS": max(1, int(start.cpus / slots)),
    }
    seen = see_only(start.gpus, os.environ) if start.gpus else {}
    return {**os.environ, **{name: str(value) for name, value in own.items()}, **seen}
