"""What every policy decides, as digests: to be printed before a change of shape and after it, and compared.

    python bench/digests.py > before.txt

Six workloads through the command line (`python -m synergy_sim`), drawn and on the catalog's models, so that every
machine has the same: for every policy the digest of its event log and of its decisions' objectives, bounds and counts.
Then the plan tables of `python -m synergy_core plan`. CPU minutes: about 12.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd

ORDERS = "[fifo,backfill,easy,sjf,srtf,las,mlfq,tiresias,qssf,themis]"
READERS = "[gavel,optimus,pollux,sia,synergy,ftf,crius]"
ALL = f"{ORDERS[:-1]},{READERS[1:]}"
THREE_TYPES = (
    "cluster.node_types=[{gpu_type:v100,nodes:8,gpus_per_node:8},{gpu_type:t4,nodes:4,gpus_per_node:4},"
    "{gpu_type:rtx2080ti,nodes:2,gpus_per_node:8}]"
)
TENANTS = "cluster.virtual_clusters={}".format(
    "{" + ",".join(f"{name}:{gpus}" for name, gpus in (("a", 40), ("b", 32), ("c", 24))) + "}"
)
QUICK = ("parameters.pollux.generations=3", "parameters.pollux.population=8")
WORKLOADS: dict[str, tuple[str, ...]] = {
    "anywhere": ("trace.window=7d", "cluster.nodes=48", "cluster.placement=spread", f"policy={ORDERS}"),
    "together": ("trace.window=7d", "cluster.nodes=60", f"policy={ORDERS}"),
    "three types": ("trace.window=2d", "trace.sample=0.3", THREE_TYPES, f"policy={ORDERS}"),
    "training": ("trace.window=6h", "trace.sample=0.25", THREE_TYPES, "trace.models=mix", f"policy={ALL}", *QUICK),
    "rounds": (
        "trace.window=12h",
        "trace.sample=0.5",
        "cluster.nodes=20",
        "testbed=shockwave_v100",
        "trace.models=mix",
        f"policy={ORDERS[:-1]},gavel,synergy]",
    ),
    "plans": ("trace.window=4h", "trace.models=llm", "cluster=heterogeneous", "policy=[fifo,srtf,crius,sia,synergy]"),
}
PLANS = (("gpt-1.3b", "a100", 16), ("gpt-175b", "a100", 1024), ("arena-moe-10b", "a40", 32))


def digest(frame: pd.DataFrame) -> str:
    """Of values alone, column by column."""
    values = hashlib.sha256()
    for name in sorted(frame):
        values.update(name.encode())
        values.update(frame[name].astype(str).str.cat(sep="\n").encode())
    return values.hexdigest()[:16]


def run(*words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    done = subprocess.run([sys.executable, "-m", *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def main() -> None:
    for name, keys in WORKLOADS.items():
        with tempfile.TemporaryDirectory() as folder:
            run(
                "synergy_sim",
                "+trace=philly",
                "trace.gpu_type=null",
                "same_information=false",
                "truth.measured=false",
                f"results_dir={folder}",
                *keys,
            )
            for events in sorted(Path(folder).rglob("events.parquet")):
                rounds = pd.read_parquet(events.with_name("rounds.parquet"))
                rounds = rounds.drop(columns="decision_s")
                print(
                    f"{name:12} {events.parent.name:14} {digest(pd.read_parquet(events))} {digest(rounds)}", flush=True
                )
    for model, gpu, gpus in PLANS:
        shown = run("synergy_core", "plan", f"model={model}", f"gpu={gpu}", f"gpus={gpus}")
        print(f"plan         {model} {gpu} {gpus} {hashlib.sha256(shown.encode()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
