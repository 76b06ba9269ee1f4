"""What the report's charts and lists are made of is what the runs hold."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
from report_reading import columns_of, report_of, sections_of, unpacked
from small_runs import cluster, drawn_workload, policies, simulate, workload
from test_results import write_policies

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_runs.outputs.comparison import compare
from synergy_runs.outputs.facts import binned_extremes, gpus_in, waiting_jobs
from synergy_runs.outputs.report import write
from synergy_runs.outputs.report.charts import MEASURES, breakdowns, completion, rounded, sweep, waiting
from synergy_runs.outputs.report.excerpt import held_by_node
from synergy_runs.outputs.report.html import job_list, packed_holdings, unit_for
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs, read_run

pytestmark = pytest.mark.usefixtures("unpictured")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = write_policies(tmp_path_factory.mktemp("results"), seeds=(0, 1))
    return compare(find_runs(folder)).rows


def test_numbers_are_rounded_to_four_digits():
    assert rounded(np.array([0.0, 1234.56, -0.000123456, np.nan, np.inf, 98765.0])) == [
        0.0, 1235.0, -0.0001235, None, None, 98760.0
    ]  # fmt: skip


def test_unit_of_times_cannot_be_seen():
    for span_s in (1.0, 3e3, 1e6, 1e9):
        assert 1e-3 <= unit_for(span_s) <= max(1e-3, min(1.0, span_s * 1e-6))


def test_curve_is_the_share_of_jobs_at_every_point(rows):
    chart = completion(rows)
    for row, line in zip(rows, chart["panels"][0]["lines"], strict=True):
        jct_s = np.concatenate([run.jobs("jct_s")["jct_s"] for run in row.runs])
        for at, share in list(zip(chart["at"], line["y"], strict=True))[::37]:
            low, high = (np.mean(jct_s <= at * edge) * 100 for edge in (0.999, 1.001))
            assert low - 0.01 <= share <= high + 0.01
        assert line["y"][-1] == 100


def test_extremes_of_a_bin_are_those_of_every_instant():
    events = simulate(drawn_workload(300, gap_s=300), cluster(2)).events
    time_s, value = waiting_jobs(events)
    edges_s = np.linspace(0, time_s[-1], 41)
    least, most = binned_extremes(time_s, value, edges_s)
    for number, (start_s, end_s) in enumerate(itertools.pairwise(edges_s)):
        before = value[time_s <= start_s][-1] if np.any(time_s <= start_s) else 0
        inside = [before, *value[(time_s > start_s) & (time_s <= end_s)]]
        assert (least[number], most[number]) == (min(inside), max(inside))


def test_waits_by_size_are_over_the_jobs_of_all_seeds(rows):
    line = waiting(rows)["panels"][0]["lines"][0]
    jobs = [run.jobs("gpus", "waiting_s") for run in rows[0].runs]
    waits_s = np.concatenate([each["waiting_s"][each["gpus"] == 1] for each in jobs])
    assert line["jobs"][0] == len(waits_s)
    assert line["y"][0] == pytest.approx(waits_s.mean(), rel=1e-3)
    assert line["high"][0] == pytest.approx(np.percentile(waits_s, 99), rel=1e-3)


def test_breakdowns_are_what_numpy_says(rows):
    found = {each["heading"]: each for each in breakdowns(rows)}
    assert found.keys() == {"size", "tenant", "end state"}
    assert found["size"]["classes"] == ["1", "2–4", "5–8", ">8"]
    columns = [run.jobs("virtual_cluster", "jct_s", "waiting_s", "duration_s", "service_gpu_s") for run in rows[2].runs]
    tenant, jct_s, waiting_s, duration_s, service_gpu_s = (
        np.concatenate([each[name] for each in columns]) for name in columns[0]
    )
    values = found["tenant"]["values"]
    assert values.keys() == MEASURES.keys()
    for at, name in enumerate(found["tenant"]["classes"]):
        mine = tenant == name
        slowdown = jct_s[mine] / duration_s[mine]
        expected = {
            "mean_jct": jct_s[mine].mean(),
            "p99_jct": np.percentile(jct_s[mine], 99),
            "mean_wait": waiting_s[mine].mean(),
            "p99_wait": np.percentile(waiting_s[mine], 99),
            "p50_slowdown": np.median(slowdown),
            "p99_slowdown": np.percentile(slowdown, 99),
            "hours": service_gpu_s[mine].sum() / 3600,
        }
        assert {measure: values[measure][2][at] for measure in MEASURES} == pytest.approx(expected, rel=1e-3)
    assert sum(found["end state"]["jobs"]) == 2 * 120


def listed(rows, **more):
    sections = job_list(rows, **more)
    about, columns = columns_of(sections["jobs"])
    return unpacked(sections["job-names"]).decode().split("\n"), about, columns


def test_list_has_every_job_under_every_policy(rows):
    names, about, columns = listed(rows)
    assert (len(names), about["jobs"], about["left_out"]) == (120, 120, 0)
    for number, row in enumerate(rows):
        jobs = row.runs[0].jobs("job_name", "jct_s", "waiting_s", "preemptions", "submit_time_s", "duration_s")
        over = columns[f"over{number}"]
        jct = columns[f"waiting{number}"] + columns["duration"] + np.where(over % 2, -(over + 1) // 2, over // 2)
        assert names == jobs["job_name"].tolist()
        assert np.allclose(jct * about["unit_s"], jobs["jct_s"], atol=about["unit_s"])
        assert np.allclose(columns[f"waiting{number}"] * about["unit_s"], jobs["waiting_s"], atol=about["unit_s"])
        assert np.array_equal(columns[f"preemptions{number}"], jobs["preemptions"])
        assert np.allclose(np.cumsum(columns["submitted_after_last"]) * about["unit_s"], jobs["submit_time_s"], atol=1)
        assert np.allclose(columns["duration"] * about["unit_s"], jobs["duration_s"], atol=about["unit_s"])


def test_list_too_long_keeps_who_waited_longest_and_says_so(rows):
    names, about, columns = listed(rows, most_cells=4 * 20)
    assert (len(names), about["jobs"], about["left_out"]) == (20, 120, 100)
    waited_s = np.max([row.runs[0].jobs("waiting_s")["waiting_s"] for row in rows], axis=0)
    assert waited_s[columns["id"]].min() >= np.delete(waited_s, columns["id"]).max()


def test_list_has_carried_jobs_which_count_nowhere_and_the_time_limits_that_users_gave(tmp_path):
    jobs = workload([0, 0, 5, 9], [50, 5, 7, 8], [1, 2, 1, 4])
    carried, drawn = np.array([True, False, False, False]), np.array([False, True, True, True])
    jobs = jobs.with_columns(carried=carried, estimate_s=np.full(4, 3600.0), estimate_drawn=drawn)
    write_run(simulate(jobs, cluster(2)), tmp_path / "fifo-0", "")
    (run,) = find_runs(tmp_path)
    rows = compare([run]).rows
    names, about, columns = listed(rows)
    assert run.summary["jobs"] == about["jobs"] == 3
    assert (len(names), columns["partial"].tolist()) == (4, [1, 0, 0, 0])
    assert {sum(each["jobs"]) for each in breakdowns(rows)} == {3}
    assert columns["limit"][0] * about["unit_s"] == 3600.0
    assert columns["limit"].tolist()[1:] == [-1] * 3


def test_lines_at_first_are_all_that_adapt_and_the_log_s(tmp_path):
    jobs = drawn_workload(20)
    names = [*(f"order {number}" for number in range(11)), "adapts", "as-logged"]
    for name in names:
        write_run(simulate(jobs, cluster(2), policy=name), tmp_path / name, "")
        if name == "adapts":
            path = tmp_path / name / "summary.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "information": "own"}))
    told = report_of(write_comparison([read_run(tmp_path / name) for name in names], tmp_path))["policies"]
    shown = [each["label"] for each in told if each["at_first"]]
    assert {"adapts", "as logged"} <= set(shown)
    assert len(shown) < len(names)


def test_sweep_draws_mean_wait_and_mean_jct_over_its_numbers(tmp_path):
    for load in (0.8, 1.2, 1.0):
        write_policies(tmp_path / f"{load}", load=load, jobs=30, seeds=(0, 1, 2))
    rows = compare(find_runs(tmp_path)).rows
    chart = sweep(rows, ["fifo", "small"])
    of_small = {row.setting[0][1]: row for row in rows if row.policy == "small"}
    small = [of_small[load] for load in ("0.8", "1.0", "1.2")]
    assert chart["at"] == pytest.approx([100 * row.mean("offered_load_fraction") for row in small])
    assert chart["x"]["label"] == "offered load, % (cluster.load 0.8, 1.0, 1.2)"
    for key, panel in zip(("mean_waiting_s", "mean_jct_s"), chart["panels"], strict=True):
        line = panel["lines"][1]
        assert line["y"] == pytest.approx([row.mean(key) for row in small], rel=1e-3)
        for end, of in (("low", min), ("high", max)):
            assert line[end] == pytest.approx([of(run.summary[key] for run in row.runs) for row in small], rel=1e-3)


def swept(tmp_path, key, values, **more):
    """The chart of a sweep in which a run per value has that key in its configuration."""
    run = simulate(drawn_workload(20), cluster(2))
    for number, value in enumerate(values):
        typed = {key: value, **{name: each[number] for name, each in more.items()}}
        write_run(run, tmp_path / f"{number}" / "fifo-0", "".join(f"{name}: {each}\n" for name, each in typed.items()))
    return sweep(compare(find_runs(tmp_path)).rows, ["fifo"])


def test_sweep_has_ticks_as_they_were_typed_and_no_band_for_one_run(tmp_path):
    chart = swept(tmp_path, "restart_s", [0.5, 2, 1.25])
    assert (chart["at"], chart["x"]["ticks"]) == ([0.5, 1.25, 2.0], ["0.50", "1.25", "2.00"])
    assert not any("low" in line for panel in chart["panels"] for line in panel["lines"])


def test_sweep_over_more_than_one_number_is_not_drawn_but_workloads_are_averaged(tmp_path):
    assert swept(tmp_path / "two", "restart_s", [1, 1, 2, 2], round_s=[1, 2, 1, 2]) is None
    weeks = {"trace": ["{window: 1d}", "{window: 2d}"] * 2}
    chart = swept(tmp_path / "weeks", "restart_s", [1, 1, 2, 2], **weeks)
    assert chart["at"] == [1.0, 2.0]
    assert "2 values of trace.window" in chart["text"]
    assert all("low" in line for panel in chart["panels"] for line in panel["lines"])


def test_gantt_holds_every_stretch_or_says_what_it_leaves_out():
    held = held_by_node(simulate(drawn_workload(200), cluster(2), quantum_s=3_600.0).events)
    about, columns = columns_of(packed_holdings(held, len(held)))
    assert (about["shown"], about["total"], about["left_out_share"]) == (len(held), len(held), 0.0)
    assert np.allclose(np.cumsum(columns["started_after_last"]) * about["unit_s"], held.start_s, atol=about["unit_s"])
    assert np.array_equal(columns["low_mask"] + (columns["high_mask"] << 32), held.gpu_mask.astype(np.int64))
    assert np.array_equal(columns["node"], held.node)
    about, columns = columns_of(packed_holdings(held, 50))
    assert (about["shown"], about["total"]) == (50, len(held))
    length_s = np.sort(held.end_s - held.start_s)
    assert about["left_out_up_to_s"] == length_s[-51]
    assert np.allclose(np.sort(columns["length"]) * about["unit_s"], length_s[-50:], atol=2 * about["unit_s"])
    slots = np.array([low.bit_count() for low in columns["low_mask"].tolist()])
    shown_gpu_s = (columns["length"] * slots).sum() * about["unit_s"]
    gpu_s = ((held.end_s - held.start_s) * gpus_in(held.gpu_mask)).sum()
    assert about["left_out_share"] == pytest.approx(1 - shown_gpu_s / gpu_s, abs=1e-4)


def test_report_of_many_jobs_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "MAX_LETTERS", 1_110_000)
    write_policies(tmp_path, jobs=2_000)
    monkeypatch.setattr(write, "bokeh_js", lambda: "x" * 1_000_000)
    sections = sections_of(write_comparison(find_runs(tmp_path), tmp_path))
    assert sum(len(text) for name, text in sections.items() if name != "bokeh") < 120_000
    about, _ = columns_of(sections["held-0"])
    assert 0 < about["shown"] < about["total"]


def test_cores_are_not_called_gpus(tmp_path):
    cores = Cluster((NodeType("cpu-0", "cpu", 1, 4),))
    write_run(simulate(workload([0, 1], [5, 9], [1, 2]), cores), tmp_path / "fifo-0", "")
    report = report_of(write_comparison(find_runs(tmp_path), tmp_path))
    assert report["units"] == ["CPU core", "CPU cores"]
    texts = [
        (chart["title"], chart["text"], chart["x"]["label"], panel["label"])
        for chart in report["charts"]
        for panel in chart["panels"]
    ]
    assert not [text for text in texts if "GPU" in "".join(text)]
    assert "CPU core-hours held" in report["measures"]["hours"]


def test_other_jobs_are_left_out_of_the_list_and_nodes_that_nobody_knows_have_no_gantt_chart(tmp_path):
    on = cluster(2)
    run = simulate(drawn_workload(30), on)
    write_run(run, tmp_path / "fifo-0", "")
    other = dataclasses.replace(policies(drawn_workload(20), on)[1], policy="sjf")
    unknown = {"node": np.full_like(other.events.node, -1), "gpu_mask": np.zeros_like(other.events.gpu_mask)}
    write_run(dataclasses.replace(other, events=dataclasses.replace(other.events, **unknown)), tmp_path / "sjf-0", "")
    path = write_comparison(find_runs(tmp_path), tmp_path)
    sections = sections_of(path)
    assert columns_of(sections["jobs"])[0]["policies"] == [0]
    assert report_of(path)["gantt"] == [0]
    assert [each.name for each in tmp_path.glob("trace-*")] == ["trace-fifo.json.gz"]
