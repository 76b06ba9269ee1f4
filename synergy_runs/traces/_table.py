"""The loop over a delimited file with a header, written once: columns found by name, rows checked, lines counted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path

from synergy_core.columns import renamed
from synergy_core.errors import InputError
from synergy_runs.traces._text import ends_with_line_break, open_text
from synergy_runs.traces._values import BadValueError, shown
from synergy_runs.traces.rows import TraceRows

AddRow = Callable[..., None]


SEPARATOR_LINE = "sep="
"""How a first line begins by which spreadsheets are told the separator."""


def header_of(head: str, delimiter: str = "") -> frozenset[str]:
    """The column names in a file's first line, or in the second after one such as `sep=;`.

    delimiter: recognised unless given, see `delimiter_of`.
    """
    lines = head.lstrip("\ufeff").split("\n", 2)
    first = lines[1] if _is_separator_line(lines[0]) and len(lines) > 1 else lines[0]
    return frozenset(name.strip().strip('"') for name in first.split(delimiter or delimiter_of(head)))


def delimiter_of(head: str) -> str:
    """What separates the columns of a CSV: what its `sep=` line says, else a semicolon where the header has more of
    them than commas, as spreadsheets write it where the comma is the decimal point.
    """
    first = head.lstrip("\ufeff").split("\n", 1)[0].strip().strip('"')
    if _is_separator_line(first) and len(first) == len(SEPARATOR_LINE) + 1:
        return first[-1]
    return ";" if first.count(";") > first.count(",") else ","


def _is_separator_line(line: str) -> bool:
    return line.strip().strip('"').lower().startswith(SEPARATOR_LINE)


def read_table(
    path: Path,
    rows: TraceRows,
    add_row: AddRow,
    *,
    required: Sequence[str],
    optional: Sequence[str] = (),
    delimiter: str = "",
    quotes: bool = True,
    any_case: bool = False,
) -> None:
    """Calls `add_row(line, *values)` for each row, with the text of `required` then `optional` columns.

    An optional column that the file lacks gives "". Blank lines are skipped. A `BadValueError` that `add_row` raises
    becomes a bad row, as does a row with another number of fields than the header. A required column that is missing,
    text that is not UTF-8 and a broken quote raise InputError. delimiter: recognised unless given. any_case: whether
    the file may write the names of columns in capitals.
    """
    if not delimiter:
        with open_text(path) as stream:
            delimiter = delimiter_of(stream.readline())
    with open_text(path) as stream:
        reader = csv.reader(stream, delimiter=delimiter, quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE)
        try:
            header = next(reader, [])
            if _is_separator_line("".join(header)):
                header = next(reader, [])
            known = {name.lower(): name for name in (*required, *optional)} if any_case else {}
            header = [known.get(name.strip().lower(), name.strip()) for name in header]
            pick = _picker(path, header, required, optional)
            width = len(header)
            line = reader.line_num
            for fields in reader:
                start, line = line + 1, reader.line_num
                if line > start:
                    got = f"a row of {line - start + 1} lines"
                    rows.reject(start, "whole row", got, "one of a single line; is a quote left open?")
                    continue
                if len(fields) != width:
                    if any(field.strip() for field in fields):
                        _reject_width(rows, start, fields, header)
                    continue
                fields.append("")
                try:
                    add_row(start, *pick(fields))
                except BadValueError as bad:
                    rows.reject(start, bad.column, bad.got, bad.expected)
        except csv.Error as error:
            raise InputError(
                f"{path}: line {reader.line_num}: {error}. Is a quote left open, or is this no text file?"
            ) from None
    if not ends_with_line_break(path):
        rows.notes.append("the last line does not end in a line break; if the file was cut off, its last job is wrong")


def _picker(
    path: Path, header: list[str], required: Sequence[str], optional: Sequence[str]
) -> Callable[[list[str]], tuple[str, ...]]:
    if len(set(header)) < len(header):
        twice = sorted({name for name in header if header.count(name) > 1})
        raise InputError(f"{path}: line 1: column {', '.join(map(repr, twice))} appears twice; remove or rename one.")
    for name in required:
        if name not in header:
            guess = f" {advice}" if (advice := renamed(name, header, (*required, *optional))) else ""
            raise InputError(
                f"{path}: line 1: column {name!r} is missing.{guess} "
                f"Expected {', '.join(required)}; got {', '.join(header)[:200] or 'an empty line'}."
            )
    places = [header.index(name) for name in required]
    places += [header.index(name) if name in header else len(header) for name in optional]
    if len(places) == 1:
        return lambda fields: (fields[places[0]],)
    return itemgetter(*places)


def _reject_width(rows: TraceRows, line: int, fields: list[str], header: list[str]) -> None:
    got = f"{len(fields)} field{'s' * (len(fields) != 1)} ending in {shown(fields[-1])}"
    if len(fields) < len(header):
        rows.reject(line, "whole row", got, f"{len(header)} fields; is the file cut off?")
    else:
        rows.reject(line, "whole row", got, f"{len(header)} fields; does a value contain the separator?")
