"""Fits the constants in synergy_core/catalog/links/ to measured collectives, and says how well they predict.

    SYNERGY_DATA=… python bench/fit_links.py [--write] [--no-held-out] [--json OUT]

Reads parallel/nccl_bandwidth.csv (NCCL alone, one node) and arena/collectives.csv (under JAX, one node and several).
A soft-L1 loss of log residuals; every group of ranks and operation counts alike, whatever its number of rows. Rows in
which ranks have nothing to exchange measure the software's own time. What is written is fitted, never a measured row.

Held out: each group size (in a node) or number of nodes in turn; each GPU type; each decade of sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from synergy_core.commands.calibrate import as_yaml
from synergy_core.commands.measurements._table import read_table
from synergy_core.goodput.calibration import Accuracy, accuracy
from synergy_core.planner.communication import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from synergy_core.planner.machine import Link, Links, rings

OUT = Path(__file__).parent.parent / "synergy_core" / "catalog" / "links"
NCCL, ARENA = "parallel/nccl_bandwidth.csv", "arena/collectives.csv"
MIB = 2.0**20
SMALL_WEIGHT = 0.3
"""Of messages below 1 MiB, which training rarely sends."""
PRIOR_WEIGHT = 0.05
SCALE = 0.1
"""Log residual from which the loss grows only linearly."""

# Arena's send rows equal its all-gather rows in time, and exceed the link as one-way transfers: taken as what they are.
OPERATIONS = {
    "all-reduce": all_reduce_s,
    "all_reduce": all_reduce_s,
    "all-gather": all_gather_s,
    "send": all_gather_s,
    "reduce-scatter": reduce_scatter_s,
    "all-to-all": all_to_all_s,
}
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


@dataclass(frozen=True)
class Rows:
    """Measured collectives as columns; network is '' within a node."""

    gpu: np.ndarray
    software: np.ndarray
    operation: np.ndarray
    groups: np.ndarray
    network: np.ndarray
    in_switch: np.ndarray
    ranks: np.ndarray
    per_node: np.ndarray
    nodes: np.ndarray
    nbytes: np.ndarray
    time_s: np.ndarray

    def __len__(self) -> int:
        return len(self.gpu)

    def take(self, mask: np.ndarray) -> Rows:
        return Rows(*(getattr(self, name)[mask] for name in Rows.__dataclass_fields__))


def nccl_rows(folder: Path) -> Rows:
    table = read_table(folder / NCCL)
    timed = np.array([bool(each) for each in table.cells("time_us")])
    size, ranks = (np.array([float(each) for each in table.cells(name)]) for name in ("size_bytes", "n_gpus"))
    time = np.array([float(each or "nan") for each in table.cells("time_us")]) * 1e-6
    rows = Rows(
        gpu=np.array([each.split("-")[0] for each in table.cells("gpu")]),
        software=np.full(len(size), "nccl"),
        operation=np.array(table.cells("collective")),
        groups=np.array(table.cells("cluster")),
        network=np.full(len(size), "", dtype="<U10"),
        in_switch=np.array(["NVLS" in each and "off" not in each for each in table.cells("algo")]),
        ranks=ranks,
        per_node=ranks,
        nodes=np.ones(len(size)),
        nbytes=size,
        time_s=time,
    )
    return rows.take(timed)


def arena_rows(folder: Path) -> tuple[Rows, dict[str, float]]:
    """Rows that exchange something, and each GPU type's median time (s) of those that do not."""
    table = read_table(folder / ARENA)
    lists = [json.loads(each) for each in table.cells("groups")]
    node = [int(each) for each in table.cells("gpus_per_node")]
    # How many nodes the first group spans.
    spans = np.array([len({rank // g for rank in each[0]}) for each, g in zip(lists, node, strict=True)], dtype=float)
    ranks, size, time, elements = (
        np.array([float(each) for each in table.cells(name)]) for name in ("group_size", "bytes", "time_s", "elements")
    )
    between = np.array(["ethernet" if each == "default" else each for each in table.cells("network")])
    rows = Rows(
        gpu=np.array(table.cells("gpu")),
        software=np.full(len(size), "jax"),
        operation=np.array(table.cells("operation")),
        groups=np.array([f"{a}:{b}" for a, b in zip(table.cells("n_nodes"), table.cells("groups"), strict=True)]),
        network=np.where(spans > 1, between, ""),
        in_switch=np.zeros(len(size), dtype=bool),
        ranks=ranks,
        per_node=ranks / spans,
        nodes=spans,
        nbytes=size,
        time_s=time,
    )
    # Fewer elements than parts: nothing moves.
    operation = rows.operation
    parts = np.select([operation == "all-reduce", operation == "all-to-all"], [np.ones_like(ranks), ranks**2], ranks)
    idle = elements < parts
    idle_s = {each: float(np.median(time[idle & (rows.gpu == each)])) for each in np.unique(rows.gpu).tolist()}
    return rows.take(~idle), idle_s


@dataclass(frozen=True)
class Fitted:
    """Constants of each kind of link, and of JAX on each host: s, and s per rank."""

    kinds: dict[str, Link]
    dispatch: dict[str, tuple[float, float]]


def predict(rows: Rows, fitted: Fitted) -> np.ndarray:
    """(rows,): s."""
    result = np.full(len(rows), np.nan)
    keys = list(zip(rows.gpu, rows.software, rows.network, rows.in_switch, rows.operation, strict=True))
    for key in sorted(set(keys)):
        gpu, software, network, in_switch, operation = key
        kind, rate, group = MACHINES[gpu, software]
        inside = fitted.kinds[kind]
        idle_s, rank_s = fitted.dispatch[gpu] if software == "jax" else (0.0, 0.0)
        links = Links(
            inside=inside if in_switch else replace(inside, switch_efficiency=0.0),
            inside_bytes_per_s=rate,
            link_group=group,
            rings=rings(kind, group),
            host=inside,
            host_bytes_per_s=rate,
            network=fitted.kinds.get(network, NETWORK_START),
            network_bytes_per_s=NETWORKS.get(network, 1.0) / A40_NODE,
            dispatch_s=idle_s,
            dispatch_rank_s=rank_s,
        )
        at = np.array([each == key for each in keys])
        result[at] = OPERATIONS[operation](rows.nbytes[at], rows.ranks[at], rows.per_node[at], links)
    return result


def weights(rows: Rows) -> np.ndarray:
    """(rows,): every (GPU, operation, group) counts alike; messages below 1 MiB count less."""
    names = np.array(
        ["|".join(map(str, each)) for each in zip(rows.gpu, rows.operation, rows.groups, rows.ranks, strict=True)]
    )
    _, group, counts = np.unique(names, return_inverse=True, return_counts=True)
    return np.sqrt(counts.mean() / counts[group]) * np.where(rows.nbytes < MIB, SMALL_WEIGHT, 1.0)


def fit_kind(kind: str, rows: Rows, known: Fitted, free: Sequence[str], hosts: Sequence[str]) -> Fitted:
    """Fits a kind's constants and its hosts' time per rank; the rest of `known` stays."""
    start = known.kinds[kind]
    first = np.log([getattr(start, name) for name in free] + [known.dispatch[host][1] for host in hosts])
    upper = np.log([1.0 if name in SHARES else 5e-3 for name in free] + [1e-3 for _ in hosts])
    lower = np.log([0.02 if name in SHARES else 1e-8 for name in free] + [1e-7 for _ in hosts])
    weight = weights(rows)

    def build(values: np.ndarray) -> Fitted:
        link = replace(start, **dict(zip(free, np.exp(values[: len(free)]).tolist(), strict=True)))
        dispatch = {
            host: (known.dispatch[host][0], float(np.exp(each)))
            for host, each in zip(hosts, values[len(free) :], strict=True)
        }
        return Fitted({**known.kinds, kind: link}, {**known.dispatch, **dispatch})

    def residuals(values: np.ndarray) -> np.ndarray:
        off = weight * np.log(predict(rows, build(values)) / rows.time_s)
        soft = SCALE * np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + (off / SCALE) ** 2) - 1.0))
        return np.concatenate([soft, PRIOR_WEIGHT * np.sqrt(len(rows)) * SCALE * (values - first)])

    found = least_squares(residuals, np.clip(first, lower + 1e-6, upper - 1e-6), bounds=(lower, upper), max_nfev=60)
    return build(found.x)


IN_NODE = ("efficiency", "fixed_s", "hop_s", "ramp_s", "low_fixed_s", "low_hop_s", "low_share")
BETWEEN = ("efficiency", "fixed_s", "hop_s", "ramp_s", "low_fixed_s", "low_hop_s", "low_share", "exchange")


def stages(rows: Rows) -> list[tuple[str, np.ndarray, tuple[str, ...], tuple[str, ...]]]:
    """What is fitted, in order: kind, its rows, free constants, hosts."""
    kind = np.array([MACHINES[each][0] for each in zip(rows.gpu, rows.software, strict=True)])
    near = rows.network == ""
    return [
        ("nvswitch", near & (kind == "nvswitch"), (*IN_NODE, "exchange", "switch_efficiency"), ("V100",)),
        ("nvlink", near & (kind == "nvlink"), IN_NODE, ()),
        ("pcie", near & (kind == "pcie"), (*IN_NODE, "exchange"), ("A40", "P100")),
        ("infiniband", rows.network == "infiniband", BETWEEN, ()),
        ("ethernet", rows.network == "ethernet", BETWEEN, ()),
    ]


def fit_all(
    rows: Rows, idle_s: dict[str, float], kept: np.ndarray, only: str | None = None, base: Fitted | None = None
) -> Fitted:
    """Fits every stage, or one on top of `base`, to the rows kept."""
    fitted = base or Fitted(
        dict.fromkeys(("nvswitch", "nvlink", "pcie"), START) | dict.fromkeys(("infiniband", "ethernet"), NETWORK_START),
        {host: (idle_s[host], DISPATCH_RANK_S) for host in idle_s},
    )
    for kind, mask, free, hosts in stages(rows):
        if kind == "nvlink":  # No all-to-all was measured on a mesh: as on switches.
            mesh = replace(fitted.kinds[kind], exchange=fitted.kinds["nvswitch"].exchange)
            fitted = Fitted({**fitted.kinds, kind: mesh}, fitted.dispatch)
        if only in (None, kind) and (mask & kept).any():
            fitted = fit_kind(kind, rows.take(mask & kept), fitted, free, hosts)
    return fitted


def bands(rows: Rows) -> dict[str, np.ndarray]:
    return {
        "< 1 MiB": rows.nbytes < MIB,
        "1-16 MiB": (rows.nbytes >= MIB) & (rows.nbytes < 16 * MIB),
        ">= 16 MiB": rows.nbytes >= 16 * MIB,
        ">= 1 MiB": rows.nbytes >= MIB,
    }


def report(rows: Rows, predicted: np.ndarray, how: str) -> list[dict[str, Any]]:
    """Errors for each GPU type, link, group size and band of sizes; 'all' sums over group sizes and operations."""
    columns = zip(rows.gpu, rows.software, rows.network, strict=True)
    link = np.array([network or MACHINES[gpu, software][0] for gpu, software, network in columns])
    simple = np.char.replace(rows.operation, "_", "-")
    result = []
    for gpu, where in sorted(set(zip(rows.gpu.tolist(), link.tolist(), strict=True))):
        here = (rows.gpu == gpu) & (link == where)
        split: list[tuple[str, np.ndarray]] = [("all", here)]
        split += [(each, here & (simple == each)) for each in np.unique(simple[here]).tolist()]
        split += [
            (f"all-reduce of {n:g} on {k:g}", here & (simple == "all-reduce") & (rows.ranks == n) & (rows.nodes == k))
            for n, k in sorted(set(zip(rows.ranks[here].tolist(), rows.nodes[here].tolist(), strict=True)))
        ]
        for name, mask in split:
            for band, sized in bands(rows).items():
                chosen = mask & sized & np.isfinite(predicted)
                if chosen.any():
                    found = accuracy(predicted[chosen], rows.time_s[chosen])
                    result.append({"how": how, "gpu": gpu, "link": where, "group": name, "band": band} | asdict(found))
    return result


def held_out(rows: Rows, idle_s: dict[str, float], full: Fitted) -> dict[str, np.ndarray]:
    """(rows,) for each way of holding out: predicted by fits that saw no row of its part; NaN if there is no other."""
    parts: dict[str, np.ndarray] = {
        "without its group size": np.where(rows.network == "", rows.ranks, rows.nodes).astype("U8"),
        "without its GPU type": np.char.add(rows.gpu, rows.software),
        "without its decade of sizes": np.floor(np.log10(rows.nbytes)).astype("U8"),
    }
    result = {}
    for how, label in parts.items():
        predicted = np.full(len(rows), np.nan)
        for kind, mask, _, hosts in stages(rows):
            values = np.unique(label[mask])
            for value in values.tolist() if len(values) > 1 else []:
                tested = mask & (label == value)
                hosts_of = dict.fromkeys(hosts, DISPATCH_RANK_S)
                dispatch = {host: (idle, hosts_of.get(host, rank)) for host, (idle, rank) in full.dispatch.items()}
                start = START if rows.network[mask][0] == "" else NETWORK_START
                fitted = fit_all(rows, idle_s, ~tested, kind, Fitted({**full.kinds, kind: start}, dispatch))
                predicted[tested] = predict(rows.take(tested), fitted)
        result[how] = predicted
    return result


def show(found: list[dict[str, Any]], keep: Callable[[dict[str, Any]], bool]) -> None:
    print(
        f"{'how':28} {'GPU':5} {'link':10} {'group':22} {'band':10} {'n':>5} "
        f"{'MAPE':>7} {'median':>7} {'p90':>7} {'max':>8} {'bias':>7}"
    )
    for each in filter(keep, found):
        figures = " ".join(f"{each[name]:7.1%}" for name in ("mape", "median", "p90"))
        print(
            f"{each['how']:28} {each['gpu']:5} {each['link']:10} {each['group']:22} {each['band']:10} {each['n']:5d} "
            f"{figures} {each['max']:8.1%} {each['bias']:+7.1%}"
        )


def write(folder: Path, rows: Rows, fitted: Fitted, held: dict[str, np.ndarray]) -> None:
    """One file for each kind, and jax.yaml."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in (NCCL, ARENA)}
    predicted = predict(rows, fitted)
    comment = "Fitted by bench/fit_links.py; what the constants mean: synergy_core/planner/machine.py."
    OUT.mkdir(exist_ok=True)

    def error(values: np.ndarray, mask: np.ndarray) -> dict[str, float]:
        found: Accuracy = accuracy(values[mask], rows.time_s[mask])
        return {"n": found.n, **{name: round(getattr(found, name), 4) for name in ("mape", "median", "p90", "max")}}

    for kind, mask, free, _ in stages(rows):
        link = asdict(fitted.kinds[kind])
        link = {k: float(f"{v:.4g}") for k, v in link.items() if k != "switch_efficiency" or k in free}
        sized = mask & (rows.nbytes >= MIB)
        errors = {"in sample": error(predicted, sized)}
        for how, values in held.items():
            known = sized & np.isfinite(values)
            if known.any():
                errors[how] = error(values, known)
        used = sorted({NCCL if each == "nccl" else ARENA for each in rows.software[mask]})
        content = {
            "constants": link,
            "fitted": list(free),
            "rows": int(mask.sum()),
            "inputs_sha256": {name: sums[name] for name in used},
            "errors_from_1_mib": errors,
        }
        (OUT / f"{kind}.yaml").write_text(as_yaml(content, comment), encoding="utf-8")
    hosts = {
        host.lower(): {"dispatch_s": float(f"{idle:.4g}"), "dispatch_rank_s": float(f"{rank:.4g}")}
        for host, (idle, rank) in fitted.dispatch.items()
    }
    content = {"hosts": hosts, "inputs_sha256": {ARENA: sums[ARENA]}}
    (OUT / "jax.yaml").write_text(as_yaml(content, comment), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the catalog's files")
    parser.add_argument("--no-held-out", action="store_true", help="only in sample: quicker")
    parser.add_argument("--all", action="store_true", help="print every group, not only sums and all-reduces")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every group as JSON")
    chosen = parser.parse_args()
    folder = Path(os.environ["SYNERGY_DATA"])
    arena, idle_s = arena_rows(folder)
    nccl = nccl_rows(folder)
    rows = Rows(*(np.concatenate([getattr(nccl, name), getattr(arena, name)]) for name in Rows.__dataclass_fields__))
    fitted = fit_all(rows, idle_s, np.ones(len(rows), dtype=bool))
    for kind, link in fitted.kinds.items():
        print(kind, {name: float(f"{value:.4g}") for name, value in asdict(link).items()})
    print("jax", fitted.dispatch)
    found = report(rows, predict(rows, fitted), "in sample")
    held = {} if chosen.no_held_out else held_out(rows, idle_s, fitted)
    for how, values in held.items():
        found += report(rows, values, how)
    show(found, lambda each: chosen.all or each["how"] == "in sample" or each["group"] in ("all", "all-reduce"))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if chosen.write:
        write(folder, rows, fitted, held)


if __name__ == "__main__":
    main()
