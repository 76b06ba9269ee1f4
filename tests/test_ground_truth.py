"""The truth about training jobs: measured tables against a naive reading of them, the catalog on any shape."""

import csv
import itertools
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from training_jobs import APPLICATIONS, CATALOG, t4s, training

from synergy_core.errors import InputError
from synergy_sim.execution import Costs
from synergy_sim.truth import Truth
from synergy_sim.truth.application import packed
from synergy_sim.truth.measured import MeasuredApplication, smallest_rotation

PROFILES = Path(os.environ.get("SYNERGY_DATA") or "/nowhere") / "profiles"
needs_profiles = pytest.mark.skipif(not PROFILES.is_dir(), reason="SYNERGY_DATA has no profiles/")
MEASURED = Truth(PROFILES) if PROFILES.is_dir() else CATALOG
SHAPES = st.lists(st.integers(1, 16), min_size=1, max_size=16).map(tuple)
KINDS = st.sampled_from(["t4", "a100", "rtx2080ti", "v100", "h100", "nonsense", "A100 80GB"])


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def placements(application, kind):
    """{placement: {local batch: (step, sync)}} as the file has it, duplicates averaged nowhere."""
    table = defaultdict(dict)
    for row in rows_of(PROFILES / application / f"placements-{kind}.csv"):
        shape = tuple(int(digit) for digit in row["placement"])
        table[shape][int(float(row["local_bsz"]))] = (float(row["step_time"]), float(row["sync_time"]))
    return table


@needs_profiles
@pytest.mark.parametrize("kind", ["t4", "a100", "rtx2080ti"])
@pytest.mark.parametrize("application", APPLICATIONS)
def test_measured_points_are_returned_as_measured_under_every_rotation(application, kind):
    app = MEASURED.application(application)
    for shape, curve in itertools.islice(placements(application, kind).items(), 0, None, 7):
        for batch, (step_s, sync_s) in curve.items():
            for turn in range(len(shape)):
                assert app.step(kind, shape[turn:] + shape[:turn], batch) == pytest.approx((step_s, sync_s))


@needs_profiles
@pytest.mark.parametrize("application", APPLICATIONS)
def test_between_measured_batches_times_are_linear(application):
    app = MEASURED.application(application)
    for shape, curve in itertools.islice(placements(application, "t4").items(), 0, None, 11):
        for low, high in itertools.pairwise(sorted(curve)):
            at = (low + high) // 2
            share = (at - low) / (high - low)
            expected = [(1 - share) * a + share * b for a, b in zip(curve[low], curve[high], strict=True)]
            assert app.step("t4", shape, at) == pytest.approx(expected)


@needs_profiles
@pytest.mark.parametrize("application", ["bert", "cifar10", "imagenet"])
def test_placements_that_were_not_measured_are_interpolated_on_a_triangulation(application):
    from scipy.interpolate import LinearNDInterpolator

    groups = defaultdict(list)
    for shape, curve in placements(application, "t4").items():
        for batch, times in curve.items():
            groups[len(shape), sum(shape), batch].append(times)
    points = [(*at, *np.mean(times, axis=0)) for at, times in sorted(groups.items())]
    wider = rows_of(PROFILES / application / "scalability-t4.csv")
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    points += [tuple(float(row[name]) for name in columns) for row in wider]
    table = np.array(points)
    surface = LinearNDInterpolator(table[:, :3], table[:, 3:])
    app = MEASURED.application(application)
    known, compared = {smallest_rotation(each) for each in placements(application, "t4")}, 0
    for shape in [(4, 4, 4, 4, 4, 4), (4,) * 8, (4,) * 12, (4, 4, 4, 4, 4, 2), (3,) * 9]:
        low, high = app.local_batches("t4", shape)
        for batch in (low, (low + high) // 2):
            expected = surface((len(shape), sum(shape), batch)).reshape(2)
            if smallest_rotation(shape) not in known and np.isfinite(expected).all():
                assert app.step("t4", shape, batch) == pytest.approx(expected.tolist())
                compared += 1
    assert compared >= 3


@needs_profiles
@pytest.mark.parametrize("application", APPLICATIONS)
def test_statistics_between_two_files_are_linear_in_the_batch(application):
    app = MEASURED.application(application)
    files = {int(path.stem.split("-")[1]): rows_of(path) for path in (PROFILES / application).glob("validation-*.csv")}
    batches = sorted(files)
    assert (app.initial_batch, app.max_batch) == (batches[0], batches[-1])
    for epoch in (0, len(files[batches[0]]) - 1):
        assert app.work_at_epoch_end[epoch] == min(float(rows[epoch]["progress"]) for rows in files.values())
        for low, high in itertools.pairwise(batches):
            for share in (0.0, 0.25, 1.0):
                at = low + share * (high - low)
                for which in ("grad_sqr", "grad_var"):
                    ends = [float(files[each][epoch][which]) for each in (low, high)]
                    expected = (1 - share) * ends[0] + share * ends[1]
                    assert getattr(app.statistics(at, epoch), which) == pytest.approx(expected)
    for beyond, file in ((1, batches[0]), (10**6, batches[-1])):
        assert app.statistics(beyond, 0).grad_var == pytest.approx(float(files[file][0]["grad_var"]))


def check_sound(app, kind, shape):
    """Times are positive and finite, also for batches that nobody measured."""
    low, high = app.local_batches(kind, shape)
    assert 1 <= low <= high
    steps = [app.step(kind, shape, batch) for batch in (1, low, (low + high) // 2, high, 2 * high, 8 * high)]
    for step_s, sync_s in steps:
        assert 0 < step_s < 1e5
        assert 0 <= sync_s <= step_s
    return steps


@given(application=st.sampled_from(APPLICATIONS), kind=KINDS, shape=SHAPES)
def test_catalog_has_a_sound_answer_for_any_shape_on_any_gpu_type(application, kind, shape):
    steps = check_sound(CATALOG.application(application), kind, shape)
    assert steps[5].step_s >= steps[4].step_s >= steps[3].step_s * 0.999


@needs_profiles
@given(application=st.sampled_from(APPLICATIONS), kind=KINDS, shape=SHAPES)
@example(application="yolov3", kind="t4", shape=(1, 1))  # synchronisation grows faster than the step it is part of
def test_measured_tables_have_a_sound_answer_for_any_shape_on_any_gpu_type(application, kind, shape):
    check_sound(MEASURED.application(application), kind, shape)


@needs_profiles
@pytest.mark.parametrize("application", APPLICATIONS)
@pytest.mark.parametrize(
    ("kind", "shape"), [("t4", (8,)), ("t4", (4,) * 32), ("a100", (16,)), ("a100", (8,) * 4), ("rtx2080ti", (2, 14))]
)
def test_beyond_the_largest_batch_a_larger_one_is_not_faster_on_more_gpus_than_were_measured(application, kind, shape):
    app = MEASURED.application(application)
    high = app.local_batches(kind, shape)[1]
    steps_s = [app.step(kind, shape, batch).step_s for batch in (high, high + 1, *(high * n for n in (2, 3, 8, 100)))]
    assert steps_s == sorted(steps_s)


@settings(max_examples=60)
@given(application=st.sampled_from(APPLICATIONS), batch=st.integers(1, 100_000))
def test_gains_lie_between_nothing_gained_and_perfect_scaling(application, batch):
    app = CATALOG.application(application)
    scale = batch / app.initial_batch
    for gain in app.gains(batch):
        assert min(1.0, scale) * (1 - 1e-9) <= gain <= max(1.0, scale) * (1 + 1e-9)


@pytest.mark.parametrize("application", APPLICATIONS)
def test_requested_run_time_is_the_sum_of_its_epochs(application):
    app, batch = CATALOG.application(application), CATALOG.application(application).initial_batch * 2
    for gpus in (1, 2, 8):
        alone_s = CATALOG.requested_run_s(application, "t4", packed(gpus, 4), batch)
        rate = app.requested_rate("t4", packed(gpus, 4), batch)
        assert alone_s * rate == pytest.approx(app.iterations(batch)[-1], rel=0.1)


def test_packed_fills_nodes_and_puts_the_rest_on_one_more():
    assert (packed(3, 4), packed(8, 4), packed(10, 4)) == ((3,), (4, 4), (4, 4, 2))


def test_specs_are_told_apart_by_the_nodes_they_are_for():
    made = training([(0, 4, 600, "bert")], t4s())
    rates = [CATALOG.spec(made, 0, each, Costs()).requested_rate["t4"] for each in (t4s(4, 4), t4s(16, 1))]
    assert rates[0] > rates[1]


def write_profile(folder, **replaced):
    """A tiny application with one value replaced."""
    folder.mkdir()
    values = {"step_time": "0.5", "sync_time": "0.1", "local_bsz": "8", "placement": "11", "grad_sqr": "1.0"} | replaced
    row = f"{values['placement']},{values['local_bsz']},{values['step_time']},{values['sync_time']}"
    (folder / "placements-t4.csv").write_text(f"placement,local_bsz,step_time,sync_time\n1,4,0.3,0\n1,8,0.4,0\n{row}\n")
    run = f"progress,iteration,grad_sqr,grad_var\n100,100,{values['grad_sqr']},5\n"
    (folder / "validation-8.csv").write_text(run)
    return folder


@pytest.mark.parametrize(
    ("column", "got"),
    [
        *[("step_time", got) for got in ("nan", "0", "-1")],
        *[("sync_time", "-0.1"), ("sync_time", "inf"), ("local_bsz", "many"), ("grad_sqr", "nan")],
    ],
)
def test_impossible_value_of_a_table_is_named_with_its_line(column, got, tmp_path):
    folder = write_profile(tmp_path / "tiny", **{column: got})
    with pytest.raises(InputError, match=rf"line \d, column {column}: got '{got}', expected a number [>≥] 0"):
        MeasuredApplication(folder)


def test_sound_table_of_a_user_is_read_and_an_incomplete_folder_named(tmp_path):
    folder = write_profile(tmp_path / "tiny")
    truth = Truth(tmp_path)
    assert "tiny" in truth.names
    assert truth.application("tiny").step("t4", (1, 1), 8) == (0.5, 0.1)
    for missing in ("validation-8.csv", "placements-t4.csv"):
        (folder / missing).rename(tmp_path / missing)
        with pytest.raises(InputError, match=r"tiny: expected placements-GPU\.csv and validation-BATCH\.csv"):
            MeasuredApplication(folder)
        (tmp_path / missing).rename(folder / missing)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"slowdown": {"bret": 2.0}}, "unknown model in truth.slowdown 'bret'"),
        ({"slowdown": {"bert": 0.0}}, "truth.slowdown.bert=0: expected a factor > 0"),
        ({"max_local_batch": {"bert": -3}}, "truth.max_local_batch.bert=-3: expected at least 1"),
        ({"fixed_gpus": {"ncf": 0}}, "truth.fixed_gpus.ncf=0: expected at least 1"),
    ],
)
def test_key_out_of_range_is_refused(keys, said):
    with pytest.raises(InputError, match=said):
        Truth(None, **keys)


def test_local_batch_below_the_smallest_measured_is_refused():
    truth = Truth(None, max_local_batch={"bert": 3})
    with pytest.raises(InputError, match=r"truth\.max_local_batch\.bert=3: expected at least 4"):
        truth.spec(training([(0, 1, 600, "bert")], t4s()), 0, t4s(), Costs())
