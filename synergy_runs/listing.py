"""The runs below a folder, a line each: when, the settings that were typed, policies, seeds, what is not whole."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from synergy_core.errors import InputError
from synergy_runs.stored import LATEST, RunFolder, followed

if TYPE_CHECKING:
    from rich.table import Table

_OWN_COLUMNS = ("policy", "seed", "trace")
_MOST_POLICIES = 6


def print_listing(folders: Sequence[RunFolder], below: Path) -> None:
    """The list on standard output, and what of it the table below it leaves out."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, highlight=False)
    console.print(Text(f"{below}: {len(folders)} runs, the newest first"))
    console.print()
    console.print(listing(folders, below))
    if broken := [each for each in folders if not each.whole]:
        told = f"not whole, and not in the table: {', '.join(str(each.path) for each in broken)}"
        console.print(Text(f"{told}; name one to see what it has", style="dim"))
    console.print()


def listing(folders: Sequence[RunFolder], below: Path) -> Table:
    """A row per run."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=False)
    for name in ("run", "settings", "policies", "seeds", ""):
        table.add_column(name, overflow="fold", no_wrap=name == "run")
    for each in folders:
        table.add_row(_name(each, below), _settings(each), _policies(each), _seeds(each), _state(each))
    return table


def _name(folder: RunFolder, below: Path) -> str:
    return str(folder.path.relative_to(followed(below)))


def _settings(folder: RunFolder) -> str:
    if folder.record is None:
        return "not known: of before run.yaml"
    typed = {key: value for key, value in folder.record.settings.items() if key not in _OWN_COLUMNS}
    return " ".join(f"{key}={value}" for key, value in typed.items()) or "as by default"


def _policies(folder: RunFolder) -> str:
    names = list(dict.fromkeys(run.label for run in folder.runs))
    more = len(names) - _MOST_POLICIES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:_MOST_POLICIES])} and {more} more"


def _seeds(folder: RunFolder) -> str:
    seeds = sorted({run.seed for run in folder.runs})
    consecutive = len(seeds) > 2 and seeds == list(range(seeds[0], seeds[-1] + 1))
    return f"{seeds[0]}–{seeds[-1]}" if consecutive else ", ".join(map(str, seeds))


def _state(folder: RunFolder) -> str:
    if folder.record is not None and folder.record.state:
        return folder.record.state
    link = folder.path.parent / LATEST
    with suppress(InputError):  # what it leads to may have been removed
        if link.exists() and followed(link).resolve() == folder.path.resolve():
            return LATEST
    return ""
