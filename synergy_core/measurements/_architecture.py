"""A measured row's model: from the catalog where it knows the name and agrees with the columns, else from the columns.

Names alone tell what columns do not hold: head widths that are not hidden ÷ heads, latent attention, shared experts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from synergy_core.errors import InputError
from synergy_core.planner.families import architecture_named, architecture_names, family_named, transformer

TOLERANCE = 0.01
"""How far the parameters of an architecture may be from the stated number and still be called equal."""


@dataclass(frozen=True, slots=True)
class ArchitectureColumns:
    """What a row says of its model; None where its cell is empty."""

    model: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    gated: bool
    seq_len: int | None
    vocab: int | None
    params: float | None = None
    experts: int | None = None
    top_k: int | None = None
    untied: bool | None = None


def architecture_of(columns: ArchitectureColumns) -> Any:
    """An `Architecture` of one of the families. Raises InputError, to be told as the row's failure, for too little."""
    known = _named(columns.model)
    if known is not None and _agrees(known, columns):
        return replace(known, seq_len=columns.seq_len) if columns.seq_len and "seq_len" in _names(known) else known
    needed = ("layers", "hidden", "heads", "ffn", "seq_len", "vocab")
    missing = [name for name in needed if getattr(columns, name) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not stated, and no architecture '{columns.model}' in the catalog")
    return _mixture(columns) if columns.experts else _dense(columns)


def _shared(columns: ArchitectureColumns) -> dict[str, Any]:
    return {
        "layers": columns.layers,
        "hidden": columns.hidden,
        "heads": columns.heads,
        "kv_heads": columns.kv_heads or columns.heads,
        "ffn": columns.ffn,
        "vocab": columns.vocab,
        "seq_len": columns.seq_len,
        "gated": columns.gated,
        "tied": not columns.gated if columns.untied is None else not columns.untied,
        "learned_positions": not columns.gated,
    }


def _dense(columns: ArchitectureColumns) -> transformer.Architecture:
    """GPT-like: tied, learned positions. Llama-like (gated): neither, unless the stated size says tied."""
    result = transformer.Architecture(**_shared(columns))
    if columns.params and columns.untied is None:
        other = replace(result, tied=not result.tied)
        off, other_off = (abs(float(each.parameters()) / columns.params - 1.0) for each in (result, other))
        if other_off < TOLERANCE < off:
            return other
    return result


def _mixture(columns: ArchitectureColumns) -> Any:
    if columns.top_k is None:
        raise InputError(f"topk not stated, and no architecture '{columns.model}' in the catalog")
    return family_named("mixture").Architecture(
        **_shared(columns), experts=columns.experts, topk=columns.top_k, expert_ffn=columns.ffn
    )


@cache
def _named(model: str) -> Any:
    """The catalog's architecture of that name, however it is spelt; None if it has none.

    Remarks in brackets are left out, and so is the point release (Llama 3.1 has the dimensions of Llama 3).
    """
    plain = re.sub(r"\(.*?\)", "", model).lower()
    spelt = {_bare(each): each for each in architecture_names()}
    for each in (plain, re.sub(r"(?<=\d)\.\d(?![0-9.]*b)", "", plain)):
        if _bare(each) in spelt:
            return architecture_named(spelt[_bare(each)])[1]
    return None


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _agrees(known: Any, columns: ArchitectureColumns) -> bool:
    """Whether nothing that the row states contradicts the catalog. Of the MLP's width, files hold one of several."""
    stated = {name: getattr(columns, name) for name in ("layers", "hidden", "heads", "vocab")}
    names = _names(known)
    return all(value is None or (name in names and getattr(known, name) == value) for name, value in stated.items())


def _names(architecture: Any) -> set[str]:
    """The names of an architecture's fields."""
    return {each.name for each in fields(architecture)}


def family_of(architecture: Any) -> ModuleType:
    """The family's module."""
    return importlib.import_module(type(architecture).__module__)


def kind_of(architecture: Any) -> tuple[Any, ...]:
    """What architectures must share to stand in one array: the family, and fields that are one value for all plans."""
    single = [each.name for each in fields(architecture) if each.type in ("bool", "str", "float", "int")]
    return (type(architecture), *((name, getattr(architecture, name)) for name in single))


def stacked(architectures: Iterable[Any]) -> Any:
    """Architectures of one kind as one whose numbers are arrays (plans,)."""
    every = list(architectures)
    first = every[0]
    if not is_dataclass(first) or isinstance(first, type):
        raise TypeError(f"an architecture is a dataclass, got {first!r}")
    columns = {
        each.name: np.array([getattr(one, each.name) for one in every])
        for each in fields(first)
        if each.type not in ("bool", "str", "float", "int")
    }
    return replace(first, **columns)
