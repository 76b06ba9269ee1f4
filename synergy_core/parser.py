"""The arguments of a command: what is wrong with them is said in a sentence, with what to type."""

from __future__ import annotations

import argparse
import re
import sys
from typing import NoReturn

from synergy_core.errors import unknown

_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}


class Parser(argparse.ArgumentParser):
    """`argparse`'s own, and of its subcommands, with errors as ours: status 2 and one sentence."""

    def error(self, message: str) -> NoReturn:
        """Says it, and ends the program."""
        print(f"error: {self._sentence(message)}", file=sys.stderr)
        self.exit(2)

    def _sentence(self, message: str) -> str:
        if missing := re.fullmatch(r"the following arguments are required: (.*)", message):
            return f"{missing[1]} is missing. Type: {self._usage()}"
        if wrong := re.fullmatch(r"argument ([^:]+): invalid (\w+) value: '(.*)'", message, re.DOTALL):
            name = wrong[1].partition("/")[0]
            return f"{name} {wrong[3]}: expected {_KINDS.get(wrong[2], wrong[2])}."
        if choice := re.fullmatch(r"argument ([^:]+): invalid choice: '(.*)' \(choose from (.*)\)", message, re.DOTALL):
            return str(unknown(choice[1].lower(), choice[2], re.split(r", ", choice[3].replace("'", ""))))
        if odd := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            options = [each for action in self._actions for each in action.option_strings]
            first = odd[1].split()[0]
            if first.startswith("-"):
                return str(unknown("option", first.partition("=")[0], options))
            return f"{odd[1]}: one argument too many. Type: {self._usage()}"
        if alone := re.fullmatch(r"argument ([^:]+): expected (?:one|at least one) argument", message):
            return f"{alone[1].partition('/')[0]}: its value is missing. Type: {self._usage()}"
        return f"{message}. Type: {self._usage()}"

    def _usage(self) -> str:
        return " ".join(self.format_usage().split()).removeprefix("usage: ")
