"""Reads a CSV file into rows of text cells that keep their file and line, so that every error can name both."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Self

from synergy_core.errors import InputError
from synergy_core.performance.catalog.columns import suggest_column

COUNT = "a whole number of 1 or more"
_OR_EMPTY = ", or an empty cell if it is not stated"
_FLAGS = {
    **dict.fromkeys(("y", "yes", "1", "true", "1.0"), True),
    **dict.fromkeys(("n", "no", "0", "false", "0.0"), False),
}


def is_count(value: float) -> bool:
    """Whether a value is a whole number of 1 or more."""
    return value >= 1 and value == int(value)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of cells without surrounding blanks. A missing column reads as an empty cell."""

    path: Path
    line: int
    cells: dict[str, str]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def measured(self, column: str, expected: str, accepts: Callable[[float], bool]) -> float:
        """Reads a required number for which `accepts` is true. expected: the condition in words, for the error."""
        try:
            value = float(self.text(column))
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and accepts(value)):
            self.refuse(column, expected)
        return value

    def number(self, column: str) -> float | None:
        """Reads a positive number; None for an empty cell."""
        if not self.text(column):
            return None
        return self.measured(column, f"a positive number{_OR_EMPTY}", lambda value: value > 0)

    def whole(self, column: str) -> int | None:
        """Reads a whole number of 1 or more; None for an empty cell."""
        return int(self.measured(column, COUNT + _OR_EMPTY, is_count)) if self.text(column) else None

    def flag(self, column: str) -> bool | None:
        """Reads y or n, 1 or 0, as a truth value; None for an empty cell."""
        cell = self.text(column).lower()
        if cell and cell not in _FLAGS:
            self.refuse(column, f"y or n (1 or 0){_OR_EMPTY}")
        return _FLAGS.get(cell)

    def changed(self, **cells: object) -> TableRow:
        """A copy of the row with these cells replaced."""
        return replace(self, cells={**self.cells, **{name: str(value) for name, value in cells.items()}})

    def refuse(self, column: str, expected: str) -> NoReturn:
        """Raises InputError for a wrong cell. expected: a valid value, in words."""
        self.fail(f"got '{self.text(column)}', expected {expected}.", f", column {column}")

    def fail(self, message: str, where: str = "") -> NoReturn:
        """Raises InputError with the row's file and line, for cells that contradict each other."""
        raise InputError(f"{self.path}, line {self.line}{where}: {message}")


@dataclass(frozen=True, slots=True)
class Table:
    """Header and rows of a file. Methods that read a column raise InputError if it is missing."""

    path: Path
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]

    @property
    def lines(self) -> list[int]:
        """The line number of each row in the file."""
        return [row.line for row in self.rows]

    def need(self, *columns: str) -> None:
        """Raises InputError for the first missing column, and names the most similar one."""
        for column in columns:
            if column not in self.columns:
                guess = f" {advice}" if (advice := suggest_column(column, self.columns)) else ""
                got = ", ".join(map(repr, self.columns))
                raise InputError(f"{self.path}, line 1: expected a column '{column}', got {got}.{guess}")

    def cells(self, column: str) -> list[str]:
        """The text of a column, one cell per row."""
        self.need(column)
        return [row.cells[column] for row in self.rows]

    def numbers(self, column: str, expected: str, accepts: Callable[[float], bool]) -> list[float]:
        """Reads a column as numbers. Raises InputError for the first number that `accepts` rejects."""
        self.need(column)
        return [row.measured(column, expected, accepts) for row in self.rows]

    def shapes(self, column: str = "placement") -> list[tuple[int, ...]]:
        """Reads a column of placements, the GPUs on each node used: 442 is (4, 4, 2)."""
        self.need(column)
        for row in self.rows:
            if not re.fullmatch("[1-9]+", row.text(column)):
                row.refuse(column, "one digit from 1 to 9 per node, such as 4422")
        return [tuple(map(int, row.text(column))) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Measurements:
    """The rows of a measurement file, parsed by its format. excluded: number of rows left out, by reason."""

    path: Path
    rows: tuple[Any, ...]
    excluded: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, model: str | None, gpu_type: str | None) -> Self:
        """Keeps only the rows of a model and a GPU type; None keeps all."""
        kept = [row for row in self.rows if model in (None, row.model) and gpu_type in (None, row.gpu_type)]
        return replace(self, rows=tuple(kept))


def read_table(path: Path) -> Table:
    """Reads a CSV file with a header line. Raises InputError if the file is missing, not text, empty or ragged."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header, *lines = [(reader.line_num, [cell.strip() for cell in row]) for row in reader] or [(1, [])]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); expected a CSV file.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: is not a text CSV file ({error}).") from None
    columns = tuple(header[1])
    if not any(columns):
        raise InputError(f"{path}: is empty; expected a header line and rows.")
    for name in columns:
        if (times := columns.count(name)) > 1:
            raise InputError(f"{path}, line 1: column '{name}' occurs {times} times; expected once.")
    rows = []
    for line, cells in lines:
        if any(cells):
            if len(cells) != len(columns):
                raise InputError(
                    f"{path}, line {line}: got {len(cells)} cells, expected {len(columns)} as in the header."
                )
            rows.append(TableRow(path, line, dict(zip(columns, cells, strict=True))))
    if not rows:
        raise InputError(f"{path}: has a header but no rows; expected at least one measurement.")
    return Table(path, columns, tuple(rows))
