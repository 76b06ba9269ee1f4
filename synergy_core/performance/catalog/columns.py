"""Finds the column of a table that probably is a missing one, under another name or unit, and reads words in cells."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from synergy_core.performance.catalog import CATALOG, read_yaml

_MIN_SIMILARITY = 0.6


@cache
def _known() -> dict[str, Any]:
    return read_yaml(CATALOG / "columns.yaml")


def named_in(column: str, cell: str) -> str | None:
    """Our name for what a cell of a column says, by the first expression that is found in it; None without any."""
    return next((name for name, words in _known()["cells"][column].items() if re.search(words, cell)), None)


def similar_column(
    wanted: str, header: Iterable[str], others: Iterable[str] = (), *, is_synonym: bool = False
) -> str | None:
    """The column of the header that may be the missing one: its name without unit is similar; None if none is.

    wanted: the missing name. others: columns of the header that are known to have another meaning. is_synonym: whether
    only its name without unit and its known synonyms count.
    """
    units = _units_of(wanted)

    def without_unit(name: str) -> str:
        parts = _words(name)
        return "_".join(parts[:-1] if len(parts) > 1 and parts[-1] in units else parts)

    # A name that is only a unit is the last choice.
    candidates = [name for name in header if name not in set(others)]
    bare = {without_unit(name): name for name in reversed(candidates)}
    names = (without_unit(wanted), *_known()["names"].get(wanted, ()))
    same = next((bare[name] for name in names if name in bare), None)
    if same or is_synonym:
        return same
    matches = (difflib.get_close_matches(name, bare, 1, _MIN_SIMILARITY) for name in names)
    only_units = (name for name in candidates if len(name) > 1 and name.lower() in units)
    return next((bare[match[0]] for match in matches if match), next(only_units, None))


def _units_of(column: str) -> dict[str, float]:
    known, unit = _known(), column.rpartition("_")[2]
    result: dict[str, float] = known["units"].get("s" if column in known["unstated_seconds"] else unit, {})
    return result


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())


def suggest_column(wanted: str, header: Iterable[str], others: Iterable[str] = ()) -> str:
    """A sentence that suggests which column may be the missing one, see `similar_column`; "" if none is similar."""
    found, units = similar_column(wanted, header, others), _units_of(wanted)
    if found is None:
        return ""
    if not units:
        return f"Is it the one called {found!r}? Rename it."
    parts = _words(found)
    factor = units.get(parts[-1]) if parts else None
    if factor is None:
        return f"Is it the one called {found!r}? Rename it, if it is in {'seconds' if 'sec' in units else 'bytes'}."
    if factor == 1.0:
        return f"Is it the one called {found!r}? Rename it."
    times = f"{factor:,.0f}" if factor > 1.0 else f"{factor:g}"
    return f"Is it {found!r}? It has another unit: write a column {wanted!r} with {times} times its values."
