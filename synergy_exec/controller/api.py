"""What people may ask of a controller over HTTP; `listening` checks their token."""

from __future__ import annotations

import json
import math
from typing import Any, Protocol

from aiohttp import web

from synergy_core.errors import InputError, unknown
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import job_of
from synergy_runs.explained import explained


class Served(Protocol):
    """What the requests need of a controller."""

    @property
    def execution(self) -> Execution | None:
        """None until all agents are there."""

    @property
    def closing(self) -> bool:
        """Whether it is ending."""

    def now_s(self) -> float:
        """Seconds on its clock."""

    def changed(self) -> None:
        """Jobs have come or gone: it decides anew."""


def routes(controller: Served) -> list[web.RouteDef]:
    """The HTTP routes that a controller answers."""
    api = Api(controller)
    return [
        web.get("/jobs", api.jobs),
        web.post("/jobs", api.submit),
        web.delete("/jobs/{job}", api.cancel),
        web.get("/jobs/{job}/explain", api.explain),
        web.get("/state", api.state),
    ]


class Api:
    """Handlers of one controller's requests."""

    def __init__(self, controller: Served) -> None:
        self._controller = controller

    async def jobs(self, _: web.Request) -> web.Response:
        """All jobs."""
        execution = self._execution()
        return _json([shown(execution, job) for job in execution.jobs.values()])

    async def submit(self, request: web.Request) -> web.Response:
        """Takes a job; answered when it is in the journal."""
        try:
            values = json.loads(await request.text())
        except (ValueError, UnicodeDecodeError) as error:
            raise InputError(f"the request is not JSON ({error}); expected a job file's keys and values.") from None
        job = job_of(values, "the job")
        execution = self._execution()
        if self._controller.closing:
            raise InputError("the controller is about to end; start it again and submit then.")
        made = execution.submit(job.name, job, self._controller.now_s())
        self._controller.changed()
        return _json({"job": made.job_id, "name": made.name}, status=201)

    async def cancel(self, request: web.Request) -> web.Response:
        """Ends a job; answered when that is in the journal."""
        execution = self._execution()
        job = _job_named(execution, request.match_info["job"], among="active")
        execution.cancel(job, self._controller.now_s())
        self._controller.changed()
        return _json(shown(execution, job))

    async def explain(self, request: web.Request) -> web.Response:
        """Why a job has what it has, by the last decision."""
        execution = self._execution()
        job = _job_named(execution, request.match_info["job"])
        decider = execution.decider
        last = decider.scheduler.last
        if not decider.policy.in_rounds:
            raise InputError(
                f"policy {decider.policy.name} orders jobs by a key; only policies that allocate are explained."
            )
        if last is None or job.job_id not in last[0].job_id:
            raise InputError(f"job {job.name} was not part of the last decision: it is {job.state}.")
        found = explained(last, decider.cluster, decider.policy.name, job.job_id, f"job {job.name}")
        return _json({"time_s": last[0].now_s, "text": found.text(), **found.as_dict()})

    async def state(self, _: web.Request) -> web.Response:
        """Everything that a live table shows."""
        execution = self._execution()
        decider = execution.decider
        used = sum(job.held_gpus for job in decider.active.values())
        return _json(
            {
                "policy": decider.policy.name,
                "time_s": self._controller.now_s(),
                "cluster": decider.cluster.describe(),
                "slots": decider.cluster.gpus,
                "slots_used": used,
                "jobs": [shown(execution, job) for job in execution.jobs.values()],
            }
        )

    def _execution(self) -> Execution:
        if self._controller.execution is None:
            raise InputError("the controller waits for its agents; try again in a few seconds.")
        return self._controller.execution


def shown(execution: Execution, job: ExecutedJob) -> dict[str, Any]:
    """A job as people see it; null where nothing is known yet."""
    plan = execution.decider.plans.get(job.job_id)
    return {
        "job": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "submit_s": job.submit_time_s,
        "slots_asked": job.gpus,
        "slots": job.held_gpus,
        "plan": None if plan is None else plan.degrees,
        "batch": None if plan is None else plan.global_batch,
        "compressor": None if plan is None else plan.compressor,
        "step": job.seen.step,
        "work": job.seen.work,
        "work_total": job.file.work,
        "loss": job.seen.loss if math.isfinite(job.seen.loss) else None,
        "restarts": job.restarts,
        "folder": str(execution.folder_of(job)),
    }


def _job_named(execution: Execution, wanted: str, *, among: str = "all") -> ExecutedJob:
    """The job with that number, or with that name if only one has it. Raises InputError."""
    jobs = execution.jobs
    named = [job for job in jobs.values() if job.name == wanted]
    active = [job for job in named if not job.ended]
    if among == "active" and len(active) == 1:
        return active[0]
    if len(named) == 1:
        return named[0]
    if named:
        numbers = ", ".join(str(job.job_id) for job in named)
        raise InputError(f"{len(named)} jobs are called {wanted}; take a number: {numbers}.")
    if wanted.isascii() and wanted.isdigit() and int(wanted) in jobs:
        return jobs[int(wanted)]
    raise unknown("job", wanted, [job.name for job in jobs.values()])


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)
