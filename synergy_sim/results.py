"""`python -m synergy_sim.results`. Finished runs in one table: see `synergy_runs.results`."""

import sys

from synergy_core.pipes import piped
from synergy_runs.results import main

if __name__ == "__main__":
    sys.exit(piped(main))
