"""Digests of what every policy decides: `python tests/digests.py` writes digests.json, test_digests.py compares.

A change of shape leaves every digest as it is. Three groups:

- cases: random small cases of tests/cases.py, which draw execution model × truth × cluster × placement. Every policy
  has its own, drawn by its name, so that another policy changes none of them. `--cases [POLICY …]` writes cases alone;
  CPU minutes: about 1.
- runs: every policy on larger workloads and experiments, through the command line; all drawn or shipped, on the
  catalog's models, so that every machine has the same. CPU minutes: about 12.
- plans: the tables of `python -m synergy_core plan`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from random import Random

import conftest  # noqa: F401 - NumPy has to find its settings when it is imported
import pandas as pd
import planned_models
from case_checks import limited, prepared_case, simulated
from cases import POLICIES, Case, random_case

from synergy_runs.outputs.invariants import check

FILE = Path(__file__).with_name("digests.json")
CASES = 26
"""Cases of each policy."""
ORDERS = "[fifo,backfill,easy,sjf,srtf,las,mlfq,tiresias,qssf,themis]"
READERS = "[gavel,optimus,pollux,sia,synergy,ftf,crius]"
ALL = f"{ORDERS[:-1]},{READERS[1:]}"
THREE_TYPES = (
    "cluster.node_types=[{gpu_type:v100,nodes:8,gpus_per_node:8},{gpu_type:t4,nodes:4,gpus_per_node:4},"
    "{gpu_type:rtx2080ti,nodes:2,gpus_per_node:8}]"
)
QUICK = ("parameters.pollux.generations=3", "parameters.pollux.population=8")
PHILLY = ("+trace=philly", "trace.gpu_type=null", "same_information=false", "truth.measured=false")
RUNS: dict[str, tuple[str, ...]] = {
    "anywhere": (*PHILLY, "trace.window=7d", "cluster.nodes=48", "cluster.placement=spread", f"policy={ORDERS}"),
    "even": (*PHILLY, "trace.window=3d", "cluster.nodes=48", "cluster.placement=even", f"policy={ORDERS}"),
    "together": (*PHILLY, "trace.window=7d", "cluster.nodes=60", f"policy={ORDERS}"),
    "patient": (
        *PHILLY,
        "trace.window=3d",
        "cluster.nodes=50",
        "cluster.placement=relax",
        "cluster.patience_s=600",
        f"policy={ORDERS}",
    ),
    "tenants": (
        *PHILLY,
        "trace.window=3d",
        "cluster.virtual_clusters=trace",
        "trace.bad_rows=skip",
        f"policy={ORDERS}",
    ),
    "borrowing": (
        *PHILLY,
        "trace.window=2d",
        "cluster.virtual_clusters=trace",
        "trace.bad_rows=skip",
        "cluster.borrowing=true",
        f"policy={ORDERS}",
    ),
    "three types": (*PHILLY, "trace.window=2d", "trace.sample=0.3", THREE_TYPES, f"policy={ORDERS}"),
    "training": (
        *PHILLY,
        "trace.window=6h",
        "trace.sample=0.25",
        THREE_TYPES,
        "trace.models=mix",
        f"policy={ALL}",
        *QUICK,
    ),
    "rounds": (
        *PHILLY,
        "trace.window=12h",
        "trace.sample=0.5",
        "cluster.nodes=20",
        "testbed=shockwave_v100",
        "trace.models=mix",
        f"policy={ORDERS[:-1]},gavel,synergy]",
    ),
    "plans": (
        *PHILLY,
        "trace.window=4h",
        "trace.models=llm",
        "cluster=heterogeneous",
        "policy=[fifo,srtf,crius,sia,synergy,sia+plans]",
    ),
    "osdi22": (
        "experiment=synergy_osdi22",
        "policy=[fifo+proportional,fifo+greedy,fifo+tune,srtf+tune,las+tune,synergy]",
        "trace.jobs=150",
        "trace.measured_jobs=null",
    ),
    "compression": ("experiment=compression", "compression=coadaptive", "cluster.network_gbps=10", "trace.window=6h"),
}
PLANS = (("gpt-1.3b", "a100", 16), ("gpt-175b", "a100", 1024), ("arena-moe-10b", "a40", 32))


def digest(frame: pd.DataFrame) -> str:
    """Of the values alone, column by column: times in full, what an optimum is worth to nine digits; without why."""
    values = hashlib.sha256()
    for name in sorted(set(frame) - {"decision_s", "gap", "reason"}):
        column = frame[name]
        rounded = column.map("{:.9g}".format) if name in ("objective", "bound") else column.astype(str)
        values.update(name.encode())
        values.update(rounded.str.cat(sep="\n").encode())
    return values.hexdigest()[:12]


def case_of(policy: str, number: int) -> Case:
    """The policy's recorded case of that number."""
    return random_case(Random(f"{policy}/{number}"), policy)


def of_case(policy: str, number: int) -> str:
    """Placement and digest of that case: its events and its decisions. An error names the case."""
    made = case_of(policy, number)
    try:
        with limited():
            done = simulated(prepared_case(made))
        check(done)
    except Exception as error:
        error.add_note(f"case {policy}/{number}:\n{made}")
        raise
    rounds = pd.DataFrame(asdict(done.decisions))
    return f"{made.keys['cluster.placement']} {done.events.digest()[:12]} {digest(rounds)}"


def of_run(name: str) -> dict[str, str]:
    """Digests of each policy's events and decisions, by the folder of its run."""
    with tempfile.TemporaryDirectory() as folder:
        _typed("synergy_sim", *RUNS[name], f"results_dir={folder}")
        found = {}
        for events in sorted(Path(folder).rglob("events.parquet")):
            rounds = pd.read_parquet(events.with_name("rounds.parquet"))
            found[events.parent.name] = f"{digest(pd.read_parquet(events))} {digest(rounds)}"
    return found


def of_plan(model: str, gpu: str, gpus: int) -> str:
    shown = _typed("synergy_core", "plan", f"model={model}", f"gpu={gpu}", f"gpus={gpus}")
    return hashlib.sha256(shown.encode()).hexdigest()[:12]


def _typed(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=FILE, help="the file to write")
    parser.add_argument("--cases", nargs="*", metavar="POLICY", help="only the cases, of all or of these policies")
    chosen = parser.parse_args()
    planned_models.install(setattr)
    made = json.loads(FILE.read_text(encoding="utf-8"))
    kept = made["cases"] if chosen.cases else {}
    cases = {name: [of_case(name, number) for number in range(CASES)] for name in chosen.cases or POLICIES}
    made["cases"] = dict(sorted({**kept, **cases}.items()))
    if chosen.cases is None:
        made["plans"] = {" ".join(map(str, asked)): of_plan(*asked) for asked in PLANS}
        made["runs"] = {name: of_run(name) for name in RUNS}
    chosen.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
