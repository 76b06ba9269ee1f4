"""What users may do, by their roles: readers look, users change what is theirs, admins all of it."""

from __future__ import annotations

import dataclasses

from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.job_file import JobFile
from synergy_exec.nodes.listening import RefusedError
from synergy_exec.users import User

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
