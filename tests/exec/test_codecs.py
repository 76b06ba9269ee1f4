"""How fast a worker finds gradients to be encoded, and how long it finds them to be exchanged."""

from __future__ import annotations

import time
from typing import Any

import groups
import pytest
import torch
from torch import nn

from synergy_core.goodput.compression import CodecSpeed, LayerSizes, codec_s, compressors
from synergy_exec.messages import PlanMessage
from synergy_exec.training.compression import codecs
from synergy_exec.training.compression.codecs import _Case, measured_codecs
from synergy_exec.training.compression.exposed import Exposed
from synergy_exec.worker.exchanges import layers_of


def test_speeds_of_known_cases_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    true = CodecSpeed(3e9, 5e10, 2e-5)

    def as_the_formula_says(compressor: Any, count: int, side: int, device: object) -> _Case:
        work = compressor.codec_work(LayerSizes.of_shapes([(side, side)] * count), 2)
        sums = (float(each.sum()) for each in (work.touched_bytes, work.flops, work.launches))
        return _Case(*sums, float(codec_s(work, true).sum()))  # type: ignore[call-arg]

    monkeypatch.setattr(codecs, "_case", as_the_formula_says)
    found = measured_codecs(torch.device("cpu"))
    assert found.keys() == {each.scheme for each in compressors()} - {"none"}
    for scheme in ("quantised", "topk", "powersgd"):
        assert found[scheme][0] == pytest.approx(true.touched_bytes_per_s)
        assert found[scheme][2] == pytest.approx(true.launch_s)
    assert found["powersgd"][1] <= true.flops_per_s * 1.001  # of what memory waits for, nothing is known


def test_what_is_measured_here_are_speeds() -> None:
    torch.set_num_threads(1)
    for speed in measured_codecs(torch.device("cpu")).values():
        touched_bytes_per_s, flops_per_s, launch_s = speed
        assert 1e7 < touched_bytes_per_s < 1e13
        assert 1e6 < flops_per_s < 1e16
        assert 0 <= launch_s < 1e-2


def test_exchanging_is_what_comes_after_the_last_gradient() -> None:
    model = nn.Linear(4, 2)
    exposed = Exposed([model], torch.device("cpu"))
    model(torch.ones(1, 4)).sum().backward()
    time.sleep(0.05)
    assert 0.05 <= exposed.take() < 5.0


def test_exchanges_take_part_of_a_step_and_encoding_part_of_them() -> None:
    plans = {each: PlanMessage(data=2, micro_batch=2, compressor=each) for each in ("none", "q4")}
    found = groups.run(
        {2: [(name, "compression_cases:exchange_times", (plan, 4)) for name, plan in plans.items()]}, timeout_s=120
    )
    for name in plans:
        for step_s, sync_s, coding_s in found[name]:
            assert 0 < sync_s < step_s
            assert (0 < coding_s < sync_s) == (name == "q4")


def test_layers_are_what_is_trained_and_has_numbers() -> None:
    model = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 5), "still": nn.Linear(4, 4)})
    model["still"].requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 4)))
    assert layers_of([model]) == [("conv.weight", 8, 75), ("conv.bias", 8, 1)]
