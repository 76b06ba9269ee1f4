"""Dates as trace files write them, to seconds since 1970."""

from __future__ import annotations

from datetime import UTC, datetime

_EPOCH = datetime(1970, 1, 1)
_EPOCH_UTC = datetime(1970, 1, 1, tzinfo=UTC)
_PACIFIC_S = {"PST": 0.0, "PDT": -3_600.0}


def epoch_s(text: str) -> float:
    """Seconds since 1970 of `2017-10-09 07:01:55`, with `T`, fractions, an offset or a PST/PDT suffix where present.

    A stamp with an offset is an instant in UTC. One without is taken as its clock shows it. `PDT` is turned into
    Pacific standard time, so that differences across the change of clocks are right. Raises ValueError otherwise.
    """
    text = text.strip()
    shift_s = 0.0
    if text[-3:] in _PACIFIC_S:
        shift_s = _PACIFIC_S[text[-3:]]
        text = text[:-3].rstrip()
    stamp = datetime.fromisoformat(text)
    if stamp.tzinfo is None:
        return (stamp - _EPOCH).total_seconds() + shift_s
    return (stamp - _EPOCH_UTC).total_seconds()


def iso(seconds: float) -> str:
    """`2017-10-09 07:01:55` for seconds since 1970."""
    return datetime.fromtimestamp(seconds, tz=UTC).strftime("%Y-%m-%d %H:%M:%S")
