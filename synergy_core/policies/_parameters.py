"""What may be given as a parameter of a policy: a value like its default, or one of those that its annotation lists."""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from synergy_core.errors import InputError, unknown


def checked(
    policy: str, function: Callable[..., Any], known: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The parameters given, in the form of their present values.

    policy: its name, for errors; function: that it is made of; known: its parameters as they are. Raises InputError for
    unknown names, for values of another kind, and for what a `Literal` does not list.
    """
    result = {}
    for name, value in given.items():
        if name not in known:
            raise unknown(f"parameter of policy {policy}", name, known)
        default, choices = known[name], _choices(function, name)
        if choices and value not in choices:
            raise unknown(f"parameter {name} of policy {policy}", str(value), choices)
        if isinstance(default, tuple):
            items = value if isinstance(value, list | tuple) else [value]
            result[name] = tuple(_like(policy, name, item, default[0] if default else 0.0) for item in items)
        else:
            result[name] = _like(policy, name, value, default)
    return result


def _choices(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """What a parameter may be, where it is annotated with a `Literal`; () for any other."""
    while isinstance(function, functools.partial):
        function = function.func
    wanted = typing.get_type_hints(function).get(name)
    return typing.get_args(wanted) if typing.get_origin(wanted) is Literal else ()


def _like(policy: str, name: str, value: Any, default: Any) -> Any:
    wanted = type(default)
    if wanted is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isfinite(value) and (value >= 0 or not name.endswith("_s")):
            return float(value)
    elif (wanted in (int, bool, str) and type(value) is wanted) or wanted not in (float, int, bool, str):
        return value
    raise InputError(
        f"parameter {name} of policy {policy}: got {value!r}, expected a value such as {default!r}"
        f"{' (seconds, ≥ 0)' if name.endswith('_s') else ''}."
    )
