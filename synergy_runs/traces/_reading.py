"""Opens job logs as text and reads delimited ones as tables of named columns, checked a column at a time.

The `csv` module splits the file, because pandas' readers lose the line number and the number of fields of malformed
rows. pandas is imported only when a log is read.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from synergy_core.errors import InputError, unknown
from synergy_core.performance.catalog.columns import suggest_column
from synergy_runs.traces.columns import UNKNOWN, Mask
from synergy_runs.traces.rows import LOG, BadValueError, TraceRows, is_missing, shown, stripped

# Opening a log as text, whether or not gzip compressed it. Errors name the file and the line.


GZIP = b"\x1f\x8b"
HEAD_BYTES = 4_096
UNPACK = "is packed by {tool}; unpack it first: {tool} -d {{name}}"
RECODE = "is {code} text; type: iconv -f {code} -t utf-8 {{name}} > fixed.txt"
MAGIC_NUMBERS = {
    b"PAR1": "is a Parquet file; write it as CSV first, with pandas: read_parquet('{name}').to_csv('log.csv')",
    b"PK\x03\x04": "is a ZIP archive or a spreadsheet; unpack it, or save the table as CSV",
    b"BZh": UNPACK.format(tool="bzip2"),
    b"\xfd7zXZ": UNPACK.format(tool="xz"),
    b"\x28\xb5\x2f\xfd": UNPACK.format(tool="zstd"),
    b"\xff\xfe\0\0": RECODE.format(code="UTF-32"),
    b"\xff\xfe": RECODE.format(code="UTF-16"),
    b"\xfe\xff": RECODE.format(code="UTF-16"),
    b"SQLite format 3": "is an SQLite database; write its table as CSV first",
    b"%PDF": "is a PDF; expected a job log as text",
}
"""First bytes of files that are not UTF-8 text → what the file is and how to convert it."""


@contextmanager
def open_text(path: Path, *, errors: str = "strict", newline: str | None = "") -> Iterator[TextIO]:
    """Opens a file as UTF-8 text without byte-order mark and decompresses gzip; keeps line breaks by default.

    Any failure while the file is open (unreadable, damaged, not UTF-8) becomes an InputError.
    """
    with (
        _failures_as_input_errors(path),
        _open_bytes(path) as content,
        TextIOWrapper(content, encoding="utf-8-sig", errors=errors, newline=newline) as stream,
    ):
        yield stream


def binary_format(path: Path) -> str:
    """Describes a file that is not UTF-8 text and how to convert it; "" if it may be text, plain or gzipped."""
    with _failures_as_input_errors(path), _open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
    for magic, description in MAGIC_NUMBERS.items():
        if head.startswith(magic):
            return description.format(name=path.name)
    return "is not text: it has zero bytes; expected a job log as text, or packed by gzip" if b"\0" in head else ""


@contextmanager
def _failures_as_input_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        line = _first_undecodable_line(path)
        raise InputError(
            f"{path}: line {line}: bytes that are not UTF-8 text. Is the file compressed or cut? "
            f"If it is text in another encoding: iconv -f latin1 -t utf-8 {path.name} > fixed.txt"
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: gzip cannot unpack it ({error}). Is it cut off? Get it again.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}).") from error


def _open_bytes(path: Path) -> BinaryIO:
    """Opens a file as bytes, decompressing it if it starts with gzip's signature, whatever its name."""
    stream = path.open("rb")
    if stream.peek(len(GZIP))[: len(GZIP)] != GZIP:
        return stream
    stream.close()
    return cast(BinaryIO, gzip.open(path, "rb"))


def _first_undecodable_line(path: Path) -> int:
    with _open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                line.decode("utf-8-sig")
            except UnicodeDecodeError:
                return number
    return 1


# Reading the header of a table.


SEPARATOR_LINE = "sep="
"""Start of an optional first line, such as `sep=;`, that tells spreadsheets the column separator."""


def header_of(head: str, delimiter: str = "") -> frozenset[str]:
    """The column names in a file's first line, or in its second line if the first is a separator line such as `sep=;`.

    delimiter: the column separator; found by `delimiter_of` unless given.
    """
    lines = head.lstrip("\ufeff").split("\n", 2)
    first = lines[1] if _is_separator_line(lines[0]) and len(lines) > 1 else lines[0]
    return frozenset(name.strip().strip('"') for name in first.split(delimiter or delimiter_of(head)))


def delimiter_of(head: str) -> str:
    """Column separator of a CSV: the character in its `sep=` line, else a semicolon if the header has more of them than
    commas, else a comma. Spreadsheets write semicolons where the comma is the decimal point.
    """
    first = head.lstrip("\ufeff").split("\n", 1)[0].strip().strip('"')
    if _is_separator_line(first) and len(first) == len(SEPARATOR_LINE) + 1:
        return first[-1]
    return ";" if first.count(";") > first.count(",") else ","


def _is_separator_line(line: str) -> bool:
    return line.strip().strip('"').lower().startswith(SEPARATOR_LINE)


# Reading the rows of a table.


UNIT_SEPARATOR = "\x1f"
"""Stands for a delimiter of several characters, which `csv` does not take."""
CHUNK_ROWS = 50_000
"""Maximum rows that are held as text at a time, so that reading a log of millions of rows needs little memory."""


@dataclass(frozen=True)
class Text:
    """How to read one column of a log. Each distinct text is converted once.

    convert: takes the text and the column's name; raises BadValueError. missing: value for rows without text and for
    files without the column; None: all texts are converted, and the file must have the column. is_required: whether the
    file must have the column although `missing` has a value.
    """

    name: str
    convert: Callable[[str, str], Any] = stripped
    missing: Any = None
    is_required: bool = False


class Number(Text):
    """How to read a column of numbers; `missing` is a float."""


class LogTable:
    """Rows of a log as text. A row that one method rejects or leaves out is dropped, and later methods skip it.

    Methods return one value per row; values of dropped rows mean nothing. left: mask of the rows not dropped.
    columns: how to read each column, keyed by its name in `rows.LOG`, or by another name if only this format's reader
    uses it. `table[name]` returns the converted values of one column.
    """

    def __init__(
        self, rows: TraceRows, columns: Mapping[str, Text], line: Sequence[int], texts: Mapping[str, Sequence[str]]
    ) -> None:
        self.rows = rows
        self.columns = columns
        self.line = np.array(line)
        self.texts = {name: np.array(each, dtype=object) for name, each in texts.items()}
        self.left: Mask = np.ones(len(line), dtype=np.bool_)
        self._left_out: dict[int, str] = {}
        self._factorized: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        self._values: dict[str, NDArray[Any]] = {}

    def __getitem__(self, name: str) -> NDArray[Any]:
        if name not in self._values:
            column = self.columns[name]
            # Names are never treated as missing: a tenant or a user may be called `none`.
            always = column.missing is None or column.convert is stripped
            where = True if always else ~self.missing(column.name)
            otherwise = column.missing if column.missing is not None else UNKNOWN if isinstance(column, Number) else ""
            self._values[name] = self.convert(column.name, column.convert, where, otherwise)
        return self._values[name]

    def _distinct(self, column: str) -> tuple[NDArray[Any], NDArray[Any]]:
        """(codes, texts): the distinct texts of a column, and for each row the index of its text among them."""
        if column not in self._factorized:
            import pandas as pd

            self._factorized[column] = pd.factorize(self.texts[column])
        return self._factorized[column]

    def text(self, column: str, change: Callable[[str], Any] = str.strip, dtype: type = object) -> NDArray[Any]:
        """The column's texts after `change`, which by default strips surrounding spaces."""
        codes, distinct = self._distinct(column)
        return np.asarray(np.array([change(text) for text in distinct], dtype=dtype)[codes])

    def missing(self, column: str) -> Mask:
        """Mask of the rows that have no value in the column."""
        return self.text(column, is_missing, bool)

    def reject(self, which: Mask, column: str, expected: str, got: NDArray[Any] | None = None) -> None:
        """Drops the rows in `which` as impossible. got: values to show in errors, by default the column's texts."""
        texts = self.texts[column] if got is None else got
        self._reject(which, lambda at: (column, shown(texts[at]), expected))

    def _reject(self, which: Mask, explain: Callable[[int], tuple[str, str, str]]) -> None:
        which = which & self.left
        self.rows.reject_all(self.line, which, explain)
        self.left &= ~which

    def leave_out(self, which: Mask, reason: str) -> None:
        """Drops jobs that are not replayed by design, such as jobs that never started; they do not count as bad."""
        which = which & self.left
        self._left_out |= dict.fromkeys(np.flatnonzero(which).tolist(), reason)
        self.left &= ~which

    def count(self, which: Mask, what: str) -> None:
        """Adds the number of these rows to a note, which says how many there are (`TraceRows.counted`)."""
        self.rows.counted[what] += int((which & self.left).sum())

    def convert(
        self, column: str, convert: Callable[[str, str], Any], where: Mask | bool = True, otherwise: Any = UNKNOWN
    ) -> NDArray[Any]:
        """Converts a column by `convert(text, column)`, once per distinct text; rejects rows with unusable text.

        where: mask of the rows to convert; all other rows get the value `otherwise`.
        """
        chosen = self.left & where
        codes, distinct = self._distinct(column)
        values = np.full(len(distinct), otherwise, dtype=np.float64 if isinstance(otherwise, float) else object)
        errors: dict[int, BadValueError] = {}
        for code in np.unique(codes[chosen]).tolist():
            try:
                values[code] = convert(distinct[code], column)
            except BadValueError as error:
                errors[code] = error
        if errors:
            self._reject(chosen & np.isin(codes, list(errors)), lambda at: errors[int(codes[at])].facts)
        return np.asarray(np.where(chosen, values[codes], otherwise))

    def add(self, *, columns: Mapping[str, str] | None = None, **values: Any) -> Mask:
        """Adds the rows not dropped to `self.rows`, see `TraceRows.add`; returns a mask of the rows added.

        values: columns of `rows.LOG` that replace or complete those read by `self.columns`. columns: names that errors
        use for columns computed here. If the format has a column of job names, each name must be unique.
        """
        own = {name: each.name for name, each in self.columns.items() if name in LOG}
        values = {"job_name": ""} | {name: self[name] for name in own if name not in values} | values
        left = np.flatnonzero(self.left)
        added = np.zeros(len(self.left), dtype=np.bool_)
        added[left] = self.rows.add(
            self.line[left],
            columns={**own, **(columns or {})},
            id_column=own.get("job_name", ""),
            **{name: each[left] if isinstance(each, np.ndarray) else each for name, each in values.items()},
        )
        return added

    def close(self) -> None:
        """Counts the jobs left out by reason, in file order."""
        self.rows.left_out.update(self._left_out[at] for at in sorted(self._left_out))


def read_tables(
    path: Path,
    rows: TraceRows,
    columns: Mapping[str, Text],
    *,
    delimiter: str = "",
    quotes: bool = True,
    any_case: bool = False,
) -> Iterator[LogTable]:
    """Yields the file's rows with the text of `columns`, in tables of up to `CHUNK_ROWS` rows.

    Blank lines are skipped. A row that spans several lines or has more or fewer fields than the header is bad. A
    missing required column, text that is not UTF-8 and an open quote raise InputError. delimiter: found by
    `delimiter_of` unless given; it may be several characters. any_case: whether column names in the file may differ in
    upper and lower case. `rows.columns` renames columns of the file.
    """
    line = ""

    def remember_line(stream: TextIO) -> Iterator[str]:
        nonlocal line
        for line in stream:
            yield line.replace(delimiter, UNIT_SEPARATOR) if len(delimiter) > 1 else line

    with open_text(path) as stream:
        delimiter = delimiter or delimiter_of(stream.readline())
        stream.seek(0)
        reader = csv.reader(
            remember_line(stream),
            delimiter=delimiter if len(delimiter) == 1 else UNIT_SEPARATOR,
            quoting=csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE,
        )
        try:
            header = next(reader, [])
            if _is_separator_line("".join(header)):
                header = next(reader, [])
            names = [each.name for each in columns.values()]
            known = {name.lower(): name for name in names} if any_case else {}
            header = [known.get(name.strip().lower(), name.strip()) for name in header]
            for ours, theirs in rows.columns.items():
                if ours not in names or theirs not in header:
                    which, has = (ours, names) if ours not in names else (theirs, header)
                    raise unknown("column in trace.columns", which, has)
                header[header.index(theirs)] = ours
            _check_header(path, header, columns)
            yield from tables_of(_fields(reader, header, rows), header, columns, rows)
        except csv.Error as error:
            raise InputError(
                f"{path}: line {reader.line_num}: {error}. Is a quote left open, or is this no text file?"
            ) from None
    if not line.endswith(("\n", "\r")):
        rows.notes.append("the last line does not end in a line break; if the file was cut off, its last job is wrong")


def by_header(*names: str) -> Callable[[Path, str], bool]:
    """A format's `recognises`: by column names in the header that no other format combines."""
    return lambda path, head: header_of(head) >= {*names}


def jobs_from_zero(columns: Mapping[str, Text], **values: Any) -> Callable[[Path, TraceRows], None]:
    """A format's `read`: adds every row as it stands; times count from the file's own origin.

    values: further columns, the same for every job.
    """

    def read(path: Path, rows: TraceRows) -> None:
        rows.from_zero = True
        for table in read_tables(path, rows, columns):
            table.add(**values)

    return read


def _check_header(path: Path, header: list[str], columns: Mapping[str, Text]) -> None:
    if len(set(header)) < len(header):
        twice = sorted({name for name in header if header.count(name) > 1})
        raise InputError(f"{path}: line 1: column {', '.join(map(repr, twice))} appears twice; remove or rename one.")
    names = [each.name for each in columns.values()]
    required = [each.name for each in columns.values() if each.is_required or each.missing is None]
    for name in required:
        if name not in header:
            guess = f" {advice}" if (advice := suggest_column(name, header, names)) else ""
            raise InputError(
                f"{path}: line 1: column {name!r} is missing.{guess} "
                f"Expected {', '.join(required)}; got {', '.join(header)[:200] or 'an empty line'}."
            )


def _fields(reader: Any, header: list[str], rows: TraceRows) -> Iterator[tuple[int, list[str]]]:
    """Yields (line, fields) of each row with as many fields as the header; rejects other rows."""
    line, width = reader.line_num, len(header)
    for fields in reader:
        start, line = line + 1, reader.line_num
        if line > start:
            got = f"a row of {line - start + 1} lines"
            rows.reject(start, "whole row", got, "one of a single line; is a quote left open?")
        elif len(fields) == width:
            yield start, fields
        elif any(field.strip() for field in fields):
            got = f"{len(fields)} field{'s' * (len(fields) != 1)} ending in {shown(fields[-1])}"
            guess = "is the file cut off?" if len(fields) < width else "does a value contain the separator?"
            rows.reject(start, "whole row", got, f"{width} fields; {guess}")


def tables_of(
    fields: Iterable[tuple[int, list[str]]], header: Sequence[str], columns: Mapping[str, Text], rows: TraceRows
) -> Iterator[LogTable]:
    """Groups rows, given as (line, fields), into tables of up to `CHUNK_ROWS` rows."""
    while chunk := list(itertools.islice(fields, CHUNK_ROWS)):
        lines, texts = zip(*chunk, strict=True)
        found = dict(zip(header, zip(*texts, strict=True), strict=True))
        silent = [""] * len(lines)
        table = LogTable(rows, columns, lines, {each.name: found.get(each.name, silent) for each in columns.values()})
        yield table
        table.close()


# Reading a JSON list one element at a time, with the line on which each element starts.


SPACE = re.compile(r"\s*")
NEAR_THE_END = 32
"""A JSON error within this many characters of the file's end means that the file was cut off."""


def objects(path: Path, text: str, start: int = 0) -> Iterator[tuple[int, object]]:
    """Yields (line, value) of each element of the JSON list at `start` in `text`, the whole content of the file `path`.

    A list that starts at 0 must be all of the text. Raises InputError, naming the line, if the file is cut off or not a
    JSON list.
    """
    decode, line, counted = json.JSONDecoder().raw_decode, 1, 0

    def after_space(at: int) -> int:
        return SPACE.match(text, at).end()  # type: ignore[union-attr]

    def wrong(at: int, why: str, near_the_end: int = 0) -> InputError:
        where, got = text.count("\n", 0, at) + 1, text[at : at + 40].split("\n")[0]
        is_cut_off = len(text) - at <= near_the_end or why.startswith("Unterminated")
        more = " The file is cut off: get it again." if is_cut_off else ""
        return InputError(f"{path}: line {where}: {why}, got {got!r}.{more}")

    at = after_space(start)
    if not text.startswith("[", at):
        raise wrong(at, "expected a JSON list, which starts with '['")
    at = after_space(at + 1)
    while not text.startswith("]", at):
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, at = decode(text, at)
        except json.JSONDecodeError as error:
            raise wrong(error.pos, error.msg, NEAR_THE_END) from None
        except RecursionError:
            raise wrong(at, "nested too deeply; expected a list of jobs") from None
        yield line, value
        at = after_space(at)
        if text.startswith(",", at):
            at = after_space(at + 1)
        elif not text.startswith("]", at):
            raise wrong(at, "expected ',' or ']' after an object")
    if not start and (at := after_space(at + 1)) < len(text):
        raise wrong(at, "expected nothing after the end of the list")
