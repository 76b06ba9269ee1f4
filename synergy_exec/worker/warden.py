"""A worker's parent, which stays until nothing is left of what the worker has started.

A fork of the zygote that touches next to no memory. It adopts what the worker's processes leave behind, so their
sessions, groups and early ends do not matter. When the worker has ended the rest is killed and reaped; only then does
the warden leave, and only then is the worker's slot free. When the zygote is gone it ends the worker by itself. A
warden that is killed takes the worker along, and what else there was comes to the zygote.

It reports two numbers to the zygote, packed by `FORM`: at once the worker's process number, or minus the errno where it
could not be forked; at the end its exit code, or minus the signal's number.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from synergy_exec.worker import offspring
from synergy_exec.worker.parent import adopt_orphans, die_with

FORM = struct.Struct("i")
END, SHOW = signal.SIGUSR2, signal.SIGUSR1
"""What a warden is told by: to end its worker; to have it write where it stands. SIGTERM is not among them: Slurm sends
it to every process of a step at once, and workers are to save then."""
_HEARD = {signal.SIGCHLD, END, SHOW}


def guard(
    zygote: int, report: int, cgroup: str, descriptors: Iterable[int], become_worker: Callable[[int], NoReturn]
) -> NoReturn:
    """Turns this fork of the zygote into a warden, and a fork of it into the worker.

    report: the pipe to the zygote. cgroup: of this worker alone, "" for none. descriptors: the worker's.
    become_worker: called in the worker, with the warden's process number.
    """
    # Taken one by one by sigwait: none interrupts anything, none is missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    os.setpgid(0, 0)
    die_with(zygote, END)
    adopt_orphans()
    warden = os.getpid()
    try:
        worker = os.fork()
    except OSError as error:
        os.write(report, FORM.pack(-(error.errno or 1)))
        os._exit(1)
    if worker == 0:
        os.close(report)
        _enter(cgroup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        become_worker(warden)
    os.write(report, FORM.pack(worker))
    for each in descriptors:
        os.close(each)
    code = _outlive(worker)
    _kill_all_in(cgroup)
    offspring.end_all()
    with suppress(BrokenPipeError):  # the zygote is gone
        os.write(report, FORM.pack(code))
    os._exit(0)


def _outlive(worker: int) -> int:
    """The worker's exit code, once it has ended; reaps its orphans meanwhile."""
    while True:
        number = signal.sigwait(_HEARD)
        if number == END:
            os.kill(worker, signal.SIGKILL)
        elif number == SHOW:
            os.kill(worker, SHOW)
        ended = dict(offspring.reaped())
        if worker in ended:
            return ended[worker]


def _enter(cgroup: str) -> None:
    if cgroup:
        try:
            Path(cgroup, "cgroup.procs").write_text("0")
        except OSError as error:
            print(f"{cgroup} cannot be entered: {error.strerror}", flush=True)


def _kill_all_in(cgroup: str) -> None:
    """At one stroke, which nothing can fork out of; kernels before 5.14 cannot."""
    if cgroup:
        with suppress(OSError):
            Path(cgroup, "cgroup.kill").write_text("1")
