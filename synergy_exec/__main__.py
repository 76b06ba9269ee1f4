"""`python -m synergy_exec +trace=demo`: trains for real what a policy schedules; `submit`, `list`, … ask it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from synergy_core import exits
from synergy_core.errors import InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig


def _run(config: DictConfig) -> None:
    from synergy_exec.run import run

    run(config)


def main() -> None:
    """Runs the command line."""
    exits.run("synergy_exec", _main, interrupted="the same command goes on from what was saved.")


def _require_extra() -> None:
    missing = [each for each in ("torch", "aiohttp", "prometheus_client") if importlib.util.find_spec(each) is None]
    if missing:
        raise InputError(f"{' and '.join(missing)} is not installed here; type: pip install -e '.[exec]'")


def _main() -> None:
    from synergy_core import __version__
    from synergy_core.modules import module_names
    from synergy_exec import commands
    from synergy_exec.commands import _asking

    arguments = sys.argv[1:]
    if arguments and arguments[0] in _asking.COMMANDS:
        _asking.main(arguments[0], arguments[1:])
        return
    if arguments and arguments[0] in module_names(commands.__name__):
        command = importlib.import_module(f"{commands.__name__}.{arguments[0]}")
        if getattr(command, "TRAINS", False):
            _require_extra()
        sys.exit(command.main(arguments[1:]))
    if any(each in ("--help", "-h") for each in arguments):
        from synergy_exec.usage import usage

        print(usage())
        return
    if "--version" in arguments:
        print(__version__)
        return
    if arguments and arguments[0].startswith("--completion="):
        from synergy_exec.program import EXECUTOR
        from synergy_runs.completion import completion

        print(completion(EXECUTOR, arguments[0]), end="")
        return
    _require_extra()
    from synergy_exec.program import EXECUTOR
    from synergy_runs import overrides
    from synergy_runs.compose import with_hydra

    sys.argv[1:] = overrides.prepared(arguments, EXECUTOR)
    with_hydra(EXECUTOR, _run)


if __name__ == "__main__":
    main()
