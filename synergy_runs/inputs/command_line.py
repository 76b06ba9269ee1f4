"""The command line of both programs: checks arguments, translates them to Hydra's grammar, and lets Hydra compose them.

Unknown names are reported with the nearest match before Hydra is imported, which is slow. Hydra's own errors are
shortened to one sentence.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, is_dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from synergy_core import __version__
from synergy_core.errors import InputError, unknown
from synergy_core.scheduling.policies import policy_names
from synergy_runs.files import conf_folder
from synergy_runs.inputs.keys import alternatives, defaults, expected, inside, keys, typed
from synergy_runs.inputs.requested import quoted, read_request, requests_in

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True, slots=True)
class Program:
    """The command line of one program.

    name: the module after `python -m`. config: the name of the file in conf/, without .yaml. settings: the class that
    declares all keys. groups: the configuration groups (folders of conf/) that the program reads. example: a trace that
    messages suggest. sweeps: whether `-m` is supported. without_trace: an argument that makes a trace unnecessary."""

    name: str
    config: str
    settings: type
    groups: tuple[str, ...]
    example: str
    sweeps: bool = False
    without_trace: str = ""


_NEEDS_NO_QUOTES = re.compile(
    r"(?!(true|false|null|[+-]?(nan|inf(inity)?|[\d._]+(e[+-]?\d+)?))$)[a-z0-9_./+-]+", re.IGNORECASE | re.ASCII
)
"""Matches text that Hydra reads as a string without quotes, because it is no number, no truth value and not null."""
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+")
_SWEPT = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag)\(.*\)", re.DOTALL)
_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SPECIAL = re.compile(r"([\\()\[\]{}:=, \t])")
NULL = "null"


def as_hydra(name: str, wanted: Any, text: str, *, sweep: bool) -> str:
    """Translates the value typed after `name=` to Hydra's grammar.

    The value of a text key is taken literally, so a path needs no quotes except the shell's. Other values may be
    written as in YAML. wanted: the key's type. sweep: whether commas separate the values of a sweep. Raises InputError
    if the value does not have the key's type, and for several values outside a sweep.
    """
    if text == NULL or _QUOTED.fullmatch(text):
        return text
    is_list_of_text = typing.get_origin(wanted) is list and _is_text(typing.get_args(wanted)[0])
    if _is_text(wanted) or (is_list_of_text and not text.startswith("[")):
        if not sweep:
            return _quoted(text)
        return text if _SWEPT.fullmatch(text) else ",".join(_quoted(each) for each in text.split(","))
    if _PLAIN.fullmatch(text) or not text:
        return text
    return _non_text(name, wanted, text, sweep=sweep)


def _is_text(wanted: Any) -> bool:
    """Whether a setting's type allows only text and null."""
    return all(each in (str, Path) or typing.get_origin(each) is typing.Literal for each in alternatives(wanted))


def _quoted(text: str) -> str:
    if text == NULL or _QUOTED.fullmatch(text) or _NEEDS_NO_QUOTES.fullmatch(text):
        return text
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser(text)
    # OmegaConf expands ${…} even within quotes, unless a backslash precedes it.
    text = _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", text)
    # Hydra reads a backslash before any quote, including the closing one, as an escape.
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    ending = len(text) - len(text.rstrip("\\"))
    return "'" + text + "\\" * ending + "'"


def _non_text(name: str, wanted: Any, text: str, *, sweep: bool) -> str:
    """Translates a number, a list or a mapping to Hydra's grammar, and the value of a key that accepts any type."""
    import yaml  # type: ignore[import-untyped]
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    several = None  # stays None if Hydra's grammar cannot read the text
    try:
        several = OverridesParser.create().parse_override(f"{name}={text}").is_sweep_override()
    except HydraException:
        if text[0] in "[{":
            with suppress(yaml.YAMLError):
                return _hydra_text(yaml.safe_load(text))
    if "${" not in text and several is not None and (sweep or not several):
        return text
    if wanted is Any and "${" not in text:
        return _quoted(text)
    got, hint = ("got several values, ", "; -m tries one after another") if several else ("", "")
    raise InputError(f"{name}={text}: {got}expected {expected(wanted)}{hint}.")


def _hydra_text(value: Any) -> str:
    if isinstance(value, dict):
        names = [_SPECIAL.sub(r"\\\1", str(each)) for each in value]
        return "{" + ",".join(f"{a}:{_hydra_text(b)}" for a, b in zip(names, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_text, value)) + "]"
    if value is None:
        return NULL
    return str(value).lower() if isinstance(value, bool | int | float) else _quoted(str(value))


_OVERRIDE = re.compile(r"^(?P<prefix>\+\+?)?(?P<key>[\w./@-]+)=(?P<value>.*)$", re.DOTALL)
_SWEEP = ("-m", "--multirun")
_SHOW = ("--cfg=job", "--cfg", "-c")
"""Options with Hydra's names: `_SWEEP` starts a sweep; `_SHOW` prints the settings of a run without starting it."""


def options(group: str) -> list[str]:
    """The values to offer for a configuration group: the names of its files in conf/, without the default trace."""
    folder = conf_folder() / group
    hidden = {"default"} if group == "trace" else set()
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem not in hidden)


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether the arguments start a sweep."""
    return any(each in _SWEEP for each in arguments)


def text_asked_for(
    program: Program, arguments: Sequence[str], usage: Callable[[], str], page: Callable[[], str]
) -> str | None:
    """The text to print instead of a run: help, version, completion script, or settings in YAML. None for a run.

    usage: returns the text of --help. page: that of --help=markdown, the program's part of docs/configuration.md.
    Raises InputError for invalid settings, and for a shell without completion."""
    if "--help" in arguments or "-h" in arguments:
        return usage()
    if "--help=markdown" in arguments:
        return page()
    if "--version" in arguments:
        return f"{__version__}\n"
    if arguments and arguments[0].startswith("--completion="):
        return completion(program, arguments[0])
    if any(each in _SHOW for each in arguments):
        from omegaconf import OmegaConf

        return OmegaConf.to_yaml(OmegaConf.create(composed(program, arguments)))
    return None


def prepared(arguments: Sequence[str], program: Program) -> list[str]:
    """Translates arguments for Hydra; `trace=x` works like `+trace=x`. Raises InputError for unknown names."""
    result: list[str] = []
    multirun = is_sweep(arguments)
    if multirun and not program.sweeps:
        raise InputError(f"{program.name} has no sweeps (-m); run it once for each setting.")
    groups: dict[str, str] = {}
    for argument, before in zip(arguments, ("", *arguments), strict=False):
        if argument in (*_SWEEP, *_SHOW) or (argument == "job" and before in _SHOW):
            continue
        if argument.startswith("-"):
            raise _no_option(argument, program)
        match = _OVERRIDE.match(argument)
        if match is None:
            raise _no_key(argument, program)
        name, value = match["key"], match["value"]
        if name in program.groups:
            if name in groups:
                raise InputError(f"{name} was given twice: {groups[name]} and {value}; give one.")
            groups[name] = value
        result.append(_override(match, program, multirun))
    experiment = conf_folder() / "experiment" / f"{groups.get('experiment')}.yaml"
    has_trace = "trace" in groups or (experiment.is_file() and "trace" in experiment.read_text(encoding="utf-8"))
    if not has_trace and program.without_trace not in arguments:
        names = ", ".join(options("trace"))
        raise InputError(
            f"no trace was given. Type: python -m {program.name} +trace={program.example}. Known traces: {names}."
        )
    if multirun and not any("hydra/launcher" in each for each in arguments) and _has_launcher("joblib"):
        result.append("hydra/launcher=joblib")
    return result


def _no_option(argument: str, program: Program) -> InputError:
    """The error for an unknown option, or for a key that was typed with dashes."""
    as_key, equals, value = argument.lstrip("-").partition("=")
    if as_key in (each.name for each in keys(program.settings)) or as_key in program.groups:
        return InputError(f"{argument}: keys have no dashes; type {as_key}={value if equals else 'VALUE'}.")
    sweeps = ", -m for a sweep" if program.sweeps else ""
    return InputError(
        f"unknown option {argument!r}. Known: --help, --help=markdown, --version, --cfg=job to show all settings"
        f"{sweeps}; all else is typed as key=value, such as seed=1."
    )


def _no_key(argument: str, program: Program) -> InputError:
    name, types_of = argument.lstrip("~+"), {each.name: each.type for each in keys(program.settings)}
    if argument.startswith("~") and name in types_of:
        null = f"; type {name}=null instead" if type(None) in typing.get_args(types_of[name]) else ""
        return InputError(f"{argument}: a key cannot be removed{null}.")
    if name in options("trace"):
        return InputError(f"{argument!r}: expected key=value. Type +trace={name}.")
    if name in program.groups or name in types_of:
        return InputError(f"{argument!r}: expected key=value, without blanks. Type {name}=VALUE.")
    return InputError(f"{argument!r}: expected key=value, such as +trace={program.example} or results_dir=DIR.")


def _override(match: re.Match[str], program: Program, multirun: bool) -> str:
    name, value = match["key"], match["value"]
    if name == "hydra/launcher" and value != "basic" and not _has_launcher(value):
        package = f"hydra-{value.partition('_')[0]}-launcher"
        raise InputError(f"hydra/launcher={value} is not installed here; type: pip install {package}")
    if name.startswith("hydra"):
        return match.group(0)
    if name in program.groups:
        for choice in value.split(",") if multirun else [value]:
            if choice not in options(name) and (choice, name) != ("null", "experiment"):
                hint = "A job log of your own: +trace=file trace.path=FILE." if name == "trace" else ""
                raise unknown(name, choice, options(name), hint=hint)
        return f"+trace={value}" if name == "trace" else match.group(0).lstrip("+")
    known, wanted = [each.name for each in keys(program.settings)], reduce(inside, name.split("."), program.settings)
    if wanted is None:
        # The message lists the keys of the same section and the most similar key of any section.
        siblings = [each for each in known if each.rpartition(".")[0] == name.rpartition(".")[0]]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        raise unknown("key", name, {*siblings, *near}, hint=f"See python -m {program.name} --help.")
    if name == "policy":
        return f"{name}={_policies(value, multirun=multirun)}"
    value = as_hydra(name, wanted, value, sweep=multirun)
    # Without ++, Hydra refuses to add elements to an empty mapping, or to a list that may be missing.
    replaces = name in known and ".0." not in name and not value.startswith("{")
    return f"{'' if replaces else '++'}{name}={value}"


def _policies(value: str, *, multirun: bool) -> str:
    """Translates the value of `policy=`, with brackets, to Hydra's grammar. Raises InputError for unknown policies."""
    requested = requests_in(value)
    if len(requested) > 1 and not value.startswith(("[", "'", '"')) and not multirun:
        raise InputError(f"policy={value}: type 'policy=[{value}]' to compare them, or -m to sweep over them.")
    for policy in requested:
        read_request(policy)
    # In a sweep, commas outside brackets separate the runs.
    return quoted(value) if multirun else as_hydra("policy", list[str], quoted(value), sweep=False)


def _has_launcher(name: str) -> bool:
    """Whether the package of a Hydra launcher is installed. name: such as `joblib` or `submitit_slurm`."""
    try:
        return importlib.util.find_spec(f"hydra_plugins.hydra_{name.partition('_')[0]}_launcher") is not None
    except ModuleNotFoundError:
        return False


def run_sweep(program: Program, overrides: Sequence[str], run: Callable[[DictConfig], None]) -> None:
    """Runs a sweep with Hydra, whose launcher calls `run` with the configuration of each run in its own processes.

    Raises InputError for impossible settings, and where the launcher's cluster cannot be reached.
    """
    import hydra

    def task(config: DictConfig) -> None:  # Hydra requires a function that is defined in a file
        run(config)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing half a traceback and exiting
    sys.argv[1:] = ["-m", *overrides]
    _declare(program)
    try:
        with _short_errors():
            hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=program.config)(task)()
    except ConnectionError as error:
        if type(error) is not ConnectionError:  # a closed pipe, not a launcher's own error
            raise
        raise InputError(f"the launcher reached no cluster: {error} To start Ray, type: ray start --head") from error


def composed(program: Program, arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that a program would run with under these arguments. Raises InputError for invalid arguments."""
    return composed_of(program, prepared(arguments, program))


def swept_values(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The values of each swept key. arguments: in Hydra's grammar. Raises InputError if Hydra cannot parse them."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with _short_errors():
        parsed = OverridesParser.create().parse_overrides(list(arguments))
        return {
            each.get_key_element(): list(each.sweep_string_iterator()) for each in parsed if each.is_discrete_sweep()
        }


def of_each_swept_value(program: Program, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the settings for every value of each swept key, while all other swept keys have their first value.

    arguments: in Hydra's grammar. Raises InputError if Hydra cannot compose them."""
    swept = swept_values(arguments)
    fixed = [each for each in arguments if each.partition("=")[0] not in swept]
    first = {key: values[0] for key, values in swept.items()}
    others = [{**first, key: value} for key, values in swept.items() for value in values[1:]]
    for chosen in (first, *others):
        yield composed_of(program, [*fixed, *(f"{key}={value}" for key, value in chosen.items())])


def composed_of(program: Program, arguments: Sequence[str]) -> dict[str, Any]:
    """The settings that Hydra composes. arguments: in Hydra's grammar. Raises InputError if Hydra refuses them."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    _declare(program)
    with _short_errors(), initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
        config = compose(program.config, list(arguments))
        values: Any = OmegaConf.to_container(config, resolve=True)
    return dict(values)


def _declare(program: Program) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=f"{program.config}_keys", node=defaults(program.settings))


@contextmanager
def _short_errors() -> Iterator[None]:
    """Converts Hydra's errors into InputErrors of one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        if element := re.search(r"\+(\w+\.\w+\.\d+)\.", first):
            raise InputError(f"{element[1]}: the list has no such element; indices start at 0.") from error
        raise InputError(f"these settings cannot be combined: {first}. --help lists all keys.") from error


def default_values(program: Program) -> dict[str, str]:
    """The default of every key that has one, as a user would type it."""
    found: dict[str, str] = {}
    values = composed(program, [f"+trace={program.example}"] if "trace" in program.groups else [])
    for each in keys(program.settings):
        at: Any = values
        for part in each.name.split("."):
            at = at.get(part, MISSING) if isinstance(at, dict) else MISSING
        if at is not MISSING and (not isinstance(at, dict) or not at):
            found[each.name] = typed(at)
    return found


def key_table(program: Program, *, without: str = "-") -> str:
    """A Markdown table of every key, with its default and possible values.

    without: leaves out the keys whose names begin so."""
    defaults, rows = default_values(program), ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for each in keys(program.settings):
        if each.name.startswith(without):
            continue
        takes = expected(each.type, each.bounds)
        if each.name in program.groups:
            takes = ", ".join(options(each.name))
        elif any(map(is_dataclass, alternatives(each.type))):
            takes = "its keys below"
        default = defaults.get(each.name)
        shown = "" if default is None else f"`{default}`" if default else "none"
        cells = (f"`{each.name}`", shown, takes, each.meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


SHELLS = ("bash", "zsh")
# The script takes the current word from the line itself, because bash, unlike zsh, also splits words at "=".
SCRIPT = """\
# To use it: eval "$(python -m {name} --completion={shell})"
{zsh}_{name}_words() {{
  local typed="${{COMP_LINE:0:COMP_POINT}}" all key
  typed="${{typed##* }}"; key="${{typed%%=*}}"
  case " $COMP_LINE" in
    *" -m {name} "*) ;;
    *) COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}")); return ;;
  esac
  if [[ "$typed" == *=* ]]; then all='{values}'; else all='{keys}'; fi
  COMPREPLY=($(compgen -W "$all" -- "$typed"))
  if [[ -z "$ZSH_VERSION" && "$typed" == *=* ]]; then COMPREPLY=("${{COMPREPLY[@]#"$key="}}"); fi
}}
complete -o nospace -o default -F _{name}_words python python3
"""


def completion(program: Program, option: str) -> str:
    """A script for bash or zsh that completes the names of keys, and the values that `_words` lists.

    option: such as `--completion=bash`. Raises InputError for a shell that is not in `SHELLS`.
    """
    shell = option.partition("=")[2]
    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS)
    defaults = default_values(program)
    words = {"+" * (group == "trace") + group: options(group) for group in program.groups}
    for each in keys(program.settings):
        if each.name not in program.groups:
            default = defaults.get(each.name, "")
            usual = [default] if default and not set(default) & set(" '[{") else []
            policies = policy_names() if each.name == "policy" else ()
            words[each.name] = list(dict.fromkeys([*policies, *_words(each.type), *usual]))
    return SCRIPT.format(
        name=program.name,
        shell=shell,
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        keys=" ".join(f"{name}=" for name in words),
        values=" ".join(f"{name}={word}" for name, takes in words.items() for word in takes),
    )


def _words(wanted: Any) -> list[str]:
    """The words that the shell can complete for a key of this type: literals, true, false and null."""
    words = [NULL] * (type(None) in typing.get_args(wanted))
    for each in alternatives(wanted):
        if typing.get_origin(each) is typing.Literal:
            words += map(str, typing.get_args(each))
        elif each is bool:
            words += ["true", "false"]
    return words
