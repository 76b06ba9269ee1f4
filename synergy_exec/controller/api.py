"""The controller's HTTP interface; `nodes.agents.listening` checks tokens."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import math
import re
import secrets
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import prometheus_client as prometheus
from aiohttp import web

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.decisions.reasons import Waiting
from synergy_exec.controller.execution import Execution, shares
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.controller.journal import open_journal
from synergy_exec.job_file import job_of
from synergy_exec.job_folder import COLUMNS, REPORTS, STEPS
from synergy_exec.nodes.agents import Agents, RefusedError
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.wire import whole_lines
from synergy_runs.outputs.explained import explained
from synergy_runs.outputs.facts import Kind

# Metrics for monitoring.


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format."""
prometheus.disable_created_metrics()  # type: ignore[no-untyped-call]


def metrics(agents: Agents, execution: Execution | None, now_s: float) -> bytes:
    """Returns the metrics as text. Metrics of slots and jobs are included once all agents have connected."""
    registry = prometheus.CollectorRegistry()
    prometheus.ProcessCollector(registry=registry)

    def gauge(name: str, meaning: str, value: float) -> None:
        prometheus.Gauge(f"synergy_{name}", meaning, registry=registry).set(value)

    def total(name: str, meaning: str, value: float) -> None:
        prometheus.Counter(f"synergy_{name}", meaning, registry=registry).inc(value)

    def gauges(name: str, meaning: str, label: str, values: Mapping[str, float]) -> None:
        family = prometheus.Gauge(f"synergy_{name}", meaning, [label], registry=registry)
        for each, value in values.items():
            family.labels(each).set(value)

    gauge("agents", "Number of connected agents.", len(agents.links))
    gauge("agents_expected", "Number of nodes of the backend. Each should have an agent.", agents.backend.nodes)
    total("agent_losses", "Number of times that an agent was lost or did not connect.", agents.losses)
    if execution is None:
        return prometheus.generate_latest(registry)
    decider = execution.decider
    quotas = {plain(name): share for name, share in shares(decider).items()}
    gauge(
        "disk_free_bytes",
        "Free bytes of the file system with the run's folder.",
        shutil.disk_usage(execution.folder).free,
    )
    gauge("slots", "Number of slots of all nodes.", decider.aside.whole.gpus)
    gauge("slots_aside", "Number of slots of excluded nodes.", decider.aside.whole.gpus - decider.cluster.gpus)
    gauge("slots_used", "Number of slots that jobs hold.", sum(job.held_gpus for job in decider.active.values()))
    gauges("jobs", "Number of jobs by state.", "state", execution.counts)
    gauges(
        "quota",
        "Quota of each virtual cluster, in slots.",
        "virtual_cluster",
        {name: q.slots for name, q in quotas.items()},
    )
    gauges(
        "quota_used",
        "Number of slots that its jobs hold.",
        "virtual_cluster",
        {name: q.used for name, q in quotas.items()},
    )
    total("decisions", "Number of decisions.", execution.decisions)
    total("decision_seconds", "Time spent on decisions, in seconds.", execution.deciding_s)
    _add_job_metrics(registry, execution, now_s)
    return prometheus.generate_latest(registry)


_JOB_METRICS = {
    "slots": "Number of slots that the job holds.",
    "step": "Number of steps trained.",
    "loss": "Last reported loss.",
    "goodput": "Iterations at the initial batch per second.",
    "seconds_since_step": "Seconds since the job was started or last reported a step.",
}


def _add_job_metrics(registry: prometheus.CollectorRegistry, execution: Execution, now_s: float) -> None:
    """Adds the metrics of each job that holds slots. Other jobs have none, which bounds the number of series."""
    families = {
        name: prometheus.Gauge(f"synergy_job_{name}", meaning, ["job", "name"], registry=registry)
        for name, meaning in _JOB_METRICS.items()
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
                families[name].labels(str(job.job_id), plain(job.name)).set(value)


# The history that the page shows.


MAX_FACTS, MAX_POINTS, MAX_DRAWN = 5_000, 300, 12
"""Maximum numbers of facts that are read, of points of a curve, and of jobs with curves."""


def history(work: Path, numbers: Collection[int]) -> dict[str, Any]:
    """Returns the spans during which jobs held slots, and the curves of the jobs with these numbers.

    A span has a job, a node, its slots and the times from_s and until_s (None if the job still holds them). The curves
    of a job are its loss by step, and its slots, batch and plan, each value with the time from which it applied.
    work: the run's folder, from which everything is read.
    """
    with contextlib.closing(open_journal(work)) as journal:
        facts = journal.facts(MAX_FACTS)
        runs = {run.run: run for run in journal.runs(numbers)}
        timings = journal.timings(MAX_FACTS, runs)
    curves = {
        number: {"loss": _losses(work / "jobs" / str(number)), "slots": list[Any](), "batch": [], "plan": []}
        for number in numbers
    }
    spans, held = list[dict[str, Any]](), dict[int, list[dict[str, Any]]]()
    for fact in facts:
        for span in held.pop(fact.job, ()):
            span["until_s"] = fact.time_s
        if fact.kind == Kind.START:  # only these facts have a placement
            placed = [
                (node, [at for at in range(mask.bit_length()) if mask >> at & 1]) for node, mask in fact.placement
            ]
            since = {"job": fact.job, "from_s": fact.time_s, "until_s": None}
            held[fact.job] = [{**since, "node": node, "slots": slots} for node, slots in placed]
            spans += held[fact.job]
        if fact.job in curves and fact.kind != Kind.SUBMIT:
            curves[fact.job]["slots"].append([fact.time_s, fact.gpus if fact.kind == Kind.START else 0])
    for each in timings:
        if each.kind == "plan":
            run = runs[each.run]
            plan = Plan(**{**run.plan, **each.parts})
            curves[run.job]["batch"].append([each.time_s, plan.global_batch])
            curves[run.job]["plan"].append([each.time_s, plan.degrees])
    return {"spans": spans, "jobs": curves}


def _losses(folder: Path) -> list[tuple[int, float]]:
    """Steps and losses of a class from steps.csv, or of a command from its reports. For a step that was trained twice,
    the later run's loss is used.
    """
    found: dict[int, float] = {}
    reports = sorted(folder.glob(REPORTS), key=lambda path: (len(path.name), path.name))
    for line in [*whole_lines(folder / STEPS)[1:], *(line for path in reports for line in whole_lines(path))]:
        with contextlib.suppress(ValueError, KeyError, IndexError, TypeError):
            values = (
                json.loads(line) if line.startswith("{") else dict(zip(COLUMNS[STEPS], line.split(","), strict=True))
            )
            if math.isfinite(loss := float(values["loss"])):
                found[int(values["step"])] = loss
    steps = sorted(found)
    return [(step, found[step]) for step in sorted({*steps[:: 1 + len(steps) // MAX_POINTS], *steps[-1:]})]


PUBLIC = ("/", "/healthz")
"""Paths that need no token."""
_PAGE = Path(__file__).with_name("page.html")
_RULES = "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'"
"""Content-Security-Policy: a browser runs only the page's own script and connects only to this controller."""
_NUMBER = re.compile(r"[0-9]{1,18}")


class Served(Protocol):
    """The part of a controller that requests use. execution: None until all agents have connected."""

    agents: Agents
    execution: Execution | None
    closing: bool

    def now_s(self) -> float: ...

    def unix_s(self, time_s: float) -> float: ...

    def changed(self) -> None: ...


def routes(controller: Served) -> list[web.RouteDef]:
    """The HTTP routes of a controller."""
    api = Api(controller)
    return [
        web.get("/jobs", api.jobs),
        web.post("/jobs", api.submit),
        web.delete("/jobs/{job}", api.cancel),
        web.post("/jobs/{job}/retry", api.retry),
        web.get("/jobs/{job}/explain", api.explain),
        web.get("/state", api.state),
        web.get("/history", api.history),
        web.get("/", api.page),
        web.get("/healthz", api.health),
        web.get("/metrics", api.metrics),
    ]


class Api:
    """Handlers of one controller's requests."""

    def __init__(self, controller: Served) -> None:
        self._controller = controller
        self._submitting = asyncio.Lock()

    async def jobs(self, _: web.Request) -> web.Response:
        return web.json_response(self._listed(self._execution().jobs.values()))

    async def submit(self, request: web.Request) -> web.Response:
        """Submits a job. The response is sent once the job is in the journal."""
        job = job_of(await _values(request), "the job")
        execution = self._execution()
        async with self._submitting:  # while the job's code is copied, no other job gets its number
            frozen = await asyncio.to_thread(execution.freeze, execution.check(job.title, job))
            if self._controller.closing:
                raise InputError("the controller is shutting down; start it again, then submit the job.")
            made = execution.submit(job.title, job, self._controller.now_s(), frozen=frozen)
        self._controller.changed()
        return web.json_response({"job": made.job_id, "name": made.name, "note": made.seen.note}, status=201)

    async def cancel(self, request: web.Request) -> web.Response:
        """Cancels a job. The response is sent once that is in the journal."""
        job = self._job_of(request)
        self._execution().cancel(job, self._controller.now_s())
        self._controller.changed()
        return web.json_response(self._listed([job])[0])

    async def retry(self, request: web.Request) -> web.Response:
        """Makes a failed or cancelled job wait again. The response is sent once that is in the journal."""
        values = await _values(request)
        if values not in ({}, {"from_start": False}, {"from_start": True}):
            raise InputError('expected {"from_start": true}, or {} to continue from the last checkpoint.')
        job = self._job_of(request)
        self._execution().retry(job, self._controller.now_s(), from_start=values.get("from_start", False))
        self._controller.changed()
        return web.json_response(self._listed([job])[0])

    async def explain(self, request: web.Request) -> web.Response:
        """Explains a job's last allocation or, under an ordering policy, why it waits or was stopped."""
        job, decider = self._job_of(request), self._execution().decider
        last = decider.scheduler.last
        (row,) = self._listed([job])
        if not decider.policy.reads_goodput or any(each["kind"] == Waiting.AFTER.name for each in row["why"]):
            sentences = [each["text"] for each in row["why"]] or [f"Job {job.name} is {job.state}."]
            if job.stopped_for is not None:
                sentences.append(f"It was last stopped because {job.stopped_for.text}.")
            answer = {"time_s": self._controller.now_s(), "text": " ".join(sentences)}
            return web.json_response({**answer, "why": row["why"], "stopped": row["stopped"]})
        if last is None or job.job_id not in last[0].job_id:
            raise InputError(f"job {job.name} was not part of the last decision; its state is {job.state}.")
        found = explained(last, decider.cluster, decider.policy.name, job.job_id, f"job {job.name}")
        return web.json_response({"time_s": last[0].now_s, "text": found.text(), **found.as_dict()})

    async def state(self, request: web.Request) -> web.Response:
        """Returns the state that the page shows. The query parameter `most` is the maximum number of jobs listed:
        first those that hold slots, then waiting jobs, then ended jobs, newest first.
        """
        execution = self._execution()
        decider, jobs = execution.decider, list(execution.jobs.values())
        if (most := request.query.get("most")) is not None:
            if not _NUMBER.fullmatch(most):
                raise InputError(f"most={plain(most, MOST_SHOWN)}; expected a number of jobs.")
            jobs = heapq.nsmallest(int(most), jobs, key=_place)
        return web.json_response(
            {
                "policy": decider.policy.name,
                "time_s": self._controller.now_s(),
                "cluster": decider.cluster.describe(),
                "slots": decider.cluster.gpus,
                "slots_used": sum(job.held_gpus for job in decider.active.values()),
                "virtual_clusters": {name: each._asdict() for name, each in shares(decider).items()},
                "aside": [
                    f"node {node} is excluded: it has no agent, or a broken device"
                    for node in sorted(decider.aside.nodes)
                ],
                "counts": execution.counts,
                "jobs": self._listed(jobs),
            }
        )

    async def history(self, request: web.Request) -> web.Response:
        """Returns what the page draws: data of the first jobs in its list and of the selected job (`job`)."""
        execution = self._execution()
        chosen = [job.job_id for job in heapq.nsmallest(MAX_DRAWN, execution.jobs.values(), key=_place)]
        if _NUMBER.fullmatch(wanted := request.query.get("job", "")) and int(wanted) in execution.jobs:
            chosen.insert(0, int(wanted))
        drawn = await asyncio.to_thread(history, execution.folder, dict.fromkeys(chosen))
        nodes = [node.gpus_per_node for node in execution.decider.aside.whole.node_type_of]
        names = {number: execution.jobs[number].name for number in (*chosen, *(each["job"] for each in drawn["spans"]))}
        return web.json_response({"time_s": self._controller.now_s(), "nodes": nodes, "names": names, **drawn})

    async def page(self, _: web.Request) -> web.Response:
        """Returns the page for a browser. It shows nothing until its reader enters the token."""
        nonce = secrets.token_urlsafe()
        text = _PAGE.read_text(encoding="utf-8").replace("NONCE", nonce)
        headers = {"Content-Security-Policy": _RULES.format(nonce=nonce), "Cache-Control": "no-store"}
        return web.Response(text=text, content_type="text/html", charset="utf-8", headers=headers)

    async def health(self, _: web.Request) -> web.Response:
        """Returns whether jobs can be submitted and trained. It gives no details, because it needs no token."""
        ready = self._controller.execution is not None and not self._controller.closing
        connected, expected = len(self._controller.agents.links), self._controller.agents.backend.nodes
        ok = ready and connected > 0
        answer = {"ok": ok, "agents": connected, "agents_expected": expected}
        return web.json_response(answer, status=200 if ok else 503)

    async def metrics(self, _: web.Request) -> web.Response:
        controller = self._controller
        text = metrics(controller.agents, controller.execution, controller.now_s())
        return web.Response(body=text, headers={"Content-Type": METRICS_TYPE})

    def _listed(self, jobs: Collection[ExecutedJob]) -> list[dict[str, Any]]:
        """Returns the fields of `shown`, the submission and start times, and the reasons for waiting, for each job."""
        execution = self._execution()
        reasons = execution.decider.why_waiting(jobs, self._controller.now_s())
        reasons |= {job.job_id: [execution.held_back(job)] for job in jobs if job.job_id in execution.held}
        return [
            {
                **shown(execution, job),
                "submitted_unix_s": self._controller.unix_s(job.submit_time_s),
                "started_unix_s": self._controller.unix_s(job.service.first_start_s)
                if job.service.first_start_s < math.inf
                else None,
                "why": [{"kind": each.kind.name, "text": each.text} for each in reasons.get(job.job_id, ())],
            }
            for job in jobs
        ]

    def _execution(self) -> Execution:
        if self._controller.execution is None:
            raise RefusedError(503, "the controller is waiting for its agents to connect; try again in a few seconds.")
        return self._controller.execution

    def _job_of(self, request: web.Request) -> ExecutedJob:
        wanted = request.match_info["job"]
        jobs = self._execution().jobs
        found = [job for job in jobs.values() if job.name == wanted]
        # If several jobs have this name, choose the one that has not ended.
        chosen = [job for job in found if not job.ended or len(found) == 1]
        if found and len(chosen) != 1:
            numbers = ", ".join(str(job.job_id) for job in found)
            raise InputError(f"{len(found)} jobs are named {wanted}; give one of their numbers: {numbers}.")
        chosen = chosen or [job for number, job in jobs.items() if str(number) == wanted]
        if not chosen:
            raise RefusedError(
                404, f"unknown job '{plain(wanted, MOST_SHOWN)}'. GET /jobs, or the command list, shows all jobs."
            )
        return chosen[0]


def shown(execution: Execution, job: ExecutedJob) -> dict[str, Any]:
    """The fields of a job as users see them; null for unknown values."""
    plan, stopped = execution.decider.plans.get(job.job_id), job.stopped_for
    return {
        "job": job.job_id,
        "name": job.name,
        "state": job.state,
        "reason": job.reason,
        "stopped": None if stopped is None else {"kind": stopped.name, "text": stopped.text},
        "note": job.seen.note,
        "user": job.request.user,
        "virtual_cluster": job.request.virtual_cluster,
        "priority": job.request.priority,
        "submit_s": job.submit_time_s,
        "slots_asked": job.gpus,
        "slots": job.held_gpus,
        "plan": None if plan is None else plan.degrees,
        "batch": None if plan is None else plan.global_batch,
        "compressor": None if plan is None else plan.compressor,
        "step": job.seen.step,
        "work": job.seen.work,
        "work_total": job.file.work,
        "goodput": _finite(job.goodput(None if plan is None else plan.global_batch)),
        "loss": _finite(job.seen.loss),
        "restarts": job.service.restarts,
        "folder": f"{execution.jobs_folder}/{job.job_id}",
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _place(job: ExecutedJob) -> tuple[bool, bool, int]:
    return job.ended, not job.held_gpus, -job.job_id if job.ended else job.job_id


async def _values(request: web.Request) -> Any:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not JSON ({plain(str(error), MOST_SHOWN)}).") from None
