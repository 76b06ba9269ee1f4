import dataclasses
import gzip
import json
import re
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from report_reading import sections_of
from small_runs import cluster, drawn_workload, simulate, workload
from test_columns import compared
from test_results import write_policies

from synergy_runs.outputs.report.chrome_trace import write_chrome_trace
from synergy_runs.outputs.report.excerpt import busy_stretch, held_by_node, overlapping
from synergy_runs.outputs.report.figures import shown_nodes
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs, read_run
from synergy_runs.outputs.tables import verdict

_EMPTY_TAGS = {"meta", "br", "link"}


class _Page(HTMLParser):
    """The text of a page; its tags must close in order, and nothing may be fetched from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in _EMPTY_TAGS:
            self.open.append(tag)
        assert all(value == "data:," for name, value in attrs if name in ("src", "href"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["script"]:
            self.text += data


def read_page(path):
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert not page.open
    return page


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_policies(tmp_path_factory.mktemp("results"), seeds=(0, 1))
    write_comparison(find_runs(folder), folder, command="python -m synergy_sim +trace=<drawn>")
    return folder


def test_report_stands_alone_and_is_well_formed_with_figures_and_traces_beside_it(report):
    page = read_page(report / "report.html")
    held = {f"held-{number}" for number in range(4)}
    assert sections_of(report / "report.html").keys() == {"report", "jobs", "job-names", "bokeh"} | held
    for each in ("the lowest mean JCT", "python -m synergy_sim +trace=<drawn>", "seeds", "load: 1.0"):
        assert each in page.text
    names = {path.name for path in report.iterdir() if path.is_file()}
    assert {"jct_cdf.png", "gpus_and_queue.png", "waiting_by_size.png", "fairness_cdf.png"} <= names
    assert {"gantt-fifo.png", "trace-round_robin.json.gz", "report.html"} <= names
    assert not [name for name in names if name.startswith(".")]


@pytest.mark.parametrize(
    "jobs",
    [
        workload([0], [0], [1]),
        workload([0, 0, 0], [1e-3, 5, 9], [1, 2, 9]),
        workload([0, 1e6], [3, 3e6], [1, 1], tenant_names=("",)),
    ],
)
def test_report_copes_with_next_to_nothing(tmp_path, jobs):
    write_run(simulate(jobs, cluster(2)), tmp_path / "fifo-0", "")
    page = read_page(write_comparison(find_runs(tmp_path), tmp_path))
    assert "mean JCT" in page.text


def test_headline_tells_a_clearly_best_policy_from_those_that_are_not(tmp_path):
    jobs = drawn_workload(400, gap_s=500)
    slow = simulate(jobs, cluster(4), policy="slow", quantum_s=3_600.0, restart_s=1_800.0)
    one, two = (simulate(jobs, cluster(4), policy=name) for name in ("one", "two"))
    text = verdict(compared(tmp_path / "best", [slow, one]))
    assert text.startswith("one has the lowest mean JCT of these jobs: ")
    assert "\u00a0% below slow." in text
    text = verdict(compared(tmp_path / "tied", [slow, one, two]))
    assert re.fullmatch(r"one \(.*\) and two \(.*\) have the lowest .*\d+\u00a0% below slow\.", text)
    assert "% " not in verdict(compared(tmp_path / "alike", [one, two]))


@pytest.mark.usefixtures("unpictured")
def test_report_copes_with_twelve_policies_and_awkward_names(tmp_path):
    jobs = dataclasses.replace(drawn_workload(30), left_out={"job steps (.batch, .extern, .0)": 4_875})
    for number in range(12):
        run = simulate(jobs, cluster(2), policy=f"a<b>/{number}", oracle=number % 2 == 0)
        write_run(run, tmp_path / f"{number}", "")
    page = read_page(write_comparison(find_runs(tmp_path), tmp_path))
    for each in ("12 scheduling policies", "a<b>/3", "left out: 4,875 job steps (.batch, .extern, .0)"):
        assert each in page.text


def test_report_of_a_sweep_says_which_setting_its_figures_show(tmp_path):
    for load in (0.8, 1.2):
        write_policies(tmp_path / f"{load}", load=load, jobs=30)
    page = read_page(write_comparison(find_runs(tmp_path), tmp_path))
    assert "Figures and breakdowns show cluster.load=0.8" in page.text
    assert "Mean wait and mean JCT over cluster.load" in page.text
    assert (tmp_path / "sweep.png").exists()


def test_figures_are_written_in_each_format_that_was_asked_for_and_the_same_again(tmp_path):
    write_run(simulate(drawn_workload(30), cluster(2)), tmp_path / "fifo-0", "")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_comparison([read_run(tmp_path / "fifo-0")], tmp_path / folder, figures=["pdf", "svg"])
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / folder).iterdir()} for folder in ("one", "two")
    )
    assert first["jct_cdf.pdf"].startswith(b"%PDF")
    assert b"/Type3" not in first["jct_cdf.pdf"]
    assert b"<svg" in first["gantt-fifo.svg"]
    assert not [name for name in first if name.endswith(".png")]
    drawn = [name for name in first if name.endswith((".pdf", ".svg"))]
    assert [name for name in drawn if first[name] != second[name]] == []


def read_trace(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_chrome_trace_has_one_event_per_job_and_gpu(tmp_path):
    run = simulate(workload([0, 4], [10, 20], [2, 9]), cluster(2))
    write_run(run, tmp_path / "fifo-0", "")
    (note,) = write_chrome_trace(read_run(tmp_path / "fifo-0"), tmp_path / "trace.json.gz")
    trace = read_trace(tmp_path / "trace.json.gz")
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(complete) == 2 + 9
    first = complete[0]
    assert (first["ts"], first["dur"], first["pid"], first["tid"]) == (0, 10e6, 0, 0)
    assert (first["args"]["job"], first["name"]) == ("job-0", "job-0 (2)")
    assert {event["tid"] for event in complete if event["pid"] == 0} == set(range(8))
    assert sum(event["dur"] for event in complete) == 1e6 * (2 * 10 + 9 * 20)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"node 0", "node 1", "GPU 7", f"cluster ({note})"} <= names
    assert note == "fifo from 2017-10-09 07:01:55 to 2017-10-09 07:02:19, all of it; time 0 is 2017-10-09 07:01:55"
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert max(event["args"].get("GPUs used", 0) for event in counters) == 11


def test_pages_of_a_long_chrome_trace_hold_all_of_the_run(tmp_path):
    run = simulate(drawn_workload(200), cluster(2))
    write_run(run, tmp_path / "fifo-0", "")
    stored = read_run(tmp_path / "fifo-0")
    notes = write_chrome_trace(stored, tmp_path / "trace.json.gz", most_intervals=100)
    pages = [read_trace(tmp_path / f"trace-{number}.json.gz") for number in range(1, len(notes) + 1)]
    assert len(notes) > 3
    assert not (tmp_path / "trace.json.gz").exists()
    assert [page["otherData"]["note"] for page in pages] == notes
    held_us: Counter = Counter()
    for page in pages:
        complete = [event for event in page["traceEvents"] if event["ph"] == "X"]
        assert len(complete) <= 100 + 16  # and what goes on from the page before, at most one a GPU
        for event in complete:
            held_us[event["args"]["job_id"]] += event["dur"]
            assert event["dur"] >= 0
    service_gpu_s = stored.jobs("service_gpu_s")["service_gpu_s"]
    assert len(held_us) == len(service_gpu_s)
    assert np.allclose([held_us[job] / 1e6 for job in range(200)], service_gpu_s, rtol=1e-9, atol=1e-3)


def test_strip_shows_at_least_one_node_at_the_longest_queue():
    events = simulate(drawn_workload(2_000, gap_s=300), cluster(4)).events
    start_s, end_s = busy_stretch(events, most_starts=100)
    assert 60 <= end_s - start_s < events.time_s[-1]
    shown = overlapping(held_by_node(events), start_s, end_s)
    assert 0 < len(shown) < 1_000
    assert [shown_nodes(gpus) for gpus in ([8] * 60, [64] * 3, [4, 4])] == [12, 1, 2]
