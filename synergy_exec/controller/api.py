"""What people may ask of a controller over HTTP; `listening` checks their token."""

from __future__ import annotations

import difflib
import heapq
import json
import math
import re
from collections import Counter
from typing import Any, Protocol

from aiohttp import web

from synergy_core.errors import InputError
from synergy_exec.alert_limits import limits_of
from synergy_exec.controller.alerts import alerts
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import STATES, ExecutedJob
from synergy_exec.controller.keeping import KINDS, Exports, pruned
from synergy_exec.controller.metrics import METRICS_TYPE, Metrics
from synergy_exec.controller.page import page
from synergy_exec.controller.quotas import shares
from synergy_exec.controller.retry import retry
from synergy_exec.controller.rights import check_admin, check_changes, submitted_by
from synergy_exec.job_file import MOST_NAME, job_of
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.listening import ASKING, RefusedError
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.users import User
from synergy_runs.explained import explained

_NUMBER = re.compile(r"[0-9]{1,18}")
"""Of a job; more digits than that are no number of any."""

PUBLIC = ("/", "/healthz")
"""Paths that are answered without the token."""


class Served(Protocol):
    """What the requests need of a controller."""

    @property
    def agents(self) -> Agents:
        """Those that are there, and should be."""

    @property
    def execution(self) -> Execution | None:
        """None until all agents are there."""

    @property
    def closing(self) -> bool:
        """Whether it is ending."""

    def now_s(self) -> float:
        """Seconds on its clock."""

    def reread(self) -> list[str]:
        """Users and settings are read again; what has changed."""

    def changed(self) -> None:
        """Jobs have come or gone: it decides anew."""


def routes(controller: Served) -> list[web.RouteDef]:
    """The HTTP routes that a controller answers."""
    api = Api(controller)
    return [
        web.get("/jobs", api.jobs),
        web.post("/jobs", api.submit),
        web.delete("/jobs/{job}", api.cancel),
        web.post("/jobs/{job}/retry", api.retry),
        web.post("/jobs/{job}/prune", api.prune),
        web.get("/jobs/{job}/weights", api.weights),
        web.get("/jobs/{job}/explain", api.explain),
        web.post("/reload", api.reload),
        web.get("/state", api.state),
        web.get("/", api.page),
        web.get("/healthz", api.health),
        web.get("/metrics", api.metrics),
        web.get("/alerts", api.alerts),
    ]


class Api:
    """Handlers of one controller's requests."""

    def __init__(self, controller: Served) -> None:
        self._controller = controller
        self._metrics = Metrics(controller.agents)
        self._exports = Exports()

    async def jobs(self, _: web.Request) -> web.Response:
        """All jobs."""
        execution = self._execution()
        return _json([shown(execution, job) for job in execution.jobs.values()])

    async def submit(self, request: web.Request) -> web.Response:
        """Takes a job; answered when it is in the journal."""
        job = submitted_by(_user(), job_of(await _values(request), "the job"))
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
        check_changes(_user(), job)
        execution.cancel(job, self._controller.now_s(), _user().name)
        self._controller.changed()
        return _json(shown(execution, job))

    async def retry(self, request: web.Request) -> web.Response:
        """Has a job that failed or was cancelled wait again; answered when that is in the journal."""
        execution = self._execution()
        values = await _values(request)
        if values not in ({}, {"from_start": False}, {"from_start": True}):
            raise InputError('expected {"from_start": true}, or {} to go on from the last checkpoint.')
        job = _job_named(execution, request.match_info["job"])
        check_changes(_user(), job)
        retry(execution, job, self._controller.now_s(), from_start=values.get("from_start", False))
        self._controller.changed()
        return _json(shown(execution, job))

    async def prune(self, request: web.Request) -> web.Response:
        """Says what need not be kept of a job that has ended, and removes it where that is asked."""
        execution = self._execution()
        job = _job_named(execution, request.match_info["job"])
        check_changes(_user(), job)
        return _json(await pruned(execution, job, await _values(request)))

    async def weights(self, request: web.Request) -> web.StreamResponse:
        """A job's weights, a file."""
        execution = self._execution()
        job = _job_named(execution, request.match_info["job"])
        check_changes(_user(), job)
        kind, step = request.query.get("format", KINDS[0]), request.query.get("step", "")
        return await self._exports.send(request, execution, job, kind, step)

    async def reload(self, request: web.Request) -> web.Response:
        """Reads users and settings again; what has changed."""
        check_admin(_user())
        return _json(self._controller.reread() or ["nothing has changed"])

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

    async def state(self, request: web.Request) -> web.Response:
        """Everything that a live table shows; with `most`, of at most so many jobs, with their losses."""
        execution = self._execution()
        decider = execution.decider
        jobs = list(execution.jobs.values())
        most = request.query.get("most")
        if most is not None and not _NUMBER.fullmatch(most):
            raise InputError(f"most={plain(most, MOST_SHOWN)}; expected a number of jobs.")
        states = Counter(job.state for job in jobs)
        rows = [shown(execution, job) for job in jobs] if most is None else _first(execution, int(most))
        used = sum(job.held_gpus for job in decider.active.values())
        return _json(
            {
                "policy": decider.policy.name,
                "time_s": self._controller.now_s(),
                "cluster": decider.cluster.describe(),
                "slots": decider.cluster.gpus,
                "slots_used": used,
                "virtual_clusters": {name: each._asdict() for name, each in shares(decider).items()},
                "aside": [[*slot, why] for slot, why in decider.aside.slots.items()],
                "counts": {state: states[state] for state in STATES},
                "jobs": rows,
            }
        )

    async def page(self, _: web.Request) -> web.Response:
        """What a browser shows; it knows nothing until its reader gives it the token."""
        return page()

    async def health(self, _: web.Request) -> web.Response:
        """Whether jobs can be taken and train; nothing that a stranger should not know."""
        ready = self._controller.execution is not None and not self._controller.closing
        there, all_of_them = len(self._controller.agents.links), self._controller.agents.backend.nodes
        ok = ready and there > 0
        return _json({"ok": ok, "agents": there, "agents_expected": all_of_them}, status=200 if ok else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        """For Prometheus."""
        text = self._metrics.text(self._controller.execution)
        return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})

    async def alerts(self, request: web.Request) -> web.Response:
        """What somebody should look at."""
        limits = limits_of(request.query)
        now_s = self._controller.now_s()
        return _json(alerts(self._execution(), self._controller.agents, now_s, limits))

    def _execution(self) -> Execution:
        if self._controller.execution is None:
            raise RefusedError(503, "the controller waits for its agents; try again in a few seconds.")
        return self._controller.execution


def shown(execution: Execution, job: ExecutedJob) -> dict[str, Any]:
    """A job as people see it; null where nothing is known yet."""
    plan = execution.decider.plans.get(job.job_id)
    return {
        "job": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "note": job.seen.note,
        "user": job.user,
        "virtual_cluster": job.virtual_cluster,
        "priority": job.priority,
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
        "folder": f"{execution.jobs_folder}/{job.job_id}",
    }


def _first(execution: Execution, most: int) -> list[dict[str, Any]]:
    """So many jobs: those that hold slots, those that wait, those that have ended, the last first; and their losses."""

    def place(job: ExecutedJob) -> tuple[bool, bool, int]:
        return job.ended, not job.held_gpus, -job.job_id if job.ended else job.job_id

    jobs = heapq.nsmallest(most, execution.jobs.values(), key=place)
    return [{**shown(execution, job), "losses": job.curve.points} for job in jobs]


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
    if _NUMBER.fullmatch(wanted) and int(wanted) in jobs:
        return jobs[int(wanted)]
    near = (
        difflib.get_close_matches(wanted, {job.name for job in jobs.values()}, n=3) if len(wanted) <= MOST_NAME else []
    )
    guess = f" Did you mean {' or '.join(repr(each) for each in near)}?" if near else ""
    raise RefusedError(
        404, f"unknown job '{plain(wanted, MOST_SHOWN)}'.{guess} GET /jobs, or the command list, has all."
    )


def _user() -> User:
    """Who asks."""
    user = ASKING.get()
    assert user is not None
    return user


async def _values(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({plain(str(error), MOST_SHOWN)}).") from None


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)
