"""The command fits: its verdict, its parts, and changes that do make it fit; and how reports of plans are scored."""

import json
import re

import pytest
from planner_setup import asked

TOO_LARGE = "llama-2-13b gpu=a100-80gb gpus=4 software=deepspeed seq_len=2048 batch=16 zero=2 micro_batch=4"
"""14 bytes a parameter over four GPUs, and 2 of weights on each."""


def sizes(printed):
    return [float(each) for each in re.findall(r"([\d.]+) GiB   ?\s*\d+%", printed)]


def test_a_model_that_fits_is_said_to_with_what_takes_the_memory(capsys):
    status, printed, _ = asked(capsys, "fits llama-3-8b gpu=h100 gpus=8 seq_len=8192")
    assert status == 0
    first = re.match(r"fits: llama-3-8b on 8 × H100 SXM5 80 GB needs ([\d.]+) GiB \(90%: ([\d.]+)–([\d.]+)\)", printed)
    needed, low, high = (float(each) for each in first.groups())
    assert low < needed < high < 78.8
    assert sum(sizes(printed)) == pytest.approx(needed, rel=0.03)
    assert "safe" not in printed


def test_every_change_that_is_named_makes_the_model_fit(capsys):
    status, printed, _ = asked(capsys, f"fits {TOO_LARGE}")
    assert status == 1
    assert printed.startswith("does not fit")
    named = [
        line.split(":")[0].strip().replace(", with ", " ")
        for line in printed.partition("tried:")[2].splitlines()
        if re.match(r"  \w+=", line)
    ]
    assert named
    kept = TOO_LARGE.split()
    for words in named:
        changed = dict(word.split("=") for word in words.split(" (")[0].split())
        typed = [word for word in kept if word.partition("=")[0] not in changed]
        status, printed, _ = asked(capsys, "fits", *typed, *(f"{key}={value}" for key, value in changed.items()))
        assert (status, printed.split(":")[0]) == (0, "fits"), words


def test_several_types_or_counts_are_for_plan(capsys):
    for typed in ("gpu=h100,a100 gpus=8", "gpu=h100 gpus=8,16"):
        status, _, complaint = asked(capsys, f"fits llama-3-8b {typed}")
        assert status == 2
        assert "plan" in complaint


def test_degrees_without_a_plan_are_named(capsys):
    status, _, complaint = asked(capsys, "fits llama-3-8b gpu=h100 gpus=8 tensor=3 batch=8")
    assert status == 2
    assert "tensor" in complaint


def reports(folder, *rows):
    path = folder / "reports.csv"
    lines = ["id,arguments,iter_time_s,peak_mem_gib,verdict", *(",".join(each) for each in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_reports_of_plans_are_scored_by_software(capsys, tmp_path):
    plan = "model=llama-3-8b gpu=h100 gpus=8 seq_len=8192 batch=64 micro_batch=1 data=8"
    path = reports(
        tmp_path,
        ("one", f"{plan} zero=3 software=torchtitan recompute=full", "8.0", "24.0", "fits"),
        ("two", f"{plan.replace('8b', '70b')} zero=3 software=torchtitan recompute=full", "", "", "oom"),
        ("three", f"{plan} zero=3 software=fsdp", "", "", "oom"),
        ("four", f"{plan} zero=1 software=torchtitan", "", "", "fits"),
    )
    out = tmp_path / "out.json"
    status, printed, _ = asked(capsys, f"validate {path} --json {out}")
    assert status == 0
    groups = {each["group"]: each for each in json.loads(out.read_text())}
    assert groups["verdict: torchtitan"]["right"] == 2
    assert groups["verdict: fsdp"]["right"] == 0, "it fits, and was reported not to"
    assert groups["verdict: torchtitan"]["failures"] == 1, "torchtitan has no ZeRO 1"
    assert groups["time: torchtitan"]["n"] == groups["memory: torchtitan"]["n"] == 1
    assert groups["memory: all"]["in_band"] in (0, 1)
    assert "undecided" in printed


def test_a_report_without_a_model_or_with_another_verdict_is_refused_with_its_line(capsys, tmp_path):
    for row, words in (
        (("one", "gpu=h100 gpus=8", "", "", "fits"), "arguments"),
        (("one", "model=llama-3-8b gpu=h100 gpus=8", "", "", "maybe"), "oom"),
    ):
        status, _, complaint = asked(capsys, f"validate {reports(tmp_path, row)}")
        assert status == 2
        assert words in complaint
        assert "2" in complaint


def test_files_of_a_report_lie_beside_it(capsys, tmp_path):
    (tmp_path / "mine.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 1024,
                "num_attention_heads": 8,
                "intermediate_size": 2816,
                "vocab_size": 32000,
                "max_position_embeddings": 2048,
            }
        )
    )
    path = reports(tmp_path, ("one", "model=mine.json gpu=h100 gpus=1 software=torchtitan batch=8", "", "", "fits"))
    status, printed, _ = asked(capsys, f"validate {path}")
    assert status == 0
    assert re.search(r"verdict: all .* 1 +0$", printed, re.MULTILINE)
