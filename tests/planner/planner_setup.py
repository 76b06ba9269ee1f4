"""Machines, software and constants that do not change when the catalog's constants are fitted anew."""

from dataclasses import replace

from synergy_core.planner.constants import Constants
from synergy_core.planner.families import transformer
from synergy_core.planner.machine import machine_named
from synergy_core.planner.software import Software

SOFTWARE = Software("test")
CONSTANTS = Constants()


def machine(name="a100", memory_bytes=80e9):
    """The usual node of a GPU type with another memory."""
    return replace(machine_named(name), memory_bytes=memory_bytes)


def gpt(**changes):
    """A small GPT."""
    numbers = {"layers": 12, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50257, "seq_len": 2048}
    return transformer.Architecture(**{**numbers, **changes})
