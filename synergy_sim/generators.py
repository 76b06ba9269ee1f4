"""`python -m synergy_sim.generators`. Generated traces: see `synergy_runs.generators`."""

from synergy_core.exits import run


def _main() -> int:
    from synergy_runs.generators.command import main
    from synergy_sim.waiting import queueing_delays

    return main(delays=queueing_delays)


if __name__ == "__main__":
    run("error", _main, interrupted="the log is written whole or not at all.")
