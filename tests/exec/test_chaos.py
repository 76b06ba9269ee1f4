"""Five minutes of random faults over a service with twenty jobs: nothing lost, nothing doubled, nothing left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "bench" / "chaos.py"
SEED, MINUTES, JOBS = 7, 5, 20
PATIENCE_S = 2_400
"""Five minutes of faults, fifteen at most for jobs to end, and all losses computed again, beside other tests."""


@pytest.mark.thorough
def test_nothing_is_lost_doubled_or_left_behind_by_random_faults(tmp_path: Path) -> None:
    command = [sys.executable, str(CHAOS), str(SEED), str(MINUTES), "--jobs", str(JOBS), "--keep", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    faults = [line for line in ended.stderr.splitlines() if " s  " in line]
    assert len(faults) >= 10, ended.stderr
