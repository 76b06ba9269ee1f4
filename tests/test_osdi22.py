"""The workload of Synergy's evaluation (OSDI 2022): its law, its published draw, its job lists, models by class."""

import csv
import hashlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from hypothesis import given
from hypothesis import strategies as st

from synergy_core.errors import InputError
from synergy_core.units import HOUR_S
from synergy_runs.generators.by_class import CLASSES, in_turn
from synergy_runs.generators.laws import LawParameters, draw, laws
from synergy_runs.inputs.from_settings import workload_of
from synergy_runs.traces import read_trace

PUBLISHED = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "resource_sensitivity/workload_9_per_hour_seed42.csv"
LAW = ((0.8, 1.5, 3.0), (0.2, 3.0, 4.0))
CLASS_OF = {model: name for name, models in CLASSES for model in models}


def asked(**changed):
    usual = {"jobs": 9_000, "jobs_per_hour": 9.0, "class_mix": (20, 70, 10), "job_gpus": "one", "run_times": LAW}
    return LawParameters(**{**usual, **changed})


def lines(rows):
    """A job a line, numbers to the last digit, as the published list has them."""
    columns = (rows.jobs[name].tolist() for name in ("job_name", "submit_s", "duration_s", "model", "gpus"))
    return [f"{job},{at:.0f},{run!r},{model},{gpus}" for job, at, run, model, gpus in zip(*columns, strict=True)]


def workload(*overrides, seed=42):
    settings = composed(*overrides)
    return workload_of(settings.trace, settings.cluster, seed)


def test_the_published_jobs_are_drawn_to_the_last_digit():
    """The digest is that of the published list's rows, with which the next test compares them where it is at hand."""
    drawn = hashlib.sha256("\n".join(lines(draw("osdi22", asked(), 42))).encode()).hexdigest()
    assert drawn == "ad792b43bb22061da58f55cc8b62f161546c3f1ead29168c0a02273c9b953224"


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="SYNERGY_DATA has no resource_sensitivity/")
def test_the_published_list_has_these_jobs_and_reads_as_them():
    with PUBLISHED.open(newline="") as stream:
        published = [",".join(row) for row in csv.reader(stream)][1:]
    drawn, read = draw("osdi22", asked(), 42), read_trace(PUBLISHED)
    assert read.format_name == "osdi22_csv"
    assert read.from_zero
    assert lines(drawn) == published == lines(read)


def test_other_seeds_draw_other_jobs_by_the_same_law():
    seeds = [draw("osdi22", asked(jobs=4_000), seed) for seed in (0, 1, 2)]
    assert len({tuple(each.jobs[name]) for each in seeds for name in ("submit_s", "duration_s")}) == 6
    for rows in seeds:
        gaps_s = np.diff(rows.jobs["submit_s"])
        minutes = np.log10(np.asarray(rows.jobs["duration_s"]) / 60)
        assert gaps_s.mean() == pytest.approx(HOUR_S / 9, rel=0.05)
        assert gaps_s.std() == pytest.approx(HOUR_S / 9, rel=0.1)
        assert 1.5 <= minutes.min() < minutes.max() <= 4.0
        assert (minutes < 3).mean() == pytest.approx(0.8, abs=0.02)
        assert minutes[minutes < 3].mean() == pytest.approx(2.25, abs=0.03)
        assert minutes[minutes > 3].mean() == pytest.approx(3.5, abs=0.04)


def test_a_rate_changes_arrivals_and_nothing_else():
    slow, fast = (draw("osdi22", asked(jobs=500, jobs_per_hour=rate), 7) for rate in (6.0, 8.5))
    assert list(slow.jobs["duration_s"]) == list(fast.jobs["duration_s"])
    assert list(slow.jobs["model"].codes) == list(fast.jobs["model"].codes)
    assert slow.jobs["submit_s"][-1] / fast.jobs["submit_s"][-1] == pytest.approx(8.5 / 6.0, rel=0.01)


def test_jobs_with_philly_s_gpus_are_else_the_same():
    one, many = (draw("osdi22", asked(job_gpus=gpus), 42) for gpus in ("one", "philly"))
    assert set(one.jobs["gpus"]) == {1}
    for column in ("submit_s", "duration_s", "model"):
        assert np.array_equal(one.jobs[column], many.jobs[column])
    share = {gpus: count / len(many) for gpus, count in Counter(many.jobs["gpus"].tolist()).items()}
    # philly.json's fractions; jobs of 12 GPUs count as one, larger ones than 16 are not drawn
    known = {1: 0.9327, 2: 0.0221, 4: 0.0228, 8: 0.0200, 16: 0.0024}
    assert share == pytest.approx(known, abs=0.006)


@given(st.lists(st.integers(0, 100), min_size=3, max_size=3).filter(any), st.integers(1, 400))
def test_shares_of_classes_are_never_off_by_more_than_a_job(mix, jobs):
    models = in_turn(mix, jobs)
    for at, (name, members) in enumerate(CLASSES):
        mine = [model for model in models if CLASS_OF[model] == name]
        assert abs(len(mine) - jobs * mix[at] / sum(mix)) <= 2
        assert mine == [members[turn % len(members)] for turn in range(len(mine))]


def test_a_longer_list_of_models_begins_with_the_shorter():
    assert in_turn((20, 70, 10), 1_000)[:300] == in_turn((20, 70, 10), 300)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"jobs": 0}, r"trace\.jobs=0: expected at least 1"),
        ({"jobs_per_hour": 0.0}, r"trace\.jobs_per_hour=0: expected a number above 0"),
        ({"jobs_per_hour": 1e-9}, r"come within 136 years"),
        ({"run_times": ((1.0, 3.0),)}, r"expected \[share, a, b\]"),
        ({"run_times": ((1.0, 4.0, 3.0),)}, r"expected \[share, a, b\]"),
        ({"run_times": ((1.0, 1.0, 30.0),)}, r"within ±7\.9"),
        ({"run_times": ((0.5, 1.0, 3.0),)}, r"shares add up to 0\.5, expected 1"),
        *(({"class_mix": mix}, r"class_mix=.*expected 3 weights ≥ 0")
          for mix in ((20, 70), (0, 0, 0), (-1, 1, 1), (float("nan"), 1, 1))),
    ],
)  # fmt: skip
def test_a_law_that_is_none_is_refused(changed, complaint):
    with pytest.raises(InputError, match=complaint):
        draw("osdi22", asked(**changed), 0)


def test_a_law_is_found_by_being_there():
    assert set(laws()) == {"osdi22"}
    with pytest.raises(InputError, match=r"unknown law 'osdi23'\. Did you mean 'osdi22'"):
        draw("osdi23", asked(), 0)


def test_keys_of_laws_are_refused_where_nothing_reads_them():
    for overrides, complaint in (
        (("+trace=philly", "trace.jobs_per_hour=6"), r"trace\.jobs_per_hour=6\.0: this key applies only to"),
        (("+trace=osdi22", "trace.run_times=null"), r"trace\.run_times is null; \+trace=osdi22 sets it"),
        (("+trace=osdi22", "trace.generator=osdi2"), r"unknown trace\.generator 'osdi2'. Did you mean 'osdi22'"),
    ):
        with pytest.raises(InputError, match=complaint):
            workload(*overrides)


def test_the_trace_has_the_law_s_jobs_in_the_order_of_their_ids():
    work = workload("+trace=osdi22", "trace.jobs=50")
    rows = draw("osdi22", asked(jobs=50), 42)
    assert work.jobs["job_name"].tolist() == [str(number) for number in range(50)]
    assert work.jobs["submit_time_s"].tolist() == list(rows.jobs["submit_s"])
    assert work.jobs["duration_s"] == pytest.approx(np.asarray(rows.jobs["duration_s"]), abs=2**-20)
    assert list(work.jobs["model"]) == in_turn((20, 70, 10), 50)
    assert "not a real trace: 9 jobs an hour, one GPU each" in work.notes[0]
    assert work.sha256 != workload("+trace=osdi22", "trace.jobs=50", "trace.class_mix=[50,0,50]").sha256
    assert len(workload("+trace=osdi22", "trace.window=2h")) == (work.jobs["submit_time_s"] < 7_200).sum() == 22
