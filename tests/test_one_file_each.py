"""A policy and a format of job logs: each is added by its file, as CONTRIBUTING.md says, which nothing else knows."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from copies import Programs

ROOT = Path(__file__).resolve().parents[1]
POLICY = '''"""Small jobs first."""

from synergy_core.scheduling.policies import ordering_policy
from synergy_core.scheduling.jobs.views import JobView


@ordering_policy(preemptive=False)
def small_first(job: JobView) -> tuple[int, float]:
    """Fewest GPUs first."""
    return job.gpus, job.submit_time_s
'''
FORMAT = '''"""Lines such as `at 5 for 60 on 2`."""

from pathlib import Path

from synergy_runs.traces.rows import TraceRows, number, whole

NAME = "spoken"
SUMMARY = "lines such as `at 5 for 60 on 2`: seconds, seconds, GPUs"


def recognises(path: Path, head: str) -> bool:
    """Recognises the format by its first line."""
    return head.startswith("at ")


def read(path: Path, rows: TraceRows) -> None:
    """Adds every line."""
    rows.from_zero = True
    for line, text in enumerate(path.read_text().splitlines(), start=1):
        _, at, _, lasts, _, gpus = text.split()
        rows.add(
            line,
            submit_s=number(at, "at", "seconds"),
            duration_s=number(lasts, "for", "seconds"),
            gpus=whole(gpus, "on"),
            job_name=f"line-{line}",
            columns={"submit_s": "at", "duration_s": "for", "gpus": "on"},
        )
'''


def copied(folder, *names):
    """Packages and what they read, to write in."""
    for name in names:
        shutil.copytree(ROOT / name, folder / "copy" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "copy"


def said(copy, *typed, fails=False, flag="-m"):
    """Runs a program of the copy, and returns its output on both streams."""
    environment = os.environ | {"PYTHONPATH": str(copy)}
    command = [sys.executable, flag, *typed]
    done = subprocess.run(command, cwd=copy.parent, env=environment, capture_output=True, text=True, timeout=240)
    assert bool(done.returncode) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_policy_and_format_are_added_by_their_files_alone(tmp_path):
    copy = copied(tmp_path, "synergy_core", "synergy_runs", "synergy_sim", "conf", "traces")
    (copy / "synergy_core" / "scheduling" / "policies" / "small_first.py").write_text(POLICY, encoding="utf-8")
    (copy / "synergy_runs" / "traces" / "spoken.py").write_text(FORMAT, encoding="utf-8")
    log = copy.parent / "log.txt"
    log.write_text("at 0 for 60 on 8\nat 1 for 60 on 8\nat 2 for 30 on 2\n")

    nodes = "cluster.node_types=[{gpu_type: v100, nodes: 1, gpus_per_node: 8}]"
    asked = ("policy=[fifo,small_first]", nodes, "testbed=ideal", "restart_s=0", "figures=false")
    with Programs(copy) as programs:
        assert "small_first" in programs.run(["synergy_sim", "--help"])[1]
        assert "small_first" in programs.run(["synergy_core", "check", "small_first"])[1]
        typed = ["synergy_sim", "+trace=file", f"trace.path={log}", "trace.name=spoken", *asked]
        status, told, _ = programs.run(typed)
    assert status == 0, told
    mean_s = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))["mean_jct_s"]
        for path in copy.rglob("summary.json")
    }
    assert mean_s == {
        "fifo-0": pytest.approx((60 + 119 + 148) / 3),
        "small_first-0": pytest.approx((60 + 149 + 88) / 3),
    }
