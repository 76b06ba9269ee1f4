"""One row of a table, cell by cell: empty cells are None, what is no number is refused with file, line and column."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from synergy_core.errors import InputError
from synergy_core.measurements._table import Table


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row that knows its file and line. A column that the file lacks reads as empty."""

    table: Table
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        """A cell, without blanks around it."""
        return self.cells.get(column, "")

    def number(self, column: str) -> float | None:
        """A positive number."""
        cell = self.text(column)
        if not cell:
            return None
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            self.refuse(column, "a positive number, or nothing where it is not stated")
        return value

    def whole(self, column: str) -> int | None:
        """A whole number of 1 or more."""
        cell = self.text(column)
        if not cell:
            return None
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 1 and value == int(value)):
            self.refuse(column, "a whole number of 1 or more, or nothing where it is not stated")
        return int(value)

    def flag(self, column: str) -> bool | None:
        """y or n, 1 or 0."""
        cell = self.text(column).lower()
        if not cell:
            return None
        if cell in ("y", "yes", "1", "true", "1.0"):
            return True
        if cell in ("n", "no", "0", "false", "0.0"):
            return False
        self.refuse(column, "y or n (1 or 0), or nothing where it is not stated")

    def refuse(self, column: str, expected: str) -> NoReturn:
        """Raises InputError for a cell."""
        raise self.table.refuse(self.line, column, self.text(column), expected)

    def contradicts(self, what: str) -> NoReturn:
        """Raises InputError for cells that cannot all be right."""
        raise InputError(f"{self.table.path}, line {self.line}: {what}")


def rows_of(table: Table, *needed: str) -> Iterator[TableRow]:
    """Every row. Raises InputError, naming the column, where one that is needed is missing."""
    for column in needed:
        table.cells(column)
    for line, cells in zip(table.lines, table.rows, strict=True):
        yield TableRow(table, line, dict(zip(table.columns, (cell.strip() for cell in cells), strict=True)))
