"""Files of measurements that a user gives: one module per format, recognised by its columns.

A format is a module in this folder with `recognises(columns) -> bool`, `DESCRIPTION` and `read(table, …)`; being in the
folder registers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from synergy_core.errors import InputError
from synergy_core.measurements._table import Table, read_table
from synergy_core.modules import modules_of

__all__ = ["Table", "formats", "read", "read_table"]


def formats() -> list[ModuleType]:
    """Every format, by name of its module."""
    return modules_of(__name__)


def read(path: Path, **options: Any) -> Any:
    """The measurements in a file, in whatever its columns say it holds. Raises InputError where nothing fits."""
    table = read_table(path)
    found = [each for each in formats() if each.recognises(table.columns)]
    if not found:
        known = "; ".join(each.DESCRIPTION for each in formats())
        raise InputError(f"{path}: no known format has the columns {_listed(table.columns)}. Known: {known}.")
    return found[0].read(table, **options)


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(repr(each) for each in columns)
