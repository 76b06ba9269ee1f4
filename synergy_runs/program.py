"""What the two programs, simulator and executor, differ in on the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Program:
    """One program's command line.

    name: after `python -m`. config: its file in conf/, without .yaml. settings: the class with all its keys. groups:
    the folders of conf/ that it chooses from. example: a trace to begin with. free_keys: beginnings of keys whose end
    is the user's own word. sweeps: whether `-m` is known. without_trace: the argument by which no trace is needed.
    """

    name: str
    config: str
    settings: type
    groups: tuple[str, ...]
    example: str
    free_keys: tuple[str, ...] = ()
    sweeps: bool = False
    without_trace: str = ""
