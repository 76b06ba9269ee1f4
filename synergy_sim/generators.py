"""`python -m synergy_sim.generators`. Generated traces: see `synergy_runs.generators`."""

import sys

from synergy_core.pipes import piped
from synergy_runs.generators.command import main
from synergy_sim.waiting import queueing_delays

if __name__ == "__main__":
    sys.exit(piped(lambda: main(delays=queueing_delays)))
