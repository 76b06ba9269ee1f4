"""python -m synergy_core COMMAND …: runs one of the core's commands."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from synergy_core import commands
from synergy_core.cli import Parser, run
from synergy_core.errors import InputError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the command's exit status, or 2 for invalid input.

    To start fast, it imports only the chosen command and reads the SUMMARY of the others from their source text.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser = Parser(prog="python -m synergy_core", description=__doc__)
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for path in sorted(Path(commands.__file__).parent.glob("[!_]*.py")):
        if path.stem not in words:
            summary = re.search(r'^SUMMARY = "(.*)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
            choices.add_parser(path.stem, help=summary[1] if summary else "")
            continue
        module = importlib.import_module(f"{commands.__name__}.{path.stem}")
        raw = argparse.RawDescriptionHelpFormatter
        added = choices.add_parser(path.stem, help=module.SUMMARY, description=module.__doc__, formatter_class=raw)
        module.add_arguments(added)
        runs[path.stem] = module.run, added
    chosen, more = parser.parse_known_args(arguments)
    if hasattr(chosen, "settings") and all(re.match(r"[a-z_]+=", each) for each in more):
        chosen.settings += more  # settings that follow an option
    elif more:
        runs[chosen.command][1].error(f"unrecognized arguments: {' '.join(more)}")
    try:
        return int(runs[chosen.command][0](chosen))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run("error", main, interrupted="each output file is either complete or was not written.")
