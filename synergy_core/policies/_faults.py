"""What is wrong with somebody's policy, said with the file and the line of theirs, not with our call stack."""

from __future__ import annotations

import functools
import importlib
import linecache
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from synergy_core.errors import InputError


def load(what: str, loader: Callable[[], object]) -> None:
    """Imports a file by calling `loader`. what: what it is, for the InputError that is raised where that fails."""
    try:
        loader()
    except InputError as error:
        raise InputError(f"{what}: {error}") from None
    except Exception as error:
        raise InputError(f"{what} cannot be loaded: {in_words(error)}.") from error


def in_words(error: BaseException, *files: str) -> str:
    """`mine.py, line 7: ZeroDivisionError: division by zero`. files: in which the line is looked for; none: wherever
    the error arose, the import machinery aside.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {error.msg}"
    places = [each for each in _places(error) if (each[0] in files if files else not _of_imports(each[0]))]
    where = ""
    if places:
        file, line = places[-1]
        code = linecache.getline(file, line).strip()
        where = f"{file}, line {line}{f' (`{code}`)' if code else ''}: "
    return f"{where}{type(error).__name__}: {error}".rstrip(".")


def _of_imports(file: str) -> bool:
    return file.startswith("<frozen") or file in (__file__, importlib.__file__)


def _places(error: BaseException | None) -> list[tuple[str, int]]:
    """File and line of every call that the error went through, that of what caused it last."""
    places: list[tuple[str, int]] = []
    while error is not None:
        trace, own = error.__traceback__, []
        while trace is not None:
            own.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        places += own
        error = error.__cause__
    return places


def place_of(function: Callable[..., Any]) -> tuple[str, int]:
    """The file and the first line of a function."""
    while isinstance(function, functools.partial):
        function = function.func
    return function.__code__.co_filename, function.__code__.co_firstlineno


def check_key(policy: str, function: Callable[..., Any], key: Any) -> None:
    """Raises InputError for a key that puts no jobs in order."""
    if isinstance(key, tuple) and not any(isinstance(each, float) and math.isnan(each) for each in key):
        return
    file, line = place_of(function)
    raise InputError(
        f"policy {policy}: {file}, line {line}: its key is {key!r}, expected a tuple of what can be compared, such as "
        "(job.submit_time_s,)."
    )


@contextmanager
def attributed_to(policy: str, functions: tuple[Callable[..., Any], ...], check: Callable[[], None]) -> Iterator[None]:
    """What is raised within is said of the policy if it is the policy's: by a line of its file, or as `check` finds.

    functions: those that it is made of. check: tries it alone, and raises InputError where it is at fault.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        files = {place_of(each)[0] for each in functions}
        again = f"python -m synergy_core check {policy} shows the smallest case"
        if any(file in files for file, _ in _places(error)):
            raise InputError(f"policy {policy} failed: {in_words(error, *files)}. {again}.") from error
        try:
            check()
        except InputError as broken:
            file, line = place_of(functions[0])
            raise InputError(f"{file}, line {line}: {broken}") from error
        raise
