"""The command line before Hydra reads it: unknown names get their nearest match; `trace=x` works like `+trace=x`."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from synergy_core.errors import InputError, unknown
from synergy_core.policies import get_policy, policy_names
from synergy_runs.program import Program
from synergy_runs.resources import conf_folder
from synergy_runs.settings import meanings

_OVERRIDE = re.compile(r"^(?P<prefix>\+\+?|~)?(?P<key>[\w./@-]+)=(?P<value>.*)$", re.DOTALL)
_NAMES = re.compile(r"[\w.+-]+")


def options(group: str) -> list[str]:
    """The files of a configuration group."""
    folder = conf_folder() / group
    hidden = {"default"} if group == "trace" else set()
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in hidden)


def prepared(arguments: Sequence[str], program: Program) -> list[str]:
    """The arguments as Hydra should get them. Raises InputError for what cannot be meant."""
    result: list[str] = []
    multirun = any(each in ("-m", "--multirun") for each in arguments)
    if multirun and not program.sweeps:
        raise InputError(f"{program.name} has no sweeps (-m); run it once for each setting.")
    asks_only = any(each in ("--help", "-h", "--hydra-help", "--version", "--info", "-i") for each in arguments)
    groups: dict[str, str] = {}
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if argument.startswith("-") or argument.startswith("~"):
            result.append(argument)
            continue
        if match is None:
            raise InputError(f"{argument!r}: expected key=value, such as +trace=philly or cluster.nodes=80.")
        name, value = match["key"], match["value"]
        if name in program.groups:
            groups[name] = value
        result.append(_override(match, program, multirun))
    asks_only |= bool(program.without_trace) and program.without_trace in arguments
    if not asks_only and "trace" not in groups and not _experiment_has_trace(groups.get("experiment")):
        names = ", ".join(options("trace"))
        raise InputError(
            f"no trace was given. Type: python -m {program.name} +trace={program.example}. Known traces: {names}."
        )
    if multirun and not any("hydra/launcher" in each for each in arguments) and _has_joblib_launcher():
        result.append("hydra/launcher=joblib")
    return result


def _override(match: re.Match[str], program: Program, multirun: bool) -> str:
    name, value = match["key"], match["value"]
    if name.startswith("hydra"):
        return match.group(0)
    if name in program.groups:
        for choice in value.split(",") if multirun else [value]:
            if choice not in ("null", *options(name)):
                hint = "A job log of your own: +trace=file trace.path=FILE." if name == "trace" else ""
                raise unknown(name, choice, options(name), hint=hint)
        return f"+trace={value}" if name == "trace" else match.group(0).lstrip("+")
    if name.startswith("parameters."):
        return f"++{name}={value}"
    known = dict(meanings(program.settings))
    if name not in known and not name.startswith(program.free_keys):
        raise _unknown_key(name, list(known), program)
    if name == "policy" and "," in value and "[" not in value and not multirun:
        raise InputError(f"policy={value}: type 'policy=[{value}]' to compare them, or -m to sweep over them.")
    if name == "policy":
        for policy in _NAMES.findall(value):
            check_policy(policy)
    replaces = name in known and not value.startswith("{")  # Hydra adds keys to an empty mapping only if told so
    return f"{'' if replaces else '++'}{name}={value}"


def _unknown_key(name: str, known: list[str], program: Program) -> InputError:
    """Lists the keys of the same section only, and the nearest of all."""
    section = name.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return unknown("key", name, {*siblings, *near}, hint=f"See python -m {program.name} --help.")


def check_policy(name: str) -> None:
    """Raises InputError with the nearest match if neither a policy nor a variant has this name."""
    known = {*policy_names(), *options("variants")}
    if name not in known and "+" in name:
        get_policy(name)
    elif name not in known:
        raise unknown("policy", name, known)


def _experiment_has_trace(name: str | None) -> bool:
    path = conf_folder() / "experiment" / f"{name}.yaml"
    return name is not None and path.is_file() and "trace" in Path(path).read_text(encoding="utf-8")


def _has_joblib_launcher() -> bool:
    try:
        return importlib.util.find_spec("hydra_plugins.hydra_joblib_launcher") is not None
    except ModuleNotFoundError:
        return False
