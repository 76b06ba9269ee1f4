"""`python -m synergy_core compression`: what it prints and writes, and what it says to bad input."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from synergy_core.__main__ import main
from synergy_core.commands._sweep import sweep
from synergy_core.goodput.compression import compressor_named
from synergy_core.planner.families import architecture_named
from synergy_core.planner.machine import machine_named
from synergy_core.planner.software import software_named

SMALL = ["model=gpt-350m", "gpu=a100", "gpus=8", "gpus_per_node=4", "batch=32", "max_batch=128"]


def asked(capsys, *arguments):
    status = main(["compression", *arguments])
    return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def found():
    family, architecture = architecture_named("gpt-350m")
    return sweep(
        family,
        architecture,
        machine_named("a100", 4),
        software_named("megatron-core"),
        gpus=8,
        batches=[32, 64, 128],
        node_bytes_per_s=[each * 1.25e8 for each in (1, 10, 100, 10_000)],
        noise_scale=500.0,
        layerwise=compressor_named("powersgd-4"),
    )


def test_an_object_for_every_network_and_a_picture(capsys, tmp_path):
    out, drawn = tmp_path / "choices.json", tmp_path / "map.svg"
    status, printed, _ = asked(capsys, *SMALL, "network_gbps=1,25,nvlink", "--json", str(out), "--picture", str(drawn))
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


def test_a_compressor_pays_below_its_crossover(found):
    for name in found.names[1:]:
        rate = found.crossover(name)
        gains = found.gains(name)
        above = [gain for gain, each in zip(gains, found.rates, strict=True) if each > rate]
        assert all(gain <= 0.0 for gain in above)
        if 0.0 < rate < float("inf"):
            assert gains[[each <= rate for each in found.rates]].max() > 0.0


def test_the_best_is_none_or_a_margin_better(found):
    for rate in found.rates:
        best = found.best(rate)
        gains = {name: found.gain(name, rate) for name in found.names}
        assert best.gain == pytest.approx(max(gains.values()) if max(gains.values()) >= 0.05 else 0.0)


def test_more_noise_wants_larger_batches(found):
    for rate in found.rates:
        batches = [found.best(rate, noise).plan.global_batch for noise in (10.0, 100.0, 1000.0, 10_000.0)]
        assert batches == sorted(batches)


def test_in_one_node_networks_are_alike(capsys):
    status, printed, _ = asked(capsys, "model=gpt-125m", "gpu=a100", "gpus=4", "batch=64", "max_batch=64")
    assert status == 0
    assert "plays no role" in printed
    assert "all GPUs" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["model=gpt-350m", "gpu=a100"], "gpus= is missing"),
        ([*SMALL, "network_gbps=0"], "a number above 0"),
        ([*SMALL, "network_gbps=fast"], "Gb/s, or nvlink"),
        ([*SMALL, "noise_tokens=-1"], "noise_tokens=-1"),
        ([*SMALL, "compressor=q3"], "q2"),
        ([*SMALL, "max_batch=16"], "at least the batch of 32"),
        ([*SMALL, "bandwidth=1"], "bandwidth"),
        ([*SMALL, "seq_len=long"], "seq_len=long: expected a whole number"),
        ([*SMALL, "--picture", "map.png"], "ends in .svg"),
        (["model=gpt-350m", "gpu=t4", "gpus=8", "network_gbps=nvlink"], "give Gb/s"),
    ],
)
def test_bad_input(capsys, arguments, said):
    status, _, error = asked(capsys, *arguments)
    assert status == 2
    assert said in error


def test_what_fits_nowhere_is_said(capsys):
    status, printed, _ = asked(capsys, "model=gpt-175b", "gpu=a100", "gpus=8", "batch=64", "max_batch=64")
    assert status == 1
    assert "says why" in printed
