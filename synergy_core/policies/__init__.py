"""Scheduling policies, one file each. Being in this folder registers a policy; so does the entry point
`synergy.policies` of an installed package, or importing a module that uses the decorators."""

from synergy_core.policies._check import RULES, BrokenRuleError, check
from synergy_core.policies._registry import (
    AllocationPolicy,
    Key,
    OrderingPolicy,
    Policy,
    allocation_policy,
    base_name,
    get_policy,
    ordering_policy,
    policy_names,
)

__all__ = [
    "RULES",
    "AllocationPolicy",
    "BrokenRuleError",
    "Key",
    "OrderingPolicy",
    "Policy",
    "allocation_policy",
    "base_name",
    "check",
    "get_policy",
    "ordering_policy",
    "policy_names",
]
