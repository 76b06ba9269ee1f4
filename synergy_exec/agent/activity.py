"""Whether a process does anything, by the kernel's account of it."""

from __future__ import annotations

import os
from pathlib import Path

LEAST_CPU = 0.02
"""Of the time that passes: what a process uses that only waits is less."""
LEAST_BYTES_PER_S = 100_000.0


class Activity:
    """Looks at a process again and again."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._cpu_s, self._bytes = _used(pid)

    def since(self, passed_s: float) -> bool:
        """Whether it has computed, read or written something worth the name in the time since it was last asked."""
        cpu_s, moved = _used(self._pid)
        active = cpu_s - self._cpu_s > LEAST_CPU * passed_s or moved - self._bytes > LEAST_BYTES_PER_S * passed_s
        self._cpu_s, self._bytes = cpu_s, moved
        return active


def _used(pid: int) -> tuple[float, float]:
    """CPU-seconds, of children that it has waited for too, and bytes read and written; zeros of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        rows = (line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        moved = {name: int(value) for name, value in rows}
    except (OSError, ValueError):
        return 0.0, 0.0
    ticks = sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK"), float(moved["rchar"] + moved["wchar"])
