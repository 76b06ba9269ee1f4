"""`python -m synergy_sim +trace=philly`: simulates, compares, and shows what happened."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from synergy_core import exits

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _run(config: DictConfig) -> None:
    from synergy_sim.run import run

    run(config)


def main() -> None:
    """Runs the command line."""
    # Policies run side by side, one on a core: threads of the linear algebra library would make all of them slower.
    # Must be set before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    exits.run("synergy_sim", _main, interrupted="runs that had ended are kept, of the one under way nothing is.")


def _main() -> None:
    from synergy_core import __version__
    from synergy_runs import overrides
    from synergy_sim.program import SIMULATOR

    arguments = sys.argv[1:]
    if any(each in ("--help", "-h") for each in arguments):
        from synergy_sim.usage import usage

        print(usage())
        return
    if "--version" in arguments:
        print(__version__)
        return
    if arguments and arguments[0].startswith("--completion="):
        from synergy_runs.completion import completion
        from synergy_sim.program import SIMULATOR

        print(completion(SIMULATOR, arguments[0]), end="")
        return
    sys.argv[1:] = overrides.prepared(arguments, SIMULATOR)
    from synergy_runs.compose import with_hydra

    if overrides.sweeps(arguments):
        from synergy_sim.sweep import swept

        swept(arguments, lambda: with_hydra(SIMULATOR, _run))
    else:
        with_hydra(SIMULATOR, _run)


if __name__ == "__main__":
    main()
