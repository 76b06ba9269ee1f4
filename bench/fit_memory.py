"""How far predicted memory is from measured memory, and the few constants behind it.

    python bench/fit_memory.py [--json OUT]

Reads $SYNERGY_DATA/parallel. Per file and group: n, then errors of the prediction as fractions of what was measured.
Megatron's tests log the last rank (the one that has the writer: `megatron/training/global_vars.py`), nanotron rank 0,
torchtitan the worst rank. A recomputation that a row does not state is a band: the best of what it may have been. Plans
that ran must fit: those refused are counted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from synergy_core.catalog import gpu_sheet
from synergy_core.commands.measurements._table import read_table
from synergy_core.goodput.calibration import accuracy
from synergy_core.planner.families import mixture, transformer
from synergy_core.planner.machine import Machine, Software
from synergy_core.planner.memory import FRAGMENTATION, VISIBLE, Memory, memory
from synergy_core.planner.plan import Plan, Recompute, plans_of

GIB = float(2**30)
MIB = float(2**20)
DATA = Path(os.environ.get("SYNERGY_DATA", "../shared/data")) / "parallel"

MEGATRON = Software("megatron", dropout=True)
MEGATRON_OLD = Software("megatron", precision="fp16", dropout=True, flash=False, workspace_bytes=8 * MIB)
NANOTRON = Software("nanotron", eager=True, logit_bytes=8.0, weighs_logits=True, workspace_bytes=32 * MIB)
TORCHTITAN = Software("torchtitan", eager=True, logit_bytes=14.0, gathers_from_master=True, workspace_bytes=32 * MIB)
# llm-foundry: flash attention's cross entropy keeps 16-bit logits and makes their gradient in 16 bits; no dropout.
FOUNDRY = Software("llm-foundry", logit_bytes=4.0, gathers_from_master=True, workspace_bytes=32 * MIB)

Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    """A file's rows by column name."""
    table = read_table(DATA / name)
    return [row.cells for row in table.rows]


def number(row: Row, name: str, default: int) -> int:
    text = row.get(name, "")
    return int(float(text)) if re.fullmatch(r"[\d.e+]+", text) else default


def architecture(rows: Sequence[Row], learned: bool, tied: bool | None) -> transformer.Architecture:
    """Of each row, as columns; tied: None reads the row."""

    def each(name: str, default: Callable[[Row], int]) -> np.ndarray:
        return np.array([number(row, name, default(row)) for row in rows])

    def width(row: Row) -> int:  # Megatron's default: 4h, for gated MLPs two thirds of it in steps of 64.
        hidden = number(row, "hidden", 0)
        return hidden * 8 // 3 // 64 * 64 if row["gated_mlp"] == "1" else 4 * hidden

    return transformer.Architecture(
        layers=each("layers", lambda row: 0),
        hidden=each("hidden", lambda row: 0),
        heads=each("heads", lambda row: 0),
        kv_heads=each("kv_heads", lambda row: 0),
        ffn=each("ffn", width),
        vocab=each("vocab", lambda row: 50257),
        seq_len=each("seq_len", lambda row: 0),
        gated=np.array([row["gated_mlp"] == "1" for row in rows]),
        tied=np.array([row.get("untied_embed", "") != "1" if tied is None else tied for row in rows]),
        learned_positions=learned,
    )


def plan(row: Row, recompute: Recompute) -> Plan:
    tensor, pipeline, context = (number(row, name, 1) for name in ("tp", "pp", "cp"))
    data = number(row, "dp", number(row, "n_gpus", 8) // (tensor * pipeline * context))
    zero = (
        3
        if row.get("zero3_fsdp") == "1" or row.get("zero") == "fsdp"
        else number(row, "zero", number(row, "dist_opt", 0))
    )
    micro = number(row, "micro_batch", 1)
    return Plan(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        data=data,
        interleave=number(row, "vpp", 1),
        expert=number(row, "ep", 1),
        micro_batch=micro,
        accumulation=max(number(row, "global_batch", 1) // (data * micro), 1),
        zero=zero,
        recompute=recompute,
        sequence=row["sp"] == "y" and tensor > 1,
    )


def predicted(
    rows: Sequence[Row],
    software: Software,
    *,
    learned: bool,
    tied: bool | None,
    stage: str,
    recompute: Recompute = Recompute.NONE,
) -> Memory:
    """Of the rows; recompute: for rows that do not state one of ours."""
    ours = {each.label: each for each in Recompute}
    plans = plans_of([plan(row, ours.get(row["recompute"], recompute)) for row in rows])
    dense = architecture(rows, learned, tied)
    if rows[0].get("n_experts"):
        sparse = mixture.Architecture(
            **{each.name: getattr(dense, each.name) for each in fields(dense)},
            experts=np.array([number(row, "n_experts", 1) for row in rows]),
            topk=np.array([number(row, "topk", 1) for row in rows]),
            expert_ffn=dense.ffn,
        )
        return memory(mixture.work(sparse, plans, software), plans, software, stage=stage)
    return memory(transformer.work(dense, plans, software), plans, software, stage=stage)


def measured(rows: Sequence[Row], column: str) -> np.ndarray:
    return np.array([float(row[column]) for row in rows]) * GIB


def ci_software(row: Row) -> Software:
    """Transformer Engine runs with `te` in the test's name; other tests lack its attention and its workspace."""
    engine, sheet = "te_" in row["test"] or "_te" in row["test"], gpu_sheet(row["platform"])
    flash = row["attn_backend"] == "flash" or (row["attn_backend"] == "" and engine)
    return replace(
        MEGATRON,
        flash=flash,
        workspace_bytes=(32 if sheet and sheet.since_hopper else 8) * MIB + (64 * MIB if engine else 0.0),
    )


UNSTATED = (
    "uneven_pipeline|account_for|tunable_overlap|cross_entropy|defer_embedding"
    "|modelopt|uninstall_te|multi_dist|qk_layer|muon"
)
"""Parts of tests' names for options that change memory and have no column: reported apart, and within `all`.

The list was made after the first scores, from the tests that were far off: the rows without them are no held-out set.
"""


def ci_rows(experts: bool = False) -> dict[str, list[Row]]:
    """Dense rows, or those with experts, with a stated number of GPUs, by generation of the software.

    Only what a plan can say: experts are split by tensor parallelism as the rest is.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows_of("megatron_ci_memory.csv"):
        found = re.search(r"golden_values_(\w+)", row["source"].replace("-", "_"))
        ours = (row["n_experts"] != "") == experts and (not experts or row["etp"] in ("", row["tp"]))
        plain = ours and "latent" not in row["notes"] and row["trust"] == "B" and row["fp8"] == ""
        if found and plain and row["dtype"] != "fp32":
            other = ", other options" if re.search(UNSTATED, row["test"]) else ""
            groups.setdefault(found.group(1) + other, []).append(row)
    return dict(sorted(groups.items()))


Report = list[dict[str, Any]]


def add(report: Report, file: str, group: str, told: np.ndarray, truth: np.ndarray) -> None:
    score = accuracy(told, truth)
    report.append({"file": file, "group": group, **asdict(score)})
    print(
        f"{file:<14}{group:<50}{score.n:>4} {score.mape:>8.1%} {score.median:>8.1%} {score.p90:>8.1%}"
        f" {score.max:>8.1%} {score.bias:>+8.1%} {score.spearman:>9.2f}"
    )


def megatron_ci(report: Report) -> None:
    """Allocated between steps, peak, and what a step adds; the first generation also by each degree."""
    groups = ci_rows()
    for family in [each for each in groups if each + ", other options" in groups]:
        groups[family + ", all"] = groups[family] + groups[family + ", other options"]
    groups |= {f"{family}, experts": rows for family, rows in ci_rows(experts=True).items()}
    for family, rows in groups.items():
        parts = [predicted([row], ci_software(row), learned=True, tied=None, stage="last") for row in rows]
        static = np.concatenate([each.static for each in parts])
        peak = np.concatenate([each.total for each in parts])
        held, top = measured(rows, "mem_allocated_gib"), measured(rows, "mem_max_gib")
        add(report, "megatron_ci", f"{family}: allocated", static, held)
        add(report, "megatron_ci", f"{family}: peak", peak, top)
        add(report, "megatron_ci", f"{family}: growth", peak - static, top - held)
        if family == "dev_dgx_h100":
            for name in ("tp", "pp", "vpp", "cp", "dist_opt", "recompute", "attn_backend", "gated_mlp", "untied_embed"):
                for value in sorted({row[name] for row in rows}):
                    of = np.array([row[name] == value for row in rows])
                    add(report, "megatron_ci", f"  {name}={value or 'default'}: peak", peak[of], top[of])


def nanotron(report: Report) -> None:
    """Peak of rank 0.

    No number is fitted, but these rows were looked at when the list of what eager autograd keeps was made (their
    differences give the bytes per layer and per logit): in sample as to form.
    """
    rows = rows_of("nanotron_llama1b_h100.csv")
    told = predicted(rows, NANOTRON, learned=False, tied=False, stage="first").total
    add(report, "nanotron", "peak of rank 0", told, measured(rows, "peak_mem_gib"))


def torchtitan(report: Report) -> None:
    """Reserved. Its selective recomputation per operator has no equal here: those rows only get bounds, no error."""
    rows = rows_of("torchtitan_h100_h200.csv")
    truth = measured(rows, "peak_mem_gib")
    full = np.array([row["recompute"] == Recompute.FULL.label for row in rows])
    most, least = (
        predicted(rows, TORCHTITAN, learned=False, tied=False, stage="worst", recompute=each).reserved
        for each in (Recompute.SELECTIVE, Recompute.FULL)
    )
    add(report, "torchtitan", "reserved, full recomputation", most[full], truth[full])
    inside = (least <= truth) & (truth <= most)
    bounds = f"{least[~full][0] / GIB:.0f} and {most[~full][0] / GIB:.0f} GiB"
    print(f"torchtitan    selective-op: {inside[~full].sum()} of {(~full).sum()} within the wide bounds {bounds}")


def must_fit(report: Report) -> None:
    """Timed plans ran on their GPUs. The best of the recomputations that a row may have had must not be refused."""
    print(f"\n{'plans that ran':<34}{'memory':>7}{'n':>5}{'refused':>9}  largest share of the GPU's memory")
    files: tuple[tuple[str, Software, bool, bool, tuple[Recompute, ...], tuple[int, ...]], ...] = (
        ("vtrain_multi_a100", MEGATRON_OLD, True, True, (Recompute.FULL,), (80, 40)),
        ("vtrain_single_a100", MEGATRON_OLD, True, True, (Recompute.FULL,), (80, 40)),
        ("megatron_v1_2020_v100_a100", MEGATRON_OLD, True, True, (Recompute.FULL,), (0,)),
        ("korthikanti_table5", MEGATRON_OLD, True, True, (Recompute.FULL,), (0,)),
        ("llmfoundry_a100_80gb_bf16", FOUNDRY, True, True, (Recompute.FULL,), (0,)),
        ("llmfoundry_h100_80gb_bf16", FOUNDRY, True, True, (Recompute.FULL,), (0,)),
        ("nanotron_llama1b_h100", NANOTRON, False, False, (Recompute.NONE,), (0,)),
        ("torchtitan_h100_h200", TORCHTITAN, False, False, (Recompute.FULL,), (0,)),
        ("mbridge_dense", replace(MEGATRON, dropout=False), False, False, (Recompute.NONE, Recompute.FULL), (0,)),
    )
    for name, software, learned, tied, recomputed, sizes in files:
        rows = [row for row in rows_of(f"{name}.csv") if "task=" not in row["notes"]]
        told = [
            predicted(rows, software, learned=learned, tied=tied, stage="worst", recompute=each) for each in recomputed
        ]
        for size in sizes:
            memories = [1e9 * (size or number(row, "gpu_mem_gb", 0)) for row in rows]
            fit = np.array([each.fits(machine(memories)) for each in told]).any(axis=0)  # type: ignore[arg-type]
            share = np.min([(each.total + each.outside) / (VISIBLE * np.array(memories)) for each in told], axis=0)
            kind = f"{memories[0] / 1e9:.0f} GB"
            print(f"{name:<34}{kind:>7}{len(rows):>5}{int((~fit).sum()):>9}  {share.max():.2f}")
            report.append(
                {"file": name, "group": f"must fit {kind}", "n": len(rows), "false_refusals": int((~fit).sum())}
            )


def machine(memory_bytes: Any) -> Machine:
    """An A100's node with that much memory per GPU; rows may differ."""
    sheet = gpu_sheet("a100")
    assert sheet is not None
    return Machine(sheet, 8, "nvswitch", 300e9, 8, 25e9, np.asarray(memory_bytes))  # type: ignore[arg-type]


def constants(report: Report) -> None:
    """The two constants that data can tell: each fitted without a group of rows and scored on that group."""
    print("\nconstants, fitted without a group and scored on it")
    rows = [row for row in ci_rows()["dev_dgx_h100"] if ci_software(row).workspace_bytes > 64 * MIB]
    bare = [replace(ci_software(row), workspace_bytes=0.0) for row in rows]
    parts = [
        predicted([row], each, learned=True, tied=None, stage="last") for row, each in zip(rows, bare, strict=True)
    ]
    held = measured(rows, "mem_allocated_gib")
    static = np.concatenate([each.static for each in parts])
    shipped = Software("").workspace_bytes / MIB
    print(f"workspace: {np.median(held - static) / MIB:.0f} MiB over all rows, {shipped:.0f} shipped")
    for name in ("tp", "pp"):
        for value in sorted({row[name] for row in rows}):
            out = np.array([row[name] == value for row in rows])
            found = float(np.median((held - static)[~out]))
            error = float(np.mean(np.abs(static[out] + found - held[out]) / held[out]))
            print(f"  without {name}={value}: {found / MIB:.0f} MiB, {error:.1%} on its {out.sum()} rows")
            group = f"workspace without {name}={value}"
            report.append({"file": "constants", "group": group, "bytes": found, "mape": error})
    rows = [row for row in rows_of("torchtitan_h100_h200.csv") if row["recompute"] == Recompute.FULL.label]
    told = predicted(rows, TORCHTITAN, learned=False, tied=False, stage="worst")
    over = (measured(rows, "peak_mem_gib") - told.total) / (told.total - told.static)
    spread = f"{over.min():.1%} to {over.max():.1%}"
    print(f"fragmentation: {np.median(over):.1%} over {len(rows)} rows ({spread}), {FRAGMENTATION:.1%} shipped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write every group there")
    chosen = parser.parse_args()
    report: Report = []
    heads = "".join(f"{name:>9}" for name in ("mape", "median", "p90", "max", "bias", "spearman"))
    print(f"{'file':<14}{'group':<44}{'n':>4}{heads}")
    megatron_ci(report)
    nanotron(report)
    torchtitan(report)
    must_fit(report)
    constants(report)
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
