"""`--thorough` runs what repeats at length what another test shows on a smaller case; without it that is skipped."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import settings

# Before NumPy and torch are imported: tests run side by side, and threads of each on all cores wait for one another.
os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
# NumPy's exp and log, and OpenBLAS's products, round differently with AVX-512 than without it. Without it, the digests
# on record hold on every x86 machine.
os.environ["NPY_DISABLE_CPU_FEATURES"] = "X86_V4 AVX512_ICL AVX512_SPR"
os.environ["OPENBLAS_CORETYPE"] = "Haswell"
# How long an example takes says nothing: other tests run beside it.
settings.register_profile("untimed", settings(), deadline=None)
settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also what repeats other tests at length")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--thorough"):
        return
    for item in items:
        if item.get_closest_marker("thorough"):
            item.add_marker(pytest.mark.skip(reason="repeats a smaller test at length; --thorough runs it"))


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """typed(*arguments): what the command said and how it ended, in this process, which has imported it already."""
    from synergy_sim.__main__ import main

    monkeypatch.delenv("SYNERGY_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["synergy_sim", *arguments])
        try:
            main()
            status = 0
        except SystemExit as left:
            status = left.code
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, said.out, said.err)

    return run
