"""bench/slow_link.py: two ranks over a slowed link, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench" / "compression_network.py"
GBPS = 0.5
REFUSED = "this machine allows no slowed link"


def typed(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({} if path is None else {"PATH": path})
    return subprocess.run(
        [sys.executable, str(BENCH), *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def measured(folder: Path, *arguments: str) -> dict[str, object]:
    out, before = folder / "found.json", links()
    ended = typed(*arguments, "--gbps", str(GBPS), "--json", str(out))
    if REFUSED in ended.stderr:
        pytest.skip(ended.stderr.strip())
    assert ended.returncode == 0, ended.stderr
    assert links() == before
    found: dict[str, object] = json.loads(out.read_text())
    return found


def test_nothing_crosses_a_slowed_link_faster_than_it_carries(tmp_path: Path) -> None:
    found = measured(tmp_path, "collectives", "--sizes", "1048576", "4194304")
    assert isinstance(found["collectives"], list)
    for each in found["collectives"]:
        # What the bucket holds goes at once, and waits for nothing.
        least_s = 8 * (each["sent_bytes"] - 128 * 1024) / (GBPS * 1e9)
        assert min(each["whole_s"], each["pieces_s"]) > least_s
        # On a busy machine it may take long; the link itself is this machine's alone.
        assert each["pieces_s"] < 20 * each["link_s"]


def test_steps_under_every_compressor_are_measured_and_predicted(tmp_path: Path) -> None:
    found = measured(tmp_path, "steps", "--rounds", "2", "--warm", "0", "--hidden", "64", "--depth", "1")
    predicted, seen = found["predicted_s"], found["seen"]
    assert isinstance(predicted, dict)
    assert isinstance(seen, dict)
    assert set(predicted) <= set(seen)
    for name, each in seen.items():
        assert each["step_s"] >= 8 * (each["sent_bytes"] - 128 * 1024) / (GBPS * 1e9), name
        assert name not in predicted or predicted[name] > 0


def test_a_machine_without_the_tools_is_told_what_to_install(tmp_path: Path) -> None:
    ended = typed("collectives", path=str(tmp_path))
    assert ended.returncode == 1
    assert "install util-linux and iproute2" in ended.stderr
