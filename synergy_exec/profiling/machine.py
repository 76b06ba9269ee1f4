"""What a profile was measured on, and where it lies."""

from __future__ import annotations

import datetime
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synergy_core.jobs.testbed_profiles import Profile, ProfiledModel
from synergy_runs.profiles import read_profile, write_profile


def machine(backend: str, options: Mapping[str, Any], *, bfloat16: bool) -> str:
    """What a profile was measured on, in words; with float32 where GPUs were not to compute in bfloat16."""
    given = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    cores = len(os.sched_getaffinity(0))
    options_given = f" ({given})" if given else ""
    precision = "" if bfloat16 else ", float32"
    return f"{socket.gethostname()}, {platform.machine()}, {cores} cores, {backend}{options_given}{precision}"


def profile_in(results_dir: Path) -> Path:
    """The file that profile=auto keeps there."""
    return results_dir / "profile.json"


def known_profile(path: Path, where: str) -> Profile:
    """What is in the file, if it was measured there; else a profile of nothing, of that machine."""
    there = read_profile(path) if path.is_file() else Profile()
    return there if there.machine == where else Profile({}, where)


def keep_profile(models: Mapping[str, ProfiledModel], where: str, path: Path) -> None:
    """Writes what was measured there, dated now."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    write_profile(Profile(models, where, now), path)
