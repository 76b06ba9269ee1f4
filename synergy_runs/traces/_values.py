"""Values of a row: text to numbers, dates and end states, or a `BadValueError` that says what was wrong."""

from __future__ import annotations

import re

from synergy_runs.traces.times import epoch_s

MISSING = frozenset({"", "none", "null", "nan", "na", "n/a", "unknown"})
SHOWN_CHARACTERS = 60
_DECIMAL_COMMA = re.compile(r"-?\d+,\d+", re.ASCII)

_END_STATES = {
    "COMPLETED": "completed",
    "PASS": "completed",
    "PASSED": "completed",
    "CANCELLED": "killed",
    "CANCELED": "killed",
    "KILLED": "killed",
    "PREEMPTED": "killed",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "BOOT_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "DEADLINE": "failed",
}


class BadValueError(ValueError):
    """One value that cannot be used; the loop over the file adds the line."""

    def __init__(self, column: str, got: str, expected: str) -> None:
        super().__init__(f"{column}: got {got}, expected {expected}")
        self.column = column
        self.got = got
        self.expected = expected


def shown(value: object) -> str:
    """The value as an error prints it, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "…"


def is_missing(text: str) -> bool:
    """Whether logs write this for "no value"."""
    return text.strip().lower() in MISSING


def date_s(text: str, column: str) -> float:
    """Seconds since 1970 of a date."""
    try:
        return epoch_s(text)
    except ValueError:
        raise BadValueError(column, shown(text), "a date such as 2017-10-09 07:01:55") from None


def instant_s(text: str, column: str) -> float:
    """Seconds since 1970 of a date, or of a number of seconds."""
    _check_digits(text, column, "seconds or a date")
    try:
        return float(text) if "_" not in text else epoch_s(text)
    except ValueError:
        pass
    try:
        return epoch_s(text)
    except ValueError:
        raise BadValueError(column, shown(text), "seconds or a date such as 2017-10-09 07:01:55") from None


def number(text: str, column: str, expected: str = "a number") -> float:
    """A decimal number; Python's `1_000` is none."""
    _check_digits(text, column, expected)
    try:
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        comma = ", with a decimal point in place of the comma" if _DECIMAL_COMMA.fullmatch(text.strip()) else ""
        raise BadValueError(column, shown(text), expected + comma) from None


def _check_digits(text: str, column: str, expected: str) -> None:
    """Raises BadValueError for digits such as the Arabic ones, which Python would read, and most other programs not."""
    if not text.isascii() and any(each.isdecimal() and not each.isascii() for each in text):
        raise BadValueError(column, shown(text), f"{expected} in the digits 0 to 9; these are digits of another script")


def whole(text: str, column: str) -> int:
    """A whole number; `8.0` is one."""
    expected = "a whole number of GPUs"
    _check_digits(text, column, expected)
    try:
        if len(text) < 19 and text.isascii() and text.isdigit():
            return int(text)
        value = number(text, column, expected)
        if not value.is_integer():
            raise ValueError
        return int(value)
    except (ValueError, OverflowError):
        raise BadValueError(column, shown(text), expected) from None


def end_state(text: str, column: str) -> str:
    """`completed`, `killed` or `failed` for the state that a log writes, in any case.

    Time-outs and node failures count as failed, as in the Helios analysis (SC '21); preemption for good as killed.
    """
    found = _END_STATES.get(text.strip().upper())
    if found is None:
        raise BadValueError(column, shown(text), f"one of {', '.join(_END_STATES)}")
    return found
