"""Fits the constants that ship to measurements, and makes the other files that a program of ours writes.

    python bench/fits.py                  # lists the fits
    python bench/fits.py links            # prints a fit's scores, and how its files would change
    python bench/fits.py links --write    # writes them

Most fits need the real data (SYNERGY_DATA). What they write is fitted, never a measured row.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).with_suffix("")
ROOT = FOLDER.parent.parent


def summaries() -> dict[str, str]:
    """What each fit does, by name."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        for line in ast.parse(path.read_text(encoding="utf-8")).body:
            match line:
                case ast.Assign([ast.Name("SUMMARY")], ast.Constant(str(text))):
                    found[path.stem] = text
    return found


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
    changed = {path: text for path, text in made.files.items() if changes(path, text)}
    for path, text in changed.items():
        print(changes(path, text))
        if chosen.write:
            from synergy_core.commands._settings import write_whole

            write_whole(ROOT / path, text)
    if made.files:
        print(f"{len(changed)} of {len(made.files)} files {'written' if chosen.write else 'would change (--write)'}")


if __name__ == "__main__":
    main()
