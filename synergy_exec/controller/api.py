"""What people may ask of a controller over HTTP; `listening` checks their token."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import difflib
import hashlib
import heapq
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from synergy_core.errors import InputError
from synergy_core.units import format_duration
from synergy_exec.controller.execution import Execution, shares
from synergy_exec.controller.jobs import STATES, ExecutedJob
from synergy_exec.controller.reconcile import retry
from synergy_exec.job_file import MOST_NAME, JobFile, job_of
from synergy_exec.job_folder import Retention, removals, remove
from synergy_exec.nodes.agents import Agents
from synergy_exec.nodes.listening import ASKING, RefusedError
from synergy_exec.plain import MOST_SHOWN, plain, plain_lines
from synergy_exec.settings import AlertLimits, limits_of
from synergy_exec.users import User
from synergy_runs.explained import explained

# What somebody should look at, a sentence each; nothing, as long as all is well.


def alerts(execution: Execution, agents: Agents, now_s: float, limits: AlertLimits) -> list[str]:
    """All of it, the cluster before its jobs."""
    return [
        *_of_nodes(agents),
        *_of_slots(execution),
        *_of_disk(execution, limits),
        *_of_jobs(execution, now_s, limits),
    ]


def _of_nodes(agents: Agents) -> Iterator[str]:
    for node in range(agents.backend.nodes):
        times = agents.lost_lately(node)
        if node not in agents.links:
            yield f"node {node} has no agent; lost within an hour: {times}"
        elif times:
            yield f"node {node}: agents lost within an hour: {times}"


def _of_slots(execution: Execution) -> Iterator[str]:
    for (node, slot), why in execution.decider.aside.slots.items():
        yield f"node {node}, slot {slot} is set aside: {why}"


def _of_disk(execution: Execution, limits: AlertLimits) -> Iterator[str]:
    disk = shutil.disk_usage(execution.folder)
    if disk.free < limits.free_fraction * disk.total:
        yield f"{execution.folder}: {disk.free / 1e9:.1f} GB of {disk.total / 1e9:.1f} GB are free"


def _of_jobs(execution: Execution, now_s: float, limits: AlertLimits) -> Iterator[str]:
    for job in execution.jobs.values():
        since_s = now_s - job.moved_s
        named = f"job {job.job_id} ({plain(job.name)})"
        if job.state == "failed" and since_s <= limits.failed_s:
            yield f"{named} failed {format_duration(since_s)} ago: {plain(job.reason)}"
        elif job.held_gpus and since_s > limits.silent_s:
            yield f"{named} has trained no step for {format_duration(since_s)}; slots that it holds: {job.held_gpus}"


# What is kept of a job that a user has: pruned, and its weights handed out.


KINDS = ("safetensors", "pt")
_CHUNK = 1 << 20


async def pruned(execution: Execution, job: ExecutedJob, asked: Any) -> dict[str, Any]:
    """What of a job that has ended need not be kept, removed where `yes` is asked.

    asked: last_checkpoint, or days, or neither for the run's own retention. Raises InputError for anything else, and
    for a job that may still write.
    """
    keep, days, yes = _asked(execution, asked)
    if not job.ended or execution.runs.of_job(job.job_id) is not None:
        raise InputError(f"job {job.name} is {job.state}; only what is left of jobs that have ended can be pruned.")
    what = await asyncio.to_thread(removals, execution.folder, [job.job_id], keep, days)
    if yes:
        await asyncio.to_thread(remove, what)
    return {"removed": yes, "what": [str(each) for each in what], "bytes": sum(each.size_bytes for each in what)}


def _asked(execution: Execution, asked: Any) -> tuple[Retention, float, bool]:
    if isinstance(asked, dict) and asked.keys() <= {"last_checkpoint", "days", "yes"}:
        days, yes, last = asked.get("days"), asked.get("yes", False), asked.get("last_checkpoint", False)
        number = isinstance(days, int | float) and not isinstance(days, bool) and days >= 0
        if isinstance(yes, bool) and isinstance(last, bool) and (days is None or (number and not last)):
            if last:
                return "last_checkpoint", 0.0, yes
            if days is not None:
                return "remove", float(days), yes
            return execution.settings.retention, execution.settings.retention_days, yes
    raise InputError('expected {"last_checkpoint": true}, {"days": a number from 0} or {}; with "yes": true to remove.')


class Exports:
    """Weights as files of a kind, made one at a time by a process that knows torch, and sent."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def send(
        self, request: web.Request, execution: Execution, job: ExecutedJob, kind: str, step: str
    ) -> web.StreamResponse:
        """The answer with a job's weights, of its newest checkpoint or that of a step. Raises InputError."""
        if kind not in KINDS or not (step == "" or (step.isdecimal() and step.isascii() and len(step) < 19)):
            raise InputError(f"expected format={' or format='.join(KINDS)}, and step=N or none.")
        folder = Path(tempfile.mkdtemp(prefix=".export-", dir=execution.folder))
        try:
            out = folder / f"weights.{kind}"
            async with self._one:
                await _export(execution.folder_of(job).resolve(), out, step)
            answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            with out.open("rb") as stream:
                answer.content_length = os.fstat(stream.fileno()).st_size
                await answer.prepare(request)
                while chunk := await asyncio.to_thread(stream.read, _CHUNK):
                    await answer.write(chunk)
            await answer.write_eof()
            return answer
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _export(folder: Path, out: Path, step: str) -> None:
    command = [sys.executable, "-m", "synergy_exec", "export", str(folder), "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(["--step", step] if step else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise InputError(plain_lines(said.decode(errors="replace").strip()) or "the export was killed.")


# What a monitor reads of a controller: Prometheus' text. Labels are bounded: only jobs that hold slots have series.


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Collector):
    """Of one controller: gathered when they are asked for. Nothing of jobs is known before all agents are there."""

    def __init__(self, agents: Agents) -> None:
        self.execution: Execution | None = None
        self._agents = agents
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
            yield from _of_all_jobs(self.execution)
            yield from _of_each_job(self.execution)


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


def _of_each_job(execution: Execution) -> Iterable[Metric]:
    meanings = {
        "slots": "Slots that the job holds.",
        "step": "Steps that it has trained.",
        "loss": "Its last reported loss.",
        "goodput": "Iterations at its initial batch per second.",
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


# What users may do, by their roles: readers look, users change what is theirs, admins all of it.


FORBIDDEN = 403


def check_admin(user: User) -> None:
    """Raises RefusedError for anybody else."""
    if user.role != "admin":
        raise RefusedError(FORBIDDEN, f"{user.name} is a {user.role}; this is for admins.")


def check_changes(user: User, job: ExecutedJob) -> None:
    """Raises RefusedError where the user may not end the job, have it wait again, or take its weights."""
    _check_no_reader(user)
    if user.role != "admin" and job.file.user != user.name:
        whose = f"{job.file.user}'s" if job.file.user else "no user's"
        raise RefusedError(FORBIDDEN, f"job {job.name} is {whose}; {user.name} may change jobs of {user.name} alone.")


def submitted_by(user: User, job: JobFile) -> JobFile:
    """The job as the user submits it: whose it is, and where it goes. An admin may submit for others.

    Raises RefusedError for what the user may not ask for.
    """
    _check_no_reader(user)
    if user.role == "admin":
        where = job.virtual_cluster or user.virtual_cluster
        return dataclasses.replace(job, user=job.user or user.name, virtual_cluster=where)
    if job.user not in ("", user.name):
        raise RefusedError(FORBIDDEN, f"user={job.user}: {user.name} submits jobs of {user.name} alone.")
    where = user.virtual_cluster or job.virtual_cluster
    if job.virtual_cluster not in ("", where):
        raise RefusedError(FORBIDDEN, f"virtual_cluster={job.virtual_cluster}: jobs of {user.name} go to {where}.")
    if job.priority > user.most_priority:
        raise RefusedError(FORBIDDEN, f"priority={job.priority}: {user.name} may ask for {user.most_priority} at most.")
    return dataclasses.replace(job, user=user.name, virtual_cluster=where)


def _check_no_reader(user: User) -> None:
    if user.role == "reader":
        raise RefusedError(FORBIDDEN, f"{user.name} is a reader, and may look at everything and change nothing.")


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
        return _json(self._listed(execution.jobs.values()))

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
        return _json(self._listed([job])[0])

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
        return _json(self._listed([job])[0])

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

    async def alerts(self, request: web.Request) -> web.Response:
        """What somebody should look at."""
        limits = limits_of(request.query)
        now_s = self._controller.now_s()
        return _json(alerts(self._execution(), self._controller.agents, now_s, limits))

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
