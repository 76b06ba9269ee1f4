"""Run times are of a GPU type: on another they are converted, and a type that nobody knows is refused."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from composed import composed
from jobs import finish_s, workload

import synergy_core
from synergy_core.errors import InputError
from synergy_core.performance.catalog import add_gpu_sheet, gpu_sheet, gpu_sheets, load_model, run_time_ratio
from synergy_core.scheduling.jobs.cluster import Cluster, NodeType
from synergy_core.scheduling.policies import get_policy
from synergy_runs.outputs.invariants import check
from synergy_sim.hardware import check_types, converted
from synergy_sim.prepare import prepared_runs
from synergy_sim.simulate import simulate
from synergy_sim.truth import Truth

SHEETS = Path(synergy_core.__file__).parent / "performance" / "catalog" / "gpus"
SMALL = (
    "+trace=philly",
    "trace.find=[]",
    "trace.window=6h",
    "trace.carry_in=false",
    "policy=fifo",
    "truth.measured=false",
)
ALIKE = "{{gpu_type: {}, nodes: 4, gpus_per_node: 8}}"


def nodes(*kinds):
    return Cluster(tuple(NodeType(kind, kind, 1, 8) for kind in kinds))


def prepared(*keys):
    (made,) = prepared_runs(composed(*SMALL, *keys))
    return made


def test_the_logs_own_waits_are_nobodys_beside_converted_run_times():
    given = workload([(0, 1, 100), (0, 1, 100)], kinds=["v100", ""]).with_columns(log_wait_s=np.array([5.0, 7.0]))
    assert converted(given, given, nodes("v100"), "v100").jobs["log_wait_s"].tolist() == [5.0, 7.0]
    np.testing.assert_equal(converted(given, given, nodes("a100", "v100"), "v100").jobs["log_wait_s"], [5.0, np.nan])


@pytest.fixture
def own_sheet(tmp_path, monkeypatch):
    """A data sheet of a GPU with twice the memory bandwidth of a V100, forgotten after the test."""
    monkeypatch.setattr("synergy_core.performance.catalog._added", {})
    path = tmp_path / "tpu9.yaml"
    text = (SHEETS / "v100.yaml").read_text()
    aliases = next(line for line in text.splitlines() if line.startswith("aliases"))
    path.write_text(text.replace("900.0e+9", "1800.0e+9").replace(aliases, "aliases: []"))
    return path


def test_ratios_are_measured_where_they_can_be_and_else_of_data_sheets():
    told = run_time_ratio("t4", "a100")
    steps = []
    for name in ("bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3"):
        kinds = load_model(name).gpu_types
        batch = min(kinds["t4"].max_local, kinds["a100"].max_local)
        steps.append(kinds["a100"].calibrated.step_time(1, 1, batch) / kinds["t4"].calibrated.step_time(1, 1, batch))
    assert told.factor == pytest.approx(float(np.exp(np.mean(np.log(steps)))))
    assert (told.how, told.of) == ("as measured", "mean of 6 applications")
    assert told.low < told.factor < told.high
    back = run_time_ratio("a100", "t4")
    assert (back.factor, back.low, back.high) == pytest.approx((1 / told.factor, 1 / told.high, 1 / told.low))
    sheets = run_time_ratio("v100", "h100")
    assert sheets.factor == pytest.approx(900 / 3350)
    assert (sheets.how, sheets.of) == ("by the data sheets' memory bandwidth", "900 to 3,350 GB/s")
    assert run_time_ratio("g2", "g2").factor == 1.0
    with pytest.raises(InputError, match=r"unknown GPU type 'g2'.*trace\.gpu_type=null keeps them"):
        run_time_ratio("g2", "v100")


def test_another_gpu_type_changes_run_times_and_says_by_how_much():
    as_logged, on_h100 = prepared().workload, prepared("cluster.gpu_type=H100").workload
    ratio = 900 / 3350
    np.testing.assert_allclose(on_h100.jobs["duration_s"], as_logged.jobs["duration_s"] * ratio, atol=1e-5)
    assert not any("H100" in each for each in as_logged.assumptions)
    (told,) = [each for each in on_h100.assumptions if "H100" in each]
    assert all(fact in told for fact in ("V100", "H100", "× 0.269", "900 to 3,350 GB/s", "× 0.126"))
    (conversion,) = on_h100.conversions
    assert (conversion.of, conversion.on, conversion.jobs) == ("v100", "h100", len(on_h100))
    assert conversion.factor == conversion.high == pytest.approx(ratio)
    assert conversion.low == pytest.approx(125 / 989.4, rel=0.01)
    kept = prepared("cluster.gpu_type=h100", "trace.gpu_type=null").workload
    assert (kept.jobs["duration_s"] == as_logged.jobs["duration_s"]).all()


def test_a_training_job_has_the_same_model_and_work_on_any_type():
    """Its models by the log's GPU-time; its work from its run time here, so that it takes that here."""
    here, there = (prepared("trace.models=mix", f"cluster.gpu_type={kind}").workload for kind in ("v100", "a100"))
    assert list(here.jobs["model"]) == list(there.jobs["model"])
    np.testing.assert_allclose(there.jobs["duration_s"], here.jobs["duration_s"] * 900 / 1555, atol=1e-5)
    truth, row = Truth(None), 0
    name, batch = there.jobs["model"][row], int(there.jobs["global_batch"][row])
    alone_s = truth.requested_run_s(name, "a100", (int(there.jobs["gpus"][row]),), batch)
    assert there.jobs["work_scale"][row] * alone_s == pytest.approx(float(there.jobs["duration_s"][row]), rel=1e-4)


def test_whole_iterations_stay_whole():
    work = prepared("trace.models=by_class", "cluster.gpu_type=a100").workload
    assert (work.jobs["iterations"] == np.floor(work.jobs["iterations"])).all()
    assert (work.jobs["iterations"] >= 1).all()


ON_A100, ON_T4 = 900 / 1555, 900 / 320


@pytest.mark.parametrize(
    ("jobs", "on", "logged_on", "run_times_s", "conversions", "note"),
    [
        pytest.param(
            {"kinds": ["v100", "", "t4"]}, ("a100", "v100", "t4"), "v100", [100, 100 * ON_A100, 100],
            {("v100", "a100"): ON_A100, ("v100", "t4"): ON_T4}, "", id="who asks for a type keeps the run time there",
        ),
        pytest.param({}, ("a100", "t4"), None, [100, 100], {}, "trace.gpu_type=TYPE", id="of an unknown type"),
        pytest.param({}, ("h100",), None, [100, 100], {}, "unchanged on h100", id="of an unknown type on one"),
        pytest.param({}, ("v100",), None, [100, 100], {}, "", id="of an unknown type on the usual one"),
        pytest.param({"kinds": ["h100"]}, ("h100",), None, [100], {}, "", id="on the type asked for"),
        pytest.param(
            {"given": ["v100", "a100", "gtx-9"]}, ("a100",), None, [100 * ON_A100, 100, 100],
            {("v100", "a100"): ON_A100}, "gtx-9", id="of the type that the log says a job ran on",
        ),
        pytest.param(
            {"given": ["v100", "a100", "gtx-9"]}, ("a100",), "t4", [100 * ON_A100, 100, 100],
            {("v100", "a100"): ON_A100}, "gtx-9", id="which counts more than the one typed",
        ),
    ],
)  # fmt: skip
def test_run_times_are_converted_from_the_type_they_are_of(jobs, on, logged_on, run_times_s, conversions, note):
    given = workload([(0, 1, 100)] * len(run_times_s), **jobs)
    made = converted(given, given, nodes(*on), logged_on)
    assert made.jobs["duration_s"].tolist() == pytest.approx(run_times_s, abs=1e-3)
    assert {(each.of, each.on): each.factor for each in made.conversions} == pytest.approx(conversions)
    assert (note in made.notes[0]) if note else made.notes == ()


def test_a_run_time_is_longer_where_gpus_are_slower():
    """Two jobs that fill a node each: the first gets the A100s, the second what is left."""
    given = workload([(0, 8, 1555), (0, 8, 1555), (10_000, 8, 1555)])
    machines = nodes("a100", "v100")
    made = converted(given, given, machines, "v100")
    done = simulate(made, machines, get_policy("fifo"))
    check(done)
    assert finish_s(done).tolist() == pytest.approx([900, 1555, 10_900], abs=1e-3)
    held = converted(given, given, machines, None)
    assert finish_s(simulate(held, machines, get_policy("fifo"))).tolist() == [1555, 1555, 11_555]


@pytest.mark.parametrize("policy", ["srtf", "las", "easy", "qssf"])
def test_every_order_runs_on_gpus_of_several_speeds(policy):
    """All work is done: what a job got, in seconds of its first type, is its run time."""
    random = np.random.default_rng(3)
    rows = [(float(at * 20), int(random.choice((1, 2, 4, 8))), float(random.integers(50, 900))) for at in range(80)]
    machines = nodes("a100", "t4", "v100")
    made = converted(given := workload(rows), given, machines, "t4")
    done = simulate(made, machines, get_policy(policy))
    check(done)
    assert np.isfinite(finish_s(done)).all()


def test_an_unknown_type_is_refused_with_the_nearest_and_what_to_do():
    with pytest.raises(InputError, match=r"unknown GPU type 'a-100'\. Did you mean 'a100'"):
        prepared("cluster.gpu_type=a-100")
    with pytest.raises(InputError, match=r"unknown GPU type 'tpu9'.*cluster\.gpu_sheets=\[tpu9\.yaml\]"):
        prepared("cluster.gpu_type=tpu9")
    with pytest.raises(InputError, match="unknown GPU type 'tpu9'"):
        prepared(f"cluster.node_types=[{ALIKE.format('v100')}, {ALIKE.format('tpu9')}]")
    with pytest.raises(InputError, match=r"unknown trace\.gpu_type 'v-100'\. Did you mean 'v100'"):
        prepared("trace.gpu_type=v-100")
    log = workload([(0, 1, 100)], kinds=["g2"])
    check_types(nodes("g2"), log, Truth(None), None)
    there = workload([(0, 1, 100)], given=["gtx-9"])  # a type that the log alone names, where jobs stay on it
    check_types(nodes("gtx-9"), there, Truth(None), None)
    assert converted(there, there, nodes("gtx-9"), None).jobs["duration_s"].tolist() == [100]
    check_types(nodes("g2", "g3"), log, Truth(None), None, ["g3"])
    with pytest.raises(InputError, match=r"unknown GPU type 'g3'.*cluster\.anonymous_gpu_types=\[g3\]"):
        check_types(nodes("g2", "g3"), log, Truth(None), None)


def test_a_data_sheet_of_ones_own_makes_a_type_known(own_sheet):
    made = prepared("cluster.gpu_type=tpu9", f"cluster.gpu_sheets=[{own_sheet}]")
    np.testing.assert_allclose(made.workload.jobs["duration_s"], prepared().workload.jobs["duration_s"] / 2, atol=1e-5)
    assert gpu_sheet("tpu9") is not None


def test_only_what_has_data_sheets_is_called_scaled(own_sheet):
    add_gpu_sheet(own_sheet)
    told = {kind: Truth(None).source(nodes(kind), ["bert"]) for kind in ("tpu9", "g2", "t4")}
    assert "A100 times scaled by data-sheet speed" in told["tpu9"]
    assert "no data sheet: RTX 2080 Ti times as they are" in told["g2"]
    assert "not measured" not in told["t4"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("1800.0e+9", "1.8", "memory_bandwidth_bytes_per_s: 1.8 is below 1e\\+10; expected bytes/s"),
        (
            "fp16: ",
            "fp16: 125.0 #",
            "tensor_flops_per_s.fp16: 125 is below 1e\\+12; expected FLOP/s; 312 TFLOP/s",
        ),
        ("clock_hz: ", "clock_hz: fast #", "clock_hz: fast; expected a number"),
        ("clock_hz: ", "clock: ", "Did you mean 'clock_hz'"),
        ("link_bytes_per_s: ", "link_bytes_per_s: 150.0 #", "link_bytes_per_s: 150; expected NVLink's bytes/s"),
        ("aliases: []", "aliases: v100s", "aliases: v100s; expected a list"),
    ],
)
def test_a_data_sheet_that_is_none(own_sheet, old, new, says):
    text = own_sheet.read_text()
    assert old in text
    own_sheet.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=says):
        add_gpu_sheet(own_sheet)


def test_names_that_the_catalog_has_are_left_to_it(own_sheet):
    own_sheet.write_text(own_sheet.read_text().replace("aliases: []", "aliases: [v100, a-name-of-my-own]", 1))
    assert add_gpu_sheet(own_sheet).aliases == ("a-name-of-my-own",)
    assert gpu_sheet("v100").name == "v100"
    taken = own_sheet.with_name("h100.yaml")
    shutil.copy(own_sheet, taken)
    with pytest.raises(InputError, match=r"rename the file, as in h100-mine\.yaml"):
        add_gpu_sheet(taken)
    assert gpu_sheets()["h100"].title == "H100 SXM5 80 GB"


def test_a_job_that_may_run_anywhere_is_as_fast_on_the_type_it_ran_on_as_in_the_log():
    """The first fills the A100s; the second ran on V100s and gets them again."""
    given = workload([(0, 8, 1555), (0, 8, 900)], given=["a100", "v100"])
    machines = nodes("a100", "v100")
    done = simulate(converted(given, given, machines, None), machines, get_policy("fifo"))
    check(done)
    assert finish_s(done).tolist() == pytest.approx([1555, 900], abs=1e-3)
