"""What a declared experiment is: tasks, each with a result that can be stored as JSON, and tables made of the results.

A module in bench/experiments/ declares one by assigning an `Experiment` to a name. A page shows it by having a block
with its name (`blocks`). Nothing else mentions it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pkgutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Result = dict[str, Any]
Collect = Callable[[Path, Any], Result]
"""Figures of a run: from its folder and its settings."""


@dataclass(frozen=True)
class Simulation:
    """One run of the simulator, as `python -m synergy_sim` makes it."""

    policy: str
    """The name as typed, such as `sia(like=synergy)`."""
    overrides: tuple[str, ...]
    """Overrides as typed; the first one names the experiment or the trace."""
    seed: int = 0
    workload: str = ""
    """A file of jobs, relative to $SYNERGY_DATA/workloads, without `.csv`. A seed other than 0 moves each of its
    submissions by up to a second, since such a run draws nothing else."""
    collect: Collect | None = None
    """Further figures beside those of summary.json."""

    @property
    def policies(self) -> tuple[str, ...]:
        return (self.policy,)

    @property
    def is_timed(self) -> bool:
        return False

    def __str__(self) -> str:
        collected = self.collect.__qualname__ if self.collect else ""
        return " ".join(filter(None, [self.policy, *self.overrides, f"seed={self.seed}", self.workload, collected]))

    def settings(self) -> Any:
        """The settings that apply: the overrides, and the defaults of the experiment that they name."""
        return [str(self), _base_settings(self.overrides[0])]

    def execute(self) -> Result:
        """Simulates; the numbers of summary.json, and what `collect` adds."""
        from synergy_sim.run import simulate_all

        with tempfile.TemporaryDirectory() as folder:
            made, values = compose(self._command_line(Path(folder)))
            (into,) = simulate_all(made, values, Path(folder) / "results", say=False)
            summary = json.loads((into / "summary.json").read_text(encoding="utf-8"))
            figures = {name: value for name, value in summary.items() if isinstance(value, int | float | bool)}
            return figures | (self.collect(into, made) if self.collect else {})

    def _command_line(self, folder: Path) -> list[str]:
        jobs = []
        if self.workload:
            path = jittered(data_file("workloads", f"{self.workload}.csv"), folder, self.seed)
            jobs = [f"trace.path={path}", f"trace.name={self.workload.replace('/', '-')}"]
        quiet = ["figures=false", "progress=false", "same_information=false", f"results_dir={folder}"]
        own = [f'policy=["{self.policy}"]', f"seed=[{self.seed}]"]
        return [self.overrides[0], *jobs, *own, *self.overrides[1:], *quiet]


@dataclass(frozen=True)
class Measurement:
    """One call of a function of a module; its arguments and its result can be stored as JSON."""

    function: Callable[..., Result]
    arguments: tuple[tuple[str, Any], ...] = ()
    policies: tuple[str, ...] = ()
    """Policies whose decisions the result depends on."""
    is_timed: bool = False
    """Whether it measures time, so that no other task may run beside it."""

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments)
        return f"{self.function.__module__}.{self.function.__qualname__}({arguments})"

    def settings(self) -> Any:
        return str(self)

    def execute(self) -> Result:
        return self.function(**dict(self.arguments))


Task = Simulation | Measurement


def measurement(
    function: Callable[..., Result], *, policies: Sequence[str] = (), is_timed: bool = False, **arguments: Any
) -> Measurement:
    """Makes a task that calls the function. Lists become tuples, so that the task can be hashed."""
    frozen = tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in arguments.items())
    return Measurement(function, frozen, tuple(policies), is_timed)


def simulations(
    overrides: Sequence[str],
    policies: Iterable[str],
    seeds: Iterable[int] = (0,),
    workloads: Iterable[str] = ("",),
    collect: Collect | None = None,
) -> list[Simulation]:
    """Every policy on every workload under every seed."""
    return [
        Simulation(policy, tuple(overrides), seed, workload, collect)
        for workload, seed, policy in product(workloads, seeds, policies)
    ]


Results = Mapping[Task, Result]
Tables = dict[str, str]


@dataclass(frozen=True)
class Experiment:
    """tasks: what is to be measured. tables: Markdown by block name, from all results."""

    tasks: Callable[[], Sequence[Task]]
    tables: Callable[[Results], Tables]
    needs: tuple[str, ...] = ()
    """What a machine may lack: `data`, `namespaces`, … (tests/documented.py has the list)."""
    reads: tuple[str, ...] = ()
    """Constants that the results depend on: files and folders, relative to the repository. `plans`: what the planner
    finds (tests/digests.json)."""
    policies: tuple[str, ...] = ()
    """Policies of all tasks, in addition to those that the tasks name."""
    name: str = field(default="", compare=False)
    """Set by `experiments`: the name it was assigned to, in small letters."""


@cache
def experiments() -> dict[str, Experiment]:
    """All declared experiments, by name. Raises ValueError if two have the same name."""
    import experiments as folder

    found: dict[str, Experiment] = {}
    for each in sorted(module.name for module in pkgutil.iter_modules(folder.__path__)):
        module = importlib.import_module(f"experiments.{each}")
        for name, value in vars(module).items():
            if isinstance(value, Experiment) and not value.name:
                if name.lower() in found:
                    raise ValueError(f"two experiments are called {name.lower()}; the second is in {module.__file__}")
                object.__setattr__(value, "name", name.lower())
                found[value.name] = value
    return found


# What tasks have in common


def data_file(*parts: str) -> Path:
    """A file below the folder of real data. Raises SystemExit if there is none."""
    path = Path(os.environ.get("SYNERGY_DATA", "")).joinpath(*parts)
    if not path.exists():
        raise SystemExit(f"{path}: no such file; SYNERGY_DATA must name the folder with the real data.")
    return path


def compose(overrides: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The settings of a command line, and the plain values they were built from."""
    from synergy_runs.inputs.command_line import composed
    from synergy_runs.inputs.keys import build
    from synergy_sim.settings import SIMULATOR, SimulatorSettings

    values = composed(SIMULATOR, list(overrides))
    return build(SimulatorSettings, values), values


@cache
def _base_settings(override: str) -> Any:
    """The defaults without keys that are null, so that a new key that sets nothing makes no result stale."""

    def without_nulls(values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: without_nulls(value) for key, value in values.items() if value is not None}

    return without_nulls(compose([override])[1])


JITTER_S = 1.0


def jittered(path: Path, folder: Path, seed: int) -> Path:
    """A copy of the workload with submissions moved by a uniform ±1 s each, not below 0; seed 0 moves none."""
    import numpy as np
    import pandas as pd

    if not seed:
        return path
    rows = pd.read_csv(path, dtype=str, keep_default_na=False)
    moves = np.random.default_rng((seed, 0xACC)).uniform(-JITTER_S, JITTER_S, len(rows))
    rows["time"] = [repr(value) for value in np.maximum(0.0, rows["time"].astype(float) + moves).tolist()]
    copy = folder / path.name
    rows.to_csv(copy, index=False)
    return copy


def module_of(function: Callable[..., Any]) -> Any:
    """The module that defines a function, decorators removed."""
    return sys.modules[inspect.unwrap(function).__module__]
