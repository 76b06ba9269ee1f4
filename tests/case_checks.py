"""Properties that every random case (tests/cases.py) must have, also under a walk over all jobs if it must agree."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from cases import Case
from hydra import compose, initialize_config_dir
from jobs import WALKING, facts
from omegaconf import OmegaConf
from test_profiled_jobs import PROFILE

from synergy_core.scheduling.policies import OrderingPolicy
from synergy_runs.files import conf_folder
from synergy_runs.inputs.command_line import prepared
from synergy_runs.inputs.from_settings import write_profile
from synergy_runs.inputs.keys import build
from synergy_runs.outputs.facts import Run
from synergy_runs.outputs.invariants import check
from synergy_sim.prepare import PreparedRun, prepared_runs
from synergy_sim.settings import SIMULATOR, SimulatorSettings
from synergy_sim.simulate import simulate

MAX_CPU_S = 20.0
"""CPU seconds after which a case has failed; most take a tenth of a second."""


class TooSlowError(Exception):
    """A case has used up its time."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises TooSlowError once the block has taken MAX_CPU_S. For programs of one thread."""

    def too_slow(*_: Any) -> None:
        raise TooSlowError(f"not done after {MAX_CPU_S:g} CPU-seconds")

    before = signal.signal(signal.SIGVTALRM, too_slow)
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def examine(case: Case) -> tuple[str, ...]:
    """Simulates the case; returns what it was compared with: "walk", where the walk over all jobs must decide alike.

    Raises what the simulator raises, InvariantError, or AssertionError for other decisions than the walk's.
    """
    made = prepared_case(case)
    done = simulated(made)
    check(done)
    if not _walks(made):
        return ()
    assert facts(done) == facts(simulated(made, make_scheduler=WALKING)), (
        "the queue and the walk over all jobs decide differently"
    )
    return ("walk",)


def simulated(made: PreparedRun, **more: Any) -> Run:
    """One simulation of it."""
    return simulate(made.workload, made.cluster, made.policy, made.execution, truth=made.truth, seed=made.seed, **more)


def prepared_case(case: Case) -> PreparedRun:
    """Prepares the run that the case's command line would start."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "jobs.csv"
        log.write_text(case.log, encoding="utf-8")
        keys = {**case.keys, "trace.path": str(log)}
        if case.truth == "profiled":
            keys["truth.profile"] = str(Path(folder) / "profile.json")
            write_profile(PROFILE, Path(keys["truth.profile"]))
        (made,) = prepared_runs_of("file", keys)
    return made


def prepared_runs_of(trace: str, keys: Mapping[str, Any]) -> Iterator[PreparedRun]:
    """Prepares the runs that `python -m synergy_sim +trace=…` would start with these keys."""
    values = _composed(trace, keys.get("testbed", "ideal")).copy()
    for key, value in keys.items():
        if key != "testbed":
            OmegaConf.update(values, key, value, merge=False, force_add=True)
    return prepared_runs(build(SimulatorSettings, OmegaConf.to_container(values, resolve=True)))


@cache
def _composed(trace: str, testbed: str) -> Any:
    """The configuration; read it, change a copy."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        return compose("config", overrides=prepared([f"+trace={trace}", f"testbed={testbed}"], SIMULATOR))


def _walks(made: PreparedRun) -> bool:
    """Whether the walk over all jobs must decide as the quicker lanes do, event for event."""
    return isinstance(made.policy, OrderingPolicy) and len(made.cluster.gpu_types) == 1 and not made.cluster.borrowing
