"""The base of policies and mechanisms: named functions with keyword parameters."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

from synergy_core.errors import InputError, unknown


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside any layers of `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def described(function: Callable[..., Any]) -> dict[str, Any]:
    """A function's name, the first line of its docstring, and the defaults of its keyword parameters."""
    parameters = inspect.signature(function).parameters.values()
    return {
        "name": function.__name__,
        "summary": (inspect.getdoc(function) or "").partition("\n")[0],
        "parameters": {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY},
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Parametrised:
    """Functions registered under one name. parameters: the present values of their keyword parameters."""

    name: str
    summary: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    noun: ClassVar[str] = "policy"
    takers: ClassVar[tuple[str, ...]] = ()
    """Fields with functions that take the parameters. The first function's signature declares the parameters."""

    def with_parameters(self, **parameters: Any) -> Self:
        """A copy with some parameters set, each converted to the type of its present value.

        Raises InputError for an unknown name, a value of another type, and a value that the function's `Literal`
        annotation does not list.
        """
        if not parameters:
            return self
        hints = typing.get_type_hints(unwrapped(getattr(self, self.takers[0])))
        checked = {name: self._checked(name, value, hints.get(name)) for name, value in parameters.items()}
        functions = {name: getattr(self, name) for name in self.takers}
        changed: dict[str, Any] = {
            name: functools.partial(function, **checked) for name, function in functions.items() if function is not None
        }
        return replace(self, **changed, parameters={**self.parameters, **checked})

    def _checked(self, name: str, value: Any, hint: Any) -> Any:
        if name not in self.parameters:
            raise unknown(f"parameter of {self.noun} {self.name}", name, self.parameters)
        default = self.parameters[name]
        choices = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
        if choices and value not in choices:
            raise unknown(f"parameter {name} of {self.noun} {self.name}", str(value), choices)
        if isinstance(default, tuple):
            items = value if isinstance(value, list | tuple) else [value]
            return tuple(self._like(name, item, default[0] if default else 0.0) for item in items)
        return self._like(name, value, default)

    def _like(self, name: str, value: Any, default: Any) -> Any:
        expected = type(default)
        if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value) and (value >= 0 or not name.endswith("_s")):
                return float(value)
        elif (expected in (int, bool, str) and type(value) is expected) or expected not in (float, int, bool, str):
            return value
        raise InputError(
            f"parameter {name} of {self.noun} {self.name}: got {value!r}, expected a value such as {default!r}"
            f"{' (seconds, ≥ 0)' if name.endswith('_s') else ''}."
        )
