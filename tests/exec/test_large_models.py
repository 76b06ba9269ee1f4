"""A rank begins with its part of a model, and with the numbers that a single process would draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import groups
import large_cases as cases
import pytest
import torch
from agents_controller import Controller
from large_cases import BARE, JOBS, PLANS, WHOLE
from torch import Tensor

from synergy_core.errors import InputError
from synergy_exec.messages import PlanMessage, Stop
from synergy_exec.training.bare import bare, constants
from synergy_exec.training.trainer import Trainer

TOLERANCE = 2e-5
SAVED = ("Mixed", "Turned", "Tied", "Reading")
"""Those that go on from a checkpoint as well."""
MODEL_BYTES = 50_000_000
WORST = 1.3
"""Of what is held at the most, in what is owned (issue 16)."""
NEEDED_BYTES = {"fsdp": MODEL_BYTES / 4}
"""What FSDP2 has whole at a time, in every step too: one of four blocks."""


def plans_of(job: str) -> list[str]:
    """Those that can be had, all of them for the first."""
    if not JOBS[job].blocks:
        return ["fsdp", "zero2"]
    return list(PLANS)[1:] if job == "Mixed" else ["fsdp", "tp", "pp"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each job begins with under its plans, and from a checkpoint."""
    folder = tmp_path_factory.mktemp("begun")
    one = [(f"{job} one", "large_cases:begun", (job, "one")) for job in JOBS]
    two = [(f"{job} {plan}", "large_cases:begun", (job, plan)) for job in JOBS for plan in plans_of(job)]
    for job in SAVED:
        place = str(folder / job)
        one += [(f"{job} saved", "large_cases:save", (job, place))]
        one += [(f"{job} one again", "large_cases:begun", (job, "one", place))]
        two += [(f"{job} {plan} again", "large_cases:begun", (job, plan, place)) for plan in plans_of(job)]
    return groups.run_once(tmp_path_factory, "large-begun", {1: one, 2: two}, timeout_s=300)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the bit."""
    assert found.keys() == expected.keys()
    assert [name for name, each in expected.items() if not torch.equal(found[name], each)] == []


@pytest.mark.parametrize("job", JOBS)
def test_every_plan_begins_with_what_one_process_draws(begun: dict[str, Any], job: str) -> None:
    alone, losses, _ = begun[f"{job} one"]
    for plan in plans_of(job):
        found, its_losses, said = begun[f"{job} {plan}"]
        same(found, alone)
        # What lies in one memory in a single process does not in several, from the first step on.
        compared = 1 if job == "Overlapping" else len(losses)
        assert its_losses[:compared] == pytest.approx(losses[:compared], abs=TOLERANCE), plan
        assert len(said) == (job in WHOLE and plan != "ddp"), plan


@pytest.mark.parametrize("job", SAVED)
def test_every_plan_goes_on_from_a_checkpoint_with_all_that_one_process_has(begun: dict[str, Any], job: str) -> None:
    """Constants too that are in no checkpoint."""
    alone, losses, _ = begun[f"{job} one again"]
    for plan in plans_of(job):
        found, its_losses, _ = begun[f"{job} {plan} again"]
        same(found, alone)
        assert its_losses == pytest.approx(losses, abs=TOLERANCE), plan


REASONS = {
    "Reading": "its numbers are read as it is built (RuntimeError",
    "Keeping": "it keeps tensors that are neither",
    "Own": "it draws random numbers on a device of its own choice",
    "Other": "it has another form when it is made without numbers",
    "Overlapping": "some of its tensors are parts of others",
}


@pytest.mark.parametrize("job", WHOLE)
def test_a_model_that_cannot_be_made_without_numbers_is_made_whole_and_that_is_said(
    begun: dict[str, Any], job: str
) -> None:
    _, _, (said,) = begun[f"{job} fsdp"]
    assert said.startswith("every rank makes the whole model before it keeps its part of it, since ")
    assert REASONS[job] in said


@pytest.mark.parametrize("job", BARE)
def test_making_a_model_without_numbers_draws_none(job: str) -> None:
    cases.seeded()
    torch.manual_seed(1)
    before = cases.draws()
    cases.seeded()
    torch.manual_seed(1)
    made = bare(BARE[job]())
    assert cases.draws() == before
    assert made.model is not None
    assert all(each.is_meta for each in made.model.parameters())
    assert not made.reason


def test_constants_are_made_without_parameters_where_they_draw_nothing() -> None:
    cases.seeded()
    torch.manual_seed(1)
    before = cases.draws()
    cases.seeded()
    torch.manual_seed(1)
    found = constants(JOBS["Turned"]())
    assert cases.draws() == before
    assert found is not None
    model = JOBS["Turned"]().build_model()
    same(found, dict(model.named_buffers(remove_duplicate=False)))
    assert not any(each.is_meta for each in model.parameters())
    assert constants(JOBS["Mixed"]()) is None
    assert constants(JOBS["Reading"]()) is None


def test_a_checkpoint_that_has_gone_is_an_error_where_numbers_were_to_come_from_it(tmp_path: Path) -> None:
    trainer = Trainer(JOBS["Mixed"](), PLANS["one"], begun=True)
    with pytest.raises(InputError, match="has no checkpoint, and there was one"):
        trainer.load(tmp_path)


def test_workers_draw_numbers_once_and_none_where_a_checkpoint_has_them(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=2)
        plan = PlanMessage(data=2, zero=3, micro_batch=4)
        first = controller.launch("Telling", {"pause_s": 0.02}, world=2, plan=plan, work=1e6)
        controller.reached(first, 3)
        controller.say(Stop(run=first.run))
        assert controller.ended(first).outcome == "paused", controller.told()
        work = controller.saved(first).work + 2
        second = controller.launch("Telling", world=2, plan=plan, work=work, folder=first.folder)
        assert controller.ended(second).outcome == "done", controller.told()
        made = [
            sorted(
                line for line in (Path(each.folder) / f"log-{each.run}.txt").read_text().splitlines() if "made" in line
            )
            for each in (first, second)
        ]
        assert made == [["made on cpu", "made on meta", "made on meta"], ["made on meta", "made on meta"]]


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind of plan, at a first start and from a checkpoint."""
    folder = str(tmp_path_factory.mktemp("peaks"))
    cases = [
        (f"{plan}{again}", "large_cases:peak", (PLANS[plan], folder if again else ""))
        for plan in ("ddp", "fsdp", "tp", "pp")
        for again in ("", " again")
    ]
    saved = ("saved", "large_cases:save_large", (folder,))
    return groups.run_once(tmp_path_factory, "large-peaks", {1: [saved], 2: cases}, timeout_s=240)


@pytest.mark.parametrize("plan", ["ddp", "fsdp", "tp", "pp"])
def test_a_rank_holds_little_more_than_it_owns_as_it_begins(peaks: dict[str, Any], plan: str) -> None:
    """But for rank 0 of a first start, which draws the whole model, once."""
    needed = NEEDED_BYTES.get(plan, 0.0)
    (first, _), (most, owned) = peaks[plan]
    assert owned == pytest.approx(MODEL_BYTES * (1 if plan == "ddp" else 1 / 2), rel=0.1)
    assert most <= WORST * owned + needed
    assert first <= WORST * MODEL_BYTES + needed
    for most, owned in peaks[f"{plan} again"]:
        assert owned == pytest.approx(4 * MODEL_BYTES * (1 if plan == "ddp" else 1 / 2), rel=0.1)
        assert most <= WORST * owned + needed
