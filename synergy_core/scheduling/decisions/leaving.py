"""Which runs still hold GPUs that a decision has given to other jobs, and what counts as service meanwhile.

In the scheduler's record a decision takes effect at once. A stopped job needs time to save, though, and the job that
gets its GPUs waits for it. So a run, one stretch of a job on its GPUs, passes through these states:

    state     begins when                    GPUs held by       service counted by      `JobRun` (executor)
    PROMISED  a decision gives it GPUs       runs that save     nobody                  waiting, reserving
    RUNNING   it is launched (`launch`)      itself             `Job.settle`            launched, started
    SAVING    a decision stops it (`stop`)   itself             `leave`                 stopping
    LEFT      its last process has exited    the next run       the next run's job      (gone)

The simulator knows at a decision when each of these states begins, and says so in advance: it calls `launch` and
`leave` with instants in the future. The executor calls them when agents report a launch or an exit. It therefore says
`promise` first, and a run that is stopped while it is PROMISED never starts. Where the simulator decides on events
instead of in rounds, the time for which a run is SAVING counts as service of the job that waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from synergy_core.scheduling.jobs.record import NEVER, Job, Placed, gpus_in


@dataclass(slots=True)
class Leaver:
    """A run that a decision has stopped and that still holds its GPUs."""

    job_id: int
    """Number of the job."""
    virtual_cluster: str
    """Tenant of the job."""
    placed: Placed
    """GPUs that it holds."""
    since_s: float
    """Instant of the decision, or that of the launch if this comes later."""
    free_s: float
    """Instant from which on its GPUs are free; inf while it is unknown."""


class Departures:
    """The runs that are PROMISED or SAVING; see the module's table. Callers pass all instants, in seconds."""

    def __init__(self) -> None:
        self._promised: dict[int, Job] = {}
        self._leavers: list[Leaver] = []

    def promise(self, job: Job) -> None:
        """A decision has given the job GPUs; the instant of its launch is unknown."""
        self._promised[job.job_id] = job

    def launch(self, job: Job, at_s: float) -> None:
        """The job's newest run is launched at `at_s`, now or later; from then on, its service counts."""
        self._promised.pop(job.job_id, None)
        job.service.settled_s = at_s
        if not job.service.restarts:
            job.service.first_start_s = at_s
        if not job.moved:
            job.service.last_start_s = at_s

    def stop(self, job: Job, placed: Placed, since_s: float, free_s: float = NEVER) -> None:
        """A decision has stopped the job's run on `placed`. A run that is PROMISED is dropped.

        since_s, free_s: see `Leaver`. `leave` follows unless `free_s` is given; the time until then is no service.
        """
        if self._promised.pop(job.job_id, None) is None:
            self._leavers.append(Leaver(job.job_id, job.request.virtual_cluster, placed, since_s, free_s))

    def leave(self, job: Job, at_s: float) -> None:
        """The last process of the job's run exits at `at_s`, now or later; counts service from its stop until then.

        Nothing happens if no decision stopped the run: it was RUNNING, and its service is counted already.
        """
        for each in reversed(self._leavers):
            if each.job_id == job.job_id and each.free_s == NEVER:
                each.free_s = at_s
                job.service.attained_gpu_s += gpus_in(each.placed) * (at_s - each.since_s)
                job.service.settled_s = at_s
                return

    def withdraw(self, job: Job, now_s: float) -> None:
        """The job has ended: it is PROMISED nothing any more."""
        if self._promised.pop(job.job_id, None) is not None:
            job.service.settled_s = now_s

    def settle(self, now_s: float) -> None:
        """Forgets runs that have left by now. Runs that are PROMISED have received no service until now."""
        for job in self._promised.values():
            job.service.settled_s = now_s
        self._leavers = [each for each in self._leavers if each.free_s > now_s]

    @property
    def all_left_s(self) -> float:
        """The instant at which every leaving run has left; 0 if there is none, inf if it is unknown."""
        return max([each.free_s for each in self._leavers], default=0.0)

    def free_s(self, placed: Placed, job: Job | None = None) -> float:
        """The instant at which no leaving run holds any of these GPUs; 0 if none does, inf if it is unknown.

        job: the job whose own earlier runs must have left, too, wherever they are.
        """
        if not self._leavers:
            return 0.0
        wanted, number = dict(placed), None if job is None else job.job_id
        ends_s = [
            each.free_s
            for each in self._leavers
            if each.job_id == number or any(wanted.get(node, 0) & mask for node, mask in each.placed)
        ]
        return max(ends_s, default=0.0)

    def within_quota_s(self, virtual_cluster: str, gpus: int, quota: int) -> float:
        """The instant at which so many runs of a tenant have left that it is within its quota; 0 if it is already.

        gpus: GPUs that the tenant's jobs hold as decided, without those of leaving runs.
        """
        leaving = [each for each in self._leavers if each.virtual_cluster == virtual_cluster]
        over = gpus + sum(gpus_in(each.placed) for each in leaving) - quota
        within_s = 0.0
        for each in sorted(leaving, key=lambda each: each.free_s):
            if over <= 0:
                break
            over -= gpus_in(each.placed)
            within_s = each.free_s
        return within_s
