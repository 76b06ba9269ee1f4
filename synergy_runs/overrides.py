"""The command line before Hydra reads it: unknown names get their nearest match; `trace=x` works like `+trace=x`."""

from __future__ import annotations

import difflib
import importlib.util
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError, unknown
from synergy_runs.asked import asked_in, quoted, read_asked
from synergy_runs.program import Program
from synergy_runs.resources import conf_folder
from synergy_runs.settings import NodeTypeSettings, keys
from synergy_runs.typed import as_hydra

_OVERRIDE = re.compile(r"^(?P<prefix>\+\+?)?(?P<key>[\w./@-]+)=(?P<value>.*)$", re.DOTALL)
_ONE_NODE_TYPE = re.compile(r"cluster\.node_types\.\d+\.(\w+)")
_ASKING = ("--help", "-h", "--hydra-help", "--version", "--info", "-i", "--shell-completion", "-sc")
_WITH_VALUE = ("--cfg", "-c", "--shell-completion", "-sc", "--package", "-p")
_SWEEPING = ("-m", "--multirun")
_OPTIONS = (*_SWEEPING, "--resolve", *_ASKING, *_WITH_VALUE)
"""Those of Hydra's options that are offered: to sweep, and to show what would be run."""


def options(group: str) -> list[str]:
    """The files of a configuration group."""
    folder = conf_folder() / group
    hidden = {"default"} if group == "trace" else set()
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in hidden)


def sweeps(arguments: Sequence[str]) -> bool:
    """Whether a sweep is asked for, and not only what its settings would be."""
    asks_only = {"--hydra-help", "--info", "-i", "--cfg", "-c"}
    return any(each in _SWEEPING for each in arguments) and not asks_only.intersection(arguments)


def prepared(arguments: Sequence[str], program: Program) -> list[str]:
    """The arguments as Hydra should get them. Raises InputError for what cannot be meant."""
    result: list[str] = []
    multirun = any(each in _SWEEPING for each in arguments)
    if multirun and not program.sweeps:
        raise InputError(f"{program.name} has no sweeps (-m); run it once for each setting.")
    asks_only = any(each in _ASKING for each in arguments)
    groups: dict[str, str] = {}
    for argument, before in zip(arguments, ("", *arguments), strict=False):
        if argument.startswith("-") or before in _WITH_VALUE:
            result.append(_option(argument, before, program))
            continue
        match = _OVERRIDE.match(argument)
        if match is None:
            raise _no_key(argument, program)
        name, value = match["key"], match["value"]
        if name in program.groups:
            if name in groups:
                raise InputError(f"{name} was given twice: {groups[name]} and {value}; give one.")
            groups[name] = value
        result.append(_override(match, program, multirun))
    asks_only |= bool(program.without_trace) and program.without_trace in arguments
    if not asks_only and "trace" not in groups and not _experiment_has_trace(groups.get("experiment")):
        names = ", ".join(options("trace"))
        raise InputError(
            f"no trace was given. Type: python -m {program.name} +trace={program.example}. Known traces: {names}."
        )
    if multirun and not any("hydra/launcher" in each for each in arguments) and _has_launcher("joblib"):
        result.append("hydra/launcher=joblib")
    # Hydra's own parser refuses settings that follow an option which others preceded.
    return sorted(result, key=lambda each: each not in _SWEEPING)


def _option(argument: str, before: str, program: Program) -> str:
    """An option of Hydra's that is ours, too."""
    name, equals, _ = argument.partition("=")
    if before in _WITH_VALUE or name in _OPTIONS:
        return argument
    as_key = name.lstrip("-")
    if as_key in (each.name for each in keys(program.settings)) or as_key in program.groups:
        raise InputError(
            f"{argument}: keys have no dashes; type {argument.lstrip('-') if equals else f'{as_key}=VALUE'}."
        )
    sweeps = ", -m for a sweep" if program.sweeps else ""
    raise InputError(
        f"unknown option {argument!r}. Known: --help, --version, --cfg=job to show all settings{sweeps}; "
        "all else is typed as key=value, such as seed=1."
    )


def _no_key(argument: str, program: Program) -> InputError:
    name, kinds = argument.lstrip("~+"), {each.name: each.kind for each in keys(program.settings)}
    if argument.startswith("~") and name in kinds:
        null = f"; {name}=null is there to type" if type(None) in typing.get_args(kinds[name]) else ""
        return InputError(f"{argument}: a key cannot be taken away{null}.")
    if name in options("trace"):
        return InputError(f"{argument!r}: expected key=value. Type +trace={name}.")
    if name in program.groups or name in kinds:
        return InputError(f"{argument!r}: expected key=value, without blanks. Type {name}=VALUE.")
    return InputError(f"{argument!r}: expected key=value, such as +trace={program.example} or results_dir=DIR.")


def _override(match: re.Match[str], program: Program, multirun: bool) -> str:
    name, value = match["key"], match["value"]
    if name == "hydra/launcher" and value != "basic":
        _check_launcher(value)
    if name.startswith("hydra"):
        return match.group(0)
    if name in program.groups:
        for choice in value.split(",") if multirun else [value]:
            if choice not in options(name) and (choice, name) != ("null", "experiment"):
                hint = "A job log of your own: +trace=file trace.path=FILE." if name == "trace" else ""
                raise unknown(name, choice, options(name), hint=hint)
        return f"+trace={value}" if name == "trace" else match.group(0).lstrip("+")
    known = {each.name: each.kind for each in keys(program.settings)}
    if one := _ONE_NODE_TYPE.fullmatch(name):
        fields = {each.name: each.kind for each in keys(NodeTypeSettings)}
        if one[1] not in fields:
            raise unknown("key", one[1], list(fields), hint="Such as cluster.node_types.0.nodes=12.")
        return f"++{name}={as_hydra(name, fields[one[1]], value, sweep=multirun)}"
    free = name.startswith(("parameters.", *program.free_keys))
    if name not in known and not free:
        raise _unknown_key(name, list(known), program)
    if name == "policy":
        return f"{name}={_policies(value, multirun=multirun)}"
    value = as_hydra(name, known.get(name, Any), value, sweep=multirun)
    replaces = name in known and not value.startswith("{")  # Hydra adds keys to an empty mapping only if told so
    return f"{'' if replaces else '++'}{name}={value}"


def _policies(value: str, *, multirun: bool) -> str:
    """In Hydra's grammar, brackets and all. Raises InputError for what is no policy."""
    asked = asked_in(value)
    if len(asked) > 1 and not value.startswith(("[", "'", '"')) and not multirun:
        raise InputError(f"policy={value}: type 'policy=[{value}]' to compare them, or -m to sweep over them.")
    for policy in asked:
        read_asked(policy)
    # In a sweep commas part runs, but for those within brackets.
    return quoted(value) if multirun else as_hydra("policy", list[str], quoted(value), sweep=False)


def _unknown_key(name: str, known: list[str], program: Program) -> InputError:
    """Lists the keys of the same section only, and the nearest of all."""
    section = name.rpartition(".")[0]
    siblings = [key for key in known if key.rpartition(".")[0] == section]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return unknown("key", name, {*siblings, *near}, hint=f"See python -m {program.name} --help.")


def _experiment_has_trace(name: str | None) -> bool:
    path = conf_folder() / "experiment" / f"{name}.yaml"
    return name is not None and path.is_file() and "trace" in Path(path).read_text(encoding="utf-8")


def _check_launcher(name: str) -> None:
    """Raises InputError where what runs a sweep is not installed."""
    package = f"hydra-{name.partition('_')[0]}-launcher"
    if not _has_launcher(name):
        raise InputError(f"hydra/launcher={name} is not installed here; type: pip install {package}")


def _has_launcher(name: str) -> bool:
    """name: `joblib`, or one of several of a package, such as `submitit_slurm`."""
    try:
        return importlib.util.find_spec(f"hydra_plugins.hydra_{name.partition('_')[0]}_launcher") is not None
    except ModuleNotFoundError:
        return False
