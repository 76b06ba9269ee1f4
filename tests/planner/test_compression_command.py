"""`python -m synergy_core compression`: what it prints and writes, and what it says to bad input."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from planner_setup import asked

from synergy_core.commands.compression import sweep
from synergy_core.performance.goodput.compression import compressor_named
from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import machine_named, software_named

SMALL = ["model=gpt-350m", "gpu=a100", "gpus=8", "gpus_per_node=4", "batch=32", "max_batch=64"]


@pytest.fixture(scope="module")
def found():
    family, architecture = architecture_named("gpt-350m")
    return sweep(
        family,
        architecture,
        machine_named("a100", 4),
        software_named("megatron-core"),
        gpus=8,
        batches=[32, 128],
        node_bytes_per_s=[each * 1.25e8 for each in (1, 25, 10_000)],
        noise_scale=500.0,
        layerwise=compressor_named("powersgd-4"),
    )


def test_an_object_for_every_network_and_a_picture(capsys, tmp_path):
    out, drawn = tmp_path / "choices.json", tmp_path / "map.svg"
    status, printed, _ = asked(
        capsys, "compression", *SMALL, "network_gbps=1,25,nvlink", "--json", str(out), "--picture", str(drawn)
    )
    assert status == 0
    rows = json.loads(out.read_text())
    assert [each["network_gbps"] for each in rows] == [1.0, 25.0, 9600.0]
    for each in rows:
        assert set(each) == {"network_gbps", "compressor", "global_batch", "plan", "goodput", "gain"}
        plan = each["plan"]
        assert plan["micro_batch"] * plan["accumulation"] * plan["data"] == each["global_batch"]
        assert each["compressor"] == plan.get("compressor", "none")
        assert (each["gain"] >= 0.05) if each["compressor"] != "none" else (each["gain"] == 0.0)
    assert rows[0]["compressor"] != "none"
    assert rows[-1]["compressor"] == "none"
    assert rows[0]["goodput"] < rows[1]["goodput"] < rows[2]["goodput"]
    assert "pays below Gb/s" in printed
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_a_compressor_pays_below_its_crossover_and_the_best_is_none_or_a_margin_better(found):
    for name in found.names[1:]:
        below = found.crossover(name)
        gains = {rate: found.gain(name, rate) for rate in found.found}
        assert all(gain <= 0.0 for rate, gain in gains.items() if rate > below)
        if 0.0 < below < float("inf"):
            assert max(gain for rate, gain in gains.items() if rate <= below) > 0.0
    for rate in found.found:
        best = found.best(rate)
        gains = {name: found.gain(name, rate) for name in found.names}
        assert best.gain == pytest.approx(max(gains.values()) if max(gains.values()) >= 0.05 else 0.0)


def test_more_noise_wants_larger_batches(found):
    for rate in found.found:
        batches = [found.best(rate, noise).plan.global_batch for noise in (10.0, 100.0, 1000.0, 10_000.0)]
        assert batches == sorted(batches)


@pytest.mark.parametrize(
    ("model", "gpus", "status", "says"),
    [("gpt-125m", 4, 0, ("between nodes does not matter", "all GPUs")), ("gpt-175b", 8, 1, ("says why",))],
)
def test_one_node_has_no_network_and_what_fits_nowhere_is_said(capsys, model, gpus, status, says):
    found, printed, _ = asked(capsys, f"compression model={model} gpu=a100 gpus={gpus} batch=64 max_batch=64")
    assert found == status
    assert all(each in printed for each in says)
