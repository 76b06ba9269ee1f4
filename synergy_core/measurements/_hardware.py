"""What a measurement file says of its GPUs and network, in its author's words, as what the catalog knows."""

from __future__ import annotations

import re
from dataclasses import dataclass

from synergy_core.catalog.sheets import gpu_sheet

BITS_PER_BYTE = 8.0

MEMORIES_GB = {"a100": (80.0, 40.0), "v100": (32.0, 16.0)}
"""GPU types sold with two sizes of memory under one name (data sheets of NVIDIA); the more common one first."""

CARDS_GBIT = {"fdr": 56.0, "edr": 100.0, "hdr": 200.0, "ndr": 400.0, "xdr": 800.0}
"""Gb/s of one port of each generation of InfiniBand, four lanes (InfiniBand Trade Association's roadmap)."""

EFA_GBIT_PER_NODE = {"v100": 100.0, "a100": 400.0, "h100": 3200.0, "h200": 3200.0, "b200": 3200.0}
"""Amazon's node types with that GPU: p3dn, p4d, p5, p5en, p6 (AWS, EC2 accelerated computing)."""

_TYPE = re.compile(
    r"(?<![a-z0-9])(g[bh][23]00|[abhlpv][0-9]+[a-z]?|t4|rtx[ _-]?[a-z]*[0-9]+(?:[ _-]?ti)?|mi[0-9]+[a-z]?)(?![a-z0-9])"
)
_MEMORY = re.compile(r"(?<![0-9.])([0-9]+) ?g(?:i?b)?(?![a-z0-9/])")
_CARDS = re.compile(r"(?:([0-9]+) ?[x× ] ?)?(fdr|edr|hdr|ndr|xdr)(?: ?([0-9]+))?")
_TIMES = re.compile(r"([0-9]+) ?[x×] ?([0-9]+(?:\.[0-9]+)?) ?g(?:b|bit)?")
_TIMES_AFTER = re.compile(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?) ?g(?:b|bit)?(?:ps|/s)? ?[x×] ?([0-9]+)")
_RATE = re.compile(r"(?<![0-9.])([0-9]+(?:\.[0-9]+)?) ?([gt])(b|bit|be|)(ps|/s|)(?![a-z])", re.IGNORECASE)
_INSIDE = re.compile(r"nvlink|nvswitch|nvl[0-9]+|pcie?\b")
_OUTSIDE = re.compile(r"infiniband|\bib\b|[fehnx]dr|ethernet|gbe|roce|efa|\bnics?\b|rdma|omni")
NVL_DOMAIN = 72
"""GPUs that a GB200 NVL72 or GB300 NVL72 joins by NVLink (data sheet)."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """Nodes of GPUs as stated: what makes a `Machine`. None where the usual one of that node type is meant.

    memory_like: a GPU with the same kind of memory, whose bandwidth per byte holds.
    """

    name: str
    memory_bytes: float | None
    gpus_per_node: int | None
    network_bytes_per_s: float | None = None
    memory_like: str = ""


def gpu_type(text: str) -> str:
    """`h100` of `H100-SXM-80GB`; the text in lower case where it names no known kind."""
    plain = text.strip().lower().replace("tesla", "").replace("nvidia", "").strip(" -_")
    found = _TYPE.search(plain)
    return re.sub(r"[ _-]", "", found[1]) if found else plain


def _memory_gb(text: str) -> float | None:
    """GB that a GPU's name ends in; None where it does not say."""
    found = _MEMORY.search(text.lower())
    return float(found[1]) if found else None


def choices(text: str, memory_gb: float | None, gpus_per_node: int, interconnect: str) -> tuple[Gpus, ...]:
    """What the GPUs may be: one choice, or, where a type has two sizes of memory and none is stated, one of each."""
    name = gpu_type(text)
    stated = memory_gb or _memory_gb(text)
    memories = (stated,) if stated is not None else MEMORIES_GB.get(name, (None,))
    domain = NVL_DOMAIN if name.startswith("gb") and "nvl72" in interconnect.lower() else gpus_per_node
    network = network_bytes_per_s(interconnect, gpus_per_node, name)
    return tuple(
        Gpus(
            sheet_name(text, memory),
            None if memory is None else memory * 1e9,
            domain,
            network,
            "h100-pcie" if name == "h100" and "hbm2e" in text.lower() else "",
        )
        for memory in memories
    )


def sheet_name(text: str, memory_gb: float | None) -> str:
    """The catalog's name for a GPU: the sheet of that very memory where there is one, else of the type."""
    name, plain = gpu_type(text), re.sub(r"[ _]+", "-", text.strip().lower())
    tried = [plain, plain.replace("-", "_")]
    form = "pcie" if "pci" in plain else "nvl" if re.search(r"h[12]00-?nvl", plain) else ""
    sizes = [f"{memory_gb:g}gb", f"{memory_gb:g}"] if memory_gb is not None else []
    for parts in [[name, form, size] for size in sizes] + [[name, form]] + [[name, size] for size in sizes] + [[name]]:
        tried += [joint.join(part for part in parts if part) for joint in "_-"]
    return next((sheet.name for each in tried if (sheet := gpu_sheet(each))), name)


def network_bytes_per_s(text: str, gpus_per_node: int, gpu_type: str) -> float | None:
    """Each GPU's share of a node's network, bytes/s one way; None where the text does not tell.

    A rate without `per GPU` is a node's. A number of cards times a rate is a node's too.
    """
    clauses = [each for each in re.split(r"[,;+]", text) if not _within(each.lower())]
    outside = ",".join(clauses)
    plain = outside.lower()
    gbit = _gbit(outside, plain, gpu_type)
    if not gbit:
        return None
    share = 1 if re.search(r"(per|/) ?gpu", plain) else gpus_per_node
    return gbit * 1e9 / BITS_PER_BYTE / share


def _within(clause: str) -> bool:
    """Whether a part of the text tells of links inside a node only."""
    return _INSIDE.search(clause) is not None and not _OUTSIDE.search(clause)


def _gbit(text: str, plain: str, gpu_type: str) -> float | None:
    """Gb/s of what the text names: cards that are counted, else a rate, else one card of a generation."""
    cards = _CARDS.search(plain)
    if cards and cards[1]:
        return float(cards[1]) * (float(cards[3]) if cards[3] else CARDS_GBIT[cards[2]])
    if found := _TIMES.search(plain) or _TIMES_AFTER.search(plain):
        return float(found[1]) * float(found[2])
    for found in _RATE.finditer(text):
        per_second, bytes_ = bool(found[4]), found[3] == "B"
        if per_second or not bytes_:
            return float(found[1]) * (1e3 if found[2] in "tT" else 1.0) * (BITS_PER_BYTE if bytes_ else 1.0)
    if cards:
        return None if "dgx" in plain else float(cards[3]) if cards[3] else CARDS_GBIT[cards[2]]
    return EFA_GBIT_PER_NODE.get(gpu_type) if "efa" in plain else None
