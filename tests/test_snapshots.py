"""States whose columns are kept from round to round are those that would be read from all jobs anew."""

from dataclasses import fields
from random import Random

import numpy as np
import planned_models
from case_checks import prepared_case, simulated
from cases import random_case

from synergy_core.scheduling.decisions import allocation, sharing
from synergy_core.scheduling.decisions.snapshots import Snapshots

COUNTED = ("received_s", "given_s")
"""Summed up from state to state: nothing in a job's record says them."""


class Compared(Snapshots):
    """Compares every state with one of a `Snapshots` that has kept nothing."""

    compared = 0

    def __init__(self, *view, **more):
        super().__init__(*view, **more)
        self.made_of = view, more

    def of(self, jobs, now_s, memory):
        view, more = self.made_of
        anew = Snapshots(*view, **more)
        for job in jobs:
            anew.entered(job)
        kept, read = super().of(jobs, now_s, memory), anew.of(jobs, now_s, memory)
        for each in fields(kept):
            ours, theirs = getattr(kept, each.name), getattr(read, each.name)
            if each.name in ("virtual_cluster", "user"):  # both number names in an order of their own
                names = [getattr(state, f"{each.name}s") for state in (kept, read)]
                assert [names[0][at] for at in ours] == [names[1][at] for at in theirs]
            elif isinstance(ours, np.ndarray) and each.name not in COUNTED:
                assert ours.dtype == theirs.dtype, each.name
                np.testing.assert_array_equal(ours, theirs, each.name)
        Compared.compared += 1
        return kept


def test_kept_columns_are_those_read_anew(monkeypatch):
    planned_models.install(monkeypatch.setattr)
    monkeypatch.setattr(allocation, "Snapshots", Compared)
    monkeypatch.setattr(sharing, "Snapshots", Compared)
    for seed in range(30):
        simulated(prepared_case(random_case(Random(seed))))
    assert Compared.compared > 60
