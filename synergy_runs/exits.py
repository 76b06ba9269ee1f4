"""How a program ends: what a user can mend is said in a sentence, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable

from synergy_core.errors import InputError
from synergy_core.pipes import piped

USAGE_ERROR = 2
INTERRUPTED = 130


def run(program: str, main: Callable[[], None], *, interrupted: str) -> None:
    """Runs a command line. program: named before what is said. interrupted: what Ctrl-C leaves behind."""
    try:
        piped(main)
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED)
