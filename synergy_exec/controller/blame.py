"""Which job it is that takes the agent of its node down with it.

When an agent is lost every run on its node is, and any of their jobs may have done it: filled the memory, killed what
it should not. A job on whose node that happens again and again is launched alone there, for as long as it took until
then, twice over. If nothing happens meanwhile it is as good as any other. If the agent is lost again the others go
first; if that is so with one of them, too, the node loses its agents whatever trains there, and nobody is to blame. The
job with which an agent is lost when it is alone for the second time has done it.
"""

from __future__ import annotations

from synergy_core.units import HOUR_S
from synergy_exec.nodes.runs import Run, Runs

ALONE_TIMES = 2
"""As many when the job was alone say that it was the job."""
LEAST_S, MOST_S = 60.0, 600.0
"""For how long a job is alone."""


class Blame:
    """Of all jobs of one execution. most: losses of its node's agent within an hour, from which on a job is alone."""

    def __init__(self, runs: Runs, most: int) -> None:
        self._runs, self.most = runs, most
        self._launched_s: dict[int, float] = {}
        self._lived_s: dict[int, list[tuple[float, float]]] = {}

    def launched(self, run: Run, now_s: float) -> None:
        """Its workers were told to start."""
        self._launched_s[run.number] = now_s

    def with_agent(self, run: Run, now_s: float) -> str:
        """An agent was lost with this run; why its job ends, "" where it goes on."""
        lived_s = now_s - self._launched_s.pop(run.number, now_s)
        recent = [each for each in self._lived_s.get(run.job, []) if each[0] > now_s - HOUR_S]
        self._lived_s[run.job] = [*recent, (now_s, lived_s)]
        times = len(self._lived_s[run.job])
        if run.job in self._runs.alone:
            return self._lost_alone(run.job, times)
        if times >= self.most:
            self._runs.alone[run.job] = 0
        return ""

    def _lost_alone(self, job: int, times: int) -> str:
        self._runs.alone[job] += 1
        if self._runs.alone[job] >= ALONE_TIMES:
            self._forget(job)
            return f"the agent of its node was lost {times} times within an hour while it trained there, at last alone"
        if sum(each > 0 for each in self._runs.alone.values()) > 1:
            for each in list(self._runs.alone):
                self._forget(each)
        return ""

    def _forget(self, job: int) -> None:
        self._lived_s.pop(job, None)
        self._runs.released(job)

    def over(self, job: int) -> None:
        """The job has ended: whatever comes is not its doing."""
        if job in self._runs.alone:
            self._forget(job)

    def left(self, run: Run) -> None:
        """The run has ended otherwise."""
        self._launched_s.pop(run.number, None)

    def trains(self, run: Run, now_s: float) -> None:
        """It reports; one that has been alone for long enough has done nothing."""
        if run.job not in self._runs.alone or run.number not in self._launched_s:
            return
        longest_s = max(lived_s for _, lived_s in self._lived_s[run.job])
        if now_s - self._launched_s[run.number] > min(max(LEAST_S, 2.0 * longest_s), MOST_S):
            self._forget(run.job)
