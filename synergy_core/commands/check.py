"""Checks that policies keep the rules of all policies, on small random cases that are the same in every run.

NAME: a policy in synergy_core/scheduling/policies/, in an installed package with the entry point synergy.policies, or
in --module. The check first calls the policy on single snapshots, then runs it on jobs that arrive and end. An error
names the broken rule and the smallest case that breaks it.
"""

from __future__ import annotations

import argparse
import importlib.util
from functools import partial

SUMMARY = "check that a policy, yours or ours, keeps the rules of all policies"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="the policies")
    parser.add_argument("--module", help="a module to import first, which registers them: my_package.my_policy")


def run(chosen: argparse.Namespace) -> int:
    """Prints a line per policy that keeps the rules. Raises BrokenRuleError at the first policy that breaks one."""
    from synergy_core.checking.conformance import conforms
    from synergy_core.errors import InputError
    from synergy_core.scheduling.decisions.starvation import bound_in_words
    from synergy_core.scheduling.policies import get_policy, load

    if chosen.module is not None:
        if importlib.util.find_spec(chosen.module.partition(".")[0]) is None:
            raise InputError(
                f"--module {chosen.module}: no such module here; expected one such as my_package.my_policy."
            )
        load(f"--module {chosen.module}", partial(importlib.import_module, chosen.module))
    for name in chosen.names:
        policy = get_policy(name)
        conforms(policy)
        print(f"{name}: keeps the rules\n  jobs wait {bound_in_words(policy)}")
    return 0
