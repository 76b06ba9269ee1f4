"""What the controller needs of a backend: agents on nodes."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from synergy_core.errors import InputError, unknown


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
    """nodes: how many agents there will be, numbered from 0."""

    @property
    def nodes(self) -> int: ...

    async def start(self, node: int, meeting: Meeting) -> None:
        """An agent on that node, which connects by itself; called again where one was lost."""

    async def stop(self) -> None:
        """No process that it started is left when this returns; agents have been told to leave before."""


def backend_named(name: str, options: Mapping[str, Any]) -> Backend:
    """What `backend(**options)` of that file in `synergy_exec.backends` gives. Raises InputError."""
    import synergy_exec.backends as folder

    known = [each.name for each in pkgutil.iter_modules(folder.__path__) if not each.name.startswith("_")]
    if name not in known:
        raise unknown("backend", name, known)
    module = importlib.import_module(f"synergy_exec.backends.{name}")
    try:
        made: Backend = module.backend(**options)
    except TypeError as error:
        raise InputError(f"backend.options={dict(options)}: {error}") from error
    return made
