"""What a policy's function reads of its view, found when it is registered: from its source, and by a trial."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from tokenize import TokenError
from typing import Any

from synergy_core.errors import InputError
from synergy_core.jobs.record import Job
from synergy_core.state.views import JobView, shown_by, through, unseen

MOST_CALLS = 8
"""How deep a view is followed into functions that it is handed to."""


def check_reads(name: str, function: Callable[..., Any], view: type, views: tuple[type, ...]) -> None:
    """Raises InputError where the function, on any branch, reads something of its first parameter that the view lacks.

    What no source tells (names made at run time) raises when it is read: views show nothing else. views: all there are.
    """
    shown = shown_by(view)
    for read in reads_of(function):
        if read not in shown and not read.startswith("_"):
            raise unseen(f"policy {name}", view, read, views)


def try_key(name: str, key: Callable[..., Any], view: type[JobView]) -> None:
    """Raises InputError where the key of some job, run or not, needs what its view lacks."""
    for job in samples():
        try:
            through(view, key)(job)
        except InputError as error:
            raise InputError(f"policy {name}: {error}") from None
        except Exception:  # only reading is tried here: what else is wrong shows when it runs
            return


def shows_enough(view: type, function: Callable[..., Any]) -> bool:
    """Whether its source tells all it does with its first parameter, and that is to read names which the view shows.

    Then it reads the same of a record as of a view, and no view need stand between.
    """
    while isinstance(function, partial):
        function = function.func
    reads = _all_reads(function)
    return reads is not None and reads <= shown_by(view)


@cache
def _all_reads(function: Callable[..., Any]) -> frozenset[str] | None:
    return frozenset(reads_of(function)) if _reads_plainly(function, 0, 0) else None


def _reads_plainly(function: Callable[..., Any], place: int, depth: int) -> bool:
    """Whether it only reads names off the parameter in that place, or hands it to functions of its module of which the
    same holds.
    """
    tree = _tree(function)
    mine = None if tree is None else _parameter(tree, place)
    if tree is None or mine is None or depth > MOST_CALLS:
        return False
    plain = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is(node.value, mine):
            plain += isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = getattr(function, "__globals__", {}).get(node.func.id)
            for at, argument in enumerate(node.args):
                if _is(argument, mine) and inspect.isfunction(called):
                    plain += _reads_plainly(called, at, depth + 1)
    return plain == sum(isinstance(node, ast.Name) and node.id == mine for node in ast.walk(tree))


def reads_of(function: Callable[..., Any], place: int = 0, depth: int = 0) -> Iterator[str]:
    """Attributes read off the parameter in that place, also by functions of its module that it is handed to."""
    while isinstance(function, partial):
        function = function.func
    tree = _tree(function)
    mine = None if tree is None else _parameter(tree, place)
    if tree is None or mine is None or depth > MOST_CALLS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is(node.value, mine):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield from _handed_on(function, node, mine, depth)


def _handed_on(function: Callable[..., Any], call: ast.Call, mine: str, depth: int) -> Iterator[str]:
    """What a called function reads of the view it is given."""
    assert isinstance(call.func, ast.Name)
    if call.func.id == "getattr" and len(call.args) > 1 and _is(call.args[0], mine):
        if isinstance(call.args[1], ast.Constant):
            yield str(call.args[1].value)
        return
    called = getattr(function, "__globals__", {}).get(call.func.id)
    for place, argument in enumerate(call.args):
        if inspect.isfunction(called) and _is(argument, mine):
            yield from reads_of(called, place, depth + 1)


def _parameter(tree: ast.FunctionDef, place: int) -> str | None:
    parameters = [each.arg for each in (*tree.args.posonlyargs, *tree.args.args)]
    return parameters[place] if place < len(parameters) else None


def _is(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _tree(function: Callable[..., Any]) -> ast.FunctionDef | None:
    """The function's source; None where there is none, as for one that was typed, or in a file that has changed."""
    with suppress(OSError, TypeError, SyntaxError, TokenError):
        body = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        if body and isinstance(body[0], ast.FunctionDef):
            return body[0]
    return None


class _Sample(Job):
    """A record with the truth beside it, as a simulator's has."""

    __slots__ = ("duration_s", "remaining_s")

    duration_s: float
    remaining_s: float


def samples() -> Iterator[Job]:
    """A job that waits, one that runs, one that was stopped: records with all that any policy can read."""
    for starts, stops in ((0, 0), (1, 0), (1, 1)):
        job = _Sample(1, 60.0, 2, virtual_cluster="vc", user="user", estimate_s=7_200.0)
        job.predicted_duration_s, job.duration_s, job.remaining_s = 3_000.0, 3_600.0, 3_600.0
        for _ in range(starts):
            job.started(120.0, ((0, 3),))
        for _ in range(stops):
            job.stopped(240.0)
        yield job
