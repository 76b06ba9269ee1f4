"""`python -m synergy_sim.traces` lists, downloads and inspects job logs (`synergy_runs.traces`)."""

from synergy_core.cli import run


def _main() -> int:
    from synergy_runs.traces.command import main

    return main()


if __name__ == "__main__":
    run("error", _main, interrupted="the same command continues where it stopped.")
