"""How measuring goes on, on standard error: one line that changes on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from synergy_exec.profiling.measure import Say


@contextmanager
def progress(*, quiet: bool = False) -> Iterator[Say]:
    """What to say each step to. quiet: nothing is wanted."""
    if quiet:
        yield lambda words: None
    elif not sys.stderr.isatty():
        yield lambda words: print(words, file=sys.stderr, flush=True)
    else:
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status("measuring") as status:
            yield lambda words: status.update(escape(words))
