"""Pollux (OSDI 2021): the policy, its genetic search, and a bound on what any search could find."""

from synergy_core.policies.pollux.policy import pollux

__all__ = ["pollux"]
