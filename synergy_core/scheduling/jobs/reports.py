"""Reports of running jobs and the throughput models fitted to them, for one job or all jobs of an application."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import exp, isclose, isfinite, log
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from synergy_core.performance.goodput.pipeline import WAITED, FittedPipeline, ObservedInputs, Pipeline, fit_pipeline
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.spec import Shape, StepReport

MAX_SHARES = 60
"""Maximum number of shares with a summary. The oldest summary is dropped; its share may then be tried again."""
MIN_CPUS_TRIED = 1.0
"""Smallest number of CPUs per GPU that is tried, as in optimistic profiling."""
UNREAD_SAMPLE_BYTES = 1e12
"""Assumed sample size if no read from storage was observed and all data fit into a GPU's part of the memory. It is so
large that policies keep all data in memory."""
ALL_DATA_FRACTION = 0.999
"""If at least this fraction of the data is in memory, no data are assumed to be read from storage."""
MIN_RELATIVE_CHANGE = 0.05
"""Smaller relative changes do not change a belief. Otherwise noise would change a job's share with every report, and
lower the share step by step, because the minimum of many noisy bounds is too low."""


class _Share(NamedTuple):
    """Key under which steps are averaged; `ObservedInputs` explains the fields."""

    cpus: float
    memory_bytes: float
    storage_bytes_per_s: float
    node_gpus: int
    samples: float


class _Summary(NamedTuple):
    """Summary of the steps at one share: the number of reports, and the means of the logarithms of their seconds."""

    reports: int
    log_gpu_step_s: float
    log_step_s: float


@dataclass(slots=True, eq=False)
class InputReports:
    """Input speeds reported by one job or by all jobs of an application. found: the last fit.

    Before the first report there is no belief, and a job gets its proportional share. Until a step has waited for CPUs,
    half of the CPUs that sufficed are believed to suffice, down to `MIN_CPUS_TRIED`. The job's next share tests this.
    A step that waits ends the search, because it shows the CPU time of a sample (optimistic profiling while the job
    trains). There is no search for memory: memory with which no step waited is believed to be enough, and while nothing
    was read from storage, the proportional memory of a GPU is believed to be enough and necessary.

    A report at a new share triggers a fit, and so does every doubling of the reports at a known share.
    """

    found: FittedPipeline | None = None
    _summaries: dict[_Share, _Summary] = field(default_factory=dict)
    _data_bytes: float = float("nan")
    _proportional_bytes: float = float("nan")
    _believed: Pipeline | None = None
    _stale: bool = False

    def add(self, step: StepReport) -> None:
        """Adds a mean step of a running job. The report must include the share with which its input was prepared."""
        assert step.given is not None
        (cpus, memory_bytes), storage_bytes_per_s, node_gpus, data_bytes, self._proportional_bytes = step.given
        self._data_bytes = data_bytes
        if memory_bytes * node_gpus >= ALL_DATA_FRACTION * data_bytes:
            memory_bytes = data_bytes
        key = _Share(cpus, memory_bytes, storage_bytes_per_s, node_gpus, step.plan.global_batch / step.shape.gpus)
        reports, log_gpu, log_step = self._summaries.pop(key, _Summary(0, 0.0, 0.0))
        reports += 1
        log_gpu += (log(step.step_s - step.waited_s) - log_gpu) / reports
        log_step += (log(step.step_s) - log_step) / reports
        if len(self._summaries) == MAX_SHARES:
            del self._summaries[next(iter(self._summaries))]
        self._summaries[key] = _Summary(reports, log_gpu, log_step)
        self._stale |= reports & (reports - 1) == 0

    @property
    def believed(self) -> Pipeline | None:
        """The formula of input speed with the believed constants; None before the first report."""
        if self._stale:
            self._stale = False
            self._fit()
        return self._believed

    def _fit(self) -> None:
        shares = np.array(list(self._summaries), dtype=np.float64).T
        gpu_step_s, step_s = np.exp([each[1:] for each in self._summaries.values()]).T
        steps = ObservedInputs(**dict(zip(_Share._fields, shares, strict=True)), gpu_step_s=gpu_step_s, step_s=step_s)
        self.found = fit_pipeline(steps, self._data_bytes)
        read = self.found.sample_bytes
        sample_bytes = read.value
        if read.state == "unseen":  # assume the largest size that storage can read in time
            sample_bytes, misses = UNREAD_SAMPLE_BYTES, 1.0 - self._proportional_bytes / self._data_bytes
            if misses > 1.0 - ALL_DATA_FRACTION:
                known = self._summaries.items()
                fed = [share.storage_bytes_per_s * exp(mean.log_gpu_step_s) / share.samples for share, mean in known]
                sample_bytes = min(UNREAD_SAMPLE_BYTES, min(fed) / misses)
        old, new = self._believed, Pipeline(self._cpu_s(self.found), sample_bytes, self._data_bytes)
        if old is None or not (
            isclose(new.cpu_s, old.cpu_s, rel_tol=MIN_RELATIVE_CHANGE)
            and isclose(new.sample_bytes, old.sample_bytes, rel_tol=MIN_RELATIVE_CHANGE)
        ):
            self._believed = new

    def _cpu_s(self, found: FittedPipeline) -> float:
        """Believed CPU-seconds of a sample: at most what sufficed, and as little as half of it until a step waits."""
        cpu_s = found.cpu_s.value
        enough = [
            (share.cpus * exp(mean.log_step_s) / share.samples, share.cpus)
            for share, mean in self._summaries.items()
            if mean.log_step_s <= mean.log_gpu_step_s + log(WAITED)
        ]
        if not enough:
            return cpu_s
        least, cpus = min(enough)
        if found.cpu_s.state == "measured" or least > WAITED * cpu_s:  # or waiting steps give a tighter bound
            return min(cpu_s, least)
        return cpu_s * max(0.5, min(1.0, MIN_CPUS_TRIED / cpus))


Quantity = Literal["sent", "codec", "error"]
MAX_REPORTS = 20
"""Approximate number of recent reports in a mean: a new report has a weight of at least a twentieth."""
MIN_CHANGE_FACTOR = 1.1
"""A belief changes only if the mean differs from it by this factor: reports always vary, but plans should stay."""
MAX_RATIO = 1e4
"""Largest credible error factor of a formula. Measurements beyond it count as wrong and are limited to it."""


class ExchangeReport(NamedTuple):
    """The gradient exchange in a step of a running job.

    plan: the job's plan; its compressor is the offer's name. sent_bytes: sent by each rank. codec_s: seconds of
    encoding and decoding. lost: squared norm of the compression error ÷ that of the compressor's input, which is a
    replica's gradient plus the part of earlier gradients that was held back; NaN if it was not measured.
    """

    shape: Shape
    plan: Plan
    sent_bytes: float
    codec_s: float
    lost: float = float("nan")


class RatioOf(NamedTuple):
    """Key of a learned ratio. across: between nodes. Errors are equal everywhere, so their keys have no GPU type."""

    quantity: Quantity
    compressor: str
    gpu_type: str = ""
    across: bool = False


@dataclass(slots=True, eq=False)
class SeenExchanges:
    """Means of measured ÷ predicted values of compressed exchanges, by `RatioOf`; 1 without observations."""

    _means: dict[RatioOf, tuple[float, int]] = field(default_factory=dict)
    _believed: dict[RatioOf, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._believed)

    def add(self, key: RatioOf, measured: float, predicted: float) -> bool:
        """Adds a measurement; returns whether `ratio` changes. Ignores NaN, infinite and negative values."""
        if not (isfinite(measured) and measured >= 0 and isfinite(predicted) and predicted > 0):
            return False
        ratio = min(max(measured / predicted, 1 / MAX_RATIO), MAX_RATIO)
        mean, count = self._means.get(key, (0.0, 0))
        count = min(count + 1, MAX_REPORTS)
        mean += (ratio - mean) / count
        self._means[key] = mean, count
        believed = self._believed.get(key)
        if believed is not None and 1 / MIN_CHANGE_FACTOR < mean / believed < MIN_CHANGE_FACTOR:
            return False
        self._believed[key] = mean
        return True

    def ratio(self, key: RatioOf) -> float:
        return self._believed.get(key, 1.0)


Theta = NDArray[np.float64]
Table = NDArray[np.float64]
"""An observation per row: nodes, GPUs, samples per GPU, seconds of the step and of synchronisation."""
Point = tuple[int, int, int]
"""Nodes, GPUs, and samples per GPU of an observation; for jobs with parallel plans, the last is the global batch."""

RATIO_SHARED, RATIO_OWN = 0.10, 0.08
"""Standard deviations of the two parts of log(true ÷ planned step time): the part that all plans of a model share on a
GPU type, and a plan's own part. Our choice, as in conf/truth/default.yaml: docs/accuracy_planner.md has 0.04 and 0.02
for held-out models if their GPU type was measured. If not, its 90 % interval is ± 0.48, so its standard deviation is
0.29."""
MAX_OBSERVED = 60
"""Maximum number of observations in a fit, taken evenly from all. More would hardly change its seven constants."""


_serials = itertools.count(1)


@dataclass(slots=True, eq=False)
class Observations:
    """Step times by GPU type and point, the models fitted to them, and the first gradient statistics.

    Jobs with plans have ratios of observed to planned step times instead of models.
    """

    inputs: InputReports | None = None
    """Reported input speeds; None if input speeds are not learned."""
    first_statistics: tuple[float, float] | None = None
    """First reported (squared norm, variance) of the gradient; None before any report."""
    models: dict[str, Theta] = field(default_factory=dict)
    """Constants θ of the fitted throughput model, by GPU type."""
    plain_exchanges: dict[tuple[str, bool], list[tuple[float, float]]] = field(default_factory=dict)
    """(step, synchronisation) seconds of steps with an uncompressed exchange, by GPU type and whether across nodes. An
    empty list means that such exchanges took place but were not measured apart from computing."""
    exchanges: SeenExchanges = field(default_factory=SeenExchanges)
    """Learned ratios of compressed exchanges."""
    choices: dict[tuple[object, ...], Plan] = field(default_factory=dict)
    """Cached plans of tasks."""
    most_gpus: int = 0
    """Largest number of GPUs observed; 0 before any report."""
    overhead: float = 1.0
    """Wall time of iterations ÷ sum of their measured step times."""
    one_type: tuple[str, ...] = ()
    """GPU types whose observations are fitted as if they were of one type; () if each type has its own model."""
    version: int = 0
    """Number that grows with every change of beliefs."""
    serial: int = field(default_factory=_serials.__next__)
    """Number that is unique to this object."""
    _steps: dict[str, dict[Point, tuple[float, float]]] = field(default_factory=dict)
    """(step, synchronisation) seconds by GPU type and point."""
    _stale: dict[str, None] = field(default_factory=dict)
    """GPU types, as keys, with observations that their model was not fitted to."""
    _ratios: dict[str, dict[Point, float]] = field(default_factory=dict)
    """Observed ÷ planned step time by GPU type and point, of jobs with plans."""
    _log_ratios: dict[str, float] = field(default_factory=dict)
    """Sum of the logarithms of `_ratios`, by GPU type."""
    too_large: set[tuple[str, int, int]] = field(default_factory=set)
    """(GPU type, GPUs, requested batch) on which a job ran out of memory."""
    _pending: list[Callable[[], None]] = field(default_factory=list)
    """Calls that add the observations that other jobs see only after `merge`."""

    @property
    def stale(self) -> bool:
        """Whether there are observations that no model was fitted to."""
        return bool(self._stale)

    def knows(self, gpu_type: str, point: Point) -> bool:
        return point in self._steps.get(self._fitted_as(gpu_type), {})

    def _fitted_as(self, gpu_type: str) -> str:
        """The GPU type under which observations on `gpu_type` are kept."""
        return self.one_type[0] if self.one_type else gpu_type

    def add(self, gpu_type: str, point: Point, step_s: float, sync_s: float, *, later: bool = False) -> None:
        """Adds a mean step time; only the first one at each point counts. later: whether it counts only after `merge`,
        because other jobs use it too.
        """
        if self.knows(gpu_type, point):
            return
        if later:
            self._pending.append(partial(self.add, gpu_type, point, step_s, sync_s))
            return
        self._steps.setdefault(self._fitted_as(gpu_type), {})[point] = (step_s, sync_s)
        self._stale[self._fitted_as(gpu_type)] = None
        self.most_gpus = max(self.most_gpus, point[1])

    def add_ratio(self, gpu_type: str, point: Point, ratio: float, *, later: bool = False) -> None:
        """Adds an observed step time ÷ the planned one, like `add`. point: with the global batch."""
        ratios = self._ratios.setdefault(gpu_type, {})
        if point in ratios:
            return
        if later:
            self._pending.append(partial(self.add_ratio, gpu_type, point, ratio))
            return
        ratios[point] = ratio
        self._log_ratios[gpu_type] = self._log_ratios.get(gpu_type, 0.0) + math.log(ratio)
        self.most_gpus = max(self.most_gpus, point[1])
        self.version += 1

    def add_too_large(self, shape: Shape, requested_batch: int) -> None:
        """Records that a job ran out of memory, so that so many GPUs of that type are not offered again on any nodes:
        the memory that a plan needs does not depend on the nodes.
        """
        self.too_large.add((shape.gpu_type, shape.gpus, requested_batch))
        self.version += 1

    def merge(self) -> None:
        """Adds the observations that were postponed by `later`."""
        for add in self._pending:
            add()
        self._pending.clear()

    def ratio(self, gpu_type: str) -> float:
        """Correction factor of planned step times on that type: the geometric mean of observed ratios; 1 if none."""
        ratios = self._ratios.get(gpu_type)
        return float(np.exp(np.mean(np.log(list(ratios.values()))))) if ratios else 1.0

    def ratio_at(self, gpu_type: str, point: Point) -> float:
        """Correction factor at one point: the observed ratio, or a prediction from those of other points.

        log(ratio) has a part that all plans of a model share on a GPU type, and a part of each plan's own, with
        standard deviations `RATIO_SHARED` and `RATIO_OWN`. The best linear prediction of the shared part from n
        observations is their sum ÷ (n + (RATIO_OWN ÷ RATIO_SHARED)²).
        """
        ratios = self._ratios.get(gpu_type, {})
        if point in ratios:
            return ratios[point]
        total = self._log_ratios.get(gpu_type, 0.0)
        return math.exp(total / (len(ratios) + (RATIO_OWN / RATIO_SHARED) ** 2))

    def forget_choices(self) -> None:
        """Drops cached choices, and with `version` everything else that was computed from earlier beliefs."""
        self.version += 1
        self.choices.clear()

    def take_stale(self) -> list[tuple[str, Table]]:
        """Returns each GPU type whose model is outdated, with the observations to fit, and marks these as fitted."""
        tables = []
        for gpu_type in self._stale:
            steps = self._steps[gpu_type]
            points = sorted(steps)
            if len(points) > MAX_OBSERVED:
                points = [points[i * len(points) // MAX_OBSERVED] for i in range(MAX_OBSERVED)]
            tables.append((gpu_type, np.array([(*point, *steps[point]) for point in points], dtype=np.float64)))
        self._stale.clear()
        return tables


def refresh_models(pools: Iterable[Observations], known: dict[bytes, Theta]) -> None:
    """Fits all outdated models in one call. known: earlier fits by their observations, as similar jobs often observe
    the same; new fits are added.
    """
    outdated = [(pool, *each) for pool in pools if pool.stale for each in pool.take_stale()]
    missing = {key: table for *_, table in outdated if (key := table.tobytes()) not in known}
    if missing:
        from synergy_core.performance.goodput.fit import fit
        from synergy_core.performance.goodput.throughput import ObservedSteps

        fits = fit([ObservedSteps(*table.T) for table in missing.values()])
        known.update(zip(missing, fits.theta, strict=True))
    for pool, gpu_type, table in outdated:
        pool.models.update(dict.fromkeys(pool.one_type or (gpu_type,), known[table.tobytes()]))
        pool.forget_choices()
