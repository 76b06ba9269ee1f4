"""What people may ask of a controller over HTTP; `listening` checks their token."""

from __future__ import annotations

import base64
import difflib
import hashlib
import heapq
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from synergy_core.errors import InputError
from synergy_exec.controller.execution import Execution, shares
from synergy_exec.controller.jobs import STATES, ExecutedJob
from synergy_exec.controller.reconcile import retry
from synergy_exec.job_file import MOST_NAME, job_of
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.listening import RefusedError
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_runs.explained import explained

# What a monitor reads of a controller: Prometheus' text. Labels are bounded: only jobs that hold slots have series.


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Of one controller: gathered when they are asked for. Nothing of jobs is known before all agents are there."""

    def __init__(self, agents: Agents, now_s: Callable[[], float]) -> None:
        self.execution: Execution | None = None
        self._agents, self._now_s = agents, now_s
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, execution: Execution | None) -> bytes:
        """As `METRICS_TYPE` says."""
        self.execution = execution
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that it is not gathered when it is registered."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All families."""
        agents = self._agents
        yield GaugeMetricFamily("synergy_agents", "Agents that are connected.", len(agents.links))
        yield GaugeMetricFamily("synergy_agents_expected", "Agents that there should be.", agents.backend.nodes)
        yield CounterMetricFamily(
            "synergy_agent_losses", "How often an agent was lost, or did not come.", agents.losses
        )
        if self.execution is not None:
            yield _free_bytes(self.execution)
            yield from _of_all_jobs(self.execution)
            yield from _of_each_job(self.execution, self._now_s())


def _free_bytes(execution: Execution) -> Metric:
    free_bytes = shutil.disk_usage(execution.folder).free
    return GaugeMetricFamily("synergy_disk_free_bytes", "Free bytes where the run's folder is.", free_bytes)


def _of_all_jobs(execution: Execution) -> Iterable[Metric]:
    states = [job.state for job in execution.jobs.values()]
    jobs = GaugeMetricFamily("synergy_jobs", "Jobs by state.", labels=("state",))
    for state in STATES:
        jobs.add_metric((state,), states.count(state))
    yield jobs
    decider = execution.decider
    used = sum(job.held_gpus for job in decider.active.values())
    yield GaugeMetricFamily("synergy_slots", "Slots that there are.", decider.aside.whole.gpus)
    yield GaugeMetricFamily("synergy_slots_aside", "Slots that are set aside.", len(decider.aside.slots))
    yield GaugeMetricFamily("synergy_slots_used", "Slots that jobs hold.", used)
    quotas = GaugeMetricFamily("synergy_quota", "Slots of each virtual cluster.", labels=("virtual_cluster",))
    held = GaugeMetricFamily("synergy_quota_used", "Slots that its jobs hold.", labels=("virtual_cluster",))
    for name, share in shares(decider).items():
        quotas.add_metric((plain(name),), share.slots)
        held.add_metric((plain(name),), share.used)
    yield from (quotas, held)
    yield SummaryMetricFamily(
        "synergy_decision_seconds", "What decisions took.", execution.decisions, execution.deciding_s
    )


def _of_each_job(execution: Execution, now_s: float) -> Iterable[Metric]:
    meanings = {
        "slots": "Slots that the job holds.",
        "step": "Steps that it has trained.",
        "loss": "Its last reported loss.",
        "goodput": "Iterations at its initial batch per second.",
        "seconds_since_step": "Seconds since it was started or last reported a step.",
    }
    families = {
        name: GaugeMetricFamily(f"synergy_job_{name}", meaning, labels=("job", "name"))
        for name, meaning in meanings.items()
    }
    for job in execution.decider.active.values():
        if not job.held_gpus:
            continue
        plan = execution.decider.plans.get(job.job_id)
        goodput = job.goodput(None if plan is None else plan.global_batch)
        values = {"slots": job.held_gpus, "step": job.seen.step, "loss": job.seen.loss, "goodput": goodput}
        values["seconds_since_step"] = now_s - job.moved_s
        for name, value in values.items():
            if not math.isnan(value):
                families[name].add_metric((str(job.job_id), plain(job.name)), value)
    yield from families.values()


# The page that shows jobs in a browser: one file, which asks `/state` with the token that its reader gives.


_FILE = Path(__file__).with_name("page.html")


def page() -> web.Response:
    """The page. A browser runs nothing on it but its own script, and talks to nobody but this controller."""
    text = _FILE.read_text(encoding="utf-8")
    rules = (
        "default-src 'none'",
        f"script-src '{_hash(text, 'script')}'",
        f"style-src '{_hash(text, 'style')}'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    headers = {
        "Content-Security-Policy": "; ".join(rules),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)


def _hash(text: str, element: str) -> str:
    """Of an element's content, as a Content-Security-Policy names it."""
    found = re.search(rf"<{element}>(.*)</{element}>", text, re.DOTALL)
    assert found is not None
    return "sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()


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
        web.get("/jobs/{job}/explain", api.explain),
        web.get("/state", api.state),
        web.get("/", api.page),
        web.get("/healthz", api.health),
        web.get("/metrics", api.metrics),
    ]


class Api:
    """Handlers of one controller's requests."""

    def __init__(self, controller: Served) -> None:
        self._controller = controller
        self._metrics = Metrics(controller.agents, controller.now_s)

    async def jobs(self, _: web.Request) -> web.Response:
        """All jobs."""
        execution = self._execution()
        return _json(self._listed(execution.jobs.values()))

    async def submit(self, request: web.Request) -> web.Response:
        """Takes a job; answered when it is in the journal."""
        job = job_of(await _values(request), "the job")
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
        return _json(self._listed([job])[0])

    async def retry(self, request: web.Request) -> web.Response:
        """Has a job that failed or was cancelled wait again; answered when that is in the journal."""
        execution = self._execution()
        values = await _values(request)
        if values not in ({}, {"from_start": False}, {"from_start": True}):
            raise InputError('expected {"from_start": true}, or {} to go on from the last checkpoint.')
        job = _job_named(execution, request.match_info["job"])
        retry(execution, job, self._controller.now_s(), from_start=values.get("from_start", False))
        self._controller.changed()
        return _json(self._listed([job])[0])

    async def explain(self, request: web.Request) -> web.Response:
        """Why a job has what it has, by the last decision; of one that a policy orders, why it waits or was stopped."""
        execution = self._execution()
        job = _job_named(execution, request.match_info["job"])
        decider = execution.decider
        last = decider.scheduler.last
        if not decider.policy.reads_goodput:
            (row,) = self._listed([job])
            sentences = [each["text"] for each in row["why"]] or [f"Job {job.name} is {job.state}."]
            if job.stopped_for is not None:
                sentences.append(f"It was last stopped because {job.stopped_for.text}.")
            told = {"time_s": self._controller.now_s(), "text": " ".join(sentences)}
            return _json({**told, "why": row["why"], "stopped": row["stopped"]})
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
        rows = self._listed(jobs) if most is None else self._listed(_first(jobs, int(most)), losses=True)
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

    def _listed(self, jobs: Collection[ExecutedJob], *, losses: bool = False) -> list[dict[str, Any]]:
        """The jobs as `shown`, with why those wait that do; losses: with their losses."""
        execution = self._execution()
        reasons = execution.decider.why_waiting(jobs, self._controller.now_s())
        rows = []
        for job in jobs:
            why = [{"kind": each.kind.name, "text": each.text} for each in reasons.get(job.job_id, ())]
            more = {"losses": job.curve.points} if losses else {}
            rows.append({**shown(execution, job), "why": why, **more})
        return rows

    def _execution(self) -> Execution:
        if self._controller.execution is None:
            raise RefusedError(503, "the controller waits for its agents; try again in a few seconds.")
        return self._controller.execution


def shown(execution: Execution, job: ExecutedJob) -> dict[str, Any]:
    """A job as people see it; null where nothing is known yet."""
    plan, stopped = execution.decider.plans.get(job.job_id), job.stopped_for
    return {
        "job": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "stopped": None if stopped is None else {"kind": stopped.name, "text": stopped.text},
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


def _first(jobs: Iterable[ExecutedJob], most: int) -> list[ExecutedJob]:
    """So many jobs: those that hold slots, those that wait, those that have ended, the last first."""

    def place(job: ExecutedJob) -> tuple[bool, bool, int]:
        return job.ended, not job.held_gpus, -job.job_id if job.ended else job.job_id

    return heapq.nsmallest(most, jobs, key=place)


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


async def _values(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({plain(str(error), MOST_SHOWN)}).") from None


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)
