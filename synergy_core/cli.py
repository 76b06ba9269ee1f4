"""How every program parses its arguments, prints and ends."""

from __future__ import annotations

import argparse
import codecs
import io
import os
import re
import select
import sys
import unicodedata
from collections.abc import Callable
from typing import NoReturn

from synergy_core.errors import InputError, unknown

# How every program prints and ends. A user's mistake and Ctrl-C print one sentence instead of a traceback. Characters
# that the terminal cannot show are replaced by ASCII. When the reader of a pipe closes it early, as in `… | head`, the
# program ends without a message.


USAGE_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""Exit status when the reader of standard output has closed the pipe: the same as a program killed by SIGPIPE."""
_ASCII = {
    **{"·": "-", "–": "-", "—": "-", "−": "-", "×": "x", "÷": "/", "≥": ">=", "≤": "<=", "≠": "!=", "≈": "~"},
    **{"→": "->", "←": "<-", "±": "+-", "∞": "inf", "√": "sqrt ", "μ": "u", "µ": "u", "°": " deg"},
    **{"“": '"', "”": '"', "„": '"', "’": "'", "‘": "'", "─": "-", "━": "-", "│": "|", "█": "#"},
}
"""ASCII replacements of characters that the encoding of a terminal or file lacks."""


def run(program: str, main: Callable[[], int | None], *, interrupted: str) -> None:
    """Runs a command line. `main` returns its exit status, None for 0.

    program: the name printed before each message. interrupted: a phrase that says what Ctrl-C leaves behind.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_to_ascii.__name__)
    try:
        try:
            status = main()
        finally:
            sys.stdout.flush()
    except InputError as error:
        print(f"{program}: {error}", file=sys.stderr)
        status = USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{program}: interrupted; {interrupted}", file=sys.stderr)
        # If an extension module ran the interrupted code, Python ends itself by the signal and ignores the exit status.
        # Running any new code first resets that state.
        import ctypes

        ctypes.pythonapi.PyRun_SimpleString(b"pass")
        status = INTERRUPTED
    except BrokenPipeError:
        if not _is_stdout_closed():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        status = PIPE_CLOSED
    if status:
        sys.exit(status)


def _is_stdout_closed() -> bool:
    """Whether standard output is the broken pipe; other connections can break too."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError, AttributeError):  # standard output is no file, or poll is missing
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    """Error handler for encoding: writes `rho` for `ρ`, `e` for `é`, and `?` for a character without an ASCII form."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = ""
    for character in error.object[error.start : error.end]:
        name = unicodedata.name(character, "").lower()
        spelled = name.split()[-1] if name.startswith("greek") else unicodedata.normalize("NFKD", character)
        text += _ASCII.get(character) or spelled.encode("ascii", "ignore").decode("ascii") or "?"
    return text, error.end


codecs.register_error(_to_ascii.__name__, _to_ascii)


# Parsing a command's arguments. An error says in one sentence what is wrong and what to type.


MIN_OPTION_SIMILARITY = 0.7
"""Similarity from which an option is suggested for an unknown one. All share their dashes."""
_KINDS = {"int": "a whole number", "float": "a number", "Path": "a path"}


class Parser(argparse.ArgumentParser):
    """An `argparse` parser, also of subcommands, that reports an error as one sentence and exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Prints the error and ends the program."""
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
        if extra := re.fullmatch(r"unrecognized arguments: (.*)", message, re.DOTALL):
            options = [option for action in self._actions for option in action.option_strings]
            first = extra[1].split()[0]
            if first.startswith("-"):
                name, _, value = first.partition("=")
                key = name.lstrip("-").replace("-", "_")
                takes_settings = any(action.dest == "settings" for action in self._actions)
                hint = f"Settings have no dashes, as in {key}={value or '…'}." if takes_settings else ""
                return str(unknown("option", name, options, hint=hint, least=MIN_OPTION_SIMILARITY))
            return f"{extra[1]}: one argument too many. Type: {self._usage()}"
        if no_value := re.fullmatch(r"argument ([^:]+): expected (?:one|at least one) argument", message):
            return f"{no_value[1].partition('/')[0]}: its value is missing. Type: {self._usage()}"
        return f"{message}. Type: {self._usage()}"

    def _usage(self) -> str:
        return " ".join(self.format_usage().split()).removeprefix("usage: ")
