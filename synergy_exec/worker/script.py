"""Runs a job that is a command: any training script, unchanged, once on each of its nodes.

Before it is moved the processes of the command get SIGTERM and `grace_s` seconds to save; it manages its own
checkpoints. It may report its progress as lines of JSON in the file that SYNERGY_REPORT names:
`{"step": 120, "loss": 2.31}` (`synergy_exec.reporting.report` writes them). If its number of slots may change, its work
is counted in these steps, and the scheduler learns from their times how fast it is on how many slots. Otherwise work is
seconds of run time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.job_file import DEFAULT_COMMAND_S, Command
from synergy_exec.job_folder import LOG, LOG_HEADING, NEVER_COPIED, OWN_FILES, PROGRESS, REPORTS
from synergy_exec.messages import PAUSED, Failure, Launch, MeansToLeave, Noted, Report, Started, Stop
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.worker import processes
from synergy_exec.worker.start import FAILED, AgentConnection, Descriptors, Heartbeat, Start, see_only
from synergy_runs.files import atomic_file

_LOOK_S, _TAIL_BYTES = 0.2, 4096
_BEAT_S = 600.0
"""The agent never takes this process to hang: it watches the command itself."""
_LONG_STEPS = 10
"""A step that takes this many times as long as the steps before it is worth a note."""
_SHORT_FRACTION = 0.1
"""A command that ends with 0 after a smaller fraction of its declared seconds is worth a note."""
_STACK_S = 10.0
"""Maximum seconds in which one process prints its stack."""


def run(start: Start, descriptors: Descriptors) -> int:
    """Runs the command until it ends or is told to stop; returns the exit code."""
    agent, heartbeat = AgentConnection(descriptors.agent), Heartbeat(descriptors.heartbeat)
    told_to_stop = False

    def terminate(*_: object) -> None:
        nonlocal told_to_stop
        told_to_stop = True

    signal.signal(signal.SIGTERM, terminate)
    launch, command = start.launch, start.launch.file.command
    assert command is not None
    directory = Path(command.directory or launch.folder)
    progress = _Progress(launch, command)
    processes.pin(os.getpid(), start.cores)
    if descriptors.store is not None:  # frees the port, at which the command's own ranks will meet
        os.close(descriptors.store)
    resumes = launch.restarts and command.resume_command and (directory / _filled(command.resume_if, launch)).exists()
    words = [_filled(word, launch) for word in (command.resume_command if resumes else command.words)]
    environment = _environment(start, command, progress.reports)
    try:
        # A group of its own, so that `kill 0` in a script does not end this process.
        child = subprocess.Popen(words, cwd=directory, env=environment, stdin=subprocess.DEVNULL, process_group=0)
    except OSError as error:
        what = f"directory {directory}" if error.filename == str(directory) else f"command {words[0]}"
        agent.say(Failure(run=launch.run, reason=f"{what}: {error.strerror} on {os.uname().nodename}"))
        return FAILED
    told_s, stopped_s, stopped_unix_s, hang = -math.inf, math.inf, math.inf, ""
    log, log_bytes = Path(launch.folder) / LOG, 0
    while child.poll() is None or (math.isfinite(stopped_s) and _alive(child.pid)):
        heartbeat.beat(_BEAT_S)
        now_s = time.monotonic()
        told_to_stop |= any(isinstance(each, Stop) for each in agent.heard())
        told_to_stop |= heartbeat.unanswered_s() > launch.agent_silence_s
        if now_s - told_s >= launch.reporting.report_s:
            progress.read()
            if launch.node.node_rank == 0:
                if math.isinf(told_s):
                    agent.say(progress.started(time.time() - start.launched_s))
                agent.say(progress.report())
            if not told_to_stop and (late := progress.late()):
                if command.hang_s:
                    hang, told_to_stop = f"{late}; its log says where it stood", True
                    _show_stacks(environment["PATH"])
                else:
                    agent.say(Noted(run=launch.run, text=f"{late}; `hang_s` in its job file ends runs that hang"))
            told_s = now_s
        if told_to_stop and math.isinf(stopped_s) and child.poll() is None:
            stopped_s, stopped_unix_s, log_bytes = now_s, time.time(), log.stat().st_size if log.exists() else 0
            _terminate(child.pid, first_only=command.sigterm_to == "first")
        if now_s >= stopped_s + command.grace_s:
            processes.kill(_alive(child.pid))
        time.sleep(_LOOK_S)
    stopped = math.isfinite(stopped_s)
    progress.read()
    sign = ""
    if stopped and child.returncode == 0:
        if path := _written((launch.folder, str(directory)), stopped_unix_s):
            sign = f"wrote {plain(path, MOST_SHOWN)} since"
        elif line := _said_of_sigterm(log, log_bytes):
            sign = f"printed '{plain(line, MOST_SHOWN)}'"
    goes_on = stopped and progress.goes_on(sign)
    if launch.node.node_rank == 0:
        agent.say(progress.report())
        if child.returncode == 0 and (note := progress.about_exit_0(sign, stopped=stopped, goes_on=goes_on)):
            agent.say(Noted(run=launch.run, text=note))
    if hang:
        agent.say(Failure(run=launch.run, reason=hang, unsaved=True, hung=True))
        return FAILED
    if stopped or child.returncode == 0:
        code = 0 if child.returncode == 0 and not goes_on else PAUSED
        agent.say(MeansToLeave(run=launch.run, code=code))
        return code
    ended = signal.Signals(-child.returncode).name if child.returncode < 0 else f"exit code {child.returncode}"
    # A signal comes from outside, for instance from the kernel when memory runs out, so the job is tried again.
    reason, code = f"the command ended with {ended}; its output is in its log", child.returncode
    agent.say(Failure(run=launch.run, reason=reason, unsaved=code < 0, exit_code=max(0, code)))
    return FAILED


def _filled(text: str, launch: Launch) -> str:
    text = text.replace("{array}", launch.file.array)
    return text.replace("{slots}", str(len(launch.node.slots))).replace("{folder}", launch.folder)


# The command's processes. This process adopts those whose parents are gone.


def _alive(first: int) -> list[int]:
    """The command's processes that have not exited, after reaping those that have; only Popen reaps the first."""
    for pid in processes.children(os.getpid()):
        if pid != first:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
    return [pid for pid in processes.descendants(os.getpid()) if processes.began(pid)]


def _terminate(first: int, *, first_only: bool) -> None:
    """Sends SIGTERM to every process of the command that no other process of it tells (`processes.hearers`)."""
    told = [pid for each in processes.children(os.getpid()) for pid in processes.hearers(each, signal.SIGTERM)]
    processes.send(signal.SIGTERM, [first] if first_only else told)


def _show_stacks(path: str) -> None:
    """Prints where the command's ranks stand, or all its programs if none has a RANK.

    py-spy shows it if it is in one of the folders of `path` and may. Otherwise a Python process shows it and dies,
    because PYTHONFAULTHANDLER makes it print its stack at SIGABRT; the others are stopped, or they would leave, too.
    """
    spy = shutil.which("py-spy", path=path)
    every = [pid for pid in processes.descendants(os.getpid()) if processes.began(pid)]
    forks = {child for pid in every for child in processes.forks(pid)}
    programs = {pid: processes.told(pid, "cmdline") for pid in every if pid not in forks}
    ranks = {pid: re.search(r"(?:^| )RANK=(\d+)", processes.told(pid, "environ")) for pid in programs}
    named = {pid: f"rank {rank[1]}" for pid, rank in ranks.items() if rank}
    waits_in = {pid: processes.told(pid, "wchan").strip("0") or "nothing" for pid in every}
    for pid, name in (named or {pid: f"process {pid} ({text[:MOST_SHOWN]})" for pid, text in programs.items()}).items():
        print(f"{plain(name)} stands at:", flush=True)
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            if spy:
                subprocess.run([spy, "dump", "--pid", str(pid)], timeout=_STACK_S, check=True)
                continue
        processes.send(signal.SIGSTOP, every)
        if processes.handles(pid, signal.SIGABRT):
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            processes.send(signal.SIGABRT, [pid])
            processes.send(signal.SIGCONT, [pid])
            processes.wait_or_kill([(pid, processes.began(pid))], patience_s=_STACK_S)
        else:
            print(f"  it waits in {waits_in[pid]} of the kernel; its own stack needs py-spy", flush=True)
    processes.send(signal.SIGCONT, every)


class _Progress:
    """The progress of the command over all runs. reports: the file in which it reports its steps in this run."""

    def __init__(self, launch: Launch, command: Command) -> None:
        folder = Path(launch.folder)
        self._launch, self._job, self._command, self._log = launch, launch.file, command, folder / LOG
        self._file, self.reports = folder / PROGRESS, folder / REPORTS.replace("*", str(launch.run))
        self._began_s = self._moved_s = time.monotonic()
        self._before_s, self._step, self._loss = 0.0, 0, math.nan
        self._first: tuple[int, float] | None = None
        self._longest_s, self._noted = 0.0, False
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(self._file.read_text(encoding="utf-8"))
            self._before_s, self._step = float(known["seconds"]), int(known.get("step", 0))
        if launch.node.node_rank == 0:
            for old in folder.glob("report-*.jsonl"):
                old.unlink(missing_ok=True)

    def started(self, launch_s: float) -> Started:
        work = float(self._step) if self._job.counts_steps else self._before_s
        return Started(run=self._launch.run, step=self._step, samples=0, work=work, launch_s=launch_s)

    def read(self) -> None:
        """Reads what the command reported last."""
        said, now_s = _last_report(self.reports), time.monotonic()
        if "step" not in said:
            return
        if (step := int(said["step"])) != self._step or self._first is None:
            if self._first is not None:
                self._longest_s = max(self._longest_s, now_s - self._moved_s)
            self._step, self._moved_s, self._noted = step, now_s, False
        self._loss = float(said.get("loss", math.nan))
        self._first = self._first or (self._step, now_s)

    def report(self) -> Report:
        """Keeps the progress, and returns it as a message. The time of a step is the mean since this run's first."""
        launch, now_s, counts_steps = self._launch, time.monotonic(), self._job.counts_steps
        seconds = self._before_s + now_s - self._began_s
        steps, step_s = int(seconds), 1.0
        if counts_steps:
            first, since_s = self._first or (self._step, now_s)
            steps = max(0, self._step - first)
            step_s = (now_s - since_s) / steps if steps else 0.0
        with contextlib.suppress(OSError, InputError), atomic_file(self._file) as partial:
            partial.write_text(json.dumps({"seconds": seconds, "step": self._step}) + "\n", encoding="utf-8")
        return Report(
            run=launch.run,
            step=self._step,
            samples=0,
            work=float(self._step) if counts_steps else seconds,
            loss=self._loss,
            micro_batch=launch.plan.micro_batch,
            accumulation=launch.plan.accumulation,
            step_s=step_s,
            steps=steps,
            grad_sqr=float(counts_steps),  # without noise: a step at the command's own batch is worth a step
        )

    def late(self) -> str:
        """Says, once, that no step was reported for longer than `hang_s` in the job file, or than usual; else ""."""
        silent_s = time.monotonic() - self._moved_s
        usual_s = self._command.hang_s or max(self._launch.settings.hang_s, _LONG_STEPS * self._longest_s)
        if self._first is None:
            usual_s = self._launch.settings.start_s if self._command.hang_s else math.inf
        if self._noted or silent_s <= usual_s:
            return ""
        self._noted = True
        return f"no step for {silent_s:.0f} s after step {self._step}"

    def goes_on(self, sign: str) -> bool:
        """Whether a command that ended with 0 when it was told to stop has more to do.

        sign: what it did after SIGTERM that shows that it left because of it; "" if nothing.
        """
        if self._job.counts_steps:
            return self._step < self._job.work
        means = self._command.exit_0_when_stopped
        return means == "paused" or (means == "auto" and bool(sign))

    def about_exit_0(self, sign: str, *, stopped: bool, goes_on: bool) -> str:
        """A note about a command whose exit code 0 may not mean that it has trained; else ""."""
        if stopped and self._command.exit_0_when_stopped == "auto" and not self._job.counts_steps:
            if goes_on:
                counts, if_not = "it is started again", "done` if it had finished"
            else:
                sign, counts, if_not = "wrote no file in its folders since", "counted as done", "paused` if it had not"
            return f"exited with 0 after SIGTERM and {sign}: {counts}; `exit_0_when_stopped: {if_not}"
        ran_s = self._before_s + time.monotonic() - self._began_s
        declares_work = self._job.work != (self._job.max_seconds or DEFAULT_COMMAND_S)
        too_short = declares_work and ran_s < _SHORT_FRACTION * self._job.work
        if self._step or not (self._job.counts_steps or self._command.hang_s or too_short):
            return ""
        lines = _end_of(self._log).decode(errors="replace").rstrip().splitlines() or [""]
        said = "it printed nothing" if lines[-1].startswith(LOG_HEADING) else f"'{plain(lines[-1], MOST_SHOWN)}'"
        return f"exited with 0 before its first step: {said}"


MAX_LOOKED_AT = 100_000
_CLOCK_S = 0.01
"""A file's time of modification may be this much earlier than `time.time()` at the moment it was written."""


def _written(folders: Iterable[str], since_unix_s: float) -> str:
    """The path of a file in these folders that the command wrote after since_unix_s; "" if none is found.

    Files that Synergy itself writes do not count. At most `MAX_LOOKED_AT` files are looked at.
    """
    looked_at, seen = 0, list[str]()
    for folder in map(os.path.realpath, folders):
        if any(os.path.commonpath((folder, each)) == each for each in seen):
            continue
        seen.append(folder)
        for where, below, files in os.walk(folder):
            below[:] = [each for each in below if each not in NEVER_COPIED]
            looked_at += len(files)
            if looked_at > MAX_LOOKED_AT:
                return ""
            for name in files:
                if where == folder and any(fnmatch(name, each) for each in OWN_FILES):
                    continue
                with contextlib.suppress(OSError):
                    if os.lstat(os.path.join(where, name)).st_mtime >= since_unix_s - _CLOCK_S:
                        return os.path.relpath(os.path.join(where, name), folder)
    return ""


def _said_of_sigterm(log: Path, since_byte: int) -> str:
    """The line about SIGTERM after this byte of the log, such as Lightning prints before it exits; "" if none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(since_byte if since_byte <= log.stat().st_size else 0)  # `bound_log` may have emptied it
        if line := re.search(rb"[^\r\n]*SIGTERM[^\r\n]*", file.read()):
            return line[0].decode(errors="replace").strip()
    return ""


def _end_of(path: Path) -> bytes:
    """The last `_TAIL_BYTES` of a file; b"" if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(-min(_TAIL_BYTES, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return file.read()
    return b""


def _last_report(path: Path) -> dict[str, Any]:
    """The numbers in the last complete report of the file."""
    for line in reversed(_end_of(path).rpartition(b"\n")[0].splitlines()):
        with contextlib.suppress(ValueError, AttributeError):
            values = json.loads(line)
            finite = {name: value for name, value in values.items() if isinstance(value, int | float)}
            return {name: value for name, value in finite.items() if math.isfinite(value)}
    return {}


def _environment(start: Start, command: Command, reports: Path) -> dict[str, str]:
    """The environment of the command: what the controller was started with, the run's variables, the job file's.

    torchrun reads its arguments from PET_*.
    """
    launch, slots = start.launch, len(start.launch.node.slots)
    port, host = launch.node.store_port, launch.node.store_host if launch.node.nodes > 1 else "127.0.0.1"
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    own = {
        "SYNERGY_SLOTS": slots,
        "SYNERGY_FOLDER": launch.folder,
        "SYNERGY_REPORT": reports,
        "SYNERGY_RESTART_COUNT": launch.restarts,
        **dict.fromkeys(("SYNERGY_ARRAY", "SLURM_ARRAY_TASK_ID") if launch.file.array else (), launch.file.array),
        "PET_NPROC_PER_NODE": slots,
        "PET_NNODES": launch.node.nodes,
        "PET_NODE_RANK": launch.node.node_rank,
        **dict.fromkeys(("PET_MASTER_ADDR", "MASTER_ADDR"), host),
        **dict.fromkeys(("PET_MASTER_PORT", "MASTER_PORT"), port),
        "OMP_NUM_THREADS": max(1, int(start.cpus / slots)),
        "PYTHONFAULTHANDLER": 1,
    }
    own |= {name: _filled(str(value), launch) for name, value in command.env.items()}
    result = {**start.environment, **{name: str(value) for name, value in own.items()}}
    # The controller's own programs, such as torchrun, come after all others.
    folders = [result.get("PATH", os.defpath), str(Path(sys.executable).parent)]
    if prefix := command.venv or command.conda:
        folders.insert(0, f"{prefix}/bin")
        for name in ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"):
            result.pop(name, None)
        result["VIRTUAL_ENV" if command.venv else "CONDA_PREFIX"] = prefix
    return result | {"PATH": os.pathsep.join(folders)} | (see_only(start.gpus, result) if start.gpus else {})
