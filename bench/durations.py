"""How long the README's commands take, those of simulator and planner, in a clone: `python bench/durations.py`.

Those that say what they need are left out, or that they take minutes, unless --all. Files that readers bring are those
of tests/documented_files. Wall-clock seconds on this machine, and CPU seconds, which its other work hardly changes.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from documented import Command, commands  # noqa: E402

OURS = re.compile(r"python -m synergy_(sim|core)\b")
NOT_ALONE = re.compile(r"\b(JOB|WORKLOAD\.csv)\b|\+trace=demo")
"""Of commands whose words stand for what other commands made, or that simulate what the executor measured."""


def asked(all_: bool) -> list[Command]:
    """The README's commands that can be typed alone."""
    found = commands("README.md", (ROOT / "README.md").read_text(encoding="utf-8"))
    alone = [each for each in found if OURS.match(each.typed) and not NOT_ALONE.search(each.typed)]
    return [each for each in alone if not each.needs and (all_ or each.minutes is None)]


def seconds(typed: str, clone: Path) -> tuple[float, float, int]:
    """Wall-clock and CPU seconds, and the exit status."""
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    done = subprocess.run(
        ["bash", "-c", typed], cwd=clone, env={**environment, "PYTHONPATH": str(clone)}, capture_output=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.monotonic() - began_s, cpu_s, done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="those that say that they take minutes, too")
    given = parser.parse_args()
    worst = 0
    with tempfile.TemporaryDirectory(prefix="synergy-durations-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        shutil.copytree(ROOT / "tests" / "documented_files", clone, dirs_exist_ok=True)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n wall s   CPU s  command", flush=True)
        for each in asked(given.all):
            wall_s, cpu_s, status = seconds(each.typed, clone)
            worst = max(worst, status)
            print(f"{wall_s:7.1f} {cpu_s:7.1f}  {each.typed}" + (f"  STATUS {status}" if status else ""), flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
