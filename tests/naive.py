"""The same policies the plain way: the whole queue is sorted and scanned at every instant. Slow, and easy to trust.

Nothing here uses the project's queue, walk, placement or engine; only times on the project's grid are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from synergy_core.units import TICK_S, grid_ceil

LIMITS = {"mlfq": (3_600.0,), "tiresias": (3_250.0, 7_200.0)}
LAS_QUANTUM_S = 3_600.0
PREEMPTIVE = ("srtf", "las", "mlfq", "tiresias")


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
    quanta: int = 0
    forgotten_gpu_s: float = 0.0
    waited_s: float = 0.0
    waits_from_s: float = inf
    running: bool = False
    started: bool = False

    def end_s(self) -> float:
        return self.start_s + self.overhead_s + self.left_s

    def attained_at(self, now_s: float) -> float:
        return self.attained_gpu_s + (self.gpus * (now_s - self.start_s) if self.running else 0.0)

    def crossing_s(self, limits) -> float:
        if not self.running or self.level >= len(limits):
            return inf
        return grid_ceil(self.start_s + (self.forgotten_gpu_s + limits[self.level] - self.attained_gpu_s) / self.gpus)

    def quantum_ends_s(self) -> float:
        if not self.running:
            return inf
        return grid_ceil(self.start_s + (self.quanta + 1) * LAS_QUANTUM_S - self.attained_gpu_s / self.gpus)

    def promotion_s(self, knob) -> float:
        if not knob or self.running or self.level == 0:
            return inf
        ran_s = (self.attained_gpu_s - self.forgotten_gpu_s) / self.gpus
        return max(grid_ceil(self.waits_from_s + knob * ran_s - self.waited_s), self.waits_from_s + TICK_S)

    def expected_end_s(self, now_s) -> float:
        end_s, late_s = self.start_s + self.estimate_s, 60.0
        if now_s < end_s:
            return end_s
        while end_s + late_s <= now_s:
            late_s *= 2
        return end_s + late_s


class Naive:
    def __init__(self, jobs, gpus, policy, restart_s=0.0, promote_knob=0.0):
        self.jobs = sorted(jobs, key=lambda job: (job.submit_s, job.job_id))
        self.gpus, self.policy, self.restart_s, self.knob = gpus, policy, restart_s, promote_knob
        self.limits = LIMITS.get(policy, ())
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
            "las": (job.quanta * job.gpus, job.submit_s),
            "mlfq": (job.level > 0, job.submit_s),
            "tiresias": (job.level, job.entered_s, job.submit_s),
        }[self.policy] + (job.job_id,)

    def run(self):
        pending = list(self.jobs)
        for job in pending:
            job.left_s, job.entered_s = job.duration_s, job.submit_s
        now_s = 0.0
        while pending or self.active:
            instants = [pending[0].submit_s] if pending else []
            instants += [job.end_s() for job in self.active if job.running]
            instants += [self.jump_s(job) for job in self.active]
            now_s = min(instants)
            for job in [job for job in self.active if job.running and job.end_s() == now_s]:
                self.active.remove(job)
                self.log.append((now_s, "finish", job.job_id))
            while pending and pending[0].submit_s == now_s:
                self.active.append(pending.pop(0))
            for job in self.active:
                if self.jump_s(job) <= now_s:
                    self.jump(job, now_s)
            self.decide(now_s)
        return sorted(self.log)

    def jump_s(self, job):
        if self.policy == "las":
            return job.quantum_ends_s()
        return min(job.crossing_s(self.limits), job.promotion_s(self.knob))

    def jump(self, job, now_s):
        job.entered_s = now_s
        if self.policy == "las":
            job.quanta += 1
        elif job.running:
            job.level += 1
        else:
            job.level, job.forgotten_gpu_s, job.waited_s, job.waits_from_s = 0, job.attained_gpu_s, 0.0, inf

    def decide(self, now_s):
        order = sorted(self.active, key=lambda job: self.key(job, now_s))
        left = self.gpus - sum(job.gpus for job in self.active if job.running)
        if self.policy in PREEMPTIVE:
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
        for end_s, gpus in sorted((job.expected_end_s(now_s), job.gpus) for job in self.active if job.running):
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
        job.waited_s += now_s - job.waits_from_s if job.waits_from_s < inf else 0.0
        job.running, job.started, job.start_s, job.waits_from_s = True, True, now_s, inf
        self.log.append((now_s, "start", job.job_id))

    def stop(self, job, now_s):
        job.attained_gpu_s = job.attained_at(now_s)
        job.left_s -= max(0.0, now_s - job.start_s - job.overhead_s)
        job.running = False
        job.waits_from_s = now_s
        self.log.append((now_s, "stop", job.job_id))
