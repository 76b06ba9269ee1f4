"""Which keys may be others when a run goes on: where and how it is carried out, not what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.rereading import CHANGING

CHANGEABLE = (
    *CHANGING,  # while it runs, too
    *("backend", "host", "port", "ports", "tls_certificate", "tls_key", "tls_authority"),
    *("users", "changes", "figures", "live"),
)


def lasting(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that stay as they were when the run began."""
    return {name: value for name, value in values.items() if name not in CHANGEABLE}


def changed(values: Mapping[str, Any], typed: Sequence[str]) -> dict[str, Any]:
    """A run's values with those that were typed, such as host=10.0.0.1, in their places. Raises InputError."""
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
            f"{', '.join(fixed)}: a run goes on with what it was begun with. These may be others: "
            f"{', '.join(CHANGEABLE)}."
        )
    both: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(dict(values)), new))
    return dict(both)
