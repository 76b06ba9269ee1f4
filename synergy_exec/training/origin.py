"""Which sources a job of a package came from, and whether they have changed since its first run.

A job given as a file is kept as it was (`frozen.py`). A package is used as it is installed: its sources' digests stand
in the job's folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

from synergy_exec.training.job import TrainingJob
from synergy_runs.atomic import atomic_file


def changes(job: TrainingJob, record: Path) -> list[str]:
    """A sentence for every source that is not as it was at the first run; that one writes the record."""
    now = digests(job)
    try:
        before: dict[str, str] = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        with atomic_file(record) as partial:
            partial.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return []
    changed = sorted(name for name in before.keys() & now.keys() if before[name] != now[name])
    return [
        f"{name} has changed since this job's first run; what it trains from here on may be another job. "
        f"Submit it anew to begin with the new code, or put the old code back. {record.name} has the digests."
        for name in changed
    ]


def digests(job: TrainingJob) -> dict[str, str]:
    """SHA-256 of the job's own module, and of those beside it in its package that are loaded, by module."""
    own = type(job).__module__
    package = own.rpartition(".")[0]
    names = [name for name in list(sys.modules) if name == own or (package and name.startswith(f"{package}."))]
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names}
    return {
        name: hashlib.sha256(Path(path).read_bytes()).hexdigest()
        for name, path in files.items()
        if path is not None and path.endswith(".py") and Path(path).is_file()
    }
