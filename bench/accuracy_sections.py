"""The sections of docs/accuracy.md: which runs each needs, and what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from accuracy_asked import Asked, Section
from accuracy_osdi22 import osdi22_body, osdi22_runs, published_runs
from accuracy_ours import ours_body, ours_runs
from accuracy_parts import ablation_body, ablation_runs, sensitivity_body, sensitivity_runs
from accuracy_pollux import pollux_body, pollux_runs
from accuracy_runs import ROOT, write_atomically
from accuracy_sia import sia_body, sia_runs

FORMS = "mean error in % over the applications, on held-out"
"""Where bench/fit.py begins to compare forms of the all-reduce."""


def fit_body(asked: Asked) -> str:
    """What bench/fit.py prints, or printed in an earlier call where nothing is to be run."""
    printed = asked.folder / "fit.txt"
    if not asked.only_page:
        error = _print_fits(printed)
        if error:
            return f"`python bench/fit.py` failed:\n\n```\n{error}\n```"
    if not printed.is_file():
        return "`python bench/fit.py` has not been run."
    fits, _, _ = printed.read_text(encoding="utf-8").partition(FORMS)
    return (
        "As `python bench/fit.py` (needs: data) prints it; [resources.md](resources.md) has the forms of the\n"
        "all-reduce. Goals: at most 2 ms CPU per fit in a batch of 100 (the peers: 47–130 ms); mean error on each\n"
        "table at or below the peers' own fit, which is Pollux's form, *all*, left of each arrow.\n\n```\n"
        + fits.strip()
        + "\n```"
    )


def _print_fits(into: Path) -> str | None:
    """Runs bench/fit.py; the last line of its error, or none."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "fit.py")], capture_output=True, text=True, env=environment, check=False
    )
    if told.returncode:
        return (told.stderr.strip().splitlines() or ["no output"])[-1]
    write_atomically(into, told.stdout)
    return None


SECTIONS = (
    Section("pollux", "Pollux's published completion times", pollux_runs, pollux_body),
    Section("sia", "Sia's published table", sia_runs, sia_body),
    Section("ours", "Synergy against Sia", ours_runs, ours_body),
    Section("ablation", "Each part alone", ablation_runs, ablation_body),
    Section("sensitivity", "Wrong declarations, split labels, noise", sensitivity_runs, sensitivity_body),
    Section("osdi22", "CPUs and memory: Synergy of OSDI 2022", osdi22_runs, osdi22_body, published_runs),
    Section("fit", "Fits", list, fit_body),
)
