"""Runs filed as a command files them, and what lies in a folder, for tests."""

import hashlib

from small_runs import cluster, drawn_workload, policies
from test_results import CONFIG

from synergy_runs.outputs.results import new_run, write_run


def tree(folder):
    """Every file below it, by the hash of its contents; links by where they lead."""
    found = sorted(folder.rglob("*"))
    return {
        str(each.relative_to(folder)): str(each.readlink()) if each.is_symlink()
        else hashlib.sha256(each.read_bytes()).hexdigest() if each.is_file() else ""
        for each in found
    }  # fmt: skip


def filed(parent, seeds=(0,), *, load=1.0, words=(), jobs=60, only=None):
    """A run of four policies, as a command files it."""
    with new_run(parent, "synergy_sim", ["+trace=drawn", f"cluster.load={load}", *words]) as folder:
        for seed in seeds:
            for run in policies(drawn_workload(jobs, seed=seed, gap_s=120 / load), cluster(4), seed=seed):
                if only is None or run.policy in only:
                    write_run(run, folder / f"{run.policy}-{seed}", CONFIG.format(seed=seed, load=load))
    return folder
