"""The same script in processes of their own, each with another seed of Python's hashes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def printed_with(script, *hash_seeds):
    """Runs a script under each hash seed; returns the set of its outputs. It can import this repository's tests."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    return {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in hash_seeds
    }
