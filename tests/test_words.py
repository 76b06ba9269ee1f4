"""What a person types with trouble for parsers, what is completed, what advice names, and how programs end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from wrong_inputs.keys import LOG

from synergy_core.errors import InputError
from synergy_core.scheduling import policies
from synergy_runs.inputs.command_line import as_hydra, completion, composed
from synergy_sim.settings import SIMULATOR

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "a b.csv", "ü.csv", "[x].csv", "a=b.csv", "a,b.csv", "a{b}.csv", "a(b).csv", "a'b.csv", 'a"b.csv', "a#b.csv",
    "a$b.csv", "${x}.csv", "a\\${x}.csv", "a:b.csv", "a\\b.csv", "a\\'b.csv", "~x.csv", "a%b.csv", "a b [1] {2}, =.csv",
    "123", "1e3", "true", "!a.csv", "*.csv", "a&b.csv", "-x.csv", "@x.csv", "x\\", "q'", "a\tb.csv", "nan",
]  # fmt: skip


PATHS = ("trace.path", "results_dir", "truth.profile")


@pytest.mark.parametrize("first", range(0, len(NAMES), len(PATHS)))
def test_a_path_is_a_path_whatever_its_name(first):
    names = dict(zip(PATHS, NAMES[first:], strict=False))
    found = composed(SIMULATOR, ["+trace=file", *(f"{key}={name}" for key, name in names.items())])
    for key, name in names.items():
        group, _, inner = key.rpartition(".")
        assert str((found[group] if group else found)[inner]) == name


def test_a_run_reads_and_writes_such_paths_and_home_is_home(tmp_path, monkeypatch, typed):
    monkeypatch.setenv("HOME", str(tmp_path / "ho me"))
    log = tmp_path / "ho me" / "my [log], 1=ü.csv"
    log.parent.mkdir()
    log.write_text(LOG)
    common = ("policy=fifo", "cluster.nodes=1", "figures=false")
    typed("+trace=file", "trace.path=~/my [log], 1=ü.csv", "results_dir=out ${x} (1)", *common)
    (summary,) = (tmp_path / "out ${x} (1)").rglob("summary.json")
    assert json.loads(summary.read_text())["jobs"] == 3


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("trace.window", str, "2017-10-02/1d,2017-10-09/1d"),
        ("policy", list[str], "fifo,las"),
        ("policy", list[str], "[fifo,las],[srtf]"),
        ("trace.path", Path, "choice(a,b)"),
        ("cluster.load", float, "0.8,1.0"),
    ],
)
def test_sweeps_and_null_stay_what_they_are(name, kind, text):
    assert as_hydra(name, kind, text, sweep=True) == text
    assert as_hydra("trace.path", Path, "null", sweep=False) == "null"


def test_json_is_read_where_a_list_of_mappings_is_wanted():
    node = '{"gpu_type": "a100", "nodes": 4, "gpus_per_node": 8}'
    found = composed(SIMULATOR, ["+trace=philly", f"cluster.node_types=[{node}]"])["cluster"]["node_types"]
    assert found == [json.loads(node)]


POLICY = """from synergy_core.scheduling.policies import allocation_policy, ordering_policy
from synergy_core.scheduling.jobs.views import Allocations, ClusterState, JobView


{}
"""
ORDER = '@ordering_policy()\ndef mine(job: JobView):\n    """Mine."""\n    '
SHARE = '@allocation_policy(round_s=60.0)\ndef mine(state: ClusterState):\n    """Mine."""\n    '


@pytest.fixture
def run_beside(tmp_path, monkeypatch, typed):
    """run_beside(policy, text): runs it where the plug-in mine.py has that text."""
    (tmp_path / "log.csv").write_text(LOG)
    monkeypatch.syspath_prepend(str(tmp_path))
    plug_in = types.SimpleNamespace(name="mine", value="mine", load=lambda: __import__("mine"))
    monkeypatch.setattr(policies, "entry_points", lambda group: [plug_in])

    def run(policy, text):
        (tmp_path / "mine.py").write_text(text)
        policies._discover.cache_clear()
        try:
            nodes = ("cluster.nodes=1", "cluster.gpus_per_node=2")
            return typed("+trace=file", "trace.path=log.csv", *nodes, f"policy={policy}", "figures=false")
        finally:
            policies._found.pop("mine", None)
            policies._broken.clear()
            sys.modules.pop("mine", None)
            policies._discover.cache_clear()

    return run


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (f"{ORDER}return (1,", ("mine.py, line 8", "was never closed")),
        (
            "import nopackage",
            ("mine.py, line 5 (`import nopackage`): ModuleNotFoundError: No module named 'nopackage'",),
        ),
        (f"{ORDER}return None", ("mine.py, line 5: its key is None, expected a tuple",)),
        (f"{ORDER}return (float('nan'),)", ("mine.py, line 5: its key is (nan,)",)),
        (
            f"{ORDER}return (1 / (job.job_id - 1),)",
            ("mine.py, line 8 (`return (1 / (job.job_id - 1),)`): ZeroDivisionError: division by zero", "check mine"),
        ),
        (
            f"{ORDER.replace('()', '(preemptive=True)', 1)}return (job.job_id if job.job_id % 2 else 'a',)",
            ("mine.py, line 5", "rule 'comparable'"),
        ),
        (f"{SHARE}return [1]", ("mine.py, line 5", "it answered [1], expected Allocations")),
        (f"{SHARE}return 1 / 0", ("mine.py, line 8 (`return 1 / 0`): ZeroDivisionError",)),
    ],
)
def test_a_broken_policy_is_told_its_file_and_line(code, said, tmp_path, run_beside):
    done = run_beside("mine", POLICY.format(code))
    assert done.returncode == 2
    for part in said:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("summary.json"))


def test_a_broken_policy_file_stops_only_commands_that_use_it(tmp_path, run_beside):
    broken = POLICY.format(f"{ORDER}return ()\n1 / 0")
    assert run_beside("fifo", broken).returncode == 0
    assert list(tmp_path.rglob("summary.json"))
    assert "mine.py, line 9 (`1 / 0`)" in run_beside("mien", broken).stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_keys_words_and_defaults(tmp_path):
    script = subprocess.run(
        [sys.executable, "-m", "synergy_sim", "--completion=bash"], capture_output=True, text=True, check=True
    ).stdout
    asked = ["+tr", "+trace=ph", "trace.mo", "trace.models=b", "cluster.load=", "policy=srt", "figures=f"]
    lines = [script]
    for each in asked:
        line = f"python -m synergy_sim {each}"
        lines.append(f"COMP_LINE='{line}'; COMP_POINT={len(line)}; _synergy_sim_words; echo \"${{COMPREPLY[*]}}\"")
    with pytest.raises(InputError, match="unknown shell 'fish'"):
        completion(SIMULATOR, "--completion=fish")
    told = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == ["+trace=", "philly", "trace.models=", "by_class", "1.0", "srtf", "false"]


@pytest.mark.parametrize(
    "words",
    [
        "synergy_sim.generators philly --days 3650 --waiting",
        "synergy_core plan model=gpt-175b gpu=a100-80gb,h100,b200 gpus=8..4096",
    ],
)
def test_ctrl_c_is_a_sentence_in_every_program(words, tmp_path):
    streams = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL, "text": True, "cwd": tmp_path}
    command = [sys.executable, "-X", "importtime", "-m", *words.split()]
    process = subprocess.Popen(command, **streams, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    begun = "synergy_runs.generators.command" if "generators" in words else "synergy_core.performance.planner.search"
    said = ""
    while begun not in said:  # its import has ended: what it computes takes much longer
        line = process.stderr.readline()
        assert line, said
        said += line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "error: interrupted; " in rest
    assert "Traceback" not in rest
    assert not os.listdir(tmp_path)
