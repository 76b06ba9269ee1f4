"""What a policy sees of one job: views that show a name only where a policy's annotation has declared that it reads it.

A view shows the scheduler's record through properties, so what it does not show cannot be reached by a plain attribute;
one that another view shows raises an `InputError` which says what to annotate. For both of two views' names, a class
of both: `class Both(EstimatedJobView, PredictedJobView): __slots__ = ()`.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

from synergy_core.errors import InputError, unknown

Result = TypeVar("Result")


def _shown(name: str) -> Any:
    """A property that reads `name` of the record."""
    return property(attrgetter(f"_job.{name}"))


class JobView:
    """One job as an ordering policy sees it: what its user asked for, and what a scheduler can have observed.

    submit_time_s: on the driver's clock. gpus: as requested. attained_service_gpu_s: GPU-seconds held so far.
    first_start_s: inf until it has run. queue_entered_s: when its key last changed (submission, until then).
    restarts: resumes after a preemption. running: whether it runs. recent_service_gpu_s, waited_s: GPU-seconds held,
    and seconds waited after that began, since the job last began anew (`OrderingPolicy.begins_anew`); since its
    submission where it never did.
    """

    __slots__ = ("_job",)

    _job: Any
    job_id: int = _shown("job_id")
    submit_time_s: float = _shown("submit_time_s")
    gpus: int = _shown("gpus")
    virtual_cluster: str = _shown("virtual_cluster")
    user: str = _shown("user")
    attained_service_gpu_s: float = _shown("attained_service_gpu_s")
    recent_service_gpu_s: float = _shown("recent_service_gpu_s")
    waited_s: float = _shown("waited_s")
    first_start_s: float = _shown("first_start_s")
    queue_entered_s: float = _shown("queue_entered_s")
    restarts: int = _shown("restarts")
    running: bool = _shown("running")

    def __getattr__(self, name: str) -> Any:
        """What is not shown; reached only where there is no such name."""
        raise missing(type(self), name, JOB_VIEWS)


class EstimatedJobView(JobView):
    """A job with the run time that its user declared, `estimate_s`.

    Where a log has none, they are drawn from true run times, and a policy that reads them is starred there.
    """

    __slots__ = ()

    estimate_s: float = _shown("estimate_s")


class PredictedJobView(JobView):
    """A job with a run time predicted from jobs that have already ended (`synergy_core.ordering.prediction`)."""

    __slots__ = ()

    predicted_duration_s: float = _shown("predicted_duration_s")


class PriorityJobView(JobView):
    """A job with the priority that its user asked for: the higher, the sooner; 0 where nobody said."""

    __slots__ = ()

    priority: int = _shown("priority")


class OracleJobView(JobView):
    """A job with its true run time. A policy that takes this knows what nobody can, and is starred in every table.

    duration_s: of the whole job on its requested GPUs. remaining_s: until it ends if it ran from now on without a
    break, any restart it still has to pay included.
    """

    __slots__ = ()

    duration_s: float = _shown("duration_s")
    remaining_s: float = _shown("remaining_s")


JOB_VIEWS: tuple[type, ...] = (JobView, EstimatedJobView, PredictedJobView, PriorityJobView, OracleJobView)


def shown_by(view: type) -> set[str]:
    """The names that a view shows: properties and methods, and the columns of a state."""
    fields = getattr(view, "__dataclass_fields__", {})
    return {name for name in (*dir(view), *fields) if not name.startswith("_")}


def unseen(who: str, view: type, name: str, views: tuple[type, ...]) -> InputError:
    """The error for reading a name that the view lacks: which of these views shows it, or the nearest name."""
    for other in views:
        if name in shown_by(other):
            also = "" if issubclass(other, view) else f", or a class of it and {view.__name__}"
            return InputError(
                f"{who} reads {name}, which {view.__name__} does not show. Annotate its first parameter with "
                f"{other.__name__}{also}."
            )
    return unknown(f"attribute of {view.__name__}, read by {who},", name, shown_by(view))


def missing(view: type, name: str, views: tuple[type, ...]) -> Exception:
    """What a view's `__getattr__` raises. Private names are plainly not there, as Python's protocols ask."""
    if name.startswith("_"):
        return AttributeError(name)
    if name in shown_by(view):
        return InputError(f"a policy reads {name}, which nobody knows here; true run times are known in simulations.")
    return unseen("a policy", view, name, views)


def through(view: type[JobView], function: Callable[..., Result]) -> Callable[..., Result]:
    """The function as one of the scheduler's record: what it is given is a view of the record.

    One view for all calls, to be read until the function returns: keys are asked for at every event.
    """
    shown = view()

    def seen(job: Any, *more: Any) -> Result:
        shown._job = job
        return function(shown, *more) if more else function(shown)

    return seen
