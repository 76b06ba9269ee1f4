"""Models measured for real and by agents that only pretend: which plans, for how long, and when again."""

import asyncio
import json
import os
from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from exec import served
from exec.pretended import FakeAgent, refuses, unchecked
from exec.served import TaskBackend

from synergy_core.performance.planner.families import architecture_named
from synergy_core.performance.planner.machine import constants_for, machine_named, software_named
from synergy_core.performance.planner.plan import Plan, plans_of
from synergy_core.performance.planner.step_time import step_time
from synergy_core.scheduling.jobs.testbed_profiles import NoiseFrom, ProfiledCosts, ProfiledModel, TestbedProfile
from synergy_exec.backends import get_backend
from synergy_exec.commands import profile as command
from synergy_exec.commands.profile import table
from synergy_exec.messages import Launch
from synergy_exec.plans import Candidates, batches_of, plans, sizes_of
from synergy_exec.profiling import profile as profiling
from synergy_exec.profiling.machine import Part
from synergy_exec.profiling.profile import QUICK, Effort, Made, add_to_profile, current_profile
from synergy_exec.profiling.selection import Selection
from synergy_exec.settings import Settings
from synergy_runs.inputs.from_settings import read_profile, write_profile
from synergy_runs.inputs.keys import build

HERE = "this machine"
TINY = Effort(seconds=0.1, noise_s=0.0)
LONG = build(Settings, {"profile_s": 600.0})


def quiet(words):
    pass


def file_of(name, initial_batch=8, max_batch=16, **more):
    values = {"class": "synergy_exec.examples.mlp:Mlp", "arguments": {"width": 16, "depth": 2}, **more}
    return unchecked(name=name, initial_batch=initial_batch, max_batch=max_batch, work=1.0, **values)


ODD_MODELS = """
import os
from synergy_exec.examples.mlp import Mlp

class Broken(Mlp):
    def build_model(self):
        raise OSError("no data here")

class Fatal(Mlp):
    def build_model(self):
        os._exit(7)
"""


@pytest.mark.usefixtures("warm_agents")
def test_two_slots_are_measured_under_every_plan_and_models_that_cannot_be_built_are_left_out(tmp_path):
    odd, folder = tmp_path / "odd.py", tmp_path / "profiles"
    odd.write_text(ODD_MODELS)
    folder.mkdir()
    path, said = folder / "profile.json", list[str]()
    files = [
        file_of("small"),
        *(file_of(name, **{"class": f"{odd}:{name}"}) for name in ("Broken", "Fatal", "Nothing")),
    ]
    made = add_to_profile(path, files, get_backend("local", {"slots": 2}), HERE, TINY, said.append, LONG)
    assert [each.name for each in made.models] == ["small"]
    remarks = "\n".join(made.remarks)
    for each in ("Broken: rank 0, building: OSError: no data here", "Fatal: rank 0 left with exit code 7", "Nothing"):
        assert each in remarks
    model = read_profile(path)["small"]
    shapes = {(row.plan.gpus, row.plan.global_batch) for row in model.rows}
    assert shapes == {(1, 8), (1, 16), (2, 8), (2, 16)}
    degrees = {(row.plan.data, row.plan.tensor, row.plan.pipeline) for row in model.rows}
    assert {(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)} <= degrees
    assert all(0 < row.step_s < 10 and row.memory_bytes > 0 for row in model.rows)
    assert 0 < model.costs.exit_s < 30
    assert 0 < model.costs.restart_s < 30
    assert model.noise[0] == NoiseFrom(0.0, 0.0)
    assert model.noise[1].work >= 10
    assert said[0].startswith("small: 1 on 1 × cpu")
    assert [path.name for path in folder.iterdir()] == ["profile.json"]


@pytest.mark.usefixtures("warm_agents")
def test_input_is_measured_in_cpu_seconds_whatever_else_the_machine_does(tmp_path):
    """A job whose samples take 20 ms of CPU to prepare, and whose model takes little beside."""
    path, said = tmp_path / "profile.json", list[str]()
    file = file_of(
        "pictures",
        **{"class": "synergy_exec.examples.pictures:Pictures"},
        arguments={"cpu_s": 0.02, "pictures": 32, "channels": 4},
        initial_batch=4,
        max_batch=4,
    )
    made = add_to_profile(path, [file], get_backend("local", {"slots": 1}), HERE, TINY, said.append, LONG)
    assert made.remarks == []
    model = read_profile(path)["pictures"]
    given = model.input
    cores = len(os.sched_getaffinity(0))
    assert {1.0, float(cores)} <= {each.cpus for each in given.steps}
    assert [each for each in said if each.startswith(f"pictures: input with {cores} CPUs")]
    assert 0.017 < given.cpu_s < 0.035
    assert all(each.step_s >= 4 * 0.017 / each.cpus and each.waited_s < each.step_s for each in given.steps)
    assert (given.batch, given.sample_bytes, given.data_bytes) == (4, 832.0, 32 * 832.0)
    heading, *lines = table(model)[-1 - len(given.steps) :]
    assert heading.startswith(f"  input on 1 × cpu, batch 4: {given.cpu_s * 1e3:.2f} ms of CPU per sample, ")
    assert [line.split()[0] for line in lines] == [f"{each.cpus:g}" for each in given.steps]


def test_models_are_measured_once_and_again_where_something_changed(tmp_path, monkeypatch):
    path, measured = tmp_path / "profile.json", list[str]()

    def measure(path, files, backend, where, effort, say, settings):
        measured.extend(each.name for each in files)
        made = [_model(each) for each in files if each.name != "broken"]
        older = read_profile(path).models if path.is_file() and read_profile(path).machine == where else {}
        write_profile(TestbedProfile({**older, **{each.name: each for each in made}}, where, "now"), path)
        return Made(made, [])

    monkeypatch.setattr(profiling, "add_to_profile", measure)

    def names(*files, where=HERE):
        measured.clear()
        profile, _ = current_profile(path, list(files), lambda: None, where, quiet, Settings())
        assert {each.name for each in files} - {"broken"} <= set(profile)
        return list(measured)

    assert names(file_of("a"), file_of("b")) == ["a", "b"]
    assert names(file_of("a"), file_of("b")) == []
    assert names(file_of("a"), file_of("c")) == ["c"]
    assert names(file_of("a", max_batch=31)) == []
    assert names(file_of("a", max_batch=32)) == ["a"]
    assert names(file_of("b", initial_batch=4)) == ["b"]
    assert names(file_of("c", arguments={"width": 32})) == ["c"]
    assert names(file_of("a", max_batch=32), where="another machine") == ["a"]
    assert names(file_of("broken")) == ["broken"]


def _model(file):
    noise = (NoiseFrom(0.0, 0.0),)
    costs, application = ProfiledCosts(1.0, 1.0, 1.0), file.application
    return ProfiledModel(file.name, file.initial_batch, file.max_batch, 1.0, noise, costs, (), application=application)


def test_what_is_no_profile_is_said(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"format": 1}')
    refuses("profile again", current_profile, path, [file_of("a")], lambda: None, HERE, quiet, Settings())


# Measuring keeps to its time, its memory and its settings; agents only pretend
LARGE = 16
"""Samples of a micro-batch that do not fit."""


class Forgetful(FakeAgent):
    """Has no memory for large micro-batches, and stands still on several slots if it is `stuck`. Its models are
    replicas, and stages of replicas.
    """

    launches: list[Launch]
    tried: list[Plan]
    stuck = False

    def hear(self, message, now_s):
        if isinstance(message, Launch):
            self.launches.append(message)
        return super().hear(message, now_s)

    @staticmethod
    def refusal(plan):
        return "no" if plan.tensor > 1 or plan.zero or plan.interleave > 1 else None

    def pass_time(self, now_s):
        told, still = [], {}
        for number, run in list(self.runs.items()):
            plan = run.launch.plan
            if plan not in self.tried:
                self.tried.append(plan)
            if plan.micro_batch >= LARGE:
                reason = "rank 0: OutOfMemoryError"
                told.append(replace(self.end(number, "failed", reason), out_of_memory=True))
            elif self.stuck and plan.gpus > 1:
                still[number] = self.runs.pop(number)
        told += super().pass_time(now_s)
        self.runs |= still
        return told


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr(served, "FakeAgent", Forgetful)
    monkeypatch.setattr(Forgetful, "launches", [], raising=False)
    monkeypatch.setattr(Forgetful, "tried", [], raising=False)
    return Forgetful.launches


def test_time_that_is_up_ends_measuring_and_what_there_was_none_for_is_predicted(tmp_path, launches, monkeypatch):
    """Of two models, each of which trains on one slot and stands still on two; nobody else would end that. What stands
    still takes half of the model's time, and leaves the rest to other plans.
    """
    monkeypatch.setattr(Forgetful, "stuck", True)
    path, said = tmp_path / "profile.json", list[str]()
    files = [file_of(name, 4, 8) for name in ("first", "second")]
    made = add_to_profile(path, files, TaskBackend(2), HERE, TINY, said.append, build(Settings, {"profile_s": 24.0}))
    assert [each.name for each in made.models] == ["first", "second"]
    for model in read_profile(path).models.values():
        known = {(row.plan.gpus, row.plan.global_batch, row.predicted) for row in model.rows}
        assert known == {(1, 4, False), (1, 8, False), (2, 4, True), (2, 8, True)}
        assert [line.endswith(", predicted") for line in table(model)[1:]] == [False, False, True, True]
    assert made.remarks[0].startswith("first: left out, dp2 · 2×1: it was not measured after ")
    assert any("time was up when 2 of 8 step times were measured; 2 are predicted" in each for each in made.remarks)
    assert said[0].startswith("first: 1 on 1 × cpu, batch 4 (")
    assert said[2].startswith("first: dp2 on 2 × cpu, batch 4 (")
    assert any(each.startswith("first: 2 of 8 step times measured") for each in said)


def test_smaller_pieces_are_measured_where_memory_ran_out(tmp_path, launches):
    """Batch 32 on one slot is two pieces of 16, which do not fit; nor would the same on two replicas, which is not
    tried then; on two stages two pieces of 16 do not fit, and four of 8 do.
    """
    path = tmp_path / "profile.json"
    file = file_of("large", 8, 32)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, TINY, quiet, Settings())
    rows = made.models[0].rows
    known = {(each.plan.gpus, each.plan.pipeline, each.plan.global_batch, each.plan.micro_batch) for each in rows}
    assert {(1, 1, 8, 4), (1, 1, 16, 8), (2, 1, 8, 4), (2, 1, 16, 8), (2, 2, 32, 8)} <= known
    assert max(micro_batch for *_, micro_batch in known) < LARGE
    assert not [each for each in rows if each.predicted]
    assert [each.partition(":")[2] for each in made.remarks] == [
        " left out, 1 GPU · 16×2: rank 0: OutOfMemoryError",
        " left out, pp2 · 16×2: rank 0: OutOfMemoryError",
    ]
    too_large = [each for each in Forgetful.tried if each.micro_batch >= LARGE]
    assert [(each.data, each.pipeline) for each in too_large] == [(1, 1), (1, 2)]


def test_plan_is_measured_again_where_its_agent_was_lost_meanwhile(tmp_path, launches, monkeypatch):
    left = []

    class Leaving(Forgetful):
        def pass_time(self, now_s):
            if self.runs and not left:
                left.append(self.node)
                raise asyncio.CancelledError
            return super().pass_time(now_s)

    monkeypatch.setattr(served, "FakeAgent", Leaving)
    path, file = tmp_path / "profile.json", file_of("small", 4, 4)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, TINY, quiet, build(Settings, {"profile_s": 60.0}))
    assert made.remarks == []
    assert len(left) == 1
    assert {(row.plan.gpus, row.plan.pipeline) for row in made.models[0].rows} == {(1, 1), (2, 1), (2, 2)}


def test_command_measures_as_a_run_would(tmp_path, launches, monkeypatch, capfd):
    """On two nodes that reach the controller by another address than its own."""
    urls = []

    async def note(node, meeting):
        urls.append(meeting.url)

    monkeypatch.setattr(command, "get_backend", lambda _, options: TaskBackend(*[1] * options["nodes"], starting=note))
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"class": "a.b:C", "name": "small", "initial_batch": 4, "work": 1}))
    of_run = ["host=127.0.0.2", "interface=lo", "precision=fp32", "memory_gb_per_slot=3", "start_s=77", "profile_s=60"]
    out = tmp_path / "profile.json"
    command.main([str(job), "--seconds", "0.1", "--out", str(out), "backend.options.nodes=2", *of_run])
    assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.2"] * 2
    settings = [each.settings for each in launches]
    given = {(each.interface, each.precision, each.memory_gb_per_slot, each.start_s) for each in settings}
    assert given == {("lo", "fp32", 3.0, 77.0)}
    model = read_profile(out)["small"]
    assert {(row.nodes, row.plan.gpus) for row in model.rows} == {(1, 1), (2, 2)}
    assert read_profile(out).machine.endswith("local (nodes=2), fp32")
    heard = capfd.readouterr().err.splitlines()
    assert heard[0] == "measuring small for at most 60 s (profile_s)"
    assert heard[1].startswith("small: 1 on 1 × cpu, batch 4 (")


# Which plans are measured: fewer than there are, without losing the fastest


def test_batches_double_and_sizes_are_powers_of_two_and_all():
    assert batches_of(file_of("a", max_batch=40)) == [8, 16, 32]
    assert batches_of(file_of("a", max_batch=16, batch=12)) == [8, 12, 16]
    assert sizes_of(1) == [1]
    assert sizes_of(2) == [1, 2]
    assert sizes_of(6) == [1, 2, 4, 6]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_every_plan_fills_the_slots_at_a_batch_that_was_asked_for(slots):
    found = plans(slots, [16, 32], lambda plan: None)
    assert found
    for each in found:
        assert each.gpus == slots
        assert each.global_batch in (16, 32)
        assert each.data > 1 or each.accumulation > 1  # else its noise could not be measured


BATCHES = [16, 32, 64, 128]
SLOTS = 8


def refused(plan):
    """Refuses plans as `admitted.plan_refusal` refuses DDP and interleaving, for a model of 24 blocks."""
    if plan.data > 1 and plan.tensor > 1 and not plan.zero:
        return "DDP fails on layers that are split"
    if plan.interleave > 1 and plan.accumulation % plan.pipeline:
        return "no multiple"
    return None if 24 % (plan.pipeline * plan.interleave) == 0 else "its blocks do not divide"


def candidates(slots=SLOTS):
    return {size: plans(size, BATCHES, refused) for size in sizes_of(slots)}


def selecting(there, effort=TINY, held_bytes=0.0, **more):
    selection = Selection(Part("cpu", 0, 1, SLOTS), every_batch=effort.every_batch, **more)
    selection.found(Candidates(there, held_bytes=held_bytes))
    return selection


def tell(selection, plan, step_s, memory_bytes=0.0):
    selection.measured(plan, step_s, memory_bytes, limit_bytes=inf)


def planned(model, gpu):
    """Seconds of a step under every candidate, as the planner has them for GPUs that were measured."""
    there = [plan for found in candidates().values() for plan in found]
    family, architecture = architecture_named(model)
    machine, software = machine_named(gpu), software_named("megatron")
    columns = plans_of(list(there))
    work = family.work(architecture, columns, software)
    times = step_time(work, columns, machine, software, constants_for(machine, software))
    return dict(zip(there, times.total_s.tolist(), strict=True))


@pytest.mark.parametrize(("model", "gpu"), [("gpt-350m", "a100-80gb"), ("resnet-50", "v100")])
def test_on_eight_slots_a_third_is_measured_and_the_fastest_is_among_it(model, gpu):
    truth = planned(model, gpu)
    selection = selecting(candidates(), QUICK)
    found, measured = {}, 0
    while (plan := selection.next()) is not None:
        key = plan.gpus, plan.global_batch
        found[key] = min(truth[plan], found.get(key, inf))
        tell(selection, plan, truth[plan])
        measured += 1
    assert measured < len(selection.plans) / 3
    best = {key: min(truth[plan] for plan in truth if (plan.gpus, plan.global_batch) == key) for key in found}
    assert len(best) == 2 * len(sizes_of(SLOTS))
    assert max(found[key] / best[key] for key in best) < 1.05


def test_what_jobs_fall_back_on_comes_first_then_the_fewest_slots():
    """The smallest and the largest batch of each, then those between; failed before: replicas at every batch took the
    time there was, and of a model with slow steps nothing else was measured.
    """
    selection, order = selecting(candidates()), list[Plan]()
    while (plan := selection.next()) is not None:
        order.append(plan)
        tell(selection, plan, 1.0)
    fallbacks = [(degrees, batch) for degrees in ("1", "dp2", "dp4", "dp8") for batch in (BATCHES[0], BATCHES[-1])]
    assert [(plan.degrees, plan.global_batch) for plan in order[:8]] == fallbacks
    others = {plan.degrees: plan for plan in reversed(order[8:])}
    firsts = [plan for plan in order[8:] if others[plan.degrees] is plan and plan.degrees not in dict(fallbacks)]
    assert len(firsts) > 20
    assert all(one.gpus <= other.gpus for one, other in pairwise(firsts))
    assert {plan.global_batch for plan in firsts} == {BATCHES[0]}
    between = [plan.global_batch in BATCHES[1:-1] for plan in order]
    assert not any(between[: order.index(firsts[-1])])


def test_what_trains_in_too_much_memory_hides_no_plan_that_fits():
    there = candidates(2)
    selection = selecting(there, memory_bytes=1.0)
    replicas = [plan for plan in there[2] if plan.degrees == "dp2"]
    sharded = [plan for plan in there[2] if plan.degrees == "dp2 zero3"]
    for plan in replicas[:2]:
        tell(selection, plan, 0.1, memory_bytes=2.0)
    tell(selection, sharded[0], 0.9)
    assert selection.worth(sharded[1])
    assert not selection.worth(replicas[2])
    assert (2, BATCHES[0]) not in {(plan.gpus, plan.global_batch) for plan, _ in selection.predicted()}


def test_weights_that_no_slot_can_hold_alone_are_not_tried_whole():
    selection = selecting(candidates(4), held_bytes=3e9, memory_bytes=1e9)
    worth = {plan.degrees for plan in selection.plans if selection.worth(plan)}
    assert worth == {
        "pp4",
        "pp4×2",
        "dp4 zero3",
        "tp4",
        "tp2 dp2 zero3",
        "pp2 dp2 zero3",
        "pp2×2 dp2 zero3",
        "tp2 pp2",
    } | {"tp2 pp2×2"}
