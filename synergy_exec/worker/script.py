"""Runs a job that is a command: any training script, unchanged, once on each of its nodes.

Before it is moved the command gets SIGTERM and `grace_s` seconds to save; it manages its own checkpoints. It may report
its progress as lines of JSON in the file that SYNERGY_REPORT names: `{"step": 120, "loss": 2.31}`
(`synergy_exec.reporting.report` writes them). If its number of slots may change, its work is counted in these steps,
and the scheduler learns from their times how fast it is on how many slots. Otherwise work is seconds of run time.
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
from synergy_exec.job_folder import REPORTS
from synergy_exec.messages import PAUSED, Failure, Launch, MeansToLeave, Report, Started, Stop
from synergy_exec.worker import processes
from synergy_exec.worker.start import FAILED, AgentConnection, Descriptors, Heartbeat, Start, see_only
from synergy_runs.files import atomic_file

PROGRESS = "progress.json"
"""File in the job's folder with the seconds that the command has run, over all runs, and the step it last reported."""
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
    launch, slots = start.launch, str(len(start.launch.slots))
    folder = Path(launch.folder)
    progress = _Progress(launch, folder)
    processes.pin(os.getpid(), start.cores)
    if descriptors.store is not None:  # frees the port, at which the command's own ranks will meet
        os.close(descriptors.store)
    try:
        child = subprocess.Popen(
            [word.replace("{slots}", slots).replace("{folder}", launch.folder) for word in launch.command],
            cwd=launch.directory or folder,
            env=_environment(start, progress.reports),
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
                agent.say(progress.started(time.time() - start.launched_s))
            agent.say(progress.report())
            told_s = now_s
        time.sleep(_LOOK_S)
    if launch.node_rank == 0:
        agent.say(progress.report())
    if told_to_stop or child.returncode == 0:
        code = PAUSED if told_to_stop else 0
        agent.say(MeansToLeave(run=launch.run, code=code))
        return code
    ended = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    # A signal comes from outside, for instance from the kernel when memory runs out, so the job is tried again.
    reason = f"the command ended with {ended}; its output is in its log"
    agent.say(Failure(run=launch.run, reason=reason, unsaved=child.returncode < 0))
    return FAILED


class _Progress:
    """What the command has done, over all runs. reports: the file in which it reports its steps in this run."""

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch, self._file, self.reports = launch, folder / PROGRESS, folder / REPORTS
        self._began_s = time.monotonic()
        self._before_s, self._step, self._loss = 0.0, 0, math.nan
        self._first: tuple[int, float] | None = None
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self._before_s, self._step = float(known["seconds"]), int(known.get("step", 0))
        if launch.node_rank == 0:
            self.reports.unlink(missing_ok=True)

    def started(self, launch_s: float) -> Started:
        work = float(self._step) if self._launch.counts_steps else self._before_s
        return Started(run=self._launch.run, step=int(work), samples=0, work=work, launch_s=launch_s)

    def report(self) -> Report:
        """Reads and keeps what the command reported last. The time of a step is the mean since this run's first."""
        launch, now_s = self._launch, time.monotonic()
        seconds = self._before_s + now_s - self._began_s
        said = _last_report(self.reports)
        steps, step_s = int(seconds), 1.0
        if "step" in said:
            self._step, self._loss = int(said["step"]), float(said.get("loss", math.nan))
            self._first = self._first or (self._step, now_s)
        if launch.counts_steps:
            first, since_s = self._first or (self._step, now_s)
            steps = max(0, self._step - first)
            step_s = (now_s - since_s) / steps if steps else 0.0
        with contextlib.suppress(OSError, InputError), atomic_file(self._file) as partial:
            partial.write_text(json.dumps({"seconds": seconds, "step": self._step}) + "\n", encoding="utf-8")
        return Report(
            run=launch.run,
            step=self._step if self._step or launch.counts_steps else int(seconds),
            samples=0,
            work=float(self._step) if launch.counts_steps else seconds,
            loss=self._loss,
            micro_batch=launch.plan.micro_batch,
            accumulation=launch.plan.accumulation,
            step_s=step_s,
            steps=steps,
            grad_sqr=float(launch.counts_steps),  # without noise: a step at the command's own batch is worth a step
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
        **dict.fromkeys(("SYNERGY_ARRAY", "SLURM_ARRAY_TASK_ID") if launch.array else (), launch.array),
        "PET_NPROC_PER_NODE": slots,
        "PET_NNODES": launch.nodes,
        "PET_NODE_RANK": launch.node_rank,
        **dict.fromkeys(("PET_MASTER_ADDR", "MASTER_ADDR"), host),
        **dict.fromkeys(("PET_MASTER_PORT", "MASTER_PORT"), port),
        "OMP_NUM_THREADS": max(1, int(start.cpus / slots)),
    }
    seen = see_only(start.gpus, os.environ) if start.gpus else {}
    return {**os.environ, **{name: str(value) for name, value in own.items()}, **seen}
