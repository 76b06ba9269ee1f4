"""`python -m synergy_core plan` with constants, a data sheet, a sequence length and a whole training of one's own."""

import json
import math
from pathlib import Path

import pytest
import yaml
from planner_setup import asked

import synergy_core
from synergy_core.commands.plan import short, spread
from synergy_core.commands.plan_report import seconds
from synergy_core.performance.planner.machine import content_of, shipped_fits

SHEETS = Path(synergy_core.__file__).parent / "performance" / "catalog" / "gpus"
BAND = {"low": -0.1, "high": 0.2, "rows": 40}
ASKED = ("model=gpt-1.3b", "gpu=h100", "gpus=8", "batch=64", "top=1")


def found(capsys, tmp_path, *words):
    """The one GPU type of the JSON, and what was printed."""
    out = tmp_path / "out.json"
    status, printed, errors = asked(capsys, "plan", *words, "--json", str(out))
    assert status == 0, errors
    (one,) = json.loads(out.read_text())["gpu_types"]
    return one, printed


def own_constants(tmp_path, **changes):
    """A file as `calibrate --out` writes it, on which products run at half the speed."""
    constants = dict(content_of("megatron-core")["h100"]["constants"])
    constants["gemm_efficiency"] *= 0.5
    content = {"software": "megatron-core", "gpu_types": {"h100": {"rows": 40, "band": BAND, "constants": constants}}}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


@pytest.fixture
def own_sheet(tmp_path, monkeypatch):
    """A copy of the H100's sheet with half the memory, forgotten after the test; it keeps the catalog's aliases."""
    monkeypatch.setattr("synergy_core.performance.catalog._added", {})
    text = (SHEETS / "h100.yaml").read_text().replace("memory_bytes: 80.0e+9", "memory_bytes: 40.0e+9")
    path = tmp_path / "h100-small.yaml"
    path.write_text(text.replace("H100 SXM5 80 GB", "H100 of 40 GB"))
    return path


def test_constants_of_ones_own_are_used_and_said(capsys, tmp_path):
    shipped, _ = found(capsys, tmp_path, *ASKED)
    mine, printed = found(capsys, tmp_path, *ASKED, f"constants={own_constants(tmp_path)}", "tokens=1B")
    assert f"constants of {tmp_path / 'mine.yaml'}" in printed
    compute = [each["plans"][0]["parts"]["compute_s"] for each in (shipped, mine)]
    assert 1.5 < compute[1] / compute[0] < 2.0
    (plan,) = mine["plans"]
    assert plan["step_time_band_s"] == pytest.approx(
        [plan["step_time_s"] * math.exp(BAND[end]) for end in ("low", "high")]
    )
    assert plan["extrapolated"] == []
    assert f"40 held-out rows of {tmp_path / 'mine.yaml'}" in printed


def test_constants_without_a_band_have_none(capsys, tmp_path):
    constants = own_constants(tmp_path, gpu_types={"h100": {"constants": content_of("fsdp")["h100"]["constants"]}})
    mine, printed = found(capsys, tmp_path, *ASKED, f"constants={constants}", "tokens=1B")
    assert mine["plans"][0]["step_time_band_s"] is None
    assert mine["trainings"][0]["band"] is None
    assert "the constants file has none" in printed


def test_a_gpu_type_that_the_constants_lack_keeps_the_shipped_ones(capsys, tmp_path):
    path = own_constants(tmp_path)
    _, printed, _ = asked(capsys, f"plan model=gpt-1.3b gpu=h100,a100 gpus=8 batch=64 constants={path}")
    assert printed.count("constants of ") == 1
    assert f"shipped constants: {path} has none for a100" in printed


@pytest.mark.parametrize(
    ("changes", "words", "says"),
    [
        ({}, ["gpu=a100"], "is for h100; type gpu=h100"),
        ({}, ["gpu=h100", "software=megatron"], "is for megatron-core; type software=megatron-core"),
        ({"gpu_types": {}}, ["gpu=h100"], "has no gpu_types; expected a file written by"),
        ({"gpu_types": {"h100": {"rows": 3}}}, ["gpu=h100"], "h100 has no constants"),
        ({"gpu_types": {"h100": {"constants": {"host_s": 1.0}}}}, ["gpu=h100"], "missing or unknown"),
        (
            {"gpu_types": {"h100": {"constants": content_of("fsdp")["h100"]["constants"], "band": {"low": 1.0}}}},
            ["gpu=h100"],
            "expected low, high (at least low) and rows",
        ),
    ],
)
def test_constants_that_are_none_are_refused(capsys, tmp_path, changes, words, says):
    path = own_constants(tmp_path, **changes)
    status, _, errors = asked(capsys, "plan model=gpt-1.3b gpus=8", *words, f"constants={path}")
    assert status == 2
    assert says in errors


def test_every_shipped_constant_is_read():
    assert all(shipped_fits().values())


def test_a_data_sheet_of_ones_own_is_planned_on(capsys, tmp_path, own_sheet):
    node = ["gpus_per_node=8", "network=50e9"]
    mine, printed = found(capsys, tmp_path, "model=gpt-13b", f"gpu={own_sheet}", "gpus=8", "batch=64", "top=1", *node)
    assert "H100 of 40 GB, 37.8 GiB usable of 40, 8 per node" in printed
    assert "450 GB/s within nodes, 50.0 GB/s between" in printed
    assert mine["plans"][0]["memory_bytes"] < 37.8 * 2**30
    _, printed, _ = asked(capsys, f"plan model=gpt-1.3b gpu={own_sheet} gpus=8", *node, "link=pcie")
    assert "63 GB/s within nodes" in printed
    status, _, errors = asked(capsys, f"plan model=gpt-1.3b gpu={own_sheet} gpus=8")
    assert status == 2
    assert "give gpus_per_node= and network=" in errors


def test_a_misspelt_precision_in_a_data_sheet_is_refused(capsys, own_sheet):
    """Otherwise its rate is ignored, and products in bf16 run on the fp32 lanes, ten times slower."""
    own_sheet.write_text(own_sheet.read_text().replace("  bf16: ", "  bf-16: "))
    status, _, errors = asked(capsys, f"plan model=gpt-1.3b gpu={own_sheet} gpus=8 gpus_per_node=8 network=50e9")
    assert status == 2
    assert "'bf-16'" in errors


def test_a_gpu_type_without_a_node_type_names_the_keys_to_type(capsys):
    status, _, errors = asked(capsys, "plan model=gpt-1.3b gpu=titan_rtx gpus=8")
    assert status == 2
    assert all(key in errors for key in ("gpus_per_node=", "network="))
    assert asked(capsys, "plan model=gpt-1.3b gpu=titan_rtx gpus=8 gpus_per_node=4 network=1e9")[0] == 0


@pytest.mark.parametrize("network", ["25", "1e-320"])
def test_a_network_in_another_unit_than_bytes_is_refused(capsys, network):
    status, _, errors = asked(capsys, f"plan model=gpt-1.3b gpu=a100 gpus=16 network={network}")
    assert status == 2
    assert f"network={float(network):g}" in errors


def test_a_longer_sequence_is_another_question(capsys, tmp_path):
    short_one, _ = found(capsys, tmp_path, *ASKED)
    long_one, _ = found(capsys, tmp_path, *ASKED, "seq_len=4096")
    assert 1.9 < long_one["plans"][0]["step_time_s"] / short_one["plans"][0]["step_time_s"] < 2.6


def test_a_whole_training_in_days_gpu_hours_and_money(capsys, tmp_path):
    one, printed = found(capsys, tmp_path, *ASKED, "tokens=300B", "price=2.50")
    (training,) = one["trainings"]
    step_s = one["plans"][0]["step_time_s"]
    seconds = 300e9 / (64 * 2048) * step_s
    assert training["days"] == pytest.approx(seconds / 86400)
    assert training["gpu_hours"] == pytest.approx(8 * seconds / 3600)
    assert training["cost"] == pytest.approx(2.5 * training["gpu_hours"])
    assert training["tokens_per_s"] == pytest.approx(64 * 2048 / step_s)
    assert "300B tokens, 131k a step; without failures, evaluation and checkpoints" in printed
    low, high = training["band"]
    assert f"{short(training['days'])} ({spread(low * training['days'], high * training['days'], short)})" in printed


def test_an_interval_names_its_unit_once():
    assert spread(94.6, 251.0, seconds) == "94.6–251 s"
    assert spread(0.98, 1.21, seconds) == "980 ms–1.21 s"
    assert spread(990.0, 1210.0, short) == "990–1.21k"


def test_amounts_have_three_digits():
    printed = {1.4e12: "1.4T", 999.6e6: "1B", 131072: "131k", 12.34: "12.3", 0.5: "0.5"}
    assert {value: short(value) for value in printed} == printed


OTHER = """
title: Accelerator
maker: {maker}
architecture: other
fp32_flops_per_s: 66.9e+12
memory_bandwidth_bytes_per_s: 3350.0e+9
memory_bytes: 80.0e+9
tensor_flops_per_s: {{fp16: 989.4e+12, bf16: 989.4e+12}}
multiprocessors: 132
clock_hz: 1830.0e+6
link_bytes_per_s: 450.0e+9
pcie_bytes_per_s: 63.0e+9
source: me
{more}
"""


@pytest.fixture
def sheet_of(tmp_path, monkeypatch):
    monkeypatch.setattr("synergy_core.performance.catalog._added", {})

    def made(maker, more=""):
        path = tmp_path / f"accelerator-of-{maker.lower()}.yaml"
        path.write_text(OTHER.format(maker=maker, more=more))
        return path

    return made


def test_a_sheet_of_another_maker_needs_no_compute_capability_and_no_aliases(capsys, tmp_path, sheet_of):
    node = ["gpus_per_node=8", "network=50e9"]
    alike, _ = found(
        capsys, tmp_path, *ASKED[:1], f"gpu={sheet_of('NVIDIA', 'compute_capability: 9.0')}", *ASKED[2:], *node
    )
    other, printed = found(capsys, tmp_path, *ASKED[:1], f"gpu={sheet_of('AMD')}", *ASKED[2:], *node)
    assert "nothing of AMD was measured" in printed
    assert "no step was measured on accelerator-of-amd" in printed  # not on `accelerator`
    assert "attention is not fused" not in printed
    ends = [each["plans"][0]["step_time_band_s"] for each in (alike, other)]
    assert [each["plans"][0]["step_time_s"] for each in (alike, other)] == pytest.approx(
        [mean_of(each) for each in ends]
    )
    assert ends[1][1] / ends[1][0] > 1.2 * ends[0][1] / ends[0][0]
    status, _, errors = asked(capsys, f"plan model=gpt-1.3b gpu={sheet_of('NVIDIA')} gpus=8", *node)
    assert status == 2
    assert all(each in errors for each in ("compute_capability", "such as 8.0", "maker: AMD"))


def mean_of(ends):
    """The geometric mean: bands are symmetric around a prediction."""
    return math.sqrt(ends[0] * ends[1])


@pytest.mark.parametrize("gpu", ["mi300x", "mi250", "gaudi3"])
def test_gpus_of_other_makers_in_the_catalog_say_that_nothing_of_them_was_measured(capsys, gpu):
    status, printed, _ = asked(capsys, f"plan model=gpt-1.3b gpu={gpu} gpus=8 batch=64 top=1")
    assert status == 0
    assert "nothing of " in printed


@pytest.mark.parametrize(
    ("got", "guess"),
    [("h2000", None), ("mi210", None), ("l200", None), ("rtx4070", None), ("mi250x", "mi250"), ("rtx-409O", None)],
)
def test_a_guess_at_a_gpu_type_has_the_same_numbers(capsys, got, guess):
    _, _, errors = asked(capsys, f"plan model=gpt-1.3b gpu={got} gpus=8")
    assert (f"Did you mean '{guess}'" in errors) if guess else ("Did you mean" not in errors)
