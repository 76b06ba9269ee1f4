"""Generated logs against the statistics they are drawn from, and against the real log where it is present."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from synergy_core.errors import InputError
from synergy_core.units import DAY_S, HOUR_S
from synergy_runs.generators import generate, names
from synergy_runs.generators.arrivals import marginals
from synergy_runs.generators.command import COLUMNS, further, main, tenant_loads
from synergy_runs.generators.statistics import statistics
from synergy_runs.inputs.workload import from_rows
from synergy_runs.traces import read_trace
from synergy_runs.traces.rows import TraceRows, epoch_s
from synergy_sim.generators import queueing_delays

CLUSTERS = names()
YEAR_S = 364 * DAY_S
PHILLY_LOG_S = 109 * DAY_S


@cache
def a_year(name: str, seed: int) -> TraceRows:
    return generate(name, window_s=YEAR_S, seed=seed)


def columns(rows: TraceRows) -> dict[str, np.ndarray]:
    """The columns of a generated log, with codes in place of names."""
    numbers = {name: rows.jobs[name] for name in ("submit_s", "duration_s", "gpus")}
    codes = {"virtual_cluster": np.int32, "user": np.int32, "end_state": np.int8}
    return numbers | {name: rows.jobs[name].codes.astype(kind) for name, kind in codes.items()}


def digest(rows: TraceRows) -> str:
    return hashlib.sha256(b"".join(each.tobytes() for each in columns(rows).values())).hexdigest()


@pytest.mark.parametrize(
    ("name", "seed"),
    [*(("philly", 1), ("uranus", 1), ("venus", 1)),
     *(pytest.param(each, seed, marks=pytest.mark.thorough) for each in CLUSTERS for seed in (1, 2))],
)  # fmt: skip
def test_a_year_has_the_known_marginals(name, seed):
    missed = [each for each in marginals(statistics(name), a_year(name, seed), YEAR_S) if not each.holds]
    assert not missed, "\n".join(f"{each.name}: {each.generated:g}, {each.source} {each.known:g}" for each in missed)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_window_as_long_as_the_philly_log_has_its_gpu_time_and_dispersion(seed):
    rows = generate("philly", window_s=PHILLY_LOG_S, seed=seed)
    aimed_at = ("GPU-time", "dispersion", "mean", "median", "p10 of all", "p50 of all", "p90 of all", "p50 of 1 GPUs")
    checked = [each for each in marginals(statistics("philly"), rows, PHILLY_LOG_S) if each.name.startswith(aimed_at)]
    assert [each.name for each in checked if not each.holds] == []


@pytest.mark.parametrize("name", ["venus", *(pytest.param(each, marks=pytest.mark.thorough) for each in CLUSTERS)])
def test_the_published_log_length_keeps_the_dispersion_of_hourly_counts(name):
    rows = generate(name, window_s=181 * DAY_S, seed=3)
    figures = {each.name: each for each in marginals(statistics(name), rows, 181 * DAY_S)}
    assert figures["dispersion of hourly counts"].holds


def test_philly_has_the_figures_written_in_the_literature():
    """Jeon et al. and the subset's figures as our literature notes quote them, not as philly.json has them."""
    jobs = columns(a_year("philly", 1))
    small = jobs["duration_s"][jobs["gpus"] == 1]
    assert np.quantile(small, [0.1, 0.25, 0.5, 0.75, 0.9]) == pytest.approx([62, 122, 1_117, 2_716, 8_512], rel=0.1)
    eight = jobs["duration_s"][(jobs["gpus"] > 4) & (jobs["gpus"] <= 8)]
    assert np.quantile(eight, [0.1, 0.5, 0.9, 0.99]) == pytest.approx([216, 23_683, 352_409, 1_066_894], rel=0.1)
    gpu_s = jobs["gpus"] * jobs["duration_s"]
    for gpus, fraction in ((1, 0.181), (2, 0.032), (4, 0.167), (8, 0.484), (16, 0.115), (32, 0.018)):
        assert gpu_s[jobs["gpus"] == gpus].sum() / gpu_s.sum() == pytest.approx(fraction, abs=0.03)
    for state, job_fraction, gpu_time_fraction in ((0, 0.693, 0.445), (1, 0.135, 0.377), (2, 0.172, 0.178)):
        mine = jobs["end_state"] == state
        assert mine.mean() == pytest.approx(job_fraction, abs=0.01)
        assert gpu_s[mine].sum() / gpu_s.sum() == pytest.approx(gpu_time_fraction, abs=0.03)


def test_venus_has_the_figures_written_in_the_literature():
    jobs = columns(a_year("venus", 1))
    hourly = np.bincount(((jobs["submit_s"] - epoch_s("2020-04-06")) // HOUR_S).astype(int))
    assert hourly.mean() == pytest.approx(28.8, rel=0.05)
    assert hourly.var() / hourly.mean() == pytest.approx(39.3, rel=0.2)
    assert np.quantile(hourly, [0.5, 0.9]) == pytest.approx([22, 63], rel=0.2)
    assert jobs["gpus"].mean() == pytest.approx(6.736, rel=0.05)
    assert np.median(jobs["gpus"]) == 1
    assert jobs["duration_s"].mean() == pytest.approx(13_041, rel=0.05)
    assert np.median(jobs["duration_s"]) == pytest.approx(204, rel=0.05)
    assert jobs["duration_s"].max() <= 50 * DAY_S + 9


@pytest.mark.parametrize("name", CLUSTERS)
def test_jobs_are_possible_and_in_order_of_submission(name):
    length_s = 7 * DAY_S - HOUR_S / 2
    rows = generate(name, window_s=length_s, seed=5)
    known, jobs = statistics(name), columns(rows)
    start_s = epoch_s(known.arrivals.first_day)
    assert (np.diff(jobs["submit_s"]) >= 0).all()
    assert jobs["submit_s"][0] >= start_s
    assert jobs["submit_s"][-1] < start_s + length_s
    assert (jobs["duration_s"] >= 1).all()
    assert (jobs["submit_s"] % 1 == 0).all()
    assert (jobs["duration_s"] % 1 == 0).all()
    quota = np.array([rows.quotas[tenant] for tenant in rows.jobs["virtual_cluster"].categories])
    assert (jobs["gpus"] <= quota[jobs["virtual_cluster"]]).all()
    assert sum(known.quotas.values()) == known.nodes * known.gpus_per_node or name == "philly"
    assert {len(each) for each in rows.jobs.columns.values()} == {len(rows)}
    assert len(from_rows(rows, name=name)) == len(rows)
    assert "not the real trace" in rows.notes[0]


@pytest.mark.parametrize("jobs", [1, 2, 10, 12_345])
def test_as_many_jobs_as_asked(jobs):
    assert len(generate("saturn", jobs=jobs, seed=1)) == jobs


def test_a_user_says_something_about_how_long_a_job_runs():
    """Within tenant and size, users explain a part of the rank's variance, near the 0.3 asked for."""
    jobs = columns(a_year("venus", 1))
    mine = (jobs["gpus"] == 1) & (jobs["virtual_cluster"] == 0)
    rank = np.argsort(np.argsort(jobs["duration_s"][mine])) / mine.sum()
    _, user = np.unique(jobs["user"][mine], return_inverse=True)
    mean = np.bincount(user, weights=rank) / np.bincount(user)
    assert 0.1 < mean[user].var() / rank.var() < 0.5


def test_jobs_come_in_batches_of_one_user_and_size():
    jobs = columns(a_year("philly", 1))
    same = np.ones(len(jobs["user"]) - 1, dtype=bool)
    for column in ("user", "virtual_cluster", "gpus"):
        same &= np.diff(jobs[column]) == 0
    log_s = np.log(jobs["duration_s"])
    assert 0.6 < same.mean() < 0.9
    assert np.corrcoef(log_s[1:][same], log_s[:-1][same])[0, 1] > 0.7


def test_the_same_seed_gives_the_same_log_on_every_machine():
    assert digest(generate("philly", jobs=2_000, seed=11)).startswith("6cad7f84115cdeb7")


def test_a_seed_sequence_is_left_as_it_was():
    seed = np.random.SeedSequence(7)
    assert digest(generate("venus", jobs=500, seed=seed)) == digest(generate("venus", jobs=500, seed=seed))
    assert seed.n_children_spawned == 0
    assert digest(generate("venus", jobs=500, seed=seed)) != digest(generate("venus", jobs=500, seed=8))


@pytest.mark.parametrize("asked", [{}, {"window_s": 0.0}, {"jobs": 0}, {"jobs": 5, "window_s": 5.0}])
def test_a_length_is_asked_for_once_and_is_positive(asked):
    with pytest.raises(InputError, match="expected either, above 0"):
        generate("philly", **asked)


def test_a_new_generator_is_one_new_file(tmp_path, monkeypatch):
    content = json.loads((Path(__file__).parents[1] / "traces" / "helios.json").read_text(encoding="utf-8"))
    own = content["generators"]["venus"]
    content["generators"] = {"pluto": own}

    def write():
        (tmp_path / "pluto.json").write_text(json.dumps(content), encoding="utf-8")

    write()
    (tmp_path / "download.json").write_text("[{}]", encoding="utf-8")
    monkeypatch.setattr(sys.modules["synergy_runs.generators.statistics"], "statistics_folder", lambda: tmp_path)
    assert names() == ("pluto",)
    assert len(generate("pluto", jobs=100)) == 100
    with pytest.raises(InputError, match="Did you mean 'pluto'"):
        generate("plato", jobs=10)
    durations = own.pop("durations")
    write()
    with pytest.raises(InputError, match=r"pluto\.json: generator pluto lacks 'durations'"):
        statistics("pluto")
    own |= {"durations": durations, "sizes": own["sizes"] | {"from": "hearsay"}}
    write()
    with pytest.raises(InputError, match="source of sizes of generator pluto"):
        statistics("pluto")


def test_the_command_prints_the_table_writes_the_log_and_simulates_waiting_on_demand(tmp_path, capsys):
    path = tmp_path / "log.csv"
    assert main(["venus", "--jobs", "200", "--csv", str(path)]) == 0
    assert "dispersion of hourly counts" in capsys.readouterr().out
    lines = path.read_text(encoding="utf-8").splitlines()
    assert (lines[0], len(lines)) == (",".join(COLUMNS), 201)
    assert [each.name for each in tmp_path.iterdir()] == ["log.csv"]
    assert main(["venus", "--jobs", "5", "--csv", str(tmp_path / "none" / "log.csv")]) == 2
    assert main(["philly", "--days", "1"], queueing_delays) == 0
    assert "simulated: " not in capsys.readouterr().out
    assert main(["philly", "--days", "1", "--waiting"], queueing_delays) == 0
    said = capsys.readouterr().out
    for part in ("simulated: fifo, quotas", "simulated: backfill, one pool", "2,816 GPUs; quotas (artifact)"):
        assert part in said


def test_generated_philly_is_like_the_real_log():
    path = Path(os.environ.get("SYNERGY_DATA", "nowhere")) / "traces" / "philly.csv"
    if not path.is_file():
        pytest.skip("SYNERGY_DATA names no folder with traces/philly.csv")
    real, made = (columns(rows) for rows in (read_trace(path), generate("philly", window_s=PHILLY_LOG_S, seed=1)))
    assert len(made["gpus"]) == pytest.approx(len(real["gpus"]), rel=0.05)
    probabilities = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
    quantiles_s, real_quantiles_s = (np.quantile(each["duration_s"], probabilities) for each in (made, real))
    assert quantiles_s == pytest.approx(real_quantiles_s, rel=0.1)
    gpu_s, real_gpu_s = (each["gpus"] * each["duration_s"] for each in (made, real))
    for gpus in (1, 2, 4, 8, 16, 32):
        share, real_share = (
            held[each["gpus"] == gpus].sum() / held.sum() for held, each in ((gpu_s, made), (real_gpu_s, real))
        )
        assert share == pytest.approx(real_share, abs=0.03)
    assert gpu_s.sum() == pytest.approx(real_gpu_s.sum(), rel=0.05)


def test_every_figure_says_where_it_is_from_and_what_no_source_says_is_not_called_known():
    """Nothing of the 82,247-job subset is passed off as the paper's or the release's."""
    known, rows = statistics("philly"), a_year("philly", 1)
    from_label = {each.name: each.source for each in marginals(known, rows, YEAR_S)}
    assert [from_label[name] for name in ("mean duration, s", "mean GPUs", "jobs failed")] == ["subset"] * 2 + ["paper"]
    assert set(from_label.values()) <= set(known.sources)
    assert "82,247 jobs" in known.sources["subset"]
    other = {each.name: each.known for each in further(known, rows) if each.source == "release"}
    assert (other["mean duration, s"], other["mean GPUs"]) == (18_006.055, 1.928)
    figures = {each.name: each for each in further(statistics("uranus"), a_year("uranus", 1))}
    for name in ("attempts per job", "GPU-time of the top 5% users", "failed of jobs on >8 GPUs"):
        assert (figures[name].source, np.isnan(figures[name].known)) == ("-", True)
    ratio = figures["GPU-time of a failed job ÷ any"]
    assert ratio.generated == pytest.approx(ratio.known, rel=0.05)
    assert ratio.known < 1  # the source's own shares: 14.5 % of the jobs, 9.2 % of the GPU-time


def test_the_share_of_the_top_users_is_theirs():
    rows = generate("venus", jobs=3_000, seed=1)
    held = np.bincount(rows.jobs["user"].codes, weights=np.multiply(rows.jobs["gpus"], rows.jobs["duration_s"]))
    top = {each.name: each.generated for each in further(statistics("venus"), rows)}["GPU-time of the top 10% users"]
    assert top == pytest.approx(np.sort(held)[-round(0.1 * len(held)) :].sum() / held.sum())


def test_strict_arrival_order_holds_within_a_quota_whose_load_is_what_is_asked_for_over_it():
    """Tenant ed69ec has 64 GPUs: its second job waits for the first, and another tenant's does not."""
    rows = TraceRows(path=Path("made"), format_name="made")
    for line, (tenant, gpus) in enumerate((("ed69ec", 64), ("ed69ec", 1), ("6214e9", 64)), start=1):
        rows.add(line, submit_s=line, duration_s=100.0, gpus=gpus, job_name=str(line), virtual_cluster=tenant)
    loads = dict(zip(statistics("philly").quotas, tenant_loads(statistics("philly"), rows, 50.0), strict=True))
    assert (loads["ed69ec"], sorted(loads.values())[0]) == (6_500 / (64 * 50), 0.0)
    waits_s = {what: list(each) for what, each in queueing_delays(statistics("philly"), rows)}
    assert waits_s["fifo, quotas"] == [0.0, 99.0, 0.0]
    assert waits_s["backfill, one pool"] == [0.0, 0.0, 0.0]
