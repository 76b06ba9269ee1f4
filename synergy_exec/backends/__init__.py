"""Backends start agents on nodes. Each file here is a backend, with a function `backend(**options) -> Backend`.

Modules whose names begin with `_` are not backends.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from synergy_core import module_names
from synergy_core.errors import unknown
from synergy_runs.inputs.keys import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The address and the token with which agents find the controller.

    url: `http://host:port`, with the websocket at `/agents`. token: the bearer token, which no message or log
    shows. folder: the run's folder, on a file system that all nodes share.
    """

    url: str
    token: str = field(repr=False)
    folder: Path


class Backend(Protocol):
    """Starts and ends agents on nodes 0 … nodes − 1. nodes: number of nodes."""

    @property
    def nodes(self) -> int: ...

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of that node; the agent then connects to the controller. Called again if it was lost."""

    def lost(self) -> dict[int, str]:
        """Nodes whose agent has exited by itself, with the reason as far as it is known."""

    async def stop(self) -> None:
        """Ends every remaining agent. When it returns, no process that this backend started is left."""


def backend_names() -> list[str]:
    """The names of the backends in this folder, sorted."""
    return module_names(__name__)


def get_backend(name: str, options: Mapping[str, Any]) -> Backend:
    """Creates the backend of that name. Raises InputError for wrong options, or if it is not available here."""
    given = checked_options(name, options)
    made: Backend = importlib.import_module(f"{__name__}.{name}").backend(**given)
    return made


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Checks the options of a backend. Raises InputError for an unknown backend or option."""
    if name not in backend_names():
        raise unknown("backend", name, backend_names(), hint="A file in synergy_exec/backends/ adds one.")
    make = importlib.import_module(f"{__name__}.{name}").backend
    hints = typing.get_type_hints(make)
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of backend {name}", option, known)
    return {
        option: cast(value, hints.get(option, Any), f"backend.options.{option}") for option, value in options.items()
    }
