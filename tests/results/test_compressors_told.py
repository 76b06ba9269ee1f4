"""Tables say under which compressors of gradients jobs trained, where any were compressed."""

import json

from test_results import write_policies

from synergy_runs.comparison import compare
from synergy_runs.notes import MAX_LINES, notes
from synergy_runs.stored import find_runs

KEY = "gpu_time_fraction_by_compressor"


def told(folder, shares):
    """What is noted of stored runs that had such shares; shares: by the run's own folder."""
    for path in folder.rglob("summary.json"):
        if path.parent.name in shares:
            path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: shares[path.parent.name]}))
    return [line for line in notes(compare(find_runs(folder))) if "GPU time" in line or KEY in line]


def test_shares_are_means_over_seeds_the_largest_first_and_what_is_little_together(tmp_path):
    write_policies(tmp_path, seeds=(0, 1))
    second = {"none": 0.972, "q8": 0.01, "q4": 0.009, "bf16": 0.009}
    shares = {"fifo-0": {"q8": 0.5, "none": 0.5}, "fifo-1": second, "sjf-0": {"none": 1.0}, "sjf-1": {"none": 1.0}}
    assert told(tmp_path, shares) == [
        "fifo: GPU time under none 74\u00a0%, q8 26\u00a0%, others 1\u00a0%",
        "sjf*: GPU time under none 100\u00a0%",
    ]


def test_settings_are_told_apart(tmp_path):
    for load in (0.8, 1.2):
        write_policies(tmp_path / str(load), load=load)
    lines = told(tmp_path, {"fifo-0": {"q8": 1.0}})
    assert lines == [f"fifo cluster.load={load}: GPU time under q8 100\u00a0%" for load in (0.8, 1.2)]


def test_many_rows_are_not_told_one_by_one(tmp_path):
    for at in range(MAX_LINES + 1):
        write_policies(tmp_path / str(at), load=1.0 + at, jobs=5)
    (line,) = told(tmp_path, {"fifo-0": {"q8": 1.0}})
    assert KEY in line


def test_of_runs_without_compression_nothing_is_said(tmp_path):
    assert told(write_policies(tmp_path), {}) == []
