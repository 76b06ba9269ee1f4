"""What a monitor reads of a controller: Prometheus' text. Labels are bounded: only jobs that hold slots have series."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import STATES
from synergy_exec.controller.quotas import shares
from synergy_exec.nodes.agents import Agents
from synergy_exec.plain import plain

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
