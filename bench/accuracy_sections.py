"""The sections of docs/accuracy.md: which runs each needs, and what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys

from accuracy_asked import Asked, Section
from accuracy_osdi22 import osdi22_body, osdi22_runs, published_runs, shares_body, shares_once, shares_runs
from accuracy_ours import ours_body, ours_runs
from accuracy_parts import ablation_body, ablation_runs, sensitivity_body, sensitivity_runs
from accuracy_pollux import pollux_body, pollux_runs
from accuracy_runs import ROOT, write_atomically
from accuracy_sia import sia_body, sia_runs

FORMS = "mean error in % over the applications, on held-out"
"""Where bench/fit.py begins to compare forms of the all-reduce."""


def fit_body(asked: Asked) -> str:
    """What bench/fit.py prints."""
    fits, _, _ = printed_by(asked, "fit.py").partition(FORMS)
    return (
        "`python bench/fit.py` (needs: data) prints the following; [resources.md](resources.md) has the forms of\n"
        "the all-reduce. Goals: at most 2 ms CPU per fit in a batch of 100 (the peers: 47–130 ms); mean error on\n"
        "each table at or below that of the peers' own fit, which is Pollux's form (column *all*, left of each\n"
        "arrow).\n\n```\n" + fits.strip() + "\n```"
    )


def load_body(asked: Asked) -> str:
    """What bench/load_curve.py prints and draws."""
    return (
        "The figures are synergy ÷ sia given the same, both with their default parameters, as `python\n"
        "bench/load_curve.py --figure docs/load.png` (needs: data; minutes: 15) prints them. A quarter of the jobs\n"
        "of 2017-10-16 to 19, drawn by five seeds, run as training jobs of the catalog's models on 15 × 8 GPUs that\n"
        "are empty at first. Arrivals are made denser until the jobs' run time × GPUs in the log is *load* times\n"
        "the GPU-time of the cluster. No parameter was chosen on these days. ±: 95 % interval over seeds, Student's\n"
        "t of paired ratios; the other columns are means of ratios. Goals: p99 wait and p99 slowdown at most 0.5;\n"
        "p99 JCT, makespan and worst ρ (metrics.md) at most 1.05.\n\n"
        "![Mean JCT of synergy ÷ that of sia given the same, by offered load](load.png)\n\n"
        + printed_by(asked, "load_curve.py", "--figure", "docs/load.png").strip()
    )


RUBICK = """\
`experiment=rubick_mlsys25` has 8 nodes of 8 A800, the artifact's trace of 406 jobs and its measured step times, 260
s before the first step on any new split of GPUs over nodes, and fixed global batches. Every policy knows the table,
and jobs run under the best plan that was measured on their GPUs; *sia* knows only replicas of the smallest plan,
and *fifo+tune* is the allocation of Synergy of OSDI 2022. synergy reads the requested steps; with
information=shared it does not. `python bench/published_plans.py rubick` (needs: data) prints:

{table}

The first row is the result of the artifact's own simulator on this trace. Our rubick follows the paper: its mean
JCT is near, its makespan is not. A job that was restarted five times keeps its GPUs, so jobs of 32 GPUs and more
wait for room; without that rule (*most_changes=1000*) they wait less. The artifact puts such jobs back into the
queue every round, but no job ever takes GPUs from them. Goals: synergy ÷ the artifact at most 0.45, without
declared work 0.60; p99 no worse; makespan at most 1.02."""
ARENA = """\
`experiment=arena_eurosys26` has 1,280 GPUs of four types, the 986 jobs of the artifact's trace within its 2,000
rounds of 300 s, and the step times that the artifact measured under the best plan. fifo, gavel and sia pay 300 s
per start, as the artifact's baselines do for their search of plans, and know only shapes on which data parallelism
fits, or else the smallest shape on which a plan fits; the others pay 40 s. `python bench/published_plans.py arena`
(needs: data; minutes: 10) prints:

{table}

In the artifact, jobs for which data parallelism fits nowhere never run under gavel and sia. Here they run on the
smallest shape, so both finish more jobs than published, and crius is less far ahead of them. Goal: synergy 25 %
below crius. No policy can be below the bound's mean of all jobs; the mean of finished jobs is lower if long jobs are
left unfinished."""


def rubick_body(asked: Asked) -> str:
    """The section on Rubick: its set-up, the table that bench/published_plans.py prints, and how to read it."""
    return RUBICK.format(table=printed_by(asked, "published_plans.py", "rubick").strip())


def arena_body(asked: Asked) -> str:
    """The section on Arena: its set-up, the table that bench/published_plans.py prints, and how to read it."""
    return ARENA.format(table=printed_by(asked, "published_plans.py", "arena").strip())


def printed_by(asked: Asked, program: str, *arguments: str) -> str:
    """What a program of bench/ prints, or printed in an earlier call where nothing is to be run."""
    printed = asked.folder / f"{program.removesuffix('.py')}.txt"
    if not asked.only_page:
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        told = subprocess.run(
            [sys.executable, str(ROOT / "bench" / program), *arguments],
            capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
        )  # fmt: skip
        if told.returncode:
            error = (told.stderr.strip().splitlines() or ["no output"])[-1]
            return f"`python bench/{program}` failed:\n\n```\n{error}\n```"
        write_atomically(printed, told.stdout)
    return printed.read_text(encoding="utf-8") if printed.is_file() else f"`python bench/{program}` has not been run."


SECTIONS = (
    Section("pollux", "Pollux's published completion times", pollux_runs, pollux_body),
    Section("sia", "Sia's published table", sia_runs, sia_body),
    Section("ours", "Synergy against Sia", ours_runs, ours_body),
    Section("load", "Against offered load", list, load_body),
    Section("ablation", "Each part alone", ablation_runs, ablation_body),
    Section("sensitivity", "Wrong declarations, split labels, noise, checkpoints", sensitivity_runs, sensitivity_body),
    Section("rubick", "Rubick's trace on its measured plans", list, rubick_body),
    Section("arena", "Arena's trace on its measured plans", list, arena_body),
    Section("osdi22", "CPUs and memory: Synergy of OSDI 2022", osdi22_runs, osdi22_body, published_runs),
    Section("shares", "CPUs and memory under synergy", shares_runs, shares_body, shares_once),
    Section("fit", "Fits", list, fit_body),
)
