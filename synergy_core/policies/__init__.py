"""Scheduling policies, one file each. Being in this folder registers a policy; so does the entry point
`synergy.policies` of an installed package, or importing a module that uses the decorators."""

from synergy_core.policies._check import RULES, BrokenRuleError, check
from synergy_core.policies._registry import (
    AllocationPolicy,
    Key,
    OrderingPolicy,
    allocation_policy,
    ordering_policy,
    policy_names,
)
from synergy_core.policies._sharing import Policy, SharingPolicy, get_policy, is_mechanism, parts_of

__all__ = [
    "RULES",
    "AllocationPolicy",
    "BrokenRuleError",
    "Key",
    "OrderingPolicy",
    "Policy",
    "SharingPolicy",
    "allocation_policy",
    "check",
    "get_policy",
    "is_mechanism",
    "ordering_policy",
    "parts_of",
    "policy_names",
]
