"""Dates as trace files write them, to seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1)
_DAYLIGHT = timedelta(hours=1)
_PACIFIC = ("PST", "PDT")


def epoch_s(text: str) -> float:
    """Seconds since 1970 of `2017-10-09 07:01:55`, with `T`, fractions, an offset or a PST/PDT suffix where present.

    A stamp with an offset is an instant in UTC. One without is taken as its clock shows it. `PDT` is turned into
    Pacific standard time, so that differences across the change of clocks are right. Raises ValueError otherwise.
    """
    return (_stamp(text) - _EPOCH).total_seconds()


def elapsed_s(start: str, end: str) -> float:
    """Seconds from one stamp to another, exact to the microsecond; negative if they are the wrong way round.

    The difference of two `epoch_s` would round at a tenth of a microsecond. Raises ValueError as `epoch_s` does.
    """
    return (_stamp(end) - _stamp(start)).total_seconds()


def _stamp(text: str) -> datetime:
    """The stamp without a zone: UTC if the text has an offset, Pacific standard time for PST/PDT, else as it stands."""
    text = text.strip()
    daylight = False
    if text[-3:] in _PACIFIC:
        daylight = text[-3:] == "PDT"
        text = text[:-3].rstrip()
    stamp = datetime.fromisoformat(text)
    try:
        if stamp.tzinfo is not None:
            return stamp.astimezone(UTC).replace(tzinfo=None)
        return stamp - _DAYLIGHT if daylight else stamp
    except OverflowError:
        raise ValueError(f"{text!r} is out of range") from None


def iso(seconds: float) -> str:
    """`2017-10-09 07:01:55` for seconds since 1970."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
