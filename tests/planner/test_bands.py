"""Bands hold what they promise on errors of known distribution; what was never measured widens them and is named."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from fits import MEASURED, bands
from fits.bands import FILE, MODEL
from planner_setup import asked
from scipy import stats

from synergy_core.performance.planner.bands import (
    COVERAGE,
    MEMORY_UPPER,
    MIN_MODELS,
    Band,
    Verdict,
    log_interval,
    memory_band,
    time_band,
    verdict,
)
from synergy_core.performance.planner.families import card_named
from synergy_core.performance.planner.machine import machine_named, software_named, with_settings
from synergy_core.performance.planner.memory import visible_bytes

DENSE, MOE, SMALL = (card_named(name).architecture for name in ("gpt-22b", "mixtral-8x7b", "gpt-125m"))


def band(gpu="a100-80gb", software="megatron", gpus=64, architecture=DENSE, **settings) -> Band:
    return time_band(machine_named(gpu), with_settings(software_named(software), **settings), architecture, gpus)


@pytest.mark.parametrize(("rows", "rank"), [(13, 13), (18, 18), (19, 19), (39, 38), (199, 190)])
def test_ends_are_the_order_statistics_of_split_conformal_prediction(rows, rank):
    errors = np.random.default_rng(rows).permutation(np.arange(1.0, rows + 1))
    assert log_interval(errors, range(rows)) == (rows + 1 - rank, rank)


def test_each_model_counts_alike_however_many_rows_it_has():
    errors = np.append(np.zeros(95), np.linspace(0.4, 0.5, 5))
    assert log_interval(errors, range(100))[1] == pytest.approx(0.4)
    assert 0.4 < log_interval(errors, [0] * 95 + [1] * 5)[1] <= 0.5


@pytest.mark.parametrize("models", [MIN_MODELS, 19])
@pytest.mark.parametrize(("shared", "own"), [(1.0, 0.3), (0.3, 1.0)])
def test_bands_hold_nine_of_ten_rows_of_a_further_model_whose_rows_share_an_error(models, shared, own):
    rng = np.random.default_rng(models)
    inside = []
    for _ in range(200):
        group = np.repeat(np.arange(models), rng.integers(1, 30, models))
        errors = shared * rng.standard_normal(models)[group] + own * rng.standard_normal(len(group))
        low, high = log_interval(errors, group, mirrored=True)
        of_one = stats.norm(shared * rng.standard_normal(50), own)  # 50 further models
        inside.append(np.mean(of_one.cdf(high) - of_one.cdf(low)))
    assert COVERAGE - 0.02 < np.mean(inside) < COVERAGE + 0.05


def test_one_odd_row_of_a_large_group_does_not_make_the_band():
    errors = np.append(np.tile(np.linspace(-0.1, 0.1, 20), 9), 3.0)
    assert log_interval(errors, [*np.repeat(np.arange(9), 20), 8], mirrored=True)[1] <= 0.1


def test_a_mirrored_interval_counts_both_signs():
    low, high = log_interval(np.arange(1.0, 100.0), range(99), mirrored=True)
    assert low == -high
    assert high == 90.0


def errors_of(rng, how, *, software="megatron", models=40, rows=20) -> pd.DataFrame:
    """Models of one family, each with its own mean error and noise about it."""
    model = np.repeat(np.arange(models), rows)
    errors = [0.05 * rng.standard_normal() + 0.05 * rng.standard_normal(rows) for _ in range(models)]
    columns = {
        "how": how,
        "fit": "fit",
        "file": [f"{software} {each % 2}" for each in model],
        "software": software,
        "gpu": "a100",
        "family": "transformer",
        "model": model.astype(str),
        "parameters": 1e9 * (model + 1),
        "error": np.concatenate(errors),
    }
    return pd.DataFrame(columns)


def joined(*parts: pd.DataFrame) -> pd.DataFrame:
    return pd.concat(parts, ignore_index=True)


def test_nested_bands_hold_nine_of_ten_rows_of_models_that_they_were_not_made_of():
    rng = np.random.default_rng(0)
    rows = errors_of(rng, MODEL)
    for each in bands.coverage(rows, rows):
        assert 0.85 <= each["inside"] <= 0.95
        assert each["n"] == (400 if each["file"].startswith("megatron") else 800)
        # The sum of both kinds of noise is normal; this is its 95 % quantile.
        if each["kind"] == MODEL:
            assert math.log(each["high"]) == pytest.approx(1.645 * 0.05 * math.sqrt(2.0), rel=0.2)


def test_errors_of_few_models_widen_a_band_but_do_not_make_it_narrower():
    rng = np.random.default_rng(0)
    others = errors_of(rng, MODEL, software="other", models=MIN_MODELS)
    close = errors_of(rng, MODEL, software="own", models=MIN_MODELS).assign(error=0.001)
    few = close[: -len(close) // MIN_MODELS]

    def high(own: pd.DataFrame) -> float:
        return bands.nearest(joined(own, others), "own", "a100", "transformer")["high"]

    assert high(close) == 0.001
    assert high(few) > 0.05
    # Eight models with an error of 1, and the mean square of the wider pool, which ends at 1, as the ninth.
    square = (8.0 + stats.norm.ppf(0.95) ** -2) / 9.0
    assert high(few.assign(error=1.0)) == pytest.approx(stats.t.ppf(0.95, 9) * math.sqrt(square), rel=1e-3)


@pytest.mark.parametrize("few", [1, 3, 6])
def test_bands_of_few_models_hold_nine_of_ten_rows_of_a_further_model_if_others_are_as_far_off(few):
    rng, inside = np.random.default_rng(few), []
    for _ in range(200):
        others = errors_of(rng, MODEL, software="other", models=MIN_MODELS, rows=4)
        own = errors_of(rng, MODEL, software="own", models=few, rows=4)
        end = bands.nearest(joined(own, others), "own", "a100", "transformer")["high"]
        inside.append(1.0 - 2.0 * stats.norm.sf(end, scale=0.05 * math.sqrt(2.0)))
    assert COVERAGE < np.mean(inside) < COVERAGE + 0.06


def test_models_smaller_than_any_that_a_fit_saw_are_counted_with_what_such_models_were_off():
    """One file has all the small models of its fit: without it, only another fit shows how far small ones are off."""
    rng = np.random.default_rng(0)
    large = errors_of(rng, MODEL, models=20)
    seen = large.assign(how=MEASURED)
    small = seen.assign(file="small", parameters=1e8)
    lost = small.assign(how=FILE, error=-0.7)
    mine = joined(large, seen, small, lost)
    before = bands.coverage(mine, large[:0])
    other = seen.assign(fit="other", file="other")
    tiny = small.assign(fit="other", file="tiny")
    after = bands.coverage(joined(mine, tiny.assign(how=FILE, error=0.8), other, tiny), large[:0])
    inside = [[one["inside"] for one in each if one["file"] == "small"] for each in (before, after)]
    assert inside == [[0.0], [1.0]]


def test_what_was_measured_is_not_extrapolated():
    known = band()
    assert known.extrapolated == band(software="fsdp", gpus=8).extrapolated == ()
    assert (known.low, known.high) == known.near
    assert known.low < 1.0 < known.high


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"software": "alpa", "gpu": "h100"}, ["of alpa was measured on h100"]),
        ({"name": "own", "like": ("fsdp",), "gpus": 8}, ["of own was measured"]),
        ({"precision": "bf16"}, ["in fp16, not in bf16"]),
        ({"architecture": MOE}, ["no mixture model was measured under megatron"]),
        ({"architecture": SMALL}, ["models of 0.2B parameters or more"]),
        ({"gpu": "t4", "gpus": 4096}, ["measured on t4", "at most 1024 GPUs"]),
    ],
)
def test_what_was_never_measured_is_named_and_widens_the_band(settings, named):
    found = band(**settings)
    assert all(any(each in clause for clause in found.extrapolated) for each in named)
    assert found.low <= found.near[0]
    assert found.high >= found.near[1]
    assert found.high / found.low > band().high / band().low


def test_few_rows_of_ones_own_do_not_make_a_band_narrower_than_the_shipped_one():
    machine, software, shipped = machine_named("a100-80gb"), software_named("megatron"), band()
    own = {"low": -0.01, "high": 0.5, "of": "mine.yaml"}
    few, many = (
        time_band(machine, software, DENSE, 64, {**own, "rows": rows}) for rows in (MIN_MODELS - 1, MIN_MODELS)
    )
    assert (few.low, few.high) == (shipped.low, math.exp(0.5))
    assert (many.low, many.high) == (math.exp(-0.01), math.exp(0.5))


def test_plans_within_each_others_band_cannot_be_told_apart():
    wide = Band(0.5, 2.0, (0.9, 1.2), "")
    assert not wide.can_tell_apart(1.0, 1.1)
    assert not wide.can_tell_apart(1.1, 1.0)
    assert wide.can_tell_apart(1.0, 1.15)  # 1.0 is below 0.9 · 1.15
    assert wide.can_tell_apart(1.3, 1.0)


def test_plans_that_cannot_be_told_apart_are_named(capsys, tmp_path):
    out = tmp_path / "out.json"
    words = "plan model=gpt-22b gpu=a100-80gb gpus=64 software=megatron top=400"
    status, printed, _ = asked(capsys, words, "--json", str(out))
    assert status == 0
    _, *slower = json.loads(out.read_text())["gpu_types"][0]["plans"]
    lines = [line for line in printed.splitlines() if line.startswith("  64: ") and "may not fit" not in line]
    assert len(lines) == len(slower)
    assert ["cannot be told apart" in line or line.endswith("as fast") for line in lines] == [
        not each["told_apart"] for each in slower
    ]
    assert {each["told_apart"] for each in slower} == {True, False}


def test_bands_and_what_is_extrapolated_are_printed(capsys, tmp_path):
    out = tmp_path / "out.json"
    status, printed, _ = asked(capsys, "plan model=gpt-1.3b gpu=t4 gpus=8 top=1 software=megatron", "--json", str(out))
    assert status == 0
    (plan,) = json.loads(out.read_text())["gpu_types"][0]["plans"]
    low, high = plan["step_time_band_s"]
    assert low < plan["step_time_s"] < high
    assert plan["memory_band_bytes"][0] < plan["memory_bytes"] < plan["memory_band_bytes"][1]
    assert "extrapolated, so the interval is wider: no step was measured on t4" in printed
    assert any("no step was measured on t4" in each for each in plan["extrapolated"])


def test_plans_are_chosen_by_the_upper_end_of_the_best_known_memory():
    found = memory_band(software_named("megatron-core"), DENSE)
    assert found.low < 1.0 < found.high <= MEMORY_UPPER
    assert not found.extrapolated


@pytest.mark.parametrize(("software", "is_measured"), [("nanotron", True), ("torchtitan", True), ("megatron", False)])
def test_memory_is_less_certain_where_less_was_measured(software, is_measured):
    found = memory_band(software_named(software), DENSE)
    assert found.high > MEMORY_UPPER
    assert bool(found.extrapolated) != is_measured
    if not is_measured:
        assert found.high > found.near[1]


@pytest.mark.parametrize("software", ["megatron-core", "torchtitan", "deepspeed"])
def test_the_verdict_follows_from_where_the_limit_lies_in_the_band(software):
    machine, band = machine_named("a100-80gb"), memory_band(software_named(software), DENSE)
    limit = visible_bytes(machine)
    assert verdict(0.999 * limit / band.high, band, machine) is Verdict.FITS
    assert verdict(1.001 * limit / band.high, band, machine) is Verdict.MAY
    assert verdict(0.999 * limit / band.low, band, machine) is Verdict.MAY
    assert verdict(1.001 * limit / band.low, band, machine) is Verdict.NOT


def test_a_plan_that_surely_fits_is_named_where_the_fastest_may_not(capsys):
    _, printed, _ = asked(capsys, "plan model=llama-3-70b gpu=h100 gpus=32 software=torchtitan top=1")
    assert "may not fit" in printed
    assert "surely fits" in printed


def test_memory_of_mixtures_is_less_certain_and_said_to_be(capsys):
    assert memory_band(software_named("megatron-core"), MOE).high > MEMORY_UPPER
    _, printed, _ = asked(capsys, "plan model=mixtral-8x7b gpu=h100 gpus=16 top=20")
    assert "may not fit" in printed
