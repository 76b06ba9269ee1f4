"""`python -m synergy_sim.generators`. Generated traces: see `synergy_runs.generators`."""

import sys

from synergy_runs.generators.command import main

if __name__ == "__main__":
    sys.exit(main())
