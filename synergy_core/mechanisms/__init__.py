"""Mechanisms: who gets how many CPUs and how much memory, among jobs that an order has put in line.

One file each; being in the folder registers it. `fifo+tune` is the order fifo with the mechanism tune.
"""

from synergy_core.mechanisms._registry import Answer, Mechanism, get_mechanism, mechanism, mechanism_names
from synergy_core.mechanisms._round import CHECKED, Applicant, Grant, Hosts, OnNodes, SharingRound, least
from synergy_core.mechanisms._turns import Places, by_gpus, turns

__all__ = [
    "CHECKED",
    "Answer",
    "Applicant",
    "Grant",
    "Hosts",
    "Mechanism",
    "OnNodes",
    "Places",
    "SharingRound",
    "by_gpus",
    "get_mechanism",
    "least",
    "mechanism",
    "mechanism_names",
    "turns",
]
