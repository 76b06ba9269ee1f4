"""Hydra put to work, with its errors turned into ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from synergy_core.errors import InputError
from synergy_runs import overrides
from synergy_runs.program import Program
from synergy_runs.resources import conf_folder
from synergy_runs.settings import defaults, keys, typed

if TYPE_CHECKING:
    from omegaconf import DictConfig


def with_hydra(program: Program, function: Callable[[DictConfig], None]) -> None:
    """Calls `function` with the configuration of the command line, or once per job of a sweep (`-m`).

    Defaults that the program's settings declare are, to the files in conf/, the file `<config>_keys`. What a job of a
    sweep is refused for is what it returns to Hydra, and the others go on.
    """
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # raise instead of printing half a traceback and exiting
    failures: list[Exception] = []

    def task(config: DictConfig) -> str | None:
        """Keeps errors from Hydra, which would print more than they say."""
        try:
            function(config)
        except (InputError, OmegaConfBaseException) as error:
            if HydraConfig.get().mode == RunMode.MULTIRUN:
                return str(error)
            failures.append(error)
        return None

    _declare(program)
    decorated = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=program.config)(task)
    with _said():
        decorated()
        if failures:
            raise failures[0]


def composed(program: Program, arguments: Sequence[str]) -> dict[str, Any]:
    """The values that the program would run with, had these been its arguments. Raises InputError."""
    return composed_of(program, overrides.prepared(arguments, program))


def of_each_swept_value(program: Program, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The values that a sweep would run with, once for each value that is swept, together with the first ones of the
    other keys. arguments: as Hydra gets them. Raises InputError."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    own = [each for each in arguments if not each.startswith(("-", "hydra"))]
    with _said():
        parsed = OverridesParser.create().parse_overrides(own)
        fixed = [each.input_line or "" for each in parsed if not each.is_discrete_sweep()]
        swept = {
            each.get_key_element(): list(each.sweep_string_iterator()) for each in parsed if each.is_discrete_sweep()
        }
    first = {key: values[0] for key, values in swept.items()}
    for key, values in swept.items():
        for value in values:
            chosen = {**first, key: value}
            yield composed_of(program, [*fixed, *(f"{each}={chosen[each]}" for each in chosen)])


def composed_of(program: Program, arguments: Sequence[str]) -> dict[str, Any]:
    """The values that Hydra makes of arguments that it can read. Raises InputError."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    _declare(program)
    with _said(), initialize_config_dir(version_base="1.3", config_dir=str(conf_folder().resolve())):
        config = compose(program.config, list(arguments))
        values: Any = OmegaConf.to_container(config, resolve=True)
    return dict(values)


def _declare(program: Program) -> None:
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name=f"{program.config}_keys", node=defaults(program.settings))


@contextmanager
def _said() -> Iterator[None]:
    """Hydra's errors are a user's, in a sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        first = str(error).strip().partition("\n")[0].rstrip(".")
        if element := re.search(r"\+(\w+\.\w+\.\d+)\.", first):
            raise InputError(f"{element[1]}: there is none of that number; they count from 0.") from error
        raise InputError(f"these settings do not go together: {first}. --help lists all keys.") from error


def default_values(program: Program) -> dict[str, str]:
    """The default of every key that has one, as it is typed."""
    found: dict[str, str] = {}
    values = composed(program, [f"+trace={program.example}"] if "trace" in program.groups else [])
    for each in keys(program.settings):
        at: Any = values
        for part in each.name.split("."):
            at = at.get(part, MISSING) if isinstance(at, dict) else MISSING
        if at is not MISSING and (not isinstance(at, dict) or not at):
            found[each.name] = typed(at)
    return found
