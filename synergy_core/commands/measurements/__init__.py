"""Reads a user's files of measurements. Each module is one file format, recognised by its columns.

A format is a module in this folder with `recognises(columns) -> bool`, `DESCRIPTION` and `read(table, …)`. Adding a
module to the folder registers its format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from synergy_core import modules_of
from synergy_core.commands.measurements._table import read_table
from synergy_core.errors import InputError


def read(path: Path, **options: Any) -> Any:
    """Reads the measurements in a file. Its columns decide the format. Raises InputError if no format matches."""
    table, formats = read_table(path), modules_of(__name__)
    for form in formats:
        if form.recognises(table.columns):
            return form.read(table, **options)
    listed, known = ", ".join(map(repr, table.columns)), "; ".join(form.DESCRIPTION for form in formats)
    raise InputError(f"{path}: no known format has the columns {listed}. Known formats: {known}.")
