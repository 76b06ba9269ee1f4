"""What a window holds: its own jobs, and what was left of those that were running when it started."""

from functools import cache

import numpy as np
import pytest
from composed import composed
from jobs import cluster, work_ticks, workload

from synergy_core.errors import InputError
from synergy_core.scheduling.policies import get_policy
from synergy_runs.generators import generate
from synergy_runs.generators.statistics import statistics
from synergy_runs.inputs.from_settings import add_history, carried_in_words, cut, without_carried, workload_of
from synergy_runs.inputs.workload import at_least, from_rows, sampled, scaled, take, windows_of, with_estimates
from synergy_runs.outputs.comparison import compare
from synergy_runs.outputs.facts import holdings
from synergy_runs.outputs.invariants import check
from synergy_runs.outputs.metrics import growth, job_table, overloaded, summarise, waiting_gpu_s
from synergy_runs.outputs.notes import notes
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs
from synergy_runs.traces import read_trace
from synergy_sim.execution import Costs, ExecutionModel
from synergy_sim.simulate import simulate

DAY_S = 86_400
LOG = """submit_time,duration_s,gpus,job,estimate_s,cpus
2024-01-01T00:00:00,864000,8,long,,64
2024-01-01T12:00:00,3600,1,over,,
2024-01-02T00:00:00,172800,4,later,259200,
2024-01-03T00:00:00,7200,8,own,,96.5
2024-01-03T01:00:00,3600,2,second,,8
"""
WINDOW = "2024-01-03/1d"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG, encoding="utf-8")
    return read_trace(path)


def windowed(rows, window=WINDOW):
    return from_rows(rows, name="log", window=window, before=True)


def test_jobs_that_run_into_the_window_enter_at_its_start_with_what_is_left(rows):
    work = cut(windowed(rows))
    assert work.jobs["job_name"].tolist() == ["long", "later", "own", "second"]
    assert work.jobs["carried"].tolist() == [True, True, False, False]
    assert work.jobs["submit_time_s"].tolist() == [0, 0, 0, 3_600]
    assert work.jobs["duration_s"].tolist() == [8 * DAY_S, DAY_S, 7_200, 3_600]
    assert work.jobs["ran_before_s"].tolist() == [2 * DAY_S, DAY_S, 0, 0]
    assert work.jobs["estimate_s"][1] == 2 * DAY_S
    np.testing.assert_array_equal(work.jobs["cpus"], [64, np.nan, 96.5, 8])
    assert work.offered_load_fraction(8) == without_carried(work).offered_load_fraction(8)
    assert carried_in_words(work)[0].startswith("2 jobs were active at the window's start")


def test_whole_logs_windows_at_their_beginning_and_times_without_a_date_carry_nothing(rows):
    for window in ("all", "1d"):
        assert not cut(windowed(rows, window)).jobs["carried"].any()
    assert not carried_in_words(cut(windowed(rows, "all")))
    rows.from_zero = True
    assert not windowed(rows).jobs["carried"].any()


def test_denser_arrivals_bring_more_of_them_into_the_window(rows):
    work = windowed(rows)
    assert cut(scaled(work, 48.0)).jobs["job_name"].tolist() == ["long", "over", "later", "own", "second"]
    assert cut(scaled(work, 48.0)).jobs["duration_s"][1] == 3_600 - 36 * 3_600 / 48
    assert cut(scaled(work, 0.4)).jobs["job_name"].tolist() == ["long", "own", "second"]
    assert cut(at_least(work, 5)).jobs["job_name"].tolist() == [
        "long",
        "own",
    ]  # narrow jobs are left out of the carried too


def test_a_log_that_has_starts_counts_from_them(tmp_path):
    head = "JobID|User|State|Submit|Start|End|ElapsedRaw|AllocTRES\n"
    lines = [
        "1|a|COMPLETED|2024-01-01T00:00:00|2024-01-02T23:00:00|2024-01-03T02:00:00|10800|gres/gpu=1",
        "2|a|COMPLETED|2024-01-02T00:00:00|2024-01-03T05:00:00|2024-01-03T06:00:00|3600|gres/gpu=1",
        "3|a|COMPLETED|2024-01-03T00:00:00|2024-01-03T00:00:00|2024-01-03T01:00:00|3600|gres/gpu=1",
    ]
    path = tmp_path / "jobs.txt"
    path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
    work = cut(windowed(read_trace(path)))
    assert work.jobs["duration_s"].tolist() == [7_200, 3_600, 3_600]
    assert work.jobs["ran_before_s"].tolist() == [3_600, 0, 0]
    assert "(1 of them waiting)" in carried_in_words(work)[0]


def test_carrying_jobs_in_changes_no_draw_of_the_windows_own():
    rows = generate("venus", window_s=20 * DAY_S, seed=3)
    start_s = min(rows.jobs["submit_s"]) + 15 * DAY_S

    def made_of(before):
        work = from_rows(rows, name="venus", window="all", first_s=start_s, before=before)
        work = cut(sampled(work, 0.5, np.random.default_rng(1)))
        assert work.jobs["carried"].any() == before
        return without_carried(with_estimates(work, 4.0, np.random.default_rng(2)))

    alone, made = made_of(False), made_of(True)
    assert made.jobs["job_name"].tolist() == alone.jobs["job_name"].tolist()
    np.testing.assert_array_equal(made.jobs["estimate_s"], alone.jobs["estimate_s"])
    np.testing.assert_array_equal(made.jobs["submit_time_s"], alone.jobs["submit_time_s"])


@pytest.mark.parametrize("name", ["fifo", "easy", "srtf", "tiresias", "themis", "qssf"])
def test_carried_jobs_hold_gpus_and_are_in_no_job_metric(rows, name):
    work = with_estimates(cut(windowed(rows)), 0.0, np.random.default_rng(0))
    done = simulate(work, cluster(1), get_policy(name))
    check(done)
    jobs, summary = job_table(done), summarise(done)
    assert np.isnan(jobs.jct_s[:2]).all()
    assert np.isnan(jobs.queueing_delay_s[:2]).all()
    assert np.isfinite(jobs.jct_s[2:]).all()
    assert summary["jobs"] == sum(summary["jobs_by_size"].values()) == 2
    assert summary["jobs_carried_in"] == 2
    assert summary["mean_jct_s"] == pytest.approx(jobs.jct_s[2:].mean())
    if name in ("fifo", "easy"):
        held = holdings(done.events)
        assert held.job_id[0] == 0  # the job submitted first starts first, and all others wait for it
        assert held.gpu_ticks().sum() == work_ticks(work)
        assert jobs.first_start_s[2] >= 8 * DAY_S


@pytest.mark.parametrize(("name", "reads"), [("easy", True), ("themis", True), ("fifo", False), ("qssf", False)])
def test_a_policy_is_starred_for_drawn_estimates_only_where_they_are_exact(rows, name, reads):
    work = cut(windowed(rows))
    drawn = with_estimates(work, 4.0, np.random.default_rng(0)).jobs["estimate_drawn"]
    assert drawn.tolist() == [True, False, True, True]
    given = take(work, ~np.isnan(work.jobs["estimate_s"]))  # by users
    for jobs, overestimate, exact in ((work, 4.0, False), (work, 0.0, True), (given, 0.0, False)):
        run = simulate(with_estimates(jobs, overestimate, np.random.default_rng(0)), cluster(1), get_policy(name))
        assert run.oracle == bool(run.truth_read) == (reads and exact)


def queue_of(load, days=7, seed=0):
    """Poisson arrivals of 1-GPU jobs of an hour or so on 8 GPUs, at that load."""
    random = np.random.default_rng(seed)
    count = random.poisson(load * 8 * days * 24)
    rows = zip(random.uniform(0, days * DAY_S, count), [1] * count, random.exponential(3_600, count), strict=True)
    return workload(list(rows))


@pytest.mark.parametrize("name", ["fifo", "srtf", "tiresias"])
@pytest.mark.parametrize(("load", "grows"), [(0.9, False), (1.2, True)])
def test_a_run_is_overloaded_where_its_queue_grows_as_long_as_jobs_arrive(name, load, grows):
    run = simulate(queue_of(load), cluster(1), get_policy(name))
    assert overloaded(run) == grows
    assert summarise(run)["overloaded"] == grows
    if grows and name != "srtf":
        assert growth(run)[0] == pytest.approx(load - 1, abs=0.1)


def test_a_queue_that_was_worked_off_and_one_of_few_jobs_are_not_overloaded():
    rush = [(10 * i, 1, 36_000) for i in range(200)]
    calm = [(10_000 + 7_200 * i, 1, 3_600) for i in range(150)]
    run = simulate(workload(rush + calm), cluster(1), get_policy("backfill"))
    assert summarise(run)["max_queue_jobs"] > 100
    assert not overloaded(run)
    few = simulate(workload([(i, 8, 3_600) for i in range(20)]), cluster(1), get_policy("fifo"))
    assert growth(few)[0] > 0.03
    assert not overloaded(few)


@pytest.mark.parametrize("name", ["fifo", "srtf", "tiresias"])
def test_waiting_work_is_what_a_plain_count_says(name):
    work = queue_of(1.1, days=1)
    run = simulate(work, cluster(1), get_policy(name), ExecutionModel(Costs(restart_s=0.0)))
    held = holdings(run.events)
    at_s = np.linspace(0.0, 90_000.0, 37)
    expected = []
    for now_s in at_s.tolist():
        waiting = 0.0
        for job in range(len(work)):
            mine = held.job_id == job
            runs = bool(((held.start_s[mine] <= now_s) & (held.end_s[mine] > now_s)).any())
            ran_s = np.clip(np.minimum(held.end_s[mine], now_s) - held.start_s[mine], 0.0, None).sum()
            if work.jobs["submit_time_s"][job] <= now_s and not runs:
                waiting += work.jobs["duration_s"][job] - ran_s
        expected.append(waiting)
    np.testing.assert_allclose(waiting_gpu_s(run, at_s), expected, atol=1e-3)


def test_the_table_says_under_whom_the_queue_still_grew_and_whose_estimates_were_exact(rows, tmp_path):
    exact = with_estimates(cut(windowed(rows)), 0.0, np.random.default_rng(0))
    told = {}
    for name, policies, work in (
        ("calm", ("fifo", "backfill"), queue_of(0.7)),
        ("rush", ("fifo", "backfill"), queue_of(1.5)),
        ("exact", ("fifo", "easy", "srtf"), exact),
    ):
        for policy in policies:
            write_run(simulate(work, cluster(1), get_policy(policy)), tmp_path / name / f"{policy}-0", "")
        compared = compare(find_runs(tmp_path / name))
        told[name] = " ".join(notes(compared))
    assert "Overloaded under backfill, fifo" in told["rush"]
    assert "Overloaded" not in told["calm"]
    assert [row.label for row in compared.rows] == ["easy*", "fifo", "srtf*"]
    assert "(easy*)" in told["exact"]
    assert "(srtf*)" in told["exact"]


def with_history(days, seed):
    rows = generate("philly", window_s=days * DAY_S, seed=1)
    first_s = min(rows.jobs["submit_s"])
    add_history(rows, "philly", seed=np.random.SeedSequence(seed))
    return cut(from_rows(rows, name="philly", first_s=first_s, before=True))


def test_generated_traces_have_a_history_that_changes_none_of_their_jobs():
    alone = from_rows(generate("philly", window_s=2 * DAY_S, seed=1), name="philly")
    own = without_carried(with_history(2, seed=2))
    assert own.jobs["job_name"].tolist() == alone.jobs["job_name"].tolist()
    for column in ("submit_time_s", "duration_s", "gpus"):
        np.testing.assert_array_equal(own.jobs[column], alone.jobs[column])


def test_as_much_work_is_carried_in_as_littles_law_says():
    past = generate("philly", window_s=70 * DAY_S, seed=100)
    gpus, duration_s = np.asarray(past.jobs["gpus"]), np.asarray(past.jobs["duration_s"], dtype=float)
    expected_gpu_s = float((gpus * duration_s**2).sum()) / 2 / (70 * DAY_S)  # λ·E[g·D²]/2
    left_gpu_s, draws = [], 12
    for seed in range(draws):
        work = with_history(1, seed)
        left_gpu_s.append(float((work.jobs["duration_s"] * work.jobs["gpus"])[work.jobs["carried"]].sum()))
    standard_error = np.std(left_gpu_s, ddof=1) / np.sqrt(draws)
    assert abs(np.mean(left_gpu_s) - expected_gpu_s) < 3 * standard_error


def test_taking_some_jobs_takes_every_column_of_theirs(rows):
    work = windowed(rows)
    kept = take(work, np.array([1, 3]))
    assert len(work.jobs.columns) > 10
    for name, column in work.jobs.columns.items():
        np.testing.assert_array_equal(kept.jobs[name], column[[1, 3]], err_msg=name)


@cache
def drawn(window, seed=0):
    settings = composed("+trace=philly", "trace.find=[]", f"trace.window={window}")
    return workload_of(settings.trace, settings.cluster, seed)


def own_jobs(work):
    """Name, submission since 1970, run time and GPUs of each of the window's own jobs."""
    own = without_carried(work)
    submit_s = (own.jobs["submit_time_s"] + own.origin_s).tolist()
    names, duration_s, gpus = (own.jobs[name].tolist() for name in ("job_name", "duration_s", "gpus"))
    return set(zip(names, submit_s, duration_s, gpus, strict=True))


def test_drawn_windows_share_the_jobs_of_the_days_that_both_have_and_no_others():
    first, second, both = (drawn(window) for window in ("2017-11-06/3d", "2017-11-09/3d", "2017-11-06/6d"))
    assert not own_jobs(first) & own_jobs(second)
    assert own_jobs(first) | own_jobs(second) == own_jobs(both)
    carried = [name for name, carried in zip(second.jobs["job_name"], second.jobs["carried"], strict=True) if carried]
    assert {name for name, *_ in own_jobs(first)} & set(carried)
    assert any("drawn" in note for note in first.notes)


def test_drawn_windows_of_different_dates_or_seeds_differ_and_are_the_same_again():
    windows = [drawn(window, seed) for window in ("2017-11-06/3d", "2017-11-09/3d") for seed in (0, 1)]
    assert len({work.sha256 for work in windows}) == 4
    assert drawn.__wrapped__("2017-11-06/3d").sha256 == windows[0].sha256


def test_a_drawn_monday_is_a_monday():
    """Over fifteen whole weeks each weekday has its known share of the jobs; they start on Monday, 4 September."""
    work = without_carried(drawn("2017-09-04/2017-12-18"))
    hour_of_week = (work.jobs["submit_time_s"] // 3_600 % 168).astype(int)
    share = np.bincount(hour_of_week // 24, minlength=7) / len(work)
    np.testing.assert_allclose(share, statistics("philly").arrivals.weekday_fraction, atol=0.02)


@pytest.mark.parametrize("window", ["2030-01-01/7d", "2017-12-20/7d", "2018-01-01"])
def test_a_window_outside_the_log_that_is_drawn_is_refused_with_the_days_it_has(window):
    with pytest.raises(InputError, match=r"2017-09-04.*2017-12-23"):
        drawn(window)
    assert own_jobs(drawn("2017-12-20")) == own_jobs(drawn("2017-12-20/3d"))  # it lasts until the log ends


@pytest.mark.parametrize(
    ("hours", "window", "expected"),
    [
        (range(40 * 24), "all", ["2024-01-01/7d", "2024-01-29/7d"]),
        (range(40 * 24), "2024-01-04/7d", ["2024-01-04/7d", "2024-02-01/7d"]),
        (range(40 * 24), "2024-01-20/7d", ["2024-01-20/4d", "2024-02-05/4d"]),
        (range(3 * 24), "all", []),
        ((0, 70 * 24), "all", []),  # no window between has jobs
    ],
)
def test_windows_that_are_advised_lie_in_the_log_and_have_jobs(hours, window, expected, tmp_path):
    path = tmp_path / "log.csv"
    lines = [f"{1_704_067_200 + hour * 3_600},60,1\n" for hour in hours]
    path.write_text("submit_time,duration_s,gpus\n" + "".join(lines), encoding="utf-8")
    log = read_trace(path)
    windows = from_rows(log, name="log", window=window).windows
    assert [*windows[:1], *windows[-1:]] == expected
    assert len(windows) in (0, 5)
    assert all(len(from_rows(log, name="log", window=each)) for each in windows)


def test_windows_to_type_leave_out_a_first_job_from_long_before():
    days = np.array([0, *range(60, 100)])
    assert windows_of(days * DAY_S + 1.0, 0.0) == tuple(
        f"1970-{day}/7d" for day in ("03-06", "03-13", "03-20", "03-27", "04-03")
    )
