"""The queue of an ordering policy: its active jobs and their keys.

Lanes, the walk over all jobs, mechanisms that share out CPUs and memory, and explanations of stored runs order jobs by
it. A key changes in three ways, all of them here:

- at an event: it is computed when the job arrives, stops or, if its remaining time is then known better, starts;
- it jumps: at an instant that the policy can tell in advance (`OrderingPolicy.next_change`);
- it falls: by a second per second while the job runs (`OrderingPolicy.falls_while_running`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace
from typing import Any

from synergy_core.scheduling.jobs.record import NEVER, Job
from synergy_core.scheduling.policies import Key, OrderingPolicy
from synergy_core.units import MAX_TIME_S, TICK_S, grid_ceil, on_grid

Form = tuple[int, bool]
"""(number of GPUs, whether they may lie apart) of waiting jobs that fit on the same free GPUs."""
ONE_FORM: Form = (0, True)
"""The form of all jobs of a queue that does not tell them apart."""
Entry = tuple[Any, int, Job, Form]
"""(key, job id, job, form): ordered by key, then by id. Of a running job whose key falls, the key's first entry is the
instant at which it reaches zero, so that advancing the clock rounds nothing."""
BLOCK = 256
"""Target number of entries in a block of `Line`."""


def order_key_of(policy: OrderingPolicy) -> Callable[[Job], Key]:
    """The function that computes the keys by which queues compare jobs.

    If keys fall with the clock, their times are rounded to the grid. Two waiting jobs are compared by their keys, two
    running jobs by clock + key at their starts, and a waiting and a running job by clock + key. On the grid this sum is
    exact (`synergy_core.units`), so the order of two jobs does not depend on how and when they are compared. Off the
    grid, sums of different keys could round to equal values, and the order could change. Times beyond `MAX_TIME_S`,
    where sums would round again, count as never.
    """
    key_of: Callable[..., Key] = policy.key
    if not policy.falls_while_running:
        return key_of

    def on_the_grid(job: Job) -> Key:
        key = key_of(job)
        time_s = key[0]
        # Between `MAX_TIME_S` and twice that, floats are one tick apart: the sum is exact only for times on the grid.
        if 0.0 <= time_s < MAX_TIME_S and time_s + MAX_TIME_S - MAX_TIME_S == time_s:
            return key
        return (on_grid(time_s) if time_s < MAX_TIME_S else NEVER, *key[1:])

    return on_the_grid


def next_jump_s(policy: OrderingPolicy, job: Job, now_s: float) -> float | None:
    """The next instant after now at which the job's key jumps without an event; None if none is known."""
    if policy.next_change is None or (instant_s := policy.next_change(job, now_s)) is None:
        return None
    instant_s, soonest_s = grid_ceil(instant_s), now_s + TICK_S
    return instant_s if instant_s > soonest_s else soonest_s


def after_jump(policy: OrderingPolicy, job: Job, instant_s: float) -> Key:
    """Settles the job at the instant at which its key was expected to jump, and returns its key at that instant.

    If the job's start was delayed, its key jumps later too and has not changed yet.
    """
    before = policy.key(job)
    job.settle(instant_s)
    if policy.begins_anew is not None and policy.begins_anew(job):
        job.service.begin_anew()
    after = policy.key(job)
    if after == before:
        return after
    job.service.queue_entered_s = instant_s
    return policy.key(job)


def apply_jumps(policy: OrderingPolicy, job: Job, from_s: float, until_s: float) -> float | None:
    """Applies the jumps of the job's key after `from_s` up to `until_s`; returns the next one's instant, or None."""
    next_s = next_jump_s(policy, job, from_s)
    while next_s is not None and next_s <= until_s:
        after_jump(policy, job, next_s)
        next_s = next_jump_s(policy, job, max(next_s, job.service.settled_s))
    return next_s


class Line:
    """Waiting jobs of one form, sorted by key, in blocks of about `BLOCK` entries."""

    __slots__ = ("_blocks", "_estimates_s", "first")

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._estimates_s: list[list[float]] = []
        """The jobs' estimated run times, block by block."""
        self.first: Entry | None = None
        """The entry with the smallest key."""

    def __iter__(self) -> Iterator[Entry]:
        return itertools.chain.from_iterable(self._blocks)

    def add(self, entry: Entry) -> None:
        """Inserts the entry; a block that grows beyond 2 × `BLOCK` is halved."""
        blocks, estimates_s = self._blocks, self._estimates_s
        if not blocks:
            blocks.append([entry])
            estimates_s.append([entry[2].request.estimate_s])
            self.first = entry
            return
        number = max(bisect_left(blocks, [entry]) - 1, 0) if len(blocks) > 1 else 0
        block, of_block = blocks[number], estimates_s[number]
        at = bisect_left(block, entry)
        block.insert(at, entry)
        of_block.insert(at, entry[2].request.estimate_s)
        if len(block) > 2 * BLOCK:
            blocks[number : number + 1] = [block[:BLOCK], block[BLOCK:]]
            estimates_s[number : number + 1] = [of_block[:BLOCK], of_block[BLOCK:]]
        self.first = blocks[0][0]

    def remove(self, entry: Entry) -> None:
        blocks, number, at = self._blocks, 0, 0
        if entry is not self.first:
            number = bisect_left(blocks, [entry])
            if number == len(blocks) or blocks[number][0] is not entry:
                number -= 1
            at = bisect_left(blocks[number], entry)
        del blocks[number][at], self._estimates_s[number][at]
        if not blocks[number]:
            del blocks[number], self._estimates_s[number]
        self.first = blocks[0][0] if blocks else None

    def first_within(self, estimate_s: float, but: Job) -> Entry | None:
        """The entry with the smallest key among jobs, except `but`, that are estimated to run at most `estimate_s`."""
        for block, estimates_s in zip(self._blocks, self._estimates_s, strict=True):
            if min(estimates_s) <= estimate_s:
                for entry, own_s in zip(block, estimates_s, strict=True):
                    if own_s <= estimate_s and entry[2] is not but:
                        return entry
        return None


def _entry_of(job: Job) -> Entry:
    """The job's entry in its queue, which must have the job."""
    entry: Any = job.ticket
    return entry  # type: ignore[no-any-return]


class JobQueue:
    """The active jobs of one policy. A job's `ticket` is its entry here, None while the queue does not have the job.

    form_of: the form of a waiting job, by which waiting jobs are kept apart; None keeps them in one line.
    """

    def __init__(self, policy: OrderingPolicy, form_of: Callable[[Job], Form] | None = None) -> None:
        self.policy = policy
        self.waiting: dict[Form, Line] = {}
        """Waiting jobs by form. Lines may be empty."""
        self.waiting_jobs = 0
        """Number of waiting jobs."""
        self.running: list[Entry] = []
        """Running jobs, sorted. A lane that admits jobs changes it directly."""
        self._key = order_key_of(policy)
        self._form_of = form_of or (lambda job: ONE_FORM)
        self.jumps: list[tuple[float, int, Job, Entry]] = []
        """A heap of expected jumps: (instant, serial number, job, its ticket when this was expected)."""
        self._serial = itertools.count()
        self._unread: list[tuple[Job, Entry]] = []  # (job, its ticket), see `started`

    @property
    def is_still(self) -> bool:
        """Whether the order changes only when jobs enter and leave."""
        return not self.policy.falls_while_running and self.policy.next_change is None

    def enter(self, job: Job) -> None:
        """Adds a job that waits from now on: it has arrived or was just stopped."""
        self._wait(job, self._key(job))
        self._expect_jump(job, job.service.settled_s)

    def _wait(self, job: Job, key: Key) -> Entry:
        form = self._form_of(job)
        entry: Entry = (key, job.job_id, job, form)
        job.ticket = entry
        line = self.waiting.get(form)
        if line is None:
            line = self.waiting[form] = Line()
        line.add(entry)
        self.waiting_jobs += 1
        return entry

    def take(self, job: Job) -> Entry:
        """Removes a waiting job, which a decision has just chosen, from its line; returns its entry."""
        entry = _entry_of(job)
        self.waiting[entry[3]].remove(entry)
        self.waiting_jobs -= 1
        job.ticket = None
        return entry

    def run(self, job: Job, now_s: float) -> None:
        """Moves a waiting job, which a decision has just chosen, to the running ones."""
        entry = self.take(job)
        if self.policy.falls_while_running:
            key = entry[0]
            entry = ((key[0] + now_s, *key[1:]), *entry[1:])
        job.ticket = entry
        insort(self.running, entry)

    def started(self, job: Job, now_s: float, *, moved: bool = False) -> None:
        """Tells the queue that a running job has just started; moved: that it ran before, on other GPUs.

        A start can change a job's remaining time, which is known once the driver has carried out the start. So its key
        is computed again before the next decision (`read_started`).
        """
        if self.policy.next_change is not None:
            self._expect_jump(job, now_s)
        if self.policy.falls_while_running and (moved or job.task is not None):
            self._unread.append((job, _entry_of(job)))

    def remove(self, job: Job) -> None:
        """Removes a job that has ended, was stopped or withdrawn; nothing if the queue does not have it."""
        entry: Any = job.ticket
        if entry is None:
            return
        if job.running:
            del self.running[bisect_left(self.running, entry)]
            job.ticket = None
        else:
            self.take(job)

    def reform(self, job: Job, now_s: float) -> None:
        """Moves a waiting job to the line of its present form, if the queue has the job."""
        if job.ticket is not None:
            self._wait(job, self.take(job)[0])
            self._expect_jump(job, now_s)

    # Changes of keys

    def _expect_jump(self, job: Job, now_s: float) -> None:
        if self.policy.next_change is None:
            return
        instant_s = next_jump_s(self.policy, job, now_s)
        if instant_s is not None:
            heappush(self.jumps, (instant_s, next(self._serial), job, _entry_of(job)))

    def next_jump_s(self) -> float:
        """The instant of the next jump, which `advance` applies; inf if none is known."""
        jumps = self.jumps
        while jumps and jumps[0][2].ticket is not jumps[0][3]:
            heappop(jumps)
        return jumps[0][0] if jumps else NEVER

    def advance(self, now_s: float) -> list[tuple[Entry, Entry]]:
        """Applies the jumps up to `now_s`, each as of its instant; returns the entries before and after each."""
        changed = []
        jumps = self.jumps
        while jumps and jumps[0][0] <= now_s:
            instant_s, _, job, before = jumps[0]
            if job.ticket is not before:
                heappop(jumps)
                continue
            key = after_jump(self.policy, job, instant_s)
            after = self._replace(before, self._at_zero(key, instant_s) if job.running else key)
            changed.append((before, after))
            next_s = next_jump_s(self.policy, job, job.service.settled_s)  # `after_jump` has settled the job
            if next_s is None:
                heappop(jumps)
            else:
                heapreplace(jumps, (next_s, next(self._serial), job, after))
        return changed

    def read_started(self) -> list[tuple[Entry, Entry]]:
        """Computes the keys of started jobs again (`started`); returns the entries before and after each change."""
        changed = []
        for job, before in self._unread:
            if job.ticket is before and job.running:
                after = self._replace(before, self._at_zero(self._key(job), job.service.settled_s))
                if after != before:
                    changed.append((before, after))
        self._unread.clear()
        return changed

    def _at_zero(self, key: Key, now_s: float) -> Key:
        return (key[0] + now_s, *key[1:]) if self.policy.falls_while_running else key

    def _replace(self, before: Entry, key: Key) -> Entry:
        """Gives a job another key."""
        job = before[2]
        if not job.running:
            self.take(job)
            return self._wait(job, key)
        after: Entry = (key, *before[1:])
        job.ticket = after
        running = self.running
        at = bisect_left(running, before)
        if before <= after and (at + 1 == len(running) or after < running[at + 1]):
            running[at] = after
        else:
            del running[at]
            insort(running, after)
        return after

    def in_order(self, now_s: float) -> list[Job]:
        """All active jobs: starved ones, the longest waiting first, then the others by their keys at `now_s`."""
        running = self.running
        if self.policy.falls_while_running:
            running = [((entry[0][0] - now_s, *entry[0][1:]), *entry[1:]) for entry in running]
        entries = [*itertools.chain.from_iterable(self.waiting.values()), *running]
        for at, entry in enumerate(entries):
            if entry[2].starved:
                entries[at] = ((-NEVER, entry[2].service.waits_since_s), *entry[1:])
        entries.sort()
        return [entry[2] for entry in entries]
