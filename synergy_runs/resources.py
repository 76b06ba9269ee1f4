"""Where the files that travel with the package lie: in a checkout, or inside an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(in_wheel: str, in_checkout: str) -> Path:
    """The absolute path of a folder that the wheel holds inside the package and the checkout beside it.

    Raises FileNotFoundError where neither exists (a broken installation).
    """
    for candidate in (_PACKAGE / in_wheel, _PACKAGE.parent / in_checkout):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"neither {_PACKAGE / in_wheel} nor {_PACKAGE.parent / in_checkout} exists")


def conf_folder() -> Path:
    """The Hydra configuration."""
    return folder("conf", "conf")


def statistics_folder() -> Path:
    """Published trace statistics, as JSON."""
    return folder("statistics", "traces")
