"""Gradient compression: what replicas get, what is kept of it, and that training goes on under it."""

from __future__ import annotations

import math
from typing import Any

import groups
import numpy as np
import pytest
import torch
from compression_cases import SCHEMES, SHAPES, FrozenGpt, SmallGpt

from synergy_core.errors import InputError
from synergy_core.goodput.compression import LayerSizes, compressor_named
from synergy_exec.examples.cnn import Cnn
from synergy_exec.examples.gpt import Gpt
from synergy_exec.messages import PlanMessage
from synergy_exec.training.admitted import refusal
from synergy_exec.training.compression.choices import SchemeByLayer, scheme_named
from synergy_exec.training.compression.replicas import layer_of
from synergy_exec.training.compression.scheme import GradientLayer
from synergy_exec.training.compression.schemes.quantised import Quantised
from synergy_exec.training.compression.watch import Sketch
from synergy_exec.training.job import TrainingJob
from synergy_exec.wire import decode, encode

MIXED = "q4,token.weight=none,layers.0.*=powersgd-2,layers.1.up.weight=topk-0.05,scores.weight=q2"
HOLDING = ["topk-0.01", "powersgd-2"]
QUANTISED = ["q8", "q4", "q2"]
STEPS = 30


def case(kind: str, *arguments: Any) -> groups.Case:
    return (f"{kind} {' '.join(map(str, arguments))}", f"compression_cases:{kind}", arguments)


def trains(compressor: str, **plan: int) -> groups.Case:
    return case("trained", SmallGpt, PlanMessage(micro_batch=4, accumulation=2, compressor=compressor, **plan), STEPS)


SWAPPED = [case("swapped", kind, numbers) for kind, numbers in (("float32", 3), ("bfloat16", 0), ("uint8", 2_500_000))]
LOOSE = [
    *SWAPPED,
    *(case("means", each) for each in SCHEMES),
    *(case("conserved", each) for each in HOLDING),
    *(case("repeated", each, 400) for each in QUANTISED),
    *(
        case("with_odd_gradients", each, odd, places)
        for each in SCHEMES
        for odd, places in ((math.nan, 1), (math.inf, 500))
    ),
    *(case("zero_gradients", each) for each in SCHEMES),
]
UNDER_DDP = [
    trains(each, data=2) for each in ("none", "bf16", "fp16", "q8", "q4", "q2", "topk-0.05", "powersgd-2", MIXED)
]
SHARED = [
    trains("q4", data=2, zero=2),
    *(trains(each, data=2, zero=3) for each in ("none", "bf16", "q8", "q4", "q2")),
]
FROZEN = [
    case("trained", FrozenGpt, PlanMessage(data=2, zero=zero, micro_batch=8, compressor=each), 10)
    for zero, each in ((0, "powersgd-2"), (3, "q4"))
]
RETUNED = [
    case("retuned", PlanMessage(data=2, micro_batch=8), ("none", "powersgd-2", "topk-0.05", "q4", MIXED, "none")),
    case("retuned", PlanMessage(data=2, zero=3, micro_batch=8), ("none", "q4", "bf16", "none")),
]
NOISES = [
    *(
        case("noises", PlanMessage(data=2, micro_batch=4, accumulation=2, compressor=each), 100)
        for each in ("none", "q4", "q2", "topk-0.05")
    ),
    case("noises", PlanMessage(data=2, zero=3, micro_batch=4, accumulation=2, compressor="q2"), 100),
]
AT_TWO = [*LOOSE, *UNDER_DDP, *SHARED, *FROZEN, *RETUNED, *NOISES]
AT_FOUR = [
    *SWAPPED,
    *(case("means", each) for each in SCHEMES),
    *(case("conserved", each) for each in HOLDING),
    trains(MIXED, data=4),
    *(trains(each, data=2, tensor=2, zero=3) for each in ("none", "q4")),
    *(trains(each, data=2, pipeline=2) for each in ("none", "q4", "powersgd-2")),
    trains("q4", data=2, pipeline=2, zero=2),
]


@pytest.fixture(scope="module")
def at_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return groups.run_once(tmp_path_factory, "compression", {2: AT_TWO}, timeout_s=400)


@pytest.fixture(scope="module")
def at_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return groups.run_once(tmp_path_factory, "compression", {4: AT_FOUR}, timeout_s=400)


@pytest.fixture(params=[2, 4])
def at_both(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.getfixturevalue({2: "at_two", 4: "at_four"}[request.param])
    return found | {"ranks": request.param}


# Of an exchange


@pytest.mark.parametrize("asked", [name for name, _, _ in SWAPPED])
def test_what_is_swapped_and_gathered_in_pieces_comes_whole_and_in_order(asked: str, at_both: dict[str, Any]) -> None:
    assert at_both[asked] == {"swapped": True, "gathered": True}


@pytest.mark.parametrize("compressor", SCHEMES)
def test_all_replicas_get_the_same_and_bytes_are_as_the_formula_says(compressor: str, at_both: dict[str, Any]) -> None:
    found = at_both[case("means", compressor)[0]]
    assert found["differ"] == []
    # Quantised rows are dealt out: as many for each replica, though the last may want some.
    padded = 2 * (at_both["ranks"] - 1) * Quantised(int(compressor[1])).row_bytes if compressor in QUANTISED else 0
    assert found["formula"] <= found["sent"] <= found["formula"] + padded
    # Within what rounding a normal number to so many levels over some ±3.2 may leave, twice; a rank or part of noise.
    most = {"none": 1e-6, "bf16": 4e-3, "fp16": 5e-4, "q8": 0.02, "q4": 0.35, "q2": 1.7}.get(compressor, 1.2)
    for name, error in found["errors"].items():
        assert error < (1e-6 if found["names"][name] == "none" else most), name
    small = compressor if compressor in ("bf16", "fp16") else "none"
    assert {found["names"][name] for name in ("small", "bias")} == {small}
    if compressor != "none" and compressor != "powersgd-500":
        assert found["names"]["wide"] == compressor


def test_a_layer_that_would_not_send_less_is_sent_as_it_is() -> None:
    # Of rank 40 it would send 40 · (40 + 300) numbers instead of 40 · 300; a part of 0.3 twice, to every other replica.
    wide = GradientLayer("wide", 40, 300)
    assert scheme_named("powersgd-500").of(wide).name == "powersgd-40"
    assert SchemeByLayer.named("powersgd-500").of(wide, 2).name == "none"
    # Half of 12,000 numbers are 17.6 rows and columns.
    assert SchemeByLayer.named("powersgd-18").of(wide, 2).name == "none"
    assert SchemeByLayer.named("powersgd-17").of(wide, 2).name == "powersgd-17"
    assert SchemeByLayer.named("topk-0.3").of(wide, 2).name == "topk-0.3"
    assert SchemeByLayer.named("topk-0.3").of(wide, 4).name == "none"


@pytest.mark.parametrize("replicas", [2, 3, 8, 64])
def test_bytes_are_those_of_the_collectives(replicas: int) -> None:
    """By hand for 1,000 × 400 numbers: 782 rows of 512."""
    layer, part = GradientLayer("x", 1000, 400), (replicas - 1) / replicas
    expected = {
        "none": 2 * part * 1_600_000,
        "bf16": 2 * part * 800_000,
        "q8": 2 * part * 782 * 520,
        "q4": 2 * part * 782 * 264,
        "q2": 2 * part * 782 * 136,
        "topk-0.01": (replicas - 1) * 8 * 4000,
        "powersgd-4": 2 * part * 4 * 1400 * 4,
    }
    for name, number in expected.items():
        assert scheme_named(name).sent_bytes(layer, replicas) == pytest.approx(number, rel=1e-12), name


@pytest.mark.parametrize("job", [Gpt(), Cnn()])
@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_bytes_are_those_that_the_core_reckons_with(job: TrainingJob, replicas: int) -> None:
    shapes = {name: each.shape for name, each in job.build_model().named_parameters()}
    layers = [layer_of(name, shape, 4) for name, shape in shapes.items()]
    sizes = LayerSizes(*(np.array(each) for each in zip(*((at.rows, at.columns, 1) for at in layers), strict=True)))
    for name in ("none", "bf16", "fp16", "q8", "q4", "q2", "topk-0.01", "powersgd-1", "powersgd-4", "powersgd-32"):
        choices = SchemeByLayer.named(name)
        own = sum(choices.of(layer, replicas).sent_bytes(layer, replicas) for layer in layers)
        assert own == pytest.approx(float(compressor_named(name).sent_bytes(sizes, replicas).sum()), rel=0.02), name


@pytest.mark.parametrize("compressor", QUANTISED)
def test_quantisation_is_unbiased(compressor: str, at_two: dict[str, Any]) -> None:
    found = at_two[case("repeated", compressor, 400)[0]]
    assert found["random"] > 0.99
    # The root mean square of 2,400 numbers that have unit variance if their means are right: ± 3 % and more.
    assert found["off"] == pytest.approx(1, abs=0.06)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_levels_come_back_as_they_were_sent(bits: int) -> None:
    scheme, generator = Quantised(bits), torch.Generator().manual_seed(0)
    levels = torch.randint(0, 2**bits, (3, 512), generator=generator)
    levels[:, 0], levels[:, 1] = 0, 2**bits - 1
    rows = levels * 0.25 - 1.5
    sent = scheme.encode(rows, generator)
    assert sent.shape == (3, 512 * bits // 8 + 8)
    assert torch.equal(scheme.decode(sent), rows)


@pytest.mark.parametrize("compressor", HOLDING)
def test_what_was_sent_and_what_is_held_back_are_all_gradients(compressor: str, at_both: dict[str, Any]) -> None:
    found = at_both[case("conserved", compressor)[0]]
    assert {"wide", "deep"} <= set(found)
    assert max(found.values()) < 1e-6


@pytest.mark.parametrize("compressor", SCHEMES)
@pytest.mark.parametrize(("odd", "places"), [(math.nan, 1), (math.inf, 500)])
def test_what_is_no_number_is_seen_by_all_and_not_kept(
    compressor: str, odd: float, places: int, at_two: dict[str, Any]
) -> None:
    found = at_two[case("with_odd_gradients", compressor, odd, places)[0]]
    everything = dict.fromkeys(SHAPES, True)
    assert found["finite"] == [everything, everything | {"wide": False}, everything]
    assert found["kept"] == [True] * 3


@pytest.mark.parametrize("compressor", SCHEMES)
def test_zero_gradients_stay_zero_and_stop_nothing(compressor: str, at_two: dict[str, Any]) -> None:
    first, second, later = at_two[case("zero_gradients", compressor)[0]]
    assert (first, second) == (0, 0)
    assert later > 0.2


# Of training


def test_replicas_stay_equal_under_every_plan(at_two: dict[str, Any], at_four: dict[str, Any]) -> None:
    for answers in (at_two, at_four):
        for name, found in answers.items():
            if isinstance(found, dict) and "differ" in found:
                assert found["differ"] == [], name


def losses(answers: dict[str, Any], name: groups.Case) -> list[float]:
    found: list[float] = answers[name[0]]["losses"]
    return found


def test_losses_are_near_those_without_compression(at_two: dict[str, Any], at_four: dict[str, Any]) -> None:
    plain = losses(at_two, UNDER_DDP[0])
    for name in UNDER_DDP[1:] + SHARED:
        found = losses(at_two, name)
        assert found[0] == pytest.approx(plain[0], abs=1e-5)
        # Of what uncompressed training wins: what is held back comes late, and q2's error is larger than the gradient.
        least = 0.8 if "topk" in name[0] or "powersgd" in name[0] else 0.95 if "q2" in name[0] else 0.99
        assert plain[0] - found[-1] > least * (plain[0] - plain[-1]), name[0]
    for name in AT_FOUR:
        if name[1] == "compression_cases:trained":
            assert plain[0] - losses(at_four, name)[-1] > 0.8 * (plain[0] - plain[-1]), name[0]


def test_a_split_gradient_is_exchanged_as_the_whole_one_is(at_two: dict[str, Any], at_four: dict[str, Any]) -> None:
    # PowerSGD goes by layer and draws nothing in a step: a pipeline's stages exchange what a whole model does.
    assert losses(at_four, trains("powersgd-2", data=2, pipeline=2)) == pytest.approx(
        losses(at_two, trains("powersgd-2", data=2)), abs=2e-4
    )


def rows(numbers: int) -> int:
    return -(-numbers // 512)


def test_bytes_of_a_step_are_counted(at_two: dict[str, Any]) -> None:
    shapes = at_two[UNDER_DDP[0][0]]["shapes"]
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    coded = {name: size for name, size in sizes.items() if len(shapes[name]) > 1 and size >= 1024}
    rest = 4 * (sum(sizes.values()) - sum(coded.values()))
    row_bytes = {"q8": 520, "q4": 264, "q2": 136}
    for compressor, each in row_bytes.items():
        # Two replicas: what is summed crosses once, and the sums once; one bucket, whose rows are dealt out together.
        dealt = 2 * -(-sum(map(rows, coded.values())) // 2) * each
        assert at_two[trains(compressor, data=2)[0]]["sent"] == {rest + dealt}
        # Each rank's half of each layer, once.
        halves = sum(rows(size // 2) for size in coded.values()) * each
        assert at_two[trains(compressor, data=2, zero=3)[0]]["sent"] == {rest / 2 + halves}
    assert at_two[trains("bf16", data=2)[0]]["sent"] == {2 * sum(sizes.values())}
    assert at_two[trains("bf16", data=2, zero=3)[0]]["sent"] == {sum(sizes.values())}
    assert at_two[trains("powersgd-2", data=2)[0]]["sent"] == {rest + 8 * sum(sum(shapes[name]) for name in coded)}


def test_errors_are_measured_by_layer(at_two: dict[str, Any]) -> None:
    found = at_two[trains(MIXED, data=2)[0]]["layers"]
    relative = {name: error / given for name, (given, error) in found.items() if given > 0}
    assert relative["token.weight"] == relative["norm.weight"] == 0
    assert 0.5 < relative["layers.0.up.weight"] < 1
    assert 0.3 < relative["layers.1.up.weight"] < 0.95
    # Stochastic rounding of roughly normal numbers to 16 levels over about ±3 of their deviations.
    assert 0.01 < relative["layers.1.down.weight"] < 0.1
    assert relative["scores.weight"] > 1
    whole = at_two[trains("none", data=2)[0]]
    assert whole["layers"] == {}
    assert at_two[trains("q4", data=2)[0]]["codec_s"] > 0


def test_the_noise_scale_is_estimated_as_without_compression(at_two: dict[str, Any]) -> None:
    found = {name: at_two[name] for name, _, _ in NOISES}
    (plain, q4, q2, topk, shared) = found.values()
    sqr, trace = plain["corrected"]
    for each, within in ((q4, 0.02), (q2, 0.12), (topk, 0.05), (shared, 0.06)):
        assert each["corrected"][0] == pytest.approx(sqr, rel=within)
        assert each["corrected"][1] == pytest.approx(trace, rel=within)
    # Taken for uncompressed norms, the same numbers say something else.
    assert q2["naive"][0] > 3 * sqr
    assert q4["naive"][0] > 1.1 * sqr


def test_a_sketch_has_the_gradients_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    # Of low rank, as gradients are: rows that are multiples of each other.
    gradient = torch.outer(torch.randn(300, generator=generator), torch.randn(100, generator=generator)).flatten()
    squares = []
    for _ in range(200):
        sketch = Sketch(generator, torch.device("cpu"))
        for part in torch.split(gradient, 7000):
            sketch.add(part)
        squares.append(float(sketch.numbers.square().sum() / gradient.square().sum()))
    mean, deviation = torch.tensor(squares).mean(), torch.tensor(squares).std()
    assert deviation < 2 * math.sqrt(2 / 4096)
    assert abs(mean - 1) < 4 * deviation / math.sqrt(200)


# Changes


def test_a_compressor_changes_without_a_restart_and_forgets(at_two: dict[str, Any]) -> None:
    whole, shared = (at_two[name] for name, _, _ in RETUNED)
    none, powersgd, topk, q4, mixed, again = whole["sent"]
    assert none == again > mixed > q4 > topk > powersgd
    assert whole["held"] == [[], ["error", "start"], ["error"], [], ["error", "start"], []]
    # What powersgd held back topk goes on with.
    assert whole["kept"] == [None, None, 1, 0, None, 0]
    # Without a compressor torch's own exchange runs, which is not counted, until there has been one.
    assert shared["sent"][0] == 0
    assert shared["sent"][3] == none / 2 > shared["sent"][2] > shared["sent"][1]


# What is refused


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zip", "there is no compressor 'zip'; write one like bf16, fp16, none, powersgd-4, q8, q4, q2, topk-0.01"),
        ("q3", "no compressor 'q3' of 3 bits; write q8, q4 or q2"),
        ("topk-2", "'topk-2' sends '2' of each layer; write a part, as in topk-0.01"),
        ("topk", "write a part"),
        ("powersgd-0", "has rank '0'; write a whole number from 1"),
        ("q4,token.weight", "'token.weight' is no choice for a layer; write NAME=COMPRESSOR"),
    ],
)
def test_odd_names_are_refused(name: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        SchemeByLayer.named(name)
    assert says in str(refusal(SmallGpt(), PlanMessage(data=2, compressor=name)))


def test_plans_that_no_compressor_is_right_for_are_refused() -> None:
    for compressor in ("topk-0.01", "powersgd-4", "q4,layers.*=powersgd-4"):
        reason = refusal(SmallGpt(), PlanMessage(data=2, zero=3, compressor=compressor))
        assert reason is not None
        assert "take zero 0, or a compressor that sums to shards, such as bf16 or q4" in reason
        assert refusal(SmallGpt(), PlanMessage(data=2, compressor=compressor)) is None
    reason = refusal(SmallGpt(), PlanMessage(data=2, compressor="q4,layer.*=none"))
    assert reason is not None
    assert "names 'layer.*', which is no parameter's name" in reason


def test_a_plan_without_a_compressor_is_read_as_before() -> None:
    text = '{"kind":"retune","run":1,"micro_batch":4,"accumulation":2}'
    assert '"compressor":"none"' in encode(decode(text))
    assert PlanMessage(data=2).compressor == "none"
    assert decode(encode(decode(text))) == decode(text)
