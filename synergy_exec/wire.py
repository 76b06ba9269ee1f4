"""Messages as lines of JSON: the only way in and out; a message with missing or odd fields is refused."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_exec.messages import Message, PlanMessage

_HINTS: dict[type[Any], dict[str, Any]] = {}
KINDS: dict[str, type[Message]] = {each.KIND: each for each in Message.__subclasses__()}


def encode(message: Message) -> str:
    """One line of JSON."""
    return json.dumps({"kind": message.KIND, **dataclasses.asdict(message)}, separators=(",", ":"))


def decode(text: str | bytes) -> Message:
    """The message in a line of JSON. Raises InputError for anything else."""
    try:
        values = json.loads(text)
        kind = KINDS[values.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise InputError(f"not a message: {text[:100]!r} ({type(error).__name__})") from None
    message: Message = _build(kind, values)
    return message


def _build(kind: type[Any], values: Any) -> Any:
    hints = _hints(kind)
    if not isinstance(values, dict) or (odd := values.keys() - hints.keys()):
        raise InputError(f"{kind.__name__}: unexpected {sorted(odd) if isinstance(values, dict) else values!r}")
    try:
        return kind(**{name: _part(hints[name], each) for name, each in values.items()})
    except (TypeError, ValueError) as error:
        raise InputError(f"{kind.__name__}: {error}") from None


def _hints(kind: type[Any]) -> dict[str, Any]:
    """The types of its fields, by name; found out once, since that takes longer than all else of a message."""
    found = _HINTS.get(kind)
    if found is None:
        hints = typing.get_type_hints(kind)
        found = _HINTS[kind] = {each.name: hints[each.name] for each in dataclasses.fields(kind)}
    return found


def _part(hint: Any, value: Any) -> Any:
    if hint is PlanMessage:
        return _build(hint, value)
    if value is not None and hint in (Share, Share | None):
        return Share(*map(float, value))
    return value
