"""Which GPUs there are, and which of them each process sees. There is none where this runs: programs pretend."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from synergy_exec.backends import local
from synergy_exec.worker.gpus import see_only


@pytest.mark.parametrize(
    ("environment", "seen"),
    [
        ({}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
        ({"HIP_VISIBLE_DEVICES": "4,6"}, {"HIP_VISIBLE_DEVICES": "6"}),
    ],
)
def test_each_rank_sees_its_own_gpu_alone(environment: dict[str, str], seen: dict[str, str]) -> None:
    assert see_only([1], environment) == seen


def test_each_node_of_this_machine_sees_its_gpus_alone() -> None:
    assert see_only(range(2, 4), {}) == {"CUDA_VISIBLE_DEVICES": "2,3"}
    assert see_only(range(2), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}


def a_machine(monkeypatch: pytest.MonkeyPatch, *, drivers: list[str], torch_finds: str) -> None:
    def asked(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout=torch_finds, stderr="")

    monkeypatch.setattr(local, "_DRIVERS", {name: lambda name=name: name in drivers for name in local._DRIVERS})
    monkeypatch.setattr(subprocess, "run", asked)


@pytest.mark.parametrize("driver", list(local._DRIVERS))
def test_gpus_of_amd_are_found_as_those_of_nvidia_are(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    a_machine(monkeypatch, drivers=[driver], torch_finds="AMD Instinct MI250X\nAMD Instinct MI250X\n")
    assert local.gpu_names() == ["AMD Instinct MI250X"] * 2


def test_a_torch_that_can_use_none_of_the_gpus_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_machine(monkeypatch, drivers=[list(local._DRIVERS)[1]], torch_finds="\n")
    assert local.gpu_names() == []
    assert capsys.readouterr().err == (
        "/dev/kfd, the driver of AMD's GPUs, is here, but this torch can use no GPU: slots are CPU cores.\n"
    )


def test_a_machine_without_gpus_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("torch was asked"))
    monkeypatch.setattr(local, "_DRIVERS", {"nvidia-smi": lambda: False, "amd": Path("/no such").exists})
    assert local.gpu_names() == []
