"""The same policies the plain way: the whole queue is sorted and scanned at every instant. Slow, and easy to trust.

Nothing here uses the project's queue, walk, placement or engine; only times on the project's grid are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from synergy_core.units import grid_ceil

LAS_LIMITS = (3_600.0,)
TIRESIAS_LIMITS = (3_250.0, 57_600.0)


@dataclass
class NaiveJob:
    job_id: int
    submit_s: float
    gpus: int
    duration_s: float
    estimate_s: float
    left_s: float = 0.0
    overhead_s: float = 0.0
    attained_gpu_s: float = 0.0
    start_s: float = inf
    entered_s: float = 0.0
    level: int = 0
    running: bool = False
    started: bool = False

    def end_s(self) -> float:
        return self.start_s + self.overhead_s + self.left_s

    def attained_at(self, now_s: float) -> float:
        return self.attained_gpu_s + (self.gpus * (now_s - self.start_s) if self.running else 0.0)

    def crossing_s(self, limits) -> float:
        if not self.running or self.level >= len(limits):
            return inf
        return grid_ceil(self.start_s + (limits[self.level] - self.attained_gpu_s) / self.gpus)


class Naive:
    def __init__(self, jobs, gpus, policy, restart_s=0.0):
        self.jobs = sorted(jobs, key=lambda job: (job.submit_s, job.job_id))
        self.gpus, self.policy, self.restart_s = gpus, policy, restart_s
        self.limits = {"las": LAS_LIMITS, "tiresias": TIRESIAS_LIMITS}.get(policy, ())
        self.active = []
        self.log = []

    def key(self, job, now_s):
        remaining = job.end_s() - now_s if job.running else job.left_s + (self.restart_s if job.started else 0.0)
        return {
            "fifo": (job.submit_s,),
            "backfill": (job.submit_s,),
            "easy": (job.submit_s,),
            "sjf": (job.duration_s, job.submit_s),
            "srtf": (remaining, job.submit_s),
            "las": (job.level > 0, job.submit_s),
            "tiresias": (job.level, job.entered_s, job.submit_s),
        }[self.policy] + (job.job_id,)

    def run(self):
        pending = list(self.jobs)
        for job in pending:
            job.left_s, job.entered_s = job.duration_s, job.submit_s
        now_s = 0.0
        while pending or self.active:
            instants = [pending[0].submit_s] if pending else []
            instants += [min(job.end_s(), job.crossing_s(self.limits)) for job in self.active if job.running]
            now_s = min(instants)
            for job in [job for job in self.active if job.running and job.end_s() == now_s]:
                self.active.remove(job)
                self.log.append((now_s, "finish", job.job_id))
            while pending and pending[0].submit_s == now_s:
                self.active.append(pending.pop(0))
            for job in self.active:
                if job.crossing_s(self.limits) <= now_s:
                    job.level += 1
                    job.entered_s = now_s
            self.decide(now_s)
        return sorted(self.log)

    def decide(self, now_s):
        order = sorted(self.active, key=lambda job: self.key(job, now_s))
        left = self.gpus - sum(job.gpus for job in self.active if job.running)
        if self.policy in ("srtf", "las", "tiresias"):
            left, chosen = self.gpus, []
            for job in order:
                if job.gpus <= left:
                    left -= job.gpus
                    chosen.append(job)
            for job in order:
                if job.running and job not in chosen:
                    self.stop(job, now_s)
            for job in chosen:
                if not job.running:
                    self.start(job, now_s)
            return
        waiting = [job for job in order if not job.running]
        for index, job in enumerate(waiting):
            if job.gpus <= left:
                left -= job.gpus
                self.start(job, now_s)
            elif self.policy == "fifo":
                return
            elif self.policy == "easy":
                return self.fill(job, waiting[index + 1 :], left, now_s)

    def fill(self, head, behind, left, now_s):
        window_s, extra = 0.0, left
        for end_s, gpus in sorted((job.start_s + job.estimate_s, job.gpus) for job in self.active if job.running):
            if extra >= head.gpus and end_s - now_s > window_s:
                break
            window_s, extra = max(window_s, end_s - now_s), extra + gpus
        extra -= head.gpus
        for job in behind:
            if job.gpus <= left and (job.estimate_s <= window_s or job.gpus <= extra):
                left -= job.gpus
                extra -= job.gpus if job.estimate_s > window_s else 0
                self.start(job, now_s)

    def start(self, job, now_s):
        job.overhead_s = self.restart_s if job.started else 0.0
        job.running, job.started, job.start_s = True, True, now_s
        self.log.append((now_s, "start", job.job_id))

    def stop(self, job, now_s):
        job.attained_gpu_s = job.attained_at(now_s)
        job.left_s -= max(0.0, now_s - job.start_s - job.overhead_s)
        job.running = False
        self.log.append((now_s, "stop", job.job_id))
