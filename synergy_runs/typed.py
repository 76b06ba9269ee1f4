"""What was typed behind `key=`, as Hydra is to get it. Text is text, whatever stands in it: a path needs no quotes
but the shell's own. All else may be written as in YAML; what cannot be read is said in words of the key.
"""

from __future__ import annotations

import os
import re
import typing
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_runs.settings import expected

_SAFE = re.compile(r"[A-Za-z0-9_./+-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+")
_SWEPT = re.compile(r"(choice|range|interval|glob|sort|shuffle|tag)\(.*\)", re.DOTALL)
_QUOTED = re.compile(r"'.*'|\".*\"", re.DOTALL)
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_SPECIAL = re.compile(r"([\\()\[\]{}:=, \t])")
NULL = "null"


def as_hydra(name: str, kind: Any, text: str, *, sweep: bool) -> str:
    """The value in Hydra's grammar. kind: the key's type. sweep: whether commas part values to try one after another.

    Raises InputError where it is none of that type, and more than one where there is no sweep.
    """
    if text == NULL or _QUOTED.fullmatch(text):
        return text
    if _is_text(kind) or (_of_texts(kind) and not text.startswith("[")):
        if not sweep:
            return _quoted(text)
        return text if _SWEPT.fullmatch(text) else ",".join(_quoted(each) for each in text.split(","))
    if _PLAIN.fullmatch(text) or not text:
        return text
    return _other(name, kind, text, sweep=sweep)


def _is_text(kind: Any) -> bool:
    """Whether all that it can be, beside null, is text."""
    choices = [each for each in typing.get_args(kind) if each is not type(None)]
    if typing.get_origin(kind) is typing.Literal:
        return all(isinstance(each, str) for each in choices)
    return kind in (str, Path) if not choices else typing.get_origin(kind) is not list and all(map(_is_text, choices))


def _of_texts(kind: Any) -> bool:
    return typing.get_origin(kind) is list and _is_text(typing.get_args(kind)[0])


def _quoted(text: str) -> str:
    if text == NULL or _QUOTED.fullmatch(text) or (_SAFE.fullmatch(text) and not _is_no_text(text)):
        return text
    if text == "~" or text.startswith("~/"):
        text = os.path.expanduser(text)
    # OmegaConf reads ${…} in quotes, too, and takes a backslash before it as its escape.
    text = _INTERPOLATION.sub(lambda found: 2 * found[1] + r"\${", text)
    # Hydra takes a backslash as an escape where a quote follows, its own closing one included.
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    ending = len(text) - len(text.rstrip("\\"))
    return "'" + text + "\\" * ending + "'"


def _is_no_text(text: str) -> bool:
    """Whether Hydra would read a number or a truth value."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", NULL)
    return True


def _other(name: str, kind: Any, text: str, *, sweep: bool) -> str:
    """A number, a list, a mapping, or whatever a key of any type takes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    wrong = InputError(f"{name}={text}: expected {expected(kind)}.")
    if "${" in text:
        raise wrong
    try:
        several = OverridesParser.create().parse_override(f"{name}={text}").is_sweep_override()
    except HydraException:
        return _of_yaml(kind, text, wrong)
    if several and not sweep:
        if kind is Any:
            return _quoted(text)
        raise InputError(f"{name}={text}: got several values, expected {expected(kind)}; -m tries one after another.")
    return text


def _of_yaml(kind: Any, text: str, wrong: InputError) -> str:
    """Lists and mappings of YAML and JSON that Hydra does not read."""
    import yaml  # type: ignore[import-untyped]

    if text[0] not in "[{":
        if kind is Any:
            return _quoted(text)
        raise wrong
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise wrong from None
    return _written(value)


def _written(value: Any) -> str:
    if isinstance(value, dict):
        names = [_SPECIAL.sub(r"\\\1", str(each)) for each in value]
        return "{" + ",".join(f"{a}:{_written(b)}" for a, b in zip(names, value.values(), strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_written, value)) + "]"
    if value is None:
        return NULL
    return str(value).lower() if isinstance(value, bool | int | float) else _quoted(str(value))
