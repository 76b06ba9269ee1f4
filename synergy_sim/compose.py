"""Hydra put to work, with its errors turned into ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from synergy_core.errors import InputError
from synergy_sim.resources import conf_folder

if TYPE_CHECKING:
    from omegaconf import DictConfig


def with_hydra(function: Callable[[DictConfig], None]) -> None:
    """Calls `function` with the configuration of the command line, or once per job of a sweep (`-m`)."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing half a traceback and exiting
    decorated = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(function)
    try:
        decorated()
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().splitlines()
        raise InputError("the configuration cannot be composed: " + "\n  ".join(first[:6])) from error
