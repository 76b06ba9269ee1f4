"""Machines, software and constants that do not change when the catalog's constants are fitted anew; a command run."""

from dataclasses import replace

from synergy_core.__main__ import main
from synergy_core.performance.planner.families import transformer
from synergy_core.performance.planner.machine import Constants, Software, machine_named

SOFTWARE = Software("test")
CONSTANTS = Constants()


def machine(name="a100", memory_bytes=80e9):
    """The usual node of a GPU type with another memory."""
    return replace(machine_named(name), memory_bytes=memory_bytes)


def asked(capsys, typed, *more):
    """Runs a command as typed, with more words appended; returns its exit code, output and error output."""
    status = main([*typed.split(), *more])
    return status, *capsys.readouterr()


def gpt(**changes):
    """A small GPT."""
    numbers = {"layers": 12, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 50257, "seq_len": 2048}
    return transformer.Architecture(**{**numbers, **changes})
