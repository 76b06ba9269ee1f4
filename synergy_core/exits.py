"""How a program ends: what a user can mend is said in a sentence, without a traceback, and so is Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Callable

from synergy_core.errors import InputError
from synergy_core.pipes import piped

USAGE_ERROR = 2
INTERRUPTED = 130


def run(program: str, main: Callable[[], int | None], *, interrupted: str) -> None:
    """Runs a command line, whose exit status `main` returns, None for 0.

    program: named before what is said. interrupted: what Ctrl-C leaves behind.
    """
    try:
        status = piped(main)
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        status = USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        status = INTERRUPTED
    if status:
        sys.exit(status)
