"""Quotas and priorities of jobs, as the core knows both: what a job may ask of a cluster under a policy."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import NamedTuple

from synergy_core.cluster import Cluster
from synergy_core.errors import InputError, unknown
from synergy_core.policies import Policy, get_policy, policy_names
from synergy_exec.controller.decider import Decider
from synergy_exec.job_file import JobFile
from synergy_exec.settings import QuotaSettings


def with_quotas(cluster: Cluster, quotas: QuotaSettings) -> Cluster:
    """The cluster, shared out. Raises InputError where quotas add up to more than there is."""
    return dataclasses.replace(
        cluster, virtual_clusters=dict(quotas.virtual_clusters or {}), borrowing=quotas.borrowing
    )


class QuotaShare(NamedTuple):
    """Slots of a virtual cluster, and how many its jobs hold."""

    slots: int
    used: int


def shares(decider: Decider) -> dict[str, QuotaShare]:
    """Of each virtual cluster, by name."""
    used = Counter[str]()
    for job in decider.active.values():
        used[job.virtual_cluster] += job.held_gpus
    return {name: QuotaShare(quota, used[name]) for name, quota in decider.cluster.virtual_clusters.items()}


def check_asks(name: str, job: JobFile, cluster: Cluster, policy: Policy) -> None:
    """Raises InputError for a job that asks for what it can never have there."""
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
