"""Digests of what a result depends on. A result whose digest is still the same is used again; a section whose digest
has changed is out of date.

- Settings: those of the task, with the defaults of the experiment that it names.
- Policies: the default parameters and constants of each, and its recorded decisions (tests/digests.json, which a test
  compares with the code). A change of shape keeps decisions, so it makes nothing stale.
- Constants: the values in the files that the experiment reads; comments do not count, nor where a file lies.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from runner.experiment import ROOT, Experiment, Task, module_of

PLANS = "plans"


def digest(value: Any) -> str:
    """Twelve digits of a value that can be written as JSON."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def of_task(task: Task, experiment: Experiment) -> str:
    """Digest of everything that the result of a task depends on."""
    policies = sorted({*task.policies, *experiment.policies})
    return digest(
        [task.settings(), [of_policy(each) for each in policies], [of_file(each) for each in experiment.reads]]
    )


def of_experiment(experiment: Experiment) -> str:
    """Digest of all its tasks."""
    return digest(sorted(of_task(each, experiment) for each in experiment.tasks()))


@cache
def of_policy(name: str) -> str:
    """Digest of a policy's parameters, constants and recorded decisions. name: as typed; what is set there is in the
    settings already."""
    from synergy_core.scheduling.policies import PLANS as READS_PLANS
    from synergy_core.scheduling.policies import get_policy

    name = name.partition("(")[0]
    policy = get_policy(name)
    functions = list(policy.functions.values())
    functions += list(getattr(getattr(policy, "mechanism", None), "functions", {}).values())
    recorded = _recorded()["cases"]
    order = name.removesuffix(READS_PLANS).partition("+")[0]
    decisions = recorded.get(name) or recorded.get(order, [])
    return digest([[_defaults(each) for each in functions], _constants(map(module_of, functions)), decisions])


def _defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(inspect.unwrap(function)).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def _constants(modules: Iterable[Any]) -> dict[str, Any]:
    plain = (bool, int, float, str, tuple)
    return {
        f"{module.__name__.rpartition('.')[2]}.{name}": value
        for module in modules
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, plain)
    }


@cache
def of_file(name: str) -> str:
    """Digest of the values in a file, or in all files of a folder."""
    import yaml

    if name == PLANS:
        return digest(_recorded()[PLANS])
    path = ROOT / name
    if not path.exists():
        raise FileNotFoundError(f"{path}: an experiment says that it reads this file, but it does not exist")
    files = sorted(path.rglob("*.yaml")) if path.is_dir() else [path]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    values = {
        str(each.relative_to(path.parent)): yaml.load(each.read_text(encoding="utf-8"), loader)
        if each.suffix in (".yaml", ".json")
        else each.read_text(encoding="utf-8")
        for each in files
    }
    return digest(values)


@cache
def _recorded() -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "digests.json").read_text(encoding="utf-8"))


PROGRAMS = ("synergy_core", "synergy_runs", "synergy_sim", "synergy_exec", "conf", "bench")


@cache
def version() -> str:
    """The last commit that changed a program or a setting, with a + if one has changed since."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *PROGRAMS]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("log", "-1", "--format=%h") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def machine() -> str:
    """CPU model and number of cores."""
    model = "unknown CPU"
    path = Path("/proc/cpuinfo")
    if path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"
