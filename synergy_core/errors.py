"""Errors that a user can correct. Messages state the input, what was expected, and what to type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable


class InputError(ValueError):
    """The user's input is invalid. The message says what is wrong, why, and what to type instead.

    Programs print the message without a traceback, and exit with status 2.
    """


MAX_NAMES = 100
"""Maximum number of known names that an error lists. The jobs of a log are more."""

MIN_PRODUCT_SIMILARITY, MIN_FAMILY_SIMILARITY = 0.8, 0.88
"""Similarity from which a product's name is suggested (l200 and h200 have 0.75), and a model's, by its first word
(mistral and mixtral have 0.86)."""

_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|can't start new thread"
    r"|failed to launch worker thread|failed to map segment",
    re.I,
)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out: Python's own, or by the text of a library's."""
    return isinstance(error, MemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def same_product(one: str, other: str) -> bool:
    """Whether two names may mean one product: the same numbers. An h20 has a seventh of an h200's speed."""
    numbers = (re.findall(r"\d+", each) for each in (one, other))
    return next(numbers) == next(numbers) and _similarity(one, other) >= MIN_PRODUCT_SIMILARITY


def same_family(one: str, other: str) -> bool:
    """Whether two names may mean models of one family: the same first word, such as gpt-9b and gpt-39b."""
    words = (re.split(r"[^a-z]", each)[0] for each in (one, other))
    return _similarity(*words) >= MIN_FAMILY_SIMILARITY


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def unknown(
    kind: str,
    got: str,
    known: Iterable[str],
    *,
    hint: str = "",
    least: float = 0.5,
    alike: Callable[[str, str], bool] = lambda *_: True,
) -> InputError:
    """The error for a name that is not among `known`; it suggests the most similar known name.

    kind: what the name stands for ("policy", "key"). hint: a further sentence, such as how to add a policy. least: the
    similarity from which a name is suggested. alike: a condition on the name and a suggested one, both in lower case.
    """
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    possible = [name for name in by_lower_case if alike(got.lower(), name)]
    near = difflib.get_close_matches(got.lower(), possible, n=1, cutoff=least)
    guess = f" Did you mean '{by_lower_case[near[0]]}'?" if near else ""
    tail = f" {hint}" if hint else ""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return InputError(f"unknown {kind} '{got}'.{guess} Known: {', '.join(names[:MAX_NAMES]) or 'none'}{more}.{tail}")


# `suggest_column` names the column of a table that probably is the missing one, under another name or in another unit.


_UNITS = {
    "s": {
        **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
        **dict.fromkeys(("ms", "msec", "milliseconds"), 1e-3),
        **dict.fromkeys(("us", "microseconds"), 1e-6),
        **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
        **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600.0),
        **dict.fromkeys(("d", "day", "days"), 86_400.0),
    },
    "bytes": {
        **dict.fromkeys(("b", "byte", "bytes"), 1.0),
        **{name: 10.0**power for power, name in ((3, "kb"), (6, "mb"), (9, "gb"), (12, "tb"))},
        **{name: 2.0**power for power, name in ((10, "kib"), (20, "mib"), (30, "gib"), (40, "tib"))},
    },
}
"""For each expected unit: suffixes of column names that state a unit, and the factor from it to the expected unit."""
_UNSTATED_SECONDS = ("step_time", "sync_time")
"""Columns in seconds whose names do not state the unit."""
_SYNONYMS = {
    "duration_s": ("run_time", "runtime", "elapsed", "walltime", "wall_time", "length"),
    "submit_time": (
        *("submit", "submission_time", "arrival", "arrival_time", "submitted_at"),
        *("created", "creation", "creation_time", "creation_timestamp"),
    ),
    "end_time": ("end", "finish_time", "completion", "completion_time", "deletion_time"),
    "gpus": ("gpu_num", "num_gpus", "n_gpus", "gpu_count", "gpu_request"),
    "virtual_cluster": ("tenant", "vc", "queue", "account"),
    "iter_time_s": ("step_time", "iteration_time", "time_per_step"),
    "estimate_s": ("time_limit", "requested_time", "walltime_limit"),
}
"""Our name of a column → its names in other formats, without units."""
_MIN_SIMILARITY = 0.6


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
    names = (without_unit(wanted), *_SYNONYMS.get(wanted, ()))
    same = next((bare[name] for name in names if name in bare), None)
    if same or is_synonym:
        return same
    matches = (difflib.get_close_matches(name, bare, 1, _MIN_SIMILARITY) for name in names)
    only_units = (name for name in candidates if len(name) > 1 and name.lower() in units)
    return next((bare[match[0]] for match in matches if match), next(only_units, None))


def _units_of(column: str) -> dict[str, float]:
    return _UNITS.get("s" if column in _UNSTATED_SECONDS else column.rpartition("_")[2], {})


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
        return (
            f"Is it the one called {found!r}? Rename it, if it is in {'seconds' if units is _UNITS['s'] else 'bytes'}."
        )
    if factor == 1.0:
        return f"Is it the one called {found!r}? Rename it."
    times = f"{factor:,.0f}" if factor > 1.0 else f"{factor:g}"
    return f"Is it {found!r}? It has another unit: write a column {wanted!r} with {times} times its values."
