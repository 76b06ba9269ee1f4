"""How agents get onto nodes: a file per way, each with a function `backend(**options) -> Backend`.

Being in this folder is what makes a backend known; a module whose name begins with `_` is none.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from synergy_core import module_names
from synergy_core.errors import unknown
from synergy_runs.settings import cast


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where agents find the controller.

    url: `http://host:port`, with the websocket at `/agents`. token_file: what `Authorization: Bearer` takes, in a file
    that only its owner reads. folder: of the run, on a file system that all nodes share.
    """

    url: str
    token_file: Path
    folder: Path


class Backend(Protocol):
    """Agents on nodes 0, 1, …; nodes: how many there will be."""

    @property
    def nodes(self) -> int: ...

    async def start(self, node: int, meeting: Meeting) -> None:
        """Starts the agent of that node, which connects by itself; called again where one was lost."""

    def lost(self) -> dict[int, str]:
        """Nodes whose agent has left by itself, with the reason as far as it can be told."""

    async def stop(self) -> None:
        """Ends every agent that has not left; no process that this started is left when it returns."""


def backend_names() -> list[str]:
    """The names of the backends in this folder, sorted."""
    return module_names(__name__)


def get_backend(name: str, options: Mapping[str, Any]) -> Backend:
    """The backend of that name. Raises InputError as `checked_options`, and where it cannot be had here."""
    given = checked_options(name, options)
    made: Backend = importlib.import_module(f"{__name__}.{name}").backend(**given)
    return made


def checked_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the backend takes them. Raises InputError for an unknown name, or what it does not take."""
    if name not in backend_names():
        raise unknown("backend", name, backend_names(), hint="A file in synergy_exec/backends/ adds one.")
    make = importlib.import_module(f"{__name__}.{name}").backend
    kinds = typing.get_type_hints(make)
    known = inspect.signature(make).parameters
    for option in options:
        if option not in known:
            raise unknown(f"option of backend {name}", option, known)
    return {
        option: cast(value, kinds.get(option, Any), f"backend.options.{option}") for option, value in options.items()
    }
