"""A backend, an example job: each is added to a copy of the packages by its file alone, and runs there."""

import json

from test_one_file_each import copied, said

BACKEND = '''"""One slot on this machine."""

from synergy_exec.agent.cores import own_cores
from synergy_exec.backends.local import Local


def backend() -> Local:
    return Local(1, 1, [], own_cores())
'''
EXAMPLE = '''"""Small perceptrons."""

from synergy_exec.examples.mlp import Mlp


class Line(Mlp):
    """width: of its layers."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width=width)
'''
JOB = "class: synergy_exec.examples.line:Line\narguments: {width: 6}\nname: line\ninitial_batch: 8\nmax_batch: 16\n"


def test_backend_and_example_are_added_by_their_files_alone(tmp_path):
    copy = copied(tmp_path, "synergy_core", "synergy_runs", "synergy_exec", "conf")
    (copy / "synergy_exec" / "backends" / "one_slot.py").write_text(BACKEND, encoding="utf-8")
    (copy / "synergy_exec" / "examples" / "line.py").write_text(EXAMPLE, encoding="utf-8")
    (copy / "conf" / "jobs" / "line.yaml").write_text(JOB, encoding="utf-8")
    trace = copy.parent / "jobs.csv"
    trace.write_text("submit_s,model,iterations,job,gpus\n0,line,20,a,1\n0.1,line,20,b,1\n", encoding="utf-8")

    known = said(copy, "synergy_exec", "--help")
    assert "one_slot" in known
    assert "line" in known
    asked = ("backend.name=one_slot", "round_s=0.3", "profile=null", "figures=false")
    said(copy, "synergy_exec", "+trace=file", f"trace.path={trace}", "trace.name=lines", "policy=fifo", *asked)
    summary = json.loads((copy.parent / "results/lines/latest/fifo-0/summary.json").read_text(encoding="utf-8"))
    assert (summary["jobs"], summary["jobs_failed"], summary["jobs_unfinished"]) == (2, 0, 0)
