"""A trace-driven discrete-event simulator of a GPU cluster. The schedulers of `synergy_core` decide in it.

`compare` and `open_run` are for notebooks (docs/python.md). They are imported when they are used, because pandas, Hydra
and the report are slow to import.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from synergy_sim.api import Results, compare, open_run

__all__ = ["Results", "compare", "open_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from synergy_sim import api

    return getattr(api, name)
