"""The machines that `plan` is asked about, and the constants that predict them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from synergy_core.catalog.sheets import add_gpu_sheet
from synergy_core.commands._question import Question
from synergy_core.errors import InputError
from synergy_core.planner.constants import Constants, OwnConstants, constants_for, own_constants
from synergy_core.planner.machine import Machine, machine_named
from synergy_core.planner.software import Software


def machine_asked(name: str, asked: Question) -> Machine:
    """The nodes of a GPU or node type, or of a data sheet of the user's."""
    if not name.endswith((".yaml", ".yml")):
        return machine_named(name, asked.gpus_per_node, asked.network, link=asked.link)
    sheet = add_gpu_sheet(Path(name))
    if asked.gpus_per_node is None or asked.network is None:
        raise InputError(
            f"gpu={name}: nobody knows nodes of {sheet.title}; give gpus_per_node=, such as 8, and network=, bytes/s "
            "per GPU, such as 25e9."
        )
    link = asked.link or ("nvswitch" if sheet.link_bytes_per_s else "pcie")
    return machine_named(sheet.name, asked.gpus_per_node, asked.network, link=link)


def constants_asked(asked: Question, machines: Sequence[Machine]) -> OwnConstants | None:
    """The user's constants. Raises InputError where they are of other software, or of none of the GPU types."""
    if asked.constants is None:
        return None
    own = own_constants(asked.constants)
    if own.software not in (None, asked.software):
        raise InputError(
            f"constants={asked.constants}: of {own.software}, not {asked.software}; type software={own.software}."
        )
    if all(own.of(each.gpu) is None for each in machines):
        known = ", ".join(own.gpu_types)
        raise InputError(f"constants={asked.constants}: of {known}, not of {', '.join(asked.gpu)}; type gpu={known}.")
    return own


def constants_of(machine: Machine, software: Software, own: OwnConstants | None) -> Constants:
    """The user's where there are some of that GPU type, else the shipped ones."""
    return (own.of(machine.gpu) if own else None) or constants_for(machine, software)


def used(own: OwnConstants, machine: Machine) -> str:
    """Which constants those are, in a line."""
    if own.of(machine.gpu) is None:
        return f"  constants as shipped: {own.path} has none of {machine.gpu.name}"
    return f"  constants of {own.path}"
