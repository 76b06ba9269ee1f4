"""`python -m synergy_sim.traces`. Job logs to replay: see `synergy_runs.traces`."""

import sys

from synergy_core.pipes import piped
from synergy_runs.traces.command import main

if __name__ == "__main__":
    sys.exit(piped(main))
