"""Errors that a user can mend: what was got, what was expected, what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what, why, and what to type instead.

    Drivers print it without a traceback and exit with status 2.
    """


def unknown(kind: str, got: str, known: Iterable[str], *, hint: str = "") -> InputError:
    """The error for a name that is not among `known`, with the nearest match first.

    `kind` names what was looked up ("policy", "key"); `hint` is one more sentence, such as how to add one.
    """
    names = sorted(known)
    by_small = {name.lower(): name for name in names}
    near = difflib.get_close_matches(got.lower(), by_small, n=1, cutoff=0.5)
    guess = f" Did you mean '{by_small[near[0]]}'?" if near else ""
    tail = f" {hint}" if hint else ""
    return InputError(f"unknown {kind} '{got}'.{guess} Known: {', '.join(names) or 'none'}.{tail}")
