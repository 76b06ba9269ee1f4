"""Readers of the planner's measurements: what they derive, what they leave open, what they refuse, and the scores."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest

from synergy_core.__main__ import main
from synergy_core.commands import _scoring
from synergy_core.commands._scoring import predicted, regrets
from synergy_core.commands.measurements import read
from synergy_core.commands.measurements._rows import machine_choices, network_bytes_per_s
from synergy_core.errors import InputError
from synergy_core.performance.planner.machine import Constants, own_constants

DATA = os.environ.get("SYNERGY_DATA")
needs_data = pytest.mark.skipif(not DATA, reason="needs the measured tables: set SYNERGY_DATA to their folder")

MODEL = {"model": "mine", "layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 4096, "gated_mlp": 0}
SIZES = {"seq_len": 1024, "vocab": 51200, "n_experts": "", "topk": ""}
MACHINE = {"gpu": "A100-SXM-80GB", "gpu_mem_gb": 80, "n_gpus": 16, "gpus_per_node": 8, "interconnect": "8xHDR200/node"}
BATCH = {"global_batch": 64, "micro_batch": 2, "grad_accum": 8}
DEGREES = {"tp": 2, "pp": 2, "vpp": 1, "dp": 4, "cp": 1, "ep": 1, "sp": "n", "zero": 0, "recompute": "full"}
MEASURED = {"iter_time_s": 1.0, "peak_mem_gib": "", "mem_kind": "", "trust": "A", "source": "", "notes": ""}
ROW = {**MODEL, **SIZES, **MACHINE, **BATCH, **DEGREES, "dtype": "fp16", "attn_impl": "", **MEASURED}


def write(path: Path, *changes) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, ROW)
        writer.writeheader()
        writer.writerows({**ROW, **change} for change in changes or [{}])
    return path


@pytest.fixture
def plain(monkeypatch):
    """Constants as they start, whatever is shipped."""
    monkeypatch.setattr(_scoring, "constants_for", lambda machine, software: Constants())


def test_a_row_becomes_a_plan_on_a_machine(tmp_path):
    (case,) = read(write(tmp_path / "x.csv")).cases()
    assert case.plans.plan(0).describe() == "tp2 pp2 dp4 · 2×8 · full"
    assert case.machine.gpu.name == "a100-80gb"
    assert case.machine.network_bytes_per_s == pytest.approx(25e9)
    assert (case.software.name, case.software.precision, case.software.flash) == ("megatron", "fp16", False)
    assert case.architecture.hidden.tolist() == [1024]


def test_what_follows_from_other_cells_is_derived(tmp_path):
    rows = read(write(tmp_path / "x.csv", {"dp": "", "grad_accum": ""}, {"n_gpus": "", "micro_batch": ""})).rows
    for row in rows:
        assert row.settings[0].plan.data == 4
        assert (row.settings[0].plan.micro_batch, row.settings[0].plan.accumulation) == (2, 8)
        assert row.unstated == ()


def test_an_unstated_field_is_every_setting_it_may_have_had(tmp_path):
    path = write(tmp_path / "x.csv", {"zero": "0?", "recompute": "", "gpu": "A100-SXM", "gpu_mem_gb": ""})
    (row,) = read(path).rows
    assert row.unstated == ("gpu_mem_gb", "zero", "recompute")
    assert len(row.settings) == 2 * 2 * 3
    (row,) = read(write(tmp_path / "y.csv", {"micro_batch": "", "grad_accum": ""})).rows
    assert [each.plan.micro_batch for each in row.settings] == [1, 2, 4]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dp": 3}, "got n_gpus 16, expected tp 2 · pp 2 · cp 1 · dp 3 = 12. Fix n_gpus or a degree; dp 4 would fit"),
        ({"dp": "", "n_gpus": 18}, "got n_gpus 18, expected a multiple of tp 2 · pp 2 · cp 1 = 4"),
        ({"vpp": 8}, "got pp 2 · vpp 8 = 16 stages, expected at most one per layer, 8"),
        ({"ep": 3}, "got ep 3, expected a divisor of tp · cp · dp = 8"),
        ({"grad_accum": 7}, "got global_batch 64, expected micro_batch 2 · grad_accum 7 · dp 4 = 56"),
        ({"zero": "maybe"}, "column zero: got 'maybe', expected 0, 1, 2, 3 or fsdp"),
        ({"recompute": "often"}, "column recompute: got 'often', expected none, selective, full, selective-op"),
        ({"layers": "8.5"}, "column layers: got '8.5', expected a whole number of 1 or more"),
        ({"sp": "perhaps"}, "column sp: got 'perhaps', expected y or n"),
        ({"kv_heads": 3}, "got kv_heads 3, expected a divisor of heads 16"),
        ({"n_experts": 6, "topk": 2, "ep": 4}, "got ep 4, expected a divisor of n_experts 6"),
        ({"n_experts": 4, "topk": 9}, "got topk 9, expected at most n_experts 4"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_with_its_line(tmp_path, capsys, change, says):
    path = write(tmp_path / "x.csv", {}, change)
    for command in ("validate", "calibrate"):
        assert main([command, str(path)]) == 2
        error = capsys.readouterr().err
        assert f"{path}, line 3" in error
        assert says in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": ""}, "layers not stated, and the catalog has no architecture 'mine'"),
        ({"gpu": "Z9000"}, "the catalog has no data sheet of GPU 'Z9000'"),
        ({"dtype": "int4"}, "precision 'int4' is not modelled"),
        ({"global_batch": 62, "grad_accum": ""}, "global_batch 62 is not a multiple of micro_batch 2 · dp 4"),
    ],
)
def test_a_row_that_says_too_little_is_a_failure_with_its_reason(tmp_path, change, reason):
    rows = read(write(tmp_path / "x.csv", {}, change)).rows
    assert [each.failure for each in rows] == ["", reason]


def test_fine_tuning_and_rows_without_a_measurement_are_left_out(tmp_path):
    found = read(write(tmp_path / "x.csv", {}, {"notes": "task=LoRA"}, {"iter_time_s": ""}))
    assert len(found) == 1
    assert found.excluded == {"task LoRA, not pre-training": 1, "nothing measured": 1}


@pytest.mark.parametrize(
    ("text", "gpu", "per_gpu"),
    [
        ("800 Gb/s per node IB", "a100", 12.5e9),
        ("Selene 8xHDR200/node", "a100", 25e9),
        ("unstated (H100 cloud, 400G x8 typical)", "h100", 50e9),
        ("HF cluster (EFA)", "h100", 50e9),
        ("4xHDR", "a100", 12.5e9),
        ("100 Gb/s", "v100", 1.5625e9),
        ("400 Gb/s per GPU", "h100", 50e9),
        ("25 GB/s per GPU", "a100", 25e9),
        ("NVLink only", "a100", None),
        ("NVL72", "h100", None),
        ("4x100Gb/s Omni-Path per node", "v100", 6.25e9),
        ("EFA 3200 Gb/s", "h100", 50e9),
        ("8 HDR NICs", "a100", 25e9),
        ("100 GbE", "v100", 1.5625e9),
        ("NVLink 600GB/s", "a100", None),
        ("1.2.3 Gb/s", "a100", None),
        ("0 Gb/s", "a100", None),
        ("NVLink 900 GB/s + 3.2 Tb/s IB", "h100", 50e9),
        ("NVSwitch 600 GB/s, IB 8x200Gbps", "a100", 25e9),
        ("", "h100", None),
    ],
)
def test_networks_are_read_from_their_authors_words(text, gpu, per_gpu):
    assert network_bytes_per_s(text, 8, gpu) == (None if per_gpu is None else pytest.approx(per_gpu))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("A100-SXM", ["a100-80gb", "a100"]),
        ("A100-SXM-40GB", ["a100"]),
        ("V100-SXM2-32GB", ["v100-32gb"]),
        ("GB200", ["gb200"]),
        ("NVIDIA GeForce RTX 2080 Ti", ["rtx2080ti"]),
    ],
)
def test_gpus_are_read_from_their_authors_words(text, names):
    assert [each.gpu.name for each in machine_choices(text, None, 8, "")] == names


def test_gpus_joined_by_one_nvlink_domain_are_one_node():
    assert machine_choices("GB200", None, 4, "NVL72")[0].gpus_per_node == 72
    assert machine_choices("H100", None, 8, "NVL72")[0].gpus_per_node == 8


def test_regret_is_what_the_plan_predicted_fastest_costs():
    told, truth = np.array([1.0, 2.0, 1.0, 9.0, np.nan]), np.array([3.0, 2.0, 1.0, 5.0, 0.1])
    assert regrets(told, truth, ["a", "a", "b", "c", "a"], list("pqrst")) == [0.5]
    assert regrets(told[:2], truth[:2], ["a", "a"], ["p", "p"]) == []


def test_scores_name_counts_bands_and_memory(tmp_path, plain):
    out = tmp_path / "o.json"
    changes = [
        {},
        {"micro_batch": 4, "grad_accum": 4, "zero": "0?", "iter_time_s": 2.0},
        {"layers": "", "iter_time_s": 3.0},
        {"peak_mem_gib": 10, "mem_kind": "nvidia-smi"},
        {"layers": 800, "hidden": 16384, "ffn": 65536, "iter_time_s": "", "notes": "OOM"},
    ]
    assert main(["validate", str(write(tmp_path / "x.csv", *changes)), "--json", str(out)]) == 0
    groups = {each["group"]: each for each in json.loads(out.read_text())}
    whole = groups["all"]
    assert (whole["n"], whole["failures"], whole["banded"], whole["false_refusals"]) == (3, 1, 1, 0)
    assert whole["kind"] == "time"
    assert whole["regret_mean"] is not None
    assert whole["baseline_mape"] is not None
    assert groups["memory: nvidia-smi"]["kind"] == "memory"
    assert (groups["ran out of memory"]["refused"], groups["ran out of memory"]["accepted"]) == (1, 0)


def test_calibrate_refits_what_is_named_and_writes_the_catalog_form(tmp_path, plain, capsys):
    rows = [{"micro_batch": b, "grad_accum": 16 // b, "iter_time_s": 3.0 + 0.1 * b} for b in (1, 2, 4, 8)]
    out = tmp_path / "megatron.yaml"
    path = write(tmp_path / "x.csv", *rows)
    assert main(["calibrate", str(path), "--constants", "software", "--out", str(out)]) == 0
    assert "megatron on a100: 4 rows, software refitted" in capsys.readouterr().out
    assert "gemm_efficiency" in out.read_text()
    band = own_constants(out).bands["a100"]
    assert band["rows"] == 4
    assert band["low"] < band["high"]
    assert main(["validate", str(path), "--calibrate", str(path), "--constants", "software"]) == 0
    assert "software refitted to 4 rows" in capsys.readouterr().out
    assert main(["calibrate", str(path), "--constants", "netwrk"]) == 2
    assert "Did you mean 'network'" in capsys.readouterr().err


def test_calibrate_leaves_out_a_lone_row_of_another_gpu_type_and_says_so(tmp_path, plain, capsys):
    rows = [{"micro_batch": b, "grad_accum": 16 // b, "iter_time_s": 3.0 + 0.1 * b} for b in (1, 2, 4, 8)]
    path = write(tmp_path / "x.csv", *rows, {"gpu": "H100", "gpu_mem_gb": 80})
    assert main(["calibrate", str(path), "--constants", "software"]) == 0
    printed = capsys.readouterr().out
    assert "megatron-core on h100 is left out" in printed
    assert "megatron on a100: 4 rows" in printed
    assert main(["validate", str(path), "--calibrate", str(path), "--constants", "software"]) == 0
    assert "software refitted to 4 rows" in capsys.readouterr().out
    assert main(["calibrate", str(write(tmp_path / "x.csv", *rows[:1], {"gpu": "H100"}))]) == 2
    told = capsys.readouterr().err
    assert all(each in told for each in ("1 of megatron on a100", "1 of megatron-core on h100", "expected 3 or more"))


def test_a_plans_time_under_another_name_is_met_with_its_own(tmp_path):
    path = write(tmp_path / "x.csv")
    path.write_text(path.read_text().replace("iter_time_s", "step_time_s", 1))
    with pytest.raises(InputError, match=r"expected a column 'iter_time_s'.*'step_time_s'\? Rename it"):
        read(path)


@pytest.mark.parametrize("cell", ["OOM", "oom", "out of memory"])
def test_oom_in_the_column_of_peaks_is_a_run_that_ran_out_of_memory(tmp_path, cell):
    (row,) = read(write(tmp_path / "x.csv", {"iter_time_s": "", "peak_mem_gib": cell})).rows
    assert row.out_of_memory


UNPREDICTABLE = {"mbridge_moe_and_other.csv": 4, "megatron_ci_memory.csv": 20}
"""Rows that lack dimensions, by file."""


@needs_data
def test_every_calibration_file_is_read():
    for path in sorted((Path(DATA) / "parallel").glob("*.csv")):
        found = read(path)
        assert found.rows
        failures = [row.line for row in found.rows if getattr(row, "failure", "")]
        assert len(failures) == UNPREDICTABLE.get(path.name, 0), path.name
    assert all(row.architecture for row in read(Path(DATA) / "arena" / "best_plan_iteration_time.csv").rows)
    assert read(Path(DATA) / "arena" / "collectives.csv").rows


RUBICK = "model,plan,pp,tp,dp,gpus_per_node_used,gpus,nodes,iter_time_s\n"


def test_rubicks_rows_become_plans_on_the_cards_that_their_gpus_reach(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(RUBICK + "llama7,3d,2,2,2,44,8,2,1\nbert,zero-dp,,,,233,8,3,1\nt5,zero-offload,,,,1,1,1,1\n")
    whole, uneven, offloaded = read(path).rows
    (setting,) = whole.settings
    assert setting.plan.describe() == "tp2 pp2 dp2 · 4×1"
    assert (setting.software.precision, setting.software.flash, setting.software.fused) == ("tf32", False, False)
    assert setting.machine.network_bytes_per_s == pytest.approx(12.5e9)
    assert uneven.settings[0].plan.describe() == "dp8 · 4×1 · zero2"
    # Two GPUs of a node share a card of 25 GB/s, which the mean of 8 ÷ 3 GPUs on a node wait for.
    assert uneven.settings[0].machine.network_bytes_per_s == pytest.approx(25e9 * 3 / 8)
    assert offloaded.settings[0].software.run.offload
    assert offloaded.settings[0].plan.offload
    assert (whole.weight, offloaded.weight) == (1.0, 0.0)
    path.write_text(RUBICK + "llama7,zero-offload,,,,1,1,1,1\n")
    assert "offloaded weights are not modelled" in read(path).rows[0].failure


def test_rubicks_models_without_accumulation_do_as_many_sequences_as_fit(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text(RUBICK + "roberta,ga,,,,1,1,1,1\nroberta,gc,,,,1,1,1,1\nt5,ga,,,,1,1,1,1\n")
    roberta, recomputed, t5 = read(path).rows
    assert (roberta.global_batch, recomputed.global_batch, t5.global_batch) == (32, 64, 16)
    assert (roberta.settings[0].plan.micro_batch, roberta.settings[0].plan.accumulation) == (32, 1)
    assert t5.settings[0].plan.accumulation == 2


@pytest.mark.parametrize(
    "row", ["llama7,3d,2,2,2,4,8,1,1", "llama7,3d,2,2,1,44,8,2,1", "vgg,ga,,,,1,1,1,1", "bert,tp,,,,1,1,1,1"]
)
def test_rubicks_rows_that_contradict_themselves_are_refused(tmp_path, row):
    (tmp_path / "x.csv").write_text(f"{RUBICK}{row}\n")
    with pytest.raises(InputError, match="line 2"):
        read(tmp_path / "x.csv")


@needs_data
def test_a_model_of_rubicks_that_no_constant_was_fitted_to_is_foretold():
    rows = predicted(read(Path(DATA) / "rubick" / "iteration_times.csv", model="llama7"))
    off = (rows.time_s / rows.iter_time_s - 1.0).dropna()
    assert len(off) == 44
    assert off.abs().mean() < 0.08


@needs_data
@pytest.mark.parametrize("model", ["roberta", "t5", "vit"])
def test_offloading_is_foretold_for_models_that_its_constants_were_not_fitted_to(model):
    rows = predicted(read(Path(DATA) / "rubick" / "iteration_times.csv", model=model))
    off = (rows.time_s / rows.iter_time_s - 1.0)[rows.weight == 0]
    assert len(off) >= 18
    assert off.abs().mean() < 0.15


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"source": "arXiv:2205.05198 Table 5"}, "megatron-v3"),
        ({"source": "arXiv:2104.04473 Table 1"}, "megatron"),
        ({"zero": 3, "tp": 1, "pp": 1, "dp": 16, "dtype": "bf16", "micro_batch": 4, "grad_accum": 1}, "fsdp"),
        ({"zero": 3, "tp": 1, "pp": 1, "dp": 16, "micro_batch": 4, "grad_accum": 1}, "megatron-deepspeed"),
    ],
)
def test_the_generation_of_a_software_is_read_from_its_row(tmp_path, words, name):
    (row,) = read(write(tmp_path / "x.csv", words)).rows
    assert row.settings[0].software.name == name


def test_published_runs_of_megatron_bridge_have_the_settings_of_their_scripts(tmp_path):
    """Gradients in 16 bits; all-to-alls without DeepEP if tokens are dropped."""
    source = "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary.md"
    models = ("mine", "mine (tokendrop)")
    rows = read(write(tmp_path / "x.csv", *({"gpu": "H100", "source": source, "model": each} for each in models))).rows
    found = [row.settings[0].software for row in rows]
    assert [(each.name, each.gradient_bytes, each.communication.sends_once) for each in found] == [
        ("megatron-core", 2.0, True),
        ("megatron-core", 2.0, False),
    ]


def test_time_and_memory_of_a_row_come_from_one_setting(tmp_path, plain):
    """Of those that fit: without recomputing everything this run needs more memory than there is."""
    row = {"iter_time_s": 1e-3, "micro_batch": 16, "grad_accum": 1, "layers": 512}
    (told,) = predicted(read(write(tmp_path / "x.csv", {**row, "recompute": ""}))).itertuples()
    alone = [predicted(read(write(tmp_path / "x.csv", {**row, "recompute": each}))) for each in ("none", "sel", "full")]
    assert [each.fits[0] for each in alone] == [False, False, True]
    assert told.fits
    assert told.time_s == pytest.approx(alone[-1].time_s[0])


def test_an_unstated_precision_is_one_the_gpu_has(tmp_path):
    gpus = ("V100", "T4", "A100")
    rows = read(write(tmp_path / "x.csv", *({"gpu": gpu, "gpu_mem_gb": "", "dtype": ""} for gpu in gpus))).rows
    assert [each.settings[0].software.precision for each in rows] == ["fp16", "fp16", "bf16"]


def test_memory_is_compared_on_the_stage_that_each_row_names(tmp_path):
    """Also where rows of several stages stand in one file."""
    base = {"tp": 1, "pp": 4, "micro_batch": 16, "grad_accum": 1, "vocab": 262144, "peak_mem_gib": 10}
    rows = [{**base, "mem_kind": "rank 0"}, {**base, "mem_kind": "worst stage"}]
    alone = [predicted(read(write(tmp_path / f"{at}.csv", row))).peak_bytes[0] for at, row in enumerate(rows)]
    assert alone[0] != alone[1]
    for order in ([0, 1], [1, 0]):
        both = predicted(read(write(tmp_path / "both.csv", *(rows[at] for at in order)))).peak_bytes
        assert both.tolist() == [alone[at] for at in order]


def test_calibrating_on_nothing_says_so(tmp_path, capsys):
    assert main(["calibrate", str(write(tmp_path / "x.csv", *[{"iter_time_s": ""}] * 8))]) == 2
    assert "nothing to fit" in capsys.readouterr().err


def test_collectives_without_a_time_are_counted(tmp_path):
    path = tmp_path / "c.csv"
    rows = (
        "gpu,collective,n_gpus,n_nodes,size_bytes,time_us",
        "A100,all_reduce,8,1,1e6,50",
        "A100,all_reduce,8,1,1e6,",
    )
    path.write_text("\n".join(rows) + "\n")
    found = read(path)
    assert (len(found.rows), found.excluded) == (1, {"no time": 1})


def test_plans_are_compared_in_the_same_setting(tmp_path, plain):
    """Recomputation is unstated. Chosen for each row by its own time, it would rank the plans as they were measured."""
    base = {"recompute": "none", "zero": "0", "iter_time_s": 1}
    degrees = [{"tp": tensor, "pp": 1, "dp": 16 // tensor, "grad_accum": 2 * tensor} for tensor in (1, 2, 4)]
    stated = [{**base, **each} for each in degrees]
    seconds = predicted(read(write(tmp_path / "x.csv", *stated))).time_s
    slow = [1.3, 1.0, 1.25]
    rows = [{**row, "iter_time_s": time * factor} for row, time, factor in zip(stated, seconds, slow, strict=True)]
    (known, *_) = _scoring.scored(read(write(tmp_path / "y.csv", *rows)))
    unstated = [{**row, "recompute": ""} for row in rows]
    table = predicted(read(write(tmp_path / "z.csv", *unstated)))
    (told, *_) = _scoring.scored(read(write(tmp_path / "z.csv", *unstated)))
    assert len(set((table.time_s / seconds).round(2))) > 1
    assert (table.shared_s / seconds).round(1).nunique() == 1
    assert told.fields["regret_mean"] == pytest.approx(known.fields["regret_mean"])
    assert told.score.mape < known.score.mape


def test_attention_that_a_stack_fuses_on_request_is_either_where_unstated(tmp_path):
    def attention(**cells):
        (row,) = read(write(tmp_path / "x.csv", {"gpu": "H100", "dtype": "bf16", **cells})).rows
        return [each.software.flash for each in row.settings], row.unstated

    assert attention(source="Megatron-DeepSpeed") == ([True, False], ("attn_impl",))
    assert attention(source="Megatron-DeepSpeed", attn_impl="flash") == ([True], ())
    assert attention(source="Megatron-DeepSpeed", attn_impl="core") == ([False], ())
    assert attention(source="Megatron-DeepSpeed", gpu="A100-SXM-80GB") == ([False], ())
    assert attention(source="Megatron Core") == ([True], ())
