"""Runs the same sweep with several launchers of Hydra, compares their tables, and prints the seconds per run.

    python bench/sweeps.py [--launchers basic joblib ray_cluster submitit_slurm] [--runs 200] [--break-off]

The sweep: two policies on --runs / 2 draws of a generated log. With --break-off each sweep is interrupted as by Ctrl-C
after a third of its runs, and resumed. Every table is compared with that of the first launcher, without the columns
that are measured. Start Ray (`ray start --head`) and Slurm beforehand.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd

SWEEP = ("+trace=philly", "trace.window=2017-10-09/6h", "trace.find=false", "figures=false", "policy=fifo,las")
MEASURED = ("decision_p50_s", "decision_p99_s", "simulation_cpu_s", "peak_memory_bytes", "folder")
"""Columns of the table that differ whenever the same runs are made again."""
OWN = {"joblib": ("hydra.launcher.n_jobs={workers}",), "submitit_slurm": ("hydra.launcher.cpus_per_task=1",)}
POLL_S = 0.2


def sweep(launcher: str, runs: int, workers: int, folder: Path, *, break_off: bool) -> tuple[pd.DataFrame, float]:
    """Runs the sweep; returns its table and its wall-clock seconds."""
    own = [each.format(workers=workers) for each in OWN.get(launcher, ())]
    seeds = f"seed=range({runs // 2})"
    command = [sys.executable, "-m", "synergy_sim", "-m", *SWEEP, seeds, f"results_dir={folder}"]
    command += [f"hydra/launcher={launcher}", *own]
    began_s, stopped_at = time.monotonic(), 0
    if break_off:
        begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while begun.poll() is None and (stopped_at := ended(folder)) < runs / 3:
            time.sleep(POLL_S)
        begun.send_signal(signal.SIGINT)
        said = begun.communicate()[1]
        resumed = re.search(r"hydra\.sweep\.dir=\S+", said)
        if resumed is None:
            raise SystemExit(f"{launcher}: the sweep was not interrupted; it said:\n{said[-3000:]}")
        command.append(resumed[0])
        if launcher == "submitit_slurm":  # its jobs go on without the command that sent them
            subprocess.run(["scancel", "--name=synergy_sim"], check=True)
            while subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True).stdout.strip():
                time.sleep(POLL_S)
        print(f"{launcher}: broken off after {stopped_at} of {runs} runs", flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    (table,) = folder.glob("sweeps/2*/comparison.parquet")
    return pd.read_parquet(table), time.monotonic() - began_s


def ended(folder: Path) -> int:
    """Counts the runs below this folder that have written their results."""
    return sum(1 for _ in folder.glob("sweeps/2*/[0-9]*/*/summary.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launchers", nargs="+", default=["basic", "joblib"], metavar="NAME")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes of joblib")
    parser.add_argument("--break-off", action="store_true")
    chosen = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it may be ignored
    first: pd.DataFrame | None = None
    for launcher in chosen.launchers:
        with tempfile.TemporaryDirectory() as folder:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            table, wall_s = sweep(launcher, chosen.runs, chosen.workers, Path(folder), break_off=chosen.break_off)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        table = table.drop(columns=[*MEASURED]).sort_values(["policy", "seed"], ignore_index=True)
        first = table if first is None else first
        verdict = "equals" if table.equals(first) else "DIFFERS FROM"
        print(
            f"{launcher}: {len(table)} runs, {wall_s:.0f} s, {wall_s / len(table):.2f} s a run, "
            f"{cpu_s:.0f} CPU s of this command's processes; the table {verdict} the first",
            flush=True,
        )


if __name__ == "__main__":
    main()
