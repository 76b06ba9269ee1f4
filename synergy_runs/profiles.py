"""Profile files, which the executor writes and both drivers read."""

from __future__ import annotations

from pathlib import Path

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile, profile_of
from synergy_runs.atomic import atomic_file


def read_profile(path: Path) -> Profile:
    """The profile in a file. Raises InputError where there is none, or it is something else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise InputError(f"{path}: expected a profile, which python -m synergy_exec profile makes ({why}).") from None
    return profile_of(text, str(path))


def write_profile(profile: Profile, path: Path) -> None:
    """Writes it whole, or not at all."""
    with atomic_file(path) as partial:
        partial.write_text(profile.to_json(), encoding="utf-8")
