"""`alerts`: says what somebody should look at, and ends with exit code 1; silent, and 0, as long as all is well."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from synergy_core.parser import Parser
from synergy_exec.alert_limits import AlertLimits
from synergy_exec.client import client_for
from synergy_exec.plain import plain
from synergy_exec.settings import Settings

ALERTED = 1
"""The exit code where there is something to look at; 2: no controller answers."""


def main(arguments: Sequence[str]) -> int:
    """Asks the controller that runs; returns the exit code. Raises InputError where none answers."""
    parser = Parser(prog="python -m synergy_exec alerts", description=__doc__)
    for each in dataclasses.fields(AlertLimits):
        parser.add_argument(f"--{each.name}", type=float, default=each.default, help=each.metadata["meaning"])
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help="the results folder of the controller")
    parser.add_argument("--url", default=None, help="the controller's address, such as http://127.0.0.1:8080")
    given = parser.parse_args(arguments)
    limits = {each.name: getattr(given, each.name) for each in dataclasses.fields(AlertLimits)}
    said = client_for(given.dir, given.url).ask("GET", f"/alerts?{urlencode(limits)}")
    for sentence in said:
        print(plain(sentence))
    return ALERTED if said else 0
