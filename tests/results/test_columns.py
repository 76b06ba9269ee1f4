"""Slowdown, GPU time, fragmentation, who loses most: by hand on cases that a person can follow."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
from small_runs import cluster, drawn_workload, simulate, workload
from test_results import write_policies

from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_runs.inputs.requested import Terms
from synergy_runs.outputs.comparison import compare
from synergy_runs.outputs.facts import Kind, gpus_in_use
from synergy_runs.outputs.metrics import fragmented_gpu_s, job_table, summarise
from synergy_runs.outputs.notes import MAX_LINES, notes
from synergy_runs.outputs.results import write_run
from synergy_runs.outputs.stored import find_runs, in_order
from synergy_runs.outputs.tables import assumptions, comparison_table, figures_of, joined, print_comparison, verdict


def test_slowdown_is_jct_over_run_time():
    run = simulate(workload([0, 0, 0], [10, 10, 0], [1, 1, 1]), cluster(1, 1))
    assert job_table(run).slowdown.tolist()[:2] == [1.0, 2.0]
    assert np.isnan(job_table(run).slowdown[2])
    summary = summarise(run)
    assert (summary["p50_slowdown"], summary["p99_slowdown"]) == pytest.approx((1.5, 1.99))


def test_run_time_ratio_is_time_with_gpus_over_run_time_in_the_log():
    jobs = workload([0, 0], [100, 300], [1, 1])
    assert summarise(simulate(jobs, cluster(2, 1)))["run_time_ratio"] == 1.0
    half = jobs.with_columns(duration_s=jobs.jobs["duration_s"] / 2)
    quick = replace(simulate(half, cluster(2, 1)), workload=jobs)
    assert summarise(quick)["run_time_ratio"] == 0.5


@pytest.mark.parametrize(
    ("submit_s", "gpus", "expected"),
    [
        # On 4 GPUs in order of arrival: 3 run for 10 s; 2 wait, and behind them 1, which the idle one would do for.
        ([0, 0, 0], [3, 2, 1], 10.0),
        ([0, 0], [3, 2], 0.0),  # the one that waits needs more than is idle
        ([0, 0, 4], [3, 2, 1], 6.0),  # it comes at 4 s
        ([0], [3], 0.0),
    ],
)
def test_gpus_are_idle_in_vain_only_while_somebody_who_waits_would_fit(submit_s, gpus, expected):
    jobs = workload(submit_s, [10, 5, 5][: len(gpus)], gpus)
    assert fragmented_gpu_s(simulate(jobs, cluster(1, 4))) == expected


@pytest.mark.parametrize(("wants", "expected"), [("", 20.0), ("a100", 0.0), ("v100", 20.0)])
def test_each_gpu_type_is_idle_for_the_jobs_that_may_run_there(wants, expected):
    """Both a100 are held for 10 s, and both v100 are idle, while the second job waits."""
    jobs = workload([0, 0], [10, 5], [2, 1])
    blocked = simulate(jobs, Cluster((NodeType("a", "a100", 1, 2),)))
    asked = jobs.with_columns(gpu_type=["", wants])
    on = Cluster((NodeType("a", "a100", 1, 2), NodeType("b", "v100", 1, 2)))
    assert fragmented_gpu_s(replace(blocked, cluster=on, workload=asked)) == expected


@pytest.mark.parametrize("seed", range(3))
def test_fragmentation_is_that_of_a_plain_scan(seed):
    run = simulate(drawn_workload(150, seed=seed, gap_s=60), cluster(4), quantum_s=1_800.0)
    events, gpus = run.events, run.workload.jobs["gpus"]
    used_s, used = gpus_in_use(events)
    waiting, total = set(), 0.0
    for at, until, idle in zip(used_s[:-1], used_s[1:], 32 - used[:-1], strict=True):
        for row in np.flatnonzero((events.time_s == at) & (events.part == 0)):
            job = int(events.job_id[row])
            (waiting.add if events.kind[row] in (Kind.SUBMIT, Kind.STOP) else waiting.discard)(job)
        total += idle * (until - at) * any(gpus[job] <= idle for job in waiting)
    assert fragmented_gpu_s(run) == pytest.approx(total)
    assert total > 0


def compared(folder, runs):
    for run in runs:
        write_run(run, folder / f"{run.policy}-0", f"policy: {run.policy}\n")
    return compare(in_order(find_runs(folder), [run.policy for run in runs]))


def test_who_loses_most_is_named_with_the_factor(tmp_path):
    # Ten narrow jobs and then ten of 4 GPUs each on 4 GPUs; served by size, largest first, the narrow ones wait.
    jobs = workload([0] * 20, [10] * 20, [1] * 10 + [4] * 10)
    wide = simulate(jobs, cluster(1, 4), policy="wide", key=lambda job: -jobs.jobs["gpus"][job])
    base = simulate(jobs, cluster(1, 4), policy="base")
    small, large = (
        np.mean(job_table(wide).jct_s[part]) / np.mean(job_table(base).jct_s[part])
        for part in (slice(0, 10), slice(10, 20))
    )
    assert large < 1 < small
    lines = notes(compared(tmp_path, [base, wide]))
    assert any(f"wide: jobs of 1 GPU {small:.2f}×" in line and "base" in line for line in lines)


def test_nobody_loses_by_the_same_schedule_and_alone_it_is_told_who_waits_longest(tmp_path):
    jobs = workload([0] * 20, [10] * 20, [1] * 10 + [4] * 10)
    runs = [simulate(jobs, cluster(1, 4), policy=name) for name in ("base", "same")]
    assert not any("×" in line for line in notes(compared(tmp_path / "two", runs)))
    assert any("waits longest: jobs of 2–4 GPUs" in line for line in notes(compared(tmp_path / "one", runs[:1])))


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_columns_fall_away_from_the_least_important_and_nothing_is_cut(tmp_path, capsys, width):
    jobs = drawn_workload(60)
    long = "las-demote_after_gpu_s-7200.0-another-parameter-0.5"
    runs = [simulate(jobs, cluster(4)), simulate(jobs, cluster(4), policy=long, quantum_s=600.0)]
    comparison = compared(tmp_path, runs)
    _, left_out = comparison_table(comparison, width)
    known = figures_of(comparison.rows)
    shown = [each for each in known if each not in left_out]
    assert shown == known[: len(shown)]
    assert len(shown) >= {40: 1, 80: 4, 120: 8, 200: 15}[width]
    print_comparison(comparison, width)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= max(width, 44)
    assert "".join(joined(long).split("\n")) == long
    for part in joined(long).split("\n"):
        assert any(part in line for line in lines)
    if left_out:
        assert left_out[-1].heading in " ".join(lines)


def test_jobs_that_run_faster_than_logged_are_told_with_the_share(tmp_path):
    jobs = workload([0, 0], [100, 300], [1, 1])
    half = jobs.with_columns(duration_s=jobs.jobs["duration_s"] / 2)
    own = asdict(terms("quick", "own", 2.0, 1, "requested"))
    quick = replace(simulate(half, cluster(2, 1), policy="quick"), workload=jobs, information="own", terms=own)
    lines = notes(compared(tmp_path, [simulate(jobs, cluster(2, 1)), quick]))
    assert any("quick 50\u00a0%" in line for line in lines)
    assert any("at most 2 ×" in line and "1 always allowed" in line and "(quick)" in line for line in lines)
    assert any("quick: " in line and "one GPU of every type" in line for line in lines)


def terms(policy, information, growth, first_gpus, batch_limit):
    return Terms(policy, "", information, ("GPUs", "batch"), "", False, growth, first_gpus, batch_limit)


def test_the_lead_is_told_with_and_without_equal_terms(tmp_path):
    def run(policy, name, speed, *limits):
        quick = jobs.with_columns(duration_s=jobs.jobs["duration_s"] / speed)
        told = asdict(terms(name, *limits))
        return replace(simulate(quick, cluster(2, 1), policy=policy), workload=jobs, information=limits[0], terms=told)

    jobs = workload([0, 0], [100, 100], [1, 1])
    less, more = ("own", 2.0, 1, "requested"), ("all", 4.0, 4, "max")
    sia, synergy = run("sia", "sia", 1, *less), run("synergy", "synergy", 4, *more)
    (line,) = [each for each in notes(compared(tmp_path / "two", [sia, synergy])) if "fair comparison" in each]
    assert all(each in line for each in ("information, growth, first GPUs, batch", "add sia(like=synergy)"))
    equal = run("sia-like-synergy", "sia", 2, *more)
    comparison = compared(tmp_path / "three", [sia, equal, synergy])
    headline = verdict(comparison)
    assert "75\u00a0% below sia" in headline
    assert "50\u00a0% below sia-like-synergy (on equal terms)" in headline
    assert not any("fair comparison" in line for line in notes(comparison))


def test_nobody_is_praised_for_what_cannot_be_known(tmp_path):
    jobs = workload([0, 0], [30, 10], [1, 1])
    oracle = simulate(jobs, cluster(1, 1), policy="srtf", key=lambda job: jobs.jobs["duration_s"][job], oracle=True)
    text = verdict(compared(tmp_path / "two", [simulate(jobs, cluster(1, 1)), oracle]))
    assert "fifo: the mean JCT is 35.0 s" in text
    assert "no real scheduler knows: srtf* (25.0 s)" in text


def assigned(policy, speed=1, truth_read="", *, named_by_log=False):
    """Two jobs that were given a model, so much faster than logged under a policy that changes their GPUs."""
    jobs = workload([0, 0], [100, 300], [1, 1]).with_columns(model="bert")
    jobs = replace(jobs, models_assigned=not named_by_log)
    if policy == "fifo":
        return simulate(jobs, cluster(2, 1))
    told = asdict(terms(policy, "all", 4.0, 4, "max"))
    quick = simulate(jobs.with_columns(duration_s=jobs.jobs["duration_s"] / speed), cluster(2, 1), policy=policy)
    return replace(quick, workload=jobs, information="all", terms=told, oracle=bool(truth_read), truth_read=truth_read)


TRUTH = "declared work that is the true run time"


@pytest.mark.parametrize(
    ("policies", "truth", "says"),
    [
        (("synergy",), "", "lowest mean JCT"),
        (("synergy",), TRUTH, "no real scheduler knows"),
        (("sia", "synergy"), "", "do not differ significantly"),
        (("synergy", "sia"), "", "do not differ significantly"),
    ],
)
def test_a_win_that_changes_jobs_names_the_models_they_were_assigned(tmp_path, policies, truth, says):
    text = verdict(compared(tmp_path, [assigned("fifo"), *(assigned(name, 2, truth) for name in policies)]))
    assert says in text
    assert "bert" in text


def test_models_that_the_log_names_are_no_condition_of_a_win(tmp_path):
    runs = [assigned("fifo", named_by_log=True), assigned("synergy", 2, named_by_log=True)]
    assert "bert" not in verdict(compared(tmp_path, runs))


def test_seeds_whose_jobs_were_given_other_models_share_one_sentence(tmp_path):
    for seed, models in enumerate((("bert",), ("bert", "ncf"))):
        jobs = workload([0, 0], [100, 300], [1, 1]).with_columns(model=[models[0], models[-1]])
        assumed = (f"Each job was given one of {', '.join(models)}.", "A restart costs 30 s.")
        run = simulate(replace(jobs, models_assigned=True, assumptions=assumed), cluster(2, 1))
        write_run(replace(run, seed=seed), tmp_path / f"fifo-{seed}", f"policy: fifo\nseed: {seed}\n")
    assert assumptions(compare(find_runs(tmp_path))) == [
        "Each job was given one of bert, ncf.",
        "A restart costs 30 s.",
    ]


def test_no_policy_has_the_shortest_tail_where_nobody_waits(tmp_path):
    assert "p99 wait" not in verdict(compared(tmp_path, [assigned("sia", 1), assigned("synergy", 4)]))


def test_a_sweep_says_what_the_swept_number_changes_under_each_policy(tmp_path):
    jobs = drawn_workload(60)
    for nodes in (1, 2, 4):
        for policy, key in (("fifo", None), ("small", lambda job: jobs.jobs["gpus"][job])):
            run = simulate(jobs, cluster(nodes), policy=policy, key=key)
            config = f"policy: {policy}\nseed: 0\ncluster: {{nodes: {nodes}}}\n"
            write_run(run, tmp_path / str(nodes) / f"{policy}-0", config)
    comparison = compare(find_runs(tmp_path))
    lines = verdict(comparison).splitlines()
    assert len(lines) == 2
    for line, policy in zip(lines, ("fifo", "small"), strict=True):
        means_s = {int(row.setting[0][1]): row.mean("mean_jct_s") for row in comparison.rows if row.policy == policy}
        fall = round(100 * (1 - means_s[4] / means_s[1]))
        assert line.startswith(policy)
        assert "3 more nodes (1 → 2 → 4)" in line
        assert "mean wait" in line
        assert f"\N{MINUS SIGN}{fall}\N{NO-BREAK SPACE}%" in line


KEY = "gpu_time_fraction_by_compressor"


def told_of(folder, shares):
    """The notes on stored runs with these shares. shares: by the run's folder."""
    for path in folder.rglob("summary.json"):
        if path.parent.name in shares:
            path.write_text(json.dumps(json.loads(path.read_text()) | {KEY: shares[path.parent.name]}))
    return [line for line in notes(compare(find_runs(folder))) if "GPU time" in line or KEY in line]


def test_shares_are_means_over_seeds_the_largest_first_and_what_is_little_together(tmp_path):
    write_policies(tmp_path, seeds=(0, 1), jobs=20)
    assert told_of(tmp_path, {}) == []
    second = {"none": 0.972, "q8": 0.01, "q4": 0.009, "bf16": 0.009}
    shares = {"fifo-0": {"q8": 0.5, "none": 0.5}, "fifo-1": second, "sjf-0": {"none": 1.0}, "sjf-1": {"none": 1.0}}
    first, other = told_of(tmp_path, shares)
    assert first.startswith("fifo: ")
    assert first.endswith(": none 74\u00a0%, q8 26\u00a0%, others 1\u00a0%")
    assert other.startswith("sjf*: ")


def test_settings_are_told_apart_until_they_are_too_many(tmp_path):
    for at in range(MAX_LINES + 1):
        write_policies(tmp_path / str(at), load=1.0 + at, jobs=5)
        if at == 1:
            lines = told_of(tmp_path, {"fifo-0": {"q8": 1.0}})
            assert [line.partition(":")[0] for line in lines] == ["fifo cluster.load=1.0", "fifo cluster.load=2.0"]
    (line,) = told_of(tmp_path, {"fifo-0": {"q8": 1.0}})
    assert KEY in line
