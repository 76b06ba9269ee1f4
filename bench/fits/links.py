"""Constants of links: latencies and efficiencies of collectives.

Reads parallel/nccl_bandwidth.csv (NCCL alone, one node) and arena/collectives.csv (under JAX, one node and several).
A soft-L1 loss of log residuals; every group of ranks and operation counts alike, whatever its number of rows. Rows in
which ranks have nothing to exchange measure the software's own time.

Held out: each group size (in a node) or number of nodes in turn; each GPU type; each decade of sizes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd
from runner.experiment import data_file
from runner.tables import error_table
from scipy.optimize import least_squares

from fits import MEASURED, Made, rounded, scored, sums, told
from synergy_core.commands._scoring import COLLECTIVES, soft_l1
from synergy_core.commands.calibrate import as_yaml, rounded_errors
from synergy_core.performance.planner.machine import Link, Links, rings

SUMMARY = "catalog/links: latencies and efficiencies of collectives (needs: data)"
NCCL, ARENA = "parallel/nccl_bandwidth.csv", "arena/collectives.csv"
MIB = 2.0**20
SMALL_WEIGHT = 0.3
"""Weight of messages below 1 MiB, which training rarely sends."""
PRIOR_WEIGHT = 0.05
SCALE = 0.1
"""Log residual from which the loss grows only linearly."""

# Arena's send rows equal its all-gather rows in time, and exceed the link as one-way transfers: taken as what they are.
OPERATIONS = {**COLLECTIVES, "send": COLLECTIVES["all-gather"]}
# Kind of link, rate of a GPU one way (bytes/s), GPUs that it joins. Vendors' data sheets: NVLink 3 and 4 of A100 and
# H200, NVLink 2 of V100 (DGX-1V's mesh; Arena's 16 on switches), PCIe 4.0 and 3.0 ×16.
MACHINES = {
    ("A100", "nccl"): ("nvswitch", 300e9, 8),
    ("H200", "nccl"): ("nvswitch", 450e9, 8),
    ("V100", "nccl"): ("nvlink", 150e9, 8),
    ("V100", "jax"): ("nvswitch", 150e9, 16),
    ("A40", "jax"): ("pcie", 31.5e9, 2),
    ("P100", "jax"): ("pcie", 15.75e9, 4),
}
# Of a node, bytes/s. Arena does not state its InfiniBand; 100 Gb/s is the slowest that its fastest rows fit into.
NETWORKS = {"infiniband": 100e9 / 8.0, "ethernet": 1e9 / 8.0}
A40_NODE = 2
# Where fits start and what they are weakly held to: NCCL's own latencies (src/graph/tuning.cc), no loss of rate.
START = Link(
    efficiency=0.8,
    fixed_s=10e-6,
    hop_s=3.4e-6,
    ramp_s=3e-6,
    low_fixed_s=6.6e-6,
    low_hop_s=1.0e-6,
    low_share=0.25,
    exchange=0.8,
    switch_efficiency=0.75,
)
NETWORK_START = replace(START, hop_s=14e-6, low_hop_s=5e-6, ramp_s=14e-6, switch_efficiency=0.0)
SHARES = ("efficiency", "low_share", "exchange", "switch_efficiency")
DISPATCH_RANK_S = 10e-6
IN_NODE = ("efficiency", "fixed_s", "hop_s", "ramp_s", "low_fixed_s", "low_hop_s", "low_share")


STAGES: dict[str, tuple[Link, tuple[str, ...], tuple[str, ...]]] = {
    "nvswitch": (START, (*IN_NODE, "exchange", "switch_efficiency"), ("V100",)),
    "nvlink": (START, IN_NODE, ()),
    "pcie": (START, (*IN_NODE, "exchange"), ("A40", "P100")),
    "infiniband": (NETWORK_START, (*IN_NODE, "exchange"), ()),
    "ethernet": (NETWORK_START, (*IN_NODE, "exchange"), ()),
}
"""By kind of link, in the order in which they are fitted: where it starts, its free constants, and hosts whose time per
rank is fitted with it."""
Fitted = tuple[dict[str, Link], dict[str, float]]
"""Constants of each kind of link, and of JAX on each host: s per rank."""


def read_csv(name: str, **names: str) -> pd.DataFrame:
    """Reads a table of collectives. names: columns to rename, from the old name to the new one."""
    cells = pd.read_csv(data_file(name), keep_default_na=False, na_values={"time_us": ""}, float_precision="round_trip")
    return cells.rename(columns=names)


def nccl_rows() -> pd.DataFrame:
    rows = read_csv(NCCL, cluster="groups", n_gpus="ranks", size_bytes="nbytes").dropna(subset="time_us")
    return rows.assign(software="nccl", network="", nodes=1, idle_s=0.0).assign(
        gpu=rows["gpu"].str.split("-").str[0],
        operation=rows["collective"].str.replace("_", "-"),
        in_switch=rows["algo"].str.contains("NVLS") & ~rows["algo"].str.contains("off"),
        time_s=rows["time_us"] * 1e-6,
    )


def arena_rows() -> pd.DataFrame:
    """Rows that exchange something. idle_s: the GPU type's median time of those that do not."""
    rows = read_csv(ARENA, group_size="ranks", bytes="nbytes")
    first_groups = (json.loads(each)[0] for each in rows["groups"])
    nodes = [len({rank // g for rank in group}) for group, g in zip(first_groups, rows["gpus_per_node"], strict=True)]
    ranks, operation = rows["ranks"], rows["operation"]
    # Fewer elements than parts: nothing moves.
    idle = rows["elements"] < ranks.mask(operation == "all-reduce", 1).mask(operation == "all-to-all", ranks**2)
    rows = rows.assign(software="jax", in_switch=False, nodes=nodes).assign(
        groups=rows["n_nodes"].astype(str) + ":" + rows["groups"],
        network=rows["network"].replace("default", "ethernet").where(np.array(nodes) > 1, ""),
        idle_s=rows["gpu"].map(rows[idle].groupby("gpu")["time_s"].median()),
    )
    return rows[~idle]


def predict(rows: pd.DataFrame, fitted: Fitted) -> np.ndarray:
    """(rows,): s."""
    kinds, rank_s = fitted
    result = np.full(len(rows), np.nan)
    sizes = np.stack([rows["nbytes"], rows["ranks"], rows["ranks"] / rows["nodes"]])
    keys = ["gpu", "software", "network", "in_switch", "operation", "idle_s"]
    for key, at in rows.groupby(keys, sort=False).indices.items():
        gpu, software, network, in_switch, operation, idle_s = key
        kind, rate, group = MACHINES[gpu, software]
        inside = kinds[kind]
        links = Links(
            inside=inside if in_switch else replace(inside, switch_efficiency=0.0),
            inside_bytes_per_s=rate,
            link_group=group,
            rings=rings(kind, group),
            host=inside,
            host_bytes_per_s=rate,
            network=kinds.get(network, NETWORK_START),
            network_bytes_per_s=NETWORKS.get(network, 1.0) / A40_NODE,
            dispatch_s=idle_s,
            dispatch_rank_s=rank_s[gpu] if software == "jax" else 0.0,
        )
        result[at] = OPERATIONS[operation](*sizes[:, at], links)
    return result


def weights(rows: pd.DataFrame) -> np.ndarray:
    """(rows,): every (GPU, operation, group) counts alike; messages below 1 MiB count less."""
    groups = rows.groupby(["gpu", "operation", "groups", "ranks"])
    counts = groups["gpu"].transform("size").to_numpy()
    return np.sqrt(len(rows) / groups.ngroups / counts) * np.where(rows["nbytes"] < MIB, SMALL_WEIGHT, 1.0)


def fit_kind(kind: str, rows: pd.DataFrame, known: Fitted) -> Fitted:
    """Fits a kind's constants and its hosts' time per rank; the rest of `known` stays."""
    (kinds, rank_s), (_, free, hosts) = known, STAGES[kind]
    first = np.log([getattr(kinds[kind], name) for name in free] + [rank_s[host] for host in hosts])
    upper = np.log([1.0 if name in SHARES else 5e-3 for name in free] + [1e-3 for _ in hosts])
    lower = np.log([0.02 if name in SHARES else 1e-8 for name in free] + [1e-7 for _ in hosts])
    weight, measured_s = weights(rows), rows["time_s"].to_numpy()

    def build(values: np.ndarray) -> Fitted:
        found = dict(zip((*free, *hosts), np.exp(values).tolist(), strict=True))
        link = replace(kinds[kind], **{name: found[name] for name in free})
        return {**kinds, kind: link}, {**rank_s, **{host: found[host] for host in hosts}}

    def residuals(values: np.ndarray) -> np.ndarray:
        off = weight * np.log(predict(rows, build(values)) / measured_s)
        soft = np.sign(off) * soft_l1(off, SCALE)
        return np.concatenate([soft, PRIOR_WEIGHT * np.sqrt(len(rows)) * SCALE * (values - first)])

    found = least_squares(residuals, np.clip(first, lower + 1e-6, upper - 1e-6), bounds=(lower, upper), max_nfev=60)
    return build(found.x)


def fit_all(rows: pd.DataFrame, fitted: Fitted, only: str | None = None) -> Fitted:
    """Fits every kind of link, or one, to the rows. fitted: where the fit starts."""
    for kind in STAGES:
        if kind == "nvlink":  # No all-to-all was measured on a mesh: as on switches.
            kinds, rank_s = fitted
            fitted = {**kinds, kind: replace(kinds[kind], exchange=kinds["nvswitch"].exchange)}, rank_s
        own = rows[rows["link"] == kind]
        if only in (None, kind) and len(own):
            fitted = fit_kind(kind, own, fitted)
    return fitted


def in_sample() -> tuple[pd.DataFrame, Fitted]:
    """All rows, and the fit to them. network is '' within a node; link is the kind that is fitted to the row."""
    rows = pd.concat([nccl_rows(), arena_rows()], ignore_index=True)
    kinds = [MACHINES[each][0] for each in zip(rows["gpu"], rows["software"], strict=True)]
    rows["link"] = rows["network"].where(rows["network"] != "", kinds)
    start = {kind: first for kind, (first, *_) in STAGES.items()}
    return rows, fit_all(rows, (start, dict.fromkeys(("A40", "P100", "V100"), DISPATCH_RANK_S)))


def large(rows: pd.DataFrame, how: str, fitted: Fitted) -> pd.DataFrame:
    """The rows of 1 MiB and more as predicted by a fit. how: what it did not see."""
    rows = rows[rows["nbytes"] >= MIB]
    return told(rows, how, predict(rows, fitted))


def held_out(rows: pd.DataFrame, full: Fitted) -> Iterator[pd.DataFrame]:
    """Yields, for each way of holding rows out, the rows with predictions by fits that did not see their part."""
    parts = {
        "without its group size": rows["ranks"].where(rows["network"] == "", rows["nodes"]),
        "without its GPU type": rows["gpu"] + rows["software"],
        "without its decade of sizes": np.floor(np.log10(rows["nbytes"])),
    }
    for how, label in parts.items():
        for kind, (start, _, hosts) in STAGES.items():
            mask = rows["link"] == kind
            values = label[mask].unique()
            for value in values if len(values) > 1 else []:
                tested = mask & (label == value)
                first = {**full[0], kind: start}, {**full[1], **dict.fromkeys(hosts, DISPATCH_RANK_S)}
                yield large(rows[tested], how, fit_all(rows[~tested], first, kind))


def everything() -> tuple[pd.DataFrame, Fitted, pd.DataFrame]:
    """All rows, the fit to them, and rows as predicted in sample and held out."""
    rows, fitted = in_sample()
    return rows, fitted, pd.concat([large(rows, MEASURED, fitted), *held_out(rows, fitted)])


def scores(predicted: pd.DataFrame) -> list[dict[str, Any]]:
    """Scores by held-out part, GPU type and link."""
    order = list(predicted["how"].unique())
    found = scored(predicted.sort_values(["gpu", "link"]), "how", "gpu", "link")
    return sorted(found, key=lambda each: order.index(each["how"]))


def fit() -> Made:
    rows, (kinds, rank_s), predicted = everything()
    contents = {}
    for kind, (_, free, _) in STAGES.items():
        own = rows[rows["link"] == kind]
        by_how = predicted[predicted["link"] == kind].groupby("how", sort=False)
        used = sorted({NCCL if each == "nccl" else ARENA for each in own["software"]})
        link = asdict(kinds[kind])
        contents[kind] = {
            "constants": {k: rounded(v) for k, v in link.items() if k != "switch_efficiency" or k in free},
            "fitted": list(free),
            "rows": len(own),
            "inputs_sha256": sums({name: data_file(name) for name in used}),
            "errors_from_1_mib": {
                how: rounded_errors(*each[["predicted_s", "time_s"]].to_numpy().T) for how, each in by_how
            },
        }
    idle_s = rows[rows["software"] == "jax"].groupby("gpu")["idle_s"].first()
    hosts = {
        host.lower(): {"dispatch_s": rounded(idle_s[host]), "dispatch_rank_s": rounded(seconds)}
        for host, seconds in rank_s.items()
    }
    contents["jax"] = {"hosts": hosts, "inputs_sha256": sums({ARENA: data_file(ARENA)})}
    comment = "Fitted by bench/fits.py links; what the constants mean: synergy_core/performance/planner/machine.py."
    folder = "synergy_core/performance/catalog/links"
    files = {f"{folder}/{name}.yaml": as_yaml(each, comment) for name, each in contents.items()}
    return Made(files, error_table(scores(predicted), rows="how", GPU="gpu", link="link"))
