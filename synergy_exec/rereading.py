"""Settings that change while a controller runs: what the file of `changes` says goes before the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from synergy_core.catalog import yaml_fault
from synergy_core.errors import InputError, unknown
from synergy_exec.job_file import MOST_BYTES
from synergy_exec.plain import MOST_SHOWN, plain
from synergy_exec.settings import Settings
from synergy_runs.settings import build, defaults

CHANGED = "changed"
"""Under which name the journal's `meta` has what the file said when it was last read."""
FIXED = {
    "trace": "its jobs were drawn when the run began",
    "load": "its jobs were drawn when the run began",
    "seed": "jobs began with the weights that were drawn from it",
    "backend": "its agents are there",
    "host": "agents and people are connected there",
    "port": "agents and people are connected there",
    "ports": "ranks meet there",
    "tls_certificate": "which file it is was typed; what stands in it is read again",
    "tls_key": "which file it is was typed; what stands in it is read again",
    "tls_authority": "agents were told whom to trust",
    "users": "which file it is was typed; what stands in it is read again",
    "changes": "which file it is was typed; what stands in it is read again",
    "cluster": "the policy's queues were made with the quotas",
    "policy": "what it knows of the jobs is not another's",
    "parameters": "the policy was made with them",
    "information": "the policy was made with it",
    "input": "the policy was made with it",
    "compression": "jobs' models were made with it",
    "compressor": "jobs' models were made with it",
    "storage_mb_per_s": "the cluster was made with it",
    "profile": "jobs' models were made with it",
    "profile_s": "models were profiled within it",
    "explore_fraction": "what learns plans while jobs train was made with it",
    "restart_s": "jobs' models were made with it",
    "bfloat16": "jobs were profiled with it, and would go on with other arithmetic",
    "serve": "whether the command ends was settled when it was typed",
    "results_dir": "jobs train there",
    "figures": "it belongs to the command, which draws them at its end",
    "live": "it belongs to the command's terminal",
}
"""Keys that stay as they were typed, and why."""
CHANGING = tuple(each.name for each in dataclasses.fields(Settings) if each.name not in FIXED)


def given(path: Path | None) -> dict[str, Any]:
    """What the file of changes says, checked; nothing where there is none. Raises InputError."""
    if path is None:
        return {}
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InputError(f"{path}: {path.stat().st_size:,} bytes; expected a few keys, such as round_s: 5")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"changes={path}: it cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not YAML: {plain(yaml_fault(error), MOST_SHOWN)}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected keys with their values, such as round_s: 5")
    for name in values:
        if name in FIXED:
            raise InputError(f"{path}: {name} cannot change while a controller runs: {FIXED[name]}.")
        if name not in CHANGING:
            raise unknown(f"key in {path}", plain(str(name), MOST_SHOWN), CHANGING)
    try:
        made = build(Settings, {**defaults(Settings), **values})
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return {name: getattr(made, name) for name in values}


def differences(before: Settings, after: Settings) -> list[str]:
    """What is another value now, a line each."""
    values = ((name, getattr(before, name), getattr(after, name)) for name in CHANGING)
    return [f"{name}: {_typed(old)} → {_typed(new)}" for name, old, new in values if old != new]


def _typed(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# Which keys may be others when a run goes on: where and how it is carried out, not what it is.


CHANGEABLE = (
    *CHANGING,  # while it runs, too
    *("backend", "host", "port", "ports", "tls_certificate", "tls_key", "tls_authority"),
    *("users", "changes", "figures", "live"),
)


def lasting(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that stay as they were when the run began."""
    return {name: value for name, value in values.items() if name not in CHANGEABLE}


def changed(values: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """A run's values with those that were typed, such as host=10.0.0.1, in their places. Raises InputError."""
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        new = OmegaConf.from_dotlist(list(typed))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        raise InputError(f"{' '.join(typed)}: expected keys and values such as host=10.0.0.1.") from None
    fixed = [str(name) for name in new if name not in CHANGEABLE]
    if fixed:
        raise InputError(
            f"{', '.join(fixed)}: a run goes on with what it was begun with. These may be others: "
            f"{', '.join(CHANGEABLE)}."
        )
    both: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(dict(values)), new))
    return dict(both)
