"""`python -m synergy_exec +trace=demo`: trains for real what a policy schedules; `submit`, `list`, … ask it."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from synergy_core.errors import InputError
from synergy_runs import exits

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _run(config: DictConfig) -> None:
    from synergy_exec.run import run

    run(config)


def main() -> None:
    """Runs the command line."""
    exits.run("synergy_exec", _main, interrupted="the same command goes on from what was saved.")


def _require_extra() -> None:
    missing = [each for each in ("torch", "aiohttp") if importlib.util.find_spec(each) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} is not installed here; type: pip install -e '.[exec]'")


def _main() -> None:
    from synergy_core import __version__
    from synergy_exec.commands import jobs

    arguments = sys.argv[1:]
    if arguments and arguments[0] in jobs.COMMANDS:
        jobs.main(arguments[0], arguments[1:])
        return
    if arguments and arguments[0] == "profile":
        _require_extra()
        from synergy_exec.commands import profile

        profile.main(arguments[1:])
        return
    if arguments and arguments[0] == "verify":
        _require_extra()
        from synergy_exec.commands import verify

        sys.exit(verify.main(arguments[1:]))
    if arguments and arguments[0] == "tensorboard":
        from synergy_exec.commands import tensorboard

        tensorboard.main(arguments[1:])
        return
    if any(each in ("--help", "-h") for each in arguments):
        from synergy_exec.usage import usage

        print(usage())
        return
    if "--version" in arguments:
        print(__version__)
        return
    _require_extra()
    from synergy_exec.program import EXECUTOR
    from synergy_runs import overrides
    from synergy_runs.compose import with_hydra

    sys.argv[1:] = overrides.prepared(arguments, EXECUTOR)
    with_hydra(EXECUTOR, _run)


if __name__ == "__main__":
    main()
