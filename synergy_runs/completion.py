"""`--completion=bash`: a script by which bash and zsh complete a program's keys, and values that are words."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from typing import Any

from synergy_core.errors import unknown
from synergy_core.policies import policy_names
from synergy_runs.compose import default_values
from synergy_runs.overrides import options
from synergy_runs.program import Program
from synergy_runs.settings import Key, keys

SHELLS = ("bash", "zsh")
# The word is cut out of the line: bash ends words at "=", too, and replaces what comes after it alone; zsh does not.
SCRIPT = """\
# To have it: eval "$(python -m {name} --completion={shell})"
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
    """What is asked for by `--completion=bash`. Raises InputError for a shell that is not among `SHELLS`."""
    return script(program, option.partition("=")[2], default_values(program))


def script(program: Program, shell: str, defaults: dict[str, str]) -> str:
    """The script. defaults: of the keys that have one, as they are typed. Raises InputError for another shell."""
    if shell not in SHELLS:
        raise unknown("shell", shell, SHELLS)
    named = [f"{'+' * (group == 'trace')}{group}" for group in program.groups]
    every = [*named, *(each.name for each in keys(program.settings) if each.name not in program.groups)]
    return SCRIPT.format(
        name=program.name,
        shell=shell,
        zsh="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        keys=" ".join(f"{each}=" for each in every),
        values=" ".join(_values(program, defaults)),
    )


def _values(program: Program, defaults: dict[str, str]) -> Iterator[str]:
    """`key=value` for every word that a key takes, and for its default."""
    for group in program.groups:
        yield from (f"{'+' * (group == 'trace')}{group}={each}" for each in options(group))
    for each in keys(program.settings):
        default = defaults.get(each.name, "")
        words = dict.fromkeys((*_words(each), *([default] if default and not set(default) & set(" '[{") else [])))
        yield from (f"{each.name}={word}" for word in words)


def _words(key: Key) -> Iterator[str]:
    if key.name == "policy":
        yield from policy_names()
    yield from _of_kind(key.kind)


def _of_kind(kind: Any) -> Iterator[str]:
    if typing.get_origin(kind) is typing.Literal:
        yield from map(str, typing.get_args(kind))
    elif kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif typing.get_origin(kind) not in (list, dict):
        for each in typing.get_args(kind):
            yield from _of_kind(each)
