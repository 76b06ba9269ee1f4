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
    what: str,
    got: str,
    known: Iterable[str],
    *,
    hint: str = "",
    least: float = 0.5,
    alike: Callable[[str, str], bool] = lambda *_: True,
) -> InputError:
    """The error for a name that is not among `known`; it suggests the most similar known name.

    what: what the name stands for ("policy", "key"). hint: a further sentence, such as how to add a policy. least: the
    similarity from which a name is suggested. alike: a condition on the name and a suggested one, both in lower case.
    """
    names = sorted(known)
    by_lower_case = {name.lower(): name for name in names}
    possible = [name for name in by_lower_case if alike(got.lower(), name)]
    near = difflib.get_close_matches(got.lower(), possible, n=1, cutoff=least)
    guess = f" Did you mean '{by_lower_case[near[0]]}'?" if near else ""
    tail = f" {hint}" if hint else ""
    more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
    return InputError(f"unknown {what} '{got}'.{guess} Known: {', '.join(names[:MAX_NAMES]) or 'none'}{more}.{tail}")
