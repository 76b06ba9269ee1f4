"""`resume`: continues an interrupted run with its settings.

Settings of where and how it runs may be changed: resume host=10.0.0.2 backend.options.slots=2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from synergy_core.cli import Parser
from synergy_core.errors import InputError
from synergy_exec.folders import WORK, meta_of, under_way
from synergy_exec.run import run
from synergy_exec.settings import CHANGEABLE, Settings


def main(arguments: Sequence[str]) -> None:
    """Does what the command that began the run would do if typed again in the same folder. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec resume", description=__doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN.work KEY=VALUE",
        help="its work folder, by default the one under way below --dir; and keys that are to be others from now on",
    )
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help="results_dir")
    given = parser.parse_args(arguments)
    named = [Path(word) for word in given.words if word.endswith(WORK) or "=" not in word]
    if len(named) > 1:
        parser.error(f"one RUN.work at a time, not {len(named)}")
    work = (named[0] if named else under_way(given.dir)).resolve()
    if not work.is_dir() or not work.name.endswith(WORK):
        raise InputError(f"{work}: expected the work folder of a run, such as results/demo/latest/synergy-0.work.")
    values: dict[str, Any] = meta_of(work).get("settings", {})
    if not values:
        raise InputError(
            f"{work}: its journal has no settings of the run. Type the command that began the run again; it resumes."
        )
    policies = values.pop("compared_with", None) or [values["policy"]]
    values |= {"policy": policies, "results_dir": str(work.parents[2])}
    run(changed(values, [word for word in given.words if Path(word) not in named]), resumed=work.parent)


def changed(values: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """A run's values with typed overrides such as host=10.0.0.1. Raises InputError."""
    import yaml  # type: ignore[import-untyped]
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        new = OmegaConf.from_dotlist(list(typed))
    except (OmegaConfBaseException, yaml.YAMLError, ValueError):
        raise InputError(f"{' '.join(typed)}: expected keys and values such as host=10.0.0.1.") from None
    fixed = [str(name) for name in new if name not in CHANGEABLE]
    if fixed:
        raise InputError(
            f"{', '.join(fixed)}: cannot be changed when a run resumes. These can: {', '.join(CHANGEABLE)}."
        )
    both: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(dict(values)), new))
    return dict(both)
