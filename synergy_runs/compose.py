"""Hydra put to work, with its errors turned into ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from synergy_core.errors import InputError
from synergy_runs.program import Program
from synergy_runs.resources import conf_folder
from synergy_runs.settings import defaults

if TYPE_CHECKING:
    from omegaconf import DictConfig


def with_hydra(program: Program, function: Callable[[DictConfig], None]) -> None:
    """Calls `function` with the configuration of the command line, or once per job of a sweep (`-m`).

    Defaults that the program's settings declare are, to the files in conf/, the file `<config>_keys`.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing half a traceback and exiting
    failures: list[InputError] = []

    def task(config: DictConfig) -> None:
        """Keeps a single run's error from Hydra, which would print more than the error says."""
        try:
            function(config)
        except InputError as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                raise
            failures.append(error)

    ConfigStore.instance().store(name=f"{program.config}_keys", node=defaults(program.settings))
    decorated = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=program.config)(task)
    try:
        decorated()
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().splitlines()
        raise InputError("the configuration cannot be composed: " + "\n  ".join(first[:6])) from error
    if failures:
        raise failures[0]
