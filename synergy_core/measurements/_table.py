"""A CSV file as text cells that know their lines, so that every complaint can name file, line and column."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from synergy_core.columns import renamed
from synergy_core.errors import InputError


@dataclass(frozen=True, slots=True)
class Table:
    """Header, rows of cells, and the line each row stands in."""

    path: Path
    columns: tuple[str, ...]
    rows: list[list[str]]
    lines: list[int]

    def cells(self, column: str) -> list[str]:
        """The column's text, one cell per row."""
        if column not in self.columns:
            guess = f" {advice}" if (advice := renamed(column, self.columns)) else ""
            got = ", ".join(repr(each) for each in self.columns)
            raise InputError(f"{self.path}, line 1: expected a column '{column}', got {got}.{guess}")
        at = self.columns.index(column)
        return [row[at].strip() for row in self.rows]

    def numbers(
        self, column: str, expected: str, accepts: Callable[[float], bool], *, factor: float = 1.0
    ) -> list[float]:
        """The column as numbers, each times `factor`. Raises InputError for the first that `accepts` refuses."""
        result = []
        for line, cell in zip(self.lines, self.cells(column), strict=True):
            try:
                value = float(cell)
            except ValueError:
                value = math.nan
            if not (math.isfinite(value) and accepts(value)):
                raise self.refuse(line, column, cell, expected)
            result.append(value * factor)
        return result

    def shapes(self, column: str = "placement") -> list[tuple[int, ...]]:
        """The column as GPUs on each node used: 442 is (4, 4, 2)."""
        result = []
        for line, cell in zip(self.lines, self.cells(column), strict=True):
            if not re.fullmatch("[1-9]+", cell):
                raise self.refuse(line, column, cell, "one digit from 1 to 9 per node, such as 4422")
            result.append(tuple(map(int, cell)))
        return result

    def refuse(self, line: int, column: str, got: str, expected: str) -> InputError:
        """The error for one cell."""
        return InputError(f"{self.path}, line {line}, column {column}: got '{got}', expected {expected}.")


def read_table(path: Path) -> Table:
    """A comma-separated file with a header line. Raises InputError if it is missing, not text, empty or ragged."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = next(reader, None)
            rows, lines = [], []
            for row in reader:
                if any(cell.strip() for cell in row):
                    rows.append(row)
                    lines.append(reader.line_num)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a CSV file.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a text CSV file ({error}).") from None
    if header is None or not any(cell.strip() for cell in header):
        raise InputError(f"{path}: is empty; expected a header line and rows.")
    columns = tuple(cell.strip() for cell in header)
    if not rows:
        raise InputError(f"{path}: has a header but no rows; expected at least one measurement.")
    for name in columns:
        if columns.count(name) > 1:
            raise InputError(
                f"{path}, line 1: column '{name}' stands there {columns.count(name)} times; expected once."
            )
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(columns):
            raise InputError(f"{path}, line {line}: got {len(row)} cells, expected {len(columns)} as in the header.")
    return Table(path, columns, rows, lines)
