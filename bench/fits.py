"""Fits the constants that ship to measurements, and makes the other files that a program of ours writes.

    python bench/fits.py                  # lists the fits
    python bench/fits.py links            # prints a fit's scores, and how its files would change
    python bench/fits.py links --write    # writes them

Most fits need the real data (SYNERGY_DATA). What they write is fitted, never a measured row.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
ROOT = FOLDER.parent.parent


def summaries() -> dict[str, str]:
    """A sentence about each fit, by its name."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
    found = {name: re.search('^SUMMARY = "(.*)"$', text, re.MULTILINE) for name, text in texts.items()}
    return {name: match[1] for name, match in found.items() if match}


def changes(path: str, text: str) -> str:
    """How a file would change, line by line; empty if it would not."""
    old = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
    return "\n".join(difflib.unified_diff(old.splitlines(), text.splitlines(), path, path, n=0, lineterm=""))


def main(arguments: Sequence[str] | None = None) -> None:
    known = summaries()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=known, metavar="NAME", help="the fit; by default, all are listed")
    parser.add_argument("--write", action="store_true", help="write its files")
    chosen = parser.parse_args(arguments)
    if not chosen.name:
        print(*(f"{name:14}{text}" for name, text in known.items()), sep="\n")
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is imported
    sys.path.insert(0, str(ROOT))
    made = importlib.import_module(f"fits.{chosen.name}").fit()
    print(made.report)
    changed = {path: lines for path, text in made.files.items() if (lines := changes(path, text))}
    for path, lines in changed.items():
        print(lines)
        if chosen.write:
            (ROOT / path).write_text(made.files[path], encoding="utf-8")
    print(f"{len(changed)} of {len(made.files)} files {'written' if chosen.write else 'would change (--write)'}")


if __name__ == "__main__":
    main()
