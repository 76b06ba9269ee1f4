"""Carries decisions out by connecting the decider, the runs and the journal. Callers pass the time.

After each call `runs.outbox` holds the messages to send; the caller commits the journal before it sends them. A request
of a user is in the journal when it returns; if it raises an error, nothing has changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from synergy_core.errors import InputError, unknown
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.decisions.reasons import Reason, Stopped, Waiting
from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import gpus_in
from synergy_core.scheduling.jobs.spec import Shape
from synergy_core.scheduling.jobs.testbed_profiles import TestbedProfile
from synergy_core.scheduling.policies import Policy, get_policy, policy_names
from synergy_exec import job_folder
from synergy_exec.controller.decider import Decider, Orders, remedy
from synergy_exec.controller.jobs import ExecutedJob, ModelExchanges, Seen
from synergy_exec.controller.journal import STATES, JobRow, Journal, Observation, State, reopen
from synergy_exec.controller.learning import Learning
from synergy_exec.job_file import JobFile, check_folders
from synergy_exec.job_folder import CHECKPOINTS, freeze
from synergy_exec.messages import Ended, Launch, Message, Noted, Report, Reporting, Saved, Started
from synergy_exec.nodes.runs import Happened, JobRun, Runs
from synergy_exec.plans import read_candidates
from synergy_exec.settings import QueueSettings, Settings
from synergy_exec.training.checkpoint_folder import saving_s
from synergy_runs.outputs.facts import Kind


def with_queue(cluster: Cluster, queue: QueueSettings) -> Cluster:
    """The cluster with these rules. Raises InputError if quotas add up to more than the cluster has."""
    rules = dataclasses.asdict(queue) | {"virtual_clusters": dict(queue.virtual_clusters or {})}
    return dataclasses.replace(cluster, **rules)


class QuotaShare(NamedTuple):
    """The quota of a virtual cluster in slots, and how many its jobs hold."""

    slots: int
    used: int


def shares(decider: Decider) -> dict[str, QuotaShare]:
    """The quota and use of each virtual cluster, by name."""
    used = Counter[str]()
    for job in decider.active.values():
        used[job.request.virtual_cluster] += job.held_gpus
    return {name: QuotaShare(quota, used[name]) for name, quota in decider.cluster.virtual_clusters.items()}


def check_asks(name: str, job: JobFile, cluster: Cluster, policy: Policy) -> None:
    """Raises InputError for a job whose request the cluster can never satisfy."""
    if job.slots > cluster.gpus:
        raise InputError(f"job {name}: slots={job.slots}; the cluster has {cluster.gpus}. Ask for fewer.")
    if quotas := cluster.virtual_clusters:
        if not job.virtual_cluster:
            raise InputError(f"job {name}: virtual_cluster is missing; expected one of {', '.join(sorted(quotas))}.")
        if job.virtual_cluster not in quotas:
            raise unknown(f"virtual cluster of job {name}", job.virtual_cluster, quotas)
        quota = quotas[job.virtual_cluster]
        if job.slots > quota and not cluster.borrowing:
            raise InputError(
                f"job {name}: slots={job.slots}; virtual cluster {job.virtual_cluster} has {quota}. Ask for fewer."
            )
    if job.priority and not policy.reads_priority:
        reading = ", ".join(each for each in policy_names() if get_policy(each).reads_priority)
        raise InputError(
            f"job {name}: priority={job.priority}; policy {policy.name} does not look at priorities. Leave it out, or "
            f"have the controller started with a policy that does: {reading}."
        )


# Restores in a new scheduler what was known about jobs.


def recall(jobs: Mapping[int, ExecutedJob], observations: Iterable[tuple[int, Observation]]) -> None:
    """Restores jobs' progress, gradient noise and observed speeds. jobs, observations: by job number."""
    for job in jobs.values():
        if not job.ended and job.task is not None:
            job.task.done_work, job.task.statistics = job.seen.work, job.seen.statistics
    for number, observation in observations:
        task = jobs[number].task if number in jobs else None
        if task is not None and not task.speed.scheduled:  # otherwise they are from before the model was profiled
            gpu_type, nodes, gpus, micro_batch, step_s, sync_s = observation
            task.recall(Shape(gpu_type, nodes, gpus), micro_batch, step_s, sync_s)


SUBMIT, START, STOP, FINISH = (int(kind) for kind in Kind)
STARTED_PARTS = ("launch_s", "build_s", "load_s", "first_step_s")
"""Seconds of `messages.Started` that the journal keeps."""
MOST_STACK = 2_000
"""Maximum characters of a hung rank's stack in the job's reason."""
EXCHANGES = "exchanges"
"""Key in the journal's `meta` for what `ModelExchanges.learn` returns."""


class Execution:
    """All jobs of one policy on one cluster. Times are seconds since the start, on the grid, and never decrease.

    folder: the run's folder. jobs_folder: contains the folder of each job. jobs: all, also those that have ended.
    held: jobs that wait for the jobs in their `after`; the decider has the others that have not ended. notes: messages
    for users; the caller prints and removes them. profile: measured speeds and restart costs of models. decisions,
    deciding_s: number of decisions and seconds spent on them since this controller began. freed: whether a job's end
    has freed slots since the last decision. closing: whether the controller is ending, and stops all runs.
    """

    def __init__(
        self,
        journal: Journal,
        policy: Policy,
        cluster: Cluster,
        settings: Settings,
        folder: Path,
        profile: TestbedProfile,
    ) -> None:
        self.journal = journal
        self.folder, self.jobs_folder = folder, folder / "jobs"
        self.settings = settings
        self.learning = Learning(
            profile,
            cluster,
            settings.profiling,
            keep_in=settings.results_dir if settings.exchange.compression == "none" else None,
        )
        self.profile = self.learning.profile
        self.decider = Decider(policy, cluster, self.learning, settings.round_s)
        self.runs = Runs(self._launch_of, settings.agents.ports or "")
        self.exchanges = ModelExchanges(settings.exchange, cluster.gpu_types)
        self.jobs: dict[int, ExecutedJob] = {}
        self.held: dict[int, ExecutedJob] = {}
        self.next_job = 0
        self.next_run = 0
        self.notes: list[str] = []
        self.decisions, self.deciding_s = 0, 0.0
        self.freed = self.closing = False
        self.broken_nodes: set[int] = set()

    # Jobs come and go

    def check(self, name: str, file: JobFile) -> JobFile:
        """The job with the numbers of the jobs in its `after`. Raises InputError if it can never run."""
        check_asks(name, file, self.decider.cluster, self.decider.policy)
        if file.command is not None:
            check_folders(file.command)
        compression, precision = self.settings.exchange.compression, self.settings.run.of_job(file.precision).precision
        if compression != "none" and precision == "fp16":
            raise InputError(
                f"precision=fp16 with compression={compression}: compressors keep errors of gradients "
                "from step to step, and the loss scale changes their unit. Set precision to bf16 or fp32."
            )
        if file.array and not file.array.isdecimal():
            raise InputError(f"array={file.array}: the command submit sends a request with each number; got several.")
        if file.trained is not None and file.trained.tensorboard and find_spec("tensorboard") is None:
            raise InputError("tensorboard=true: not installed for the controller. Type: pip install tensorboard")
        before: list[str] = []
        for wanted in file.after:
            # The newest of its name; of an array, the newest of each number.
            found = {job.file.array: job for job in self.jobs.values() if wanted in (job.name, job.file.name)}
            numbered = [job for job in self.jobs.values() if str(job.job_id) == wanted]
            if not (found or numbered):
                raise unknown(f"job in after of {name}", wanted, {job.name for job in self.jobs.values()})
            before += [str(job.job_id) for job in (found.values() or numbered)]
        return dataclasses.replace(file, after=before)

    def freeze(self, file: JobFile, row: int | None = None) -> tuple[JobFile, str]:
        """Copies the code of the next job into its folder; see `job_folder.freeze`. Any thread may call it."""
        folder = self.jobs_folder / str(self.next_job if row is None else row)
        return freeze(file, folder, (self.settings.results_dir, self.folder))

    def submit(
        self,
        name: str,
        file: JobFile,
        now_s: float,
        *,
        row: int | None = None,
        frozen: tuple[JobFile, str] | None = None,
    ) -> ExecutedJob:
        """Accepts a job. When this returns, the job is in the journal and its code in its folder.

        frozen: what `freeze` returned, if it was called. Raises InputError if it can never run.
        """
        file, note = frozen or self.freeze(self.check(name, file), row)
        number = self.next_job if row is None else row
        told = JobRow(number, name, file.values(), now_s, row, "waiting", "", 0, uuid4().hex)
        try:
            with self.journal.request():
                self.journal.submitted(told)
                self.journal.fact(now_s, SUBMIT, number, file.slots)
        except InputError:
            job_folder.discard_code(self.jobs_folder / str(number))
            raise
        job = self.made(told, file)
        job_folder.give(self.folder_of(job), job.filed)
        unended = (*self.decider.active.values(), *self.held.values())
        directory = "" if file.command is None else file.command.directory
        others = [each for each in unended if each.file.command and each.file.command.directory == directory]
        if beside := [each.name for each in others if directory.startswith("/")]:
            shared = f"also in {directory}: {', '.join(beside)}. Files of one name are overwritten; code: copy"
            note = "; ".join(filter(None, [note, shared]))
        if note:
            self._note(job, note)
        self.arrive(job, now_s)
        return job

    def arrive(self, job: ExecutedJob, now_s: float) -> None:
        """Hands a job to the scheduler, as soon as the jobs in its `after` are done; ends it if one of them was not."""
        before = self.awaited(job)
        self.held.pop(job.job_id, None)
        if failed := [each for each in before if each is None or each.ended]:
            what = "unknown" if failed[0] is None else f"{failed[0].state}: job {failed[0].job_id} ({failed[0].name})"
            self._end(job, "failed", f"it never started, because a job in its after is {what}", now_s)
        elif before:
            self.held[job.job_id] = job
        else:
            self.decider.back(job, now_s)

    def awaited(self, job: ExecutedJob) -> list[ExecutedJob | None]:
        """The jobs that this job waits for (`after`) and that are not done; None for one that is not in the journal."""
        before = [self.jobs.get(int(each)) for each in job.file.after]
        return [each for each in before if each is None or each.state != "done"]

    def made(self, row: JobRow, file: JobFile) -> ExecutedJob:
        """Creates the job of a row of the journal, without telling the scheduler."""
        job = self.jobs[row.job] = ExecutedJob(
            row,
            file,
            gpu_types=self.decider.cluster.gpu_types,
            restart_s=self.settings.profiling.restart_s,
            profile=self.profile,
            exchange=self.exchanges.of(file.application),
        )
        self.next_job = max(self.next_job, row.job + 1)
        return job

    def cancel(self, job: ExecutedJob, now_s: float) -> None:
        """Ends the job now and kills its workers. Raises InputError if it has ended already."""
        if job.ended:
            raise InputError(f"job {job.name} has ended: {job.state}.")
        with self.journal.request():
            self.journal.job_is(job.job_id, "cancelled", "", job.losses)
        self._end(job, "cancelled", "cancelled by its user", now_s)
        self._settle(now_s)

    def retry(self, job: ExecutedJob, now_s: float, *, from_start: bool) -> None:
        """Makes a failed or cancelled job wait again; see `journal.reopen`. Raises InputError."""
        if job.ended and self.runs.of_job(job.job_id):
            raise InputError(f"job {job.name}: its last processes are leaving still; type it again in some seconds.")
        reopen(self.journal, self.folder_of(job), job.job_id, job.name, job.state, from_start=from_start)
        job.state, job.reason, job.losses, job.hung_step = "waiting", "", 0, -1
        if from_start:
            # What was learned of the model still holds.
            job.seen = Seen(spared_micro_batch=job.seen.spared_micro_batch, unused=job.seen.unused)
        self.arrive(job, now_s)
        job.stands_at(*job.seen.saved)
        if job.task is not None:
            job.task.statistics = job.seen.statistics

    def held_back(self, job: ExecutedJob) -> Reason:
        """Why a job waits whose `after` has jobs that are not done."""
        names = ", ".join(f"{each.job_id} ({each.name})" for each in self.awaited(job) if each is not None)
        return Reason(Waiting.AFTER, f"It starts after these jobs, which are not done yet: {names}.")

    @property
    def counts(self) -> dict[str, int]:
        """The number of jobs in each state."""
        found = Counter(job.state for job in self.jobs.values())
        return {state: found[state] for state in STATES}

    @property
    def idle(self) -> bool:
        return not self.decider.active and not self.runs.runs

    def decide(self, now_s: float) -> Orders:
        """Makes one decision, records it, and orders what follows from it."""
        answer = self.decider.decide(now_s)
        self.freed = False
        self.decisions += 1
        self.deciding_s += answer.took_s
        started: list[JobRun] = []
        for job, placed, plan in answer.starts:
            run = JobRun(self.next_run, job.job_id, placed, plan, job.share)
            self.next_run += 1
            job.run = run.number
            started.append(run)
            self.journal.decided_run(run.number, run.job, now_s, placed, dataclasses.asdict(plan))
            self.journal.timing(run.number, now_s, "plan", self._trained_with(plan))
            if job.share is not None:
                self.journal.timing(run.number, now_s, "share", job.share._asdict())
        going_on = ((run, self.jobs[run.job]) for run in self.runs.runs.values() if not run.stopping)
        reshared = [
            (run.number, job.share)
            for run, job in going_on
            if job.running and job.run == run.number and job.share is not None and job.share != run.share
        ]
        for number, share in reshared:
            self.journal.timing(number, now_s, "share", share._asdict())
        for job, plan in answer.retunes:
            self.journal.retuned(job.run, dataclasses.asdict(plan))
            self.journal.timing(job.run, now_s, "plan", self._trained_with(plan))
        running = [job for job in self.decider.active.values() if job.running]
        self.journal.decision(
            time_s=now_s,
            decision_s=answer.took_s,
            started=len(answer.starts),
            stopped=len(answer.stops),
            running=len(running),
            queued=self.decider.scheduler.waiting,
            gpus_used=sum(job.held_gpus for job in running),
            objective=answer.objective,
            bound=answer.bound,
        )
        for job in answer.stops:
            for number in self.runs.of_job(job.job_id):
                job.state = "stopping"
                self.journal.timing(number, now_s, "stop", {})
                self.runs.stop(number)
        for run in started:
            self.jobs[run.job].state = "starting"
            self.runs.start(run)
        for job, plan in answer.retunes:
            self.runs.retune(job.run, plan)
        for number, share in reshared:
            self.runs.reshare(number, share)
        self._settle(now_s)
        return answer

    def leave_out(self, away: set[int], now_s: float) -> bool:
        """Excludes these nodes and those with a broken device, and includes the others again.

        After a change the scheduler is new: it is told what is known of active jobs, and decides at once if there are
        any. Returns whether it has decided.
        """
        changes = self.decider.without(away | self.broken_nodes, now_s)
        self.notes += changes
        if not changes or not self.decider.active:
            return False
        recall(self.decider.active, self.journal.observations())
        self.decide(now_s)
        return True

    def agent_came(self, node: int, now_s: float) -> None:
        self.broken_nodes.discard(node)
        self.runs.agent_came(node)
        self._settle(now_s)

    def agent_left(self, node: int, now_s: float) -> None:
        self.runs.agent_left(node)
        self._settle(now_s)

    def heard(self, node: int, message: Message, now_s: float) -> None:
        run = self.runs.runs.get(getattr(message, "run", -1))
        if run is not None and node in run.nodes:
            self._learn(self.jobs[run.job], run, message, now_s)
            if isinstance(message, Ended) and message.broken_device:
                self.broken_nodes.add(node)
        self.runs.heard(node, message)
        self._settle(now_s)

    def _learn(self, job: ExecutedJob, run: JobRun, message: Message, now_s: float) -> None:
        """Records what a message of a run says about progress and checkpoints."""
        if isinstance(message, Report):
            seen = job.seen
            if message.step != seen.step:
                job.moved_s = now_s
            seen.step, seen.samples, seen.work, seen.loss = message.step, message.samples, message.work, message.loss
            seen.step_s, seen.memory_bytes = message.step_s, message.memory.used_bytes
            if message.step > seen.best_step:
                seen.best_step, job.losses = message.step, 0
            if job.run == run.number and not job.ended:
                observation = self.decider.report(job, message)
                if observation is not None:
                    self.journal.observed(job.job_id, observation)
            seen.statistics = job.task.statistics if job.task is not None else None
            self.journal.reported(job.job_id, seen.values())
        elif isinstance(message, Saved):
            job.seen.saved = message.step, message.samples, message.work
            self.journal.timing(run.number, now_s, "saved", {"save_s": message.save_s})
            self.journal.reported(job.job_id, job.seen.values())
        elif isinstance(message, Noted):
            self._note(job, message.text)

    def _note(self, job: ExecutedJob, text: str) -> None:
        if text != job.seen.note:
            job.seen.note = text
            self.notes.append(f"job {job.name}: {text}")
            self.journal.reported(job.job_id, job.seen.values())

    def _settle(self, now_s: float) -> None:
        """Handles all events of runs, including those that follow from others."""
        while self.runs.happened:
            happened, self.runs.happened = self.runs.happened, []
            for each in happened:
                self._follow(each, now_s)

    def _follow(self, what: Happened, now_s: float) -> None:
        run = what.run
        job = self.jobs[run.job]
        if what.what == "launched":
            self.journal.launched(run.number)
            self.decider.departures.launch(job, now_s)
            job.moved_s = now_s
            job.launched_s = now_s
            job.seen.starts += 1
            self.journal.reported(job.job_id, job.seen.values())
            self.journal.fact(now_s, START, job.job_id, gpus_in(run.placed), run.placed)
            if not (self.folder_of(job) / job_folder.DESCRIPTION).exists():
                with contextlib.suppress(InputError):  # the disk is full, and the next launch tries again
                    job_folder.describe(self.folder_of(job), job.filed)
            job_folder.begin_log(self.folder_of(job), run.number)
        elif (started := what.started) is not None:
            job.instants.first_step_s = now_s
            job.stands_at(started.step, started.samples, started.work)
            parts = {name: getattr(started, name) for name in STARTED_PARTS}
            self.journal.timing(run.number, now_s, "started", parts)
            self._learn_exchange(job, run, started)
            if self.learning.wants(job.file) and (found := read_candidates(self.folder_of(job))) is not None:
                self.learning.found(job.file, found)
            if not run.stopping:
                job.state = "running"
        elif what.what == "dropped":
            self.journal.ended(run.number, "dropped", "")
            self._waits_unless_it_goes_on(job)
        elif what.ended is not None:
            self._left(job, run, what.ended, now_s)

    def _learn_exchange(self, job: ExecutedJob, run: JobRun, said: Started) -> None:
        """Learns layers and encoding speed from a worker's report. Plans may have compressors afterwards."""
        if not (said.layers or said.codecs):
            return
        gpu_type = self.decider.aside.whole.type_of(run.placed)
        known = self.exchanges.learn(job.file.application, said.layers, gpu_type, said.codecs)
        self.journal.set_meta(EXCHANGES, known)
        for each in self.decider.active.values():
            found = self.exchanges.of(each.file.application)
            if found is not None and found is not each.exchange:
                each.may_exchange(found)

    def _left(self, job: ExecutedJob, run: JobRun, ended: Ended, now_s: float) -> None:
        """Handles the exit of a run's last process: ends the job, retries it, or lets it wait."""
        outcome, reason = ended.outcome, ended.reason
        self.journal.ended(run.number, outcome, reason)
        hung_step = job.seen.step if ended.hung else -1
        lasted_s = now_s - job.launched_s
        job.ran_s, job.launched_s = job.ran_seconds(now_s), math.inf
        self.decider.departures.leave(job, now_s)
        if not job.ended:
            if outcome in ("failed", "lost"):
                job.stands_at(*job.seen.saved)
            if outcome == "done":
                self._end(job, "done", "", now_s)
            elif outcome == "failed":
                if done := self._refused(job, run, ended) or remedy(job.seen, run.plan, ended):
                    self._note(job, done)
                elif again := self._tries_again(job, ended):
                    self._note(job, again)
                else:
                    self._end(job, "failed", reason, now_s)
            elif ended.hung and hung_step == job.hung_step:
                self._end(job, "failed", f"it hung twice after step {hung_step}: {reason}{self._stack(run)}", now_s)
            elif outcome == "lost" and (too_many := self._lost(job, run, ended, lasted_s)):
                self._end(job, "failed", f"{too_many}; at last: {reason}", now_s)
            job.hung_step = hung_step
        evicted = not job.ended and job.running and job.run == run.number
        if evicted:
            job.stopped_for = Stopped.CONTROLLER_ENDED if self.closing else Stopped.EVICTED
        kind, reason_code = (FINISH, None) if job.ended else (STOP, job.stopped_for)
        self.journal.fact(now_s, kind, job.job_id, gpus_in(run.placed), reason=reason_code)
        self.freed |= job.ended
        if not job.ended:
            if evicted:
                job.state = "waiting"
                self.decider.evicted(job, now_s)
            self._waits_unless_it_goes_on(job)
        self._journal_job(job)

    def _refused(self, job: ExecutedJob, run: JobRun, ended: Ended) -> str:
        """If a run failed under a plan that was being tried, drops the plan and returns a message; else ""."""
        shape = Shape(self.decider.aside.whole.type_of(run.placed), len(run.placed), gpus_in(run.placed))
        return self.learning.refused(job.file, shape, run.plan, ended)

    def _stack(self, run: JobRun) -> str:
        """The stack that rank 0 of a hung run wrote into its log; "" if there is none."""
        log = self.jobs_folder / str(run.job) / job_folder.LOG
        try:
            text = log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        of_run = text.rpartition(f"{job_folder.LOG_HEADING} {run.number}\n")[2]
        _, found, stack = of_run.rpartition("rank 0 stands at:\n")
        if not found:  # of a command without ranks
            _, found, stack = of_run.partition(" stands at:\n")
        return f"\n{stack.strip()[:MOST_STACK]}" if found else ""

    def end_overdue(self, now_s: float) -> None:
        for job in list(self.decider.active.values()):
            if 0 < job.file.max_seconds <= job.ran_seconds(now_s):
                self._end(job, "failed", f"it has run for max_seconds={job.file.max_seconds:g}", now_s)
        self._settle(now_s)

    def _lost(self, job: ExecutedJob, run: JobRun, ended: Ended, lasted_s: float) -> str:
        """Counts a lost run. Returns why the job itself seems at fault for repeated losses, or ""."""
        if run.excused:
            return ""
        if not run.agent_lost and (said := self._refused(job, run, ended)):
            self._note(job, said)
            return ""
        if job.file.command and not job.seen.best_step and lasted_s > self.settings.run.start_s:
            job.losses = 0  # it reports no steps, so that it ran for long counts as progress
        job.losses += 1
        most = max(self.settings.retries, job.file.command.retries if job.file.command else 0)
        return f"lost {job.losses} times without a step of progress" if job.losses > most else ""

    def _tries_again(self, job: ExecutedJob, ended: Ended) -> str:
        """Counts the error of a command. Returns a note if its job file says that it is started again, else ""."""
        command = job.file.command
        if command is None or not ended.exit_code or job.losses >= command.retries:
            return ""
        if command.retry_exit_codes and ended.exit_code not in command.retry_exit_codes:
            return ""
        job.losses += 1
        return f"{ended.reason}; retry {job.losses} of {command.retries}"

    def _waits_unless_it_goes_on(self, job: ExecutedJob) -> None:
        if not job.ended and not job.running and not self.runs.of_job(job.job_id):
            job.state = "waiting"
            if not job.queued:
                self.decider.requeue(job)

    def _end(self, job: ExecutedJob, state: State, reason: str, now_s: float) -> None:
        job.state, job.reason, job.moved_s = state, reason, now_s
        self._journal_job(job)
        if job.job_id in self.decider.active:
            self.decider.finish(job, now_s)
        end = self.runs.stop if job.file.command else self.runs.kill  # a command may have to clean up
        for number in self.runs.of_job(job.job_id):
            end(number)
        self.held.pop(job.job_id, None)
        for each in [each for each in self.held.values() if str(job.job_id) in each.file.after]:
            self.arrive(each, now_s)

    def grace_s(self) -> float:
        """The longest time that a job which may run now has to save: a command has the time from SIGTERM to SIGKILL, a
        class as long as its checkpoint may take to write.
        """
        jobs = (self.jobs[each] for each in {*self.decider.active, *(run.job for run in self.runs.runs.values())})
        of_class = (saving_s(self.folder_of(job) / CHECKPOINTS) for job in jobs if not job.file.command)
        of_command = (job.file.command.grace_s for job in jobs if job.file.command)
        return max([*of_class, *of_command], default=0.0)

    def _journal_job(self, job: ExecutedJob) -> None:
        # In the journal a job that has not ended waits, because it would if the controller died now.
        state = job.state if job.ended else "waiting"
        self.journal.job_is(job.job_id, state, job.reason, job.losses)

    def folder_of(self, job: ExecutedJob) -> Path:
        return self.jobs_folder / str(job.job_id)

    def _launch_of(self, run: JobRun) -> Launch:
        job = self.jobs[run.job]
        gpu_type = self.decider.aside.whole.type_of(run.placed)
        folder, file = self.folder_of(job).resolve(), job.file
        if file.command is not None:
            command = dataclasses.replace(file.command, directory=str(folder / file.command.directory))
            file = dataclasses.replace(file, command=command)
        return Launch(
            run=run.number,
            job=job.job_id,
            file=file,
            plan=job.as_told(run.plan),
            folder=str(folder),
            settings=self.settings.run.of_job(job.file.precision),
            reporting=Reporting(
                noise=job.file.max_batch > job.file.initial_batch,
                layers=self.exchanges.lacks_layers(job.file.application),
                codecs=self.exchanges.lacks_codecs(gpu_type),
                plans_on=self.learning.wants(job.file),
            ),
            unused=job.seen.unused,
            job_uuid=job.uuid,
            saved_step=job.seen.saved[0],
            restarts=job.seen.starts,
            grace_s=file.command.grace_s if file.command else self.settings.agents.leave_s,
        )

    def _trained_with(self, plan: Plan) -> dict[str, Any]:
        """The batch and compressor of a plan as the journal keeps them with a run."""
        parts: dict[str, Any] = {"micro_batch": plan.micro_batch, "accumulation": plan.accumulation}
        return parts if self.settings.exchange.compression == "none" else {**parts, "compressor": plan.compressor}
