"""`python -m synergy_sim.results` shows finished runs in one table (`synergy_runs.outputs.results`)."""

from synergy_core.cli import run


def _main() -> int:
    from synergy_runs.outputs.results import main

    return main()


if __name__ == "__main__":
    run("error", _main, interrupted="results are only read.")
