"""python -m synergy_core COMMAND …: the core's own commands. They are the only part that reads a user's files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from synergy_core import commands
from synergy_core.errors import InputError
from synergy_core.exits import run
from synergy_core.modules import modules_of
from synergy_core.parser import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if it did what was asked, 2 for input that cannot be used."""
    parser = Parser(prog="python -m synergy_core", description=__doc__)
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = {}
    for module in modules_of(commands.__name__):
        name = module.__name__.rpartition(".")[2]
        added = choices.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(added)
        runs[name] = module.run
    chosen = parser.parse_args(arguments)
    try:
        return int(runs[chosen.command](chosen))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    run("error", main, interrupted="what was to be written is there whole or not at all.")
