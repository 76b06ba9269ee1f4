"""Models measured for real and by agents that only pretend: which plans, for how long, and when again."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from exec import served
from exec.pretended import STEP_S, FakeAgent, refuses
from exec.real import wait_until
from exec.served import TaskBackend, through

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import (
    NoiseFrom,
    PlanTimes,
    Profile,
    ProfiledCosts,
    ProfiledModel,
    SeenPlan,
    degrees_of,
)
from synergy_core.planner.families import architecture_named
from synergy_core.planner.machine import constants_for, machine_named, software_named
from synergy_core.planner.plan import Plan, plans_of
from synergy_core.planner.step_time import step_time
from synergy_exec.backends import get_backend
from synergy_exec.commands import profile as command
from synergy_exec.commands.profile import table
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Failure, Launch
from synergy_exec.profiling import profile as profiling
from synergy_exec.profiling.finder import CandidatePlans, batches_of, finder, plans, sizes_of
from synergy_exec.profiling.machine import Part
from synergy_exec.profiling.measuring import Orders
from synergy_exec.profiling.profile import QUICK, Made, add_to_profile, current_profile, noise_curve
from synergy_exec.profiling.selection import Effort, Selection, Task, record_of
from synergy_exec.settings import Settings
from synergy_exec.worker import processes
from synergy_runs.inputs import read_profile, write_profile

HERE = "this machine"
TINY = Effort(seconds=0.1, hopeless=1e9, noise_s=0.0)
"""Everything is measured, however slow it is."""
LONG = Settings(profile_s=600.0)


def file_of(name, **more):
    values = {"job_class": "synergy_exec.examples.mlp:Mlp", "arguments": {"width": 16, "depth": 2}, **more}
    return JobFile(**{"name": name, "initial_batch": 8, "max_batch": 16, "work": 1.0, **values})


def test_two_slots_are_measured_under_every_plan(tmp_path):
    path, said = tmp_path / "profile.json", list[str]()
    files = [file_of("small"), file_of("broken", job_class="synergy_exec.examples.mlp:Nothing")]
    made = add_to_profile(path, files, get_backend("local", {"slots": 2}), HERE, TINY, said.append, LONG)
    assert [each.name for each in made.models] == ["small"]
    assert any("Nothing" in each for each in made.remarks)
    model = read_profile(path)["small"]
    shapes = {(row.plan.gpus, row.plan.global_batch) for row in model.rows}
    assert shapes == {(1, 8), (1, 16), (2, 8), (2, 16)}
    degrees = {(row.plan.data, row.plan.tensor, row.plan.pipeline) for row in model.rows}
    assert {(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)} <= degrees
    assert all(0 < row.step_s < 10 and row.memory_bytes > 0 for row in model.rows)
    assert 0 < model.costs.exit_s < 30
    assert 0 < model.costs.restart_s < 30
    assert model.noise[:2] == (NoiseFrom(0.0, 0.0), NoiseFrom(10.0, model.noise[1].ratio))
    assert said[0].startswith("small: 1 on 1 × cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_input_is_measured_in_cpu_seconds_whatever_else_the_machine_does(tmp_path):
    """A job whose samples take 30 ms of CPU to prepare, and whose model takes little beside."""
    path, said = tmp_path / "profile.json", list[str]()
    file = file_of(
        "pictures",
        job_class="synergy_exec.examples.pictures:Pictures",
        arguments={"cpu_s": 0.03, "pictures": 32, "channels": 4},
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
    assert 0.027 < given.cpu_s < 0.045
    assert all(each.step_s >= 4 * 0.027 / each.cpus and each.waited_s < each.step_s for each in given.steps)
    assert (given.batch, given.sample_bytes, given.data_bytes) == (4, 832.0, 32 * 832.0)
    heading, *lines = table(model)[-1 - len(given.steps) :]
    assert heading.startswith(f"  input on 1 × cpu, batch 4: {given.cpu_s * 1e3:.2f} ms of CPU per sample, ")
    assert [line.split()[0] for line in lines] == [f"{each.cpus:g}" for each in given.steps]


def test_agent_that_is_lost_for_good_ends_profiling_with_what_to_type(tmp_path):
    class Dying(TaskBackend):
        async def start(self, node, meeting):
            await super().start(node, meeting)
            asyncio.get_running_loop().call_later(0.2, self.agents[node].cancel)

    says = "profiling ended: node 0: its agent was lost 4 times within an hour; at last: .*nothing was measured .*again"
    with pytest.raises(InputError, match=re.compile(says, re.DOTALL)):
        add_to_profile(tmp_path / "profile.json", [file_of("small")], Dying(2), HERE, TINY, lambda _: None, LONG)


ODD_MODELS = """
import os, pathlib, time
from synergy_exec.examples.mlp import Mlp

class Noted(Mlp):
    def build_model(self):
        print("what the user prints")
        with pathlib.Path(__file__).with_name("pids").open("a") as notes:
            notes.write(f"{os.getpid()}\\n")
        return super().build_model()

class Endless(Noted):
    def build_model(self):
        super().build_model()
        time.sleep(600)

class Broken(Mlp):
    def build_model(self):
        raise OSError("no data here")

class Fatal(Mlp):
    def build_model(self):
        os._exit(7)
"""


def test_models_are_built_outside_the_process_that_listens_and_once(tmp_path):
    (tmp_path / "odd.py").write_text(ODD_MODELS)

    async def ask():
        async with finder() as find:
            found = []
            for name in ("Broken", "Fatal", "Noted"):
                file = file_of(name, job_class=f"{tmp_path / 'odd.py'}:{name}")
                try:
                    found.append(await find.candidates(file, [1, 2]))
                except InputError as error:
                    found.append(str(error))
            return found

    broken, fatal, noted = through(ask)
    assert "its model cannot be built: OSError: no data here" in str(broken)
    assert "Fatal: the process that builds its model left with exit code 7" in str(fatal)
    assert noted.parameters > 100
    assert {plan.gpus for lists in noted.plans.values() for plans in lists for plan in plans} == {1, 2}
    (pid,) = (tmp_path / "pids").read_text().split()
    assert int(pid) != os.getpid()


ASKING = """
import asyncio, sys
from synergy_exec.job_file import JobFile
from synergy_exec.profiling.finder import finder

async def ask():
    async with finder() as find:
        await find.candidates(JobFile(job_class=sys.argv[1], name="a", initial_batch=4, max_batch=4, work=1.0), [1])

if __name__ == "__main__":
    asyncio.run(ask())
"""


def test_what_finds_plans_dies_with_who_asked_whatever_it_is_building(tmp_path):
    (tmp_path / "odd.py").write_text(ODD_MODELS)
    (tmp_path / "asking.py").write_text(ASKING)
    command = [sys.executable, str(tmp_path / "asking.py"), f"{tmp_path / 'odd.py'}:Endless"]
    asking = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    noted = tmp_path / "pids"
    wait_until(lambda: noted.exists() and noted.read_text().endswith("\n"), 120)
    asking.kill()
    wait_until(lambda: not processes.began(int(noted.read_text())), 60)
    asking.wait()
    assert asking.stderr.read() == "what the user prints\n"


def test_noise_is_the_median_of_stretches_and_unknown_before():
    seen = [NoiseFrom(*each) for each in ((12.0, 1.0), (13.0, 3.0), (14.0, 2.0), (16.0, 5.0), (40.0, 9.0))]
    assert noise_curve(seen) == (NoiseFrom(0, 0), NoiseFrom(10.0, 2.0), NoiseFrom(15.0, 5.0), NoiseFrom(33.75, 9.0))
    assert noise_curve([]) == (NoiseFrom(0, 0),)
    assert noise_curve([NoiseFrom(30.0, 4.0)]) == (NoiseFrom(0, 0), NoiseFrom(10.0, 4.0))


def test_models_are_measured_once_and_again_where_something_changed(tmp_path, monkeypatch):
    path, measured = tmp_path / "profile.json", list[str]()

    def measure(path, files, backend, where, effort, say, settings):
        measured.extend(each.name for each in files)
        made = [_model(each) for each in files if each.name != "broken"]
        older = read_profile(path).models if path.is_file() and read_profile(path).machine == where else {}
        write_profile(Profile({**older, **{each.name: each for each in made}}, where, "now"), path)
        return Made(made, [])

    monkeypatch.setattr(profiling, "add_to_profile", measure)

    def names(*files, where=HERE):
        measured.clear()
        profile, _ = current_profile(path, list(files), lambda: None, where, lambda _: None, Settings())
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
    refuses("profile again", current_profile, path, [file_of("a")], lambda: None, HERE, lambda _: None, Settings())


# Measuring keeps to its time, its memory and its settings; agents only pretend
BRIEF = Effort(seconds=0.1, noise_s=0.0)
LARGE = 16
"""Samples of a micro-batch that do not fit."""


class Forgetful(FakeAgent):
    """Carries out measuring runs at once. It has no memory for large micro-batches, and is `stuck` on several slots."""

    launches: list[Launch]
    stuck = False

    def hear(self, message, now_s):
        answers = super().hear(message, now_s)
        if isinstance(message, Launch):
            self.launches.append(message)
        if isinstance(message, Launch) and message.measure:
            answers += self.measure(message)
        return answers

    def measure(self, launch):
        if launch.first_rank:
            return [self.end(launch.run, "done")]
        path = Path(launch.measure)

        def write(kind, **values):
            with record_of(path).open("a") as file:
                file.write(json.dumps({"kind": kind, **values}) + "\n")

        orders = Orders(Task.read(path), record_of(path), write)
        while (order := orders.next()) is not None:
            plan = Plan(**order["plan"])
            self.tried.append(plan)
            if self.stuck and plan.gpus > 1:
                return []
            if plan.micro_batch >= LARGE:
                reason = "rank 0: OutOfMemoryError"
                failure = Failure(run=launch.run, rank=0, reason=reason, out_of_memory=True)
                return [failure, self.end(launch.run, "failed", reason)]
            times = {"step_s": STEP_S / plan.gpus, "memory_bytes": 0, "limit_bytes": 0}
            orders.done([[] if order["noise"] else times] * len(order["copies"]))
        return [self.end(launch.run, "done")]


class Found:
    """In place of the process that builds models: replicas, and stages of replicas."""

    async def candidates(self, file, sizes):
        def refusal(plan):
            return "no" if plan.tensor > 1 or plan.zero or plan.interleave > 1 else None

        batches = batches_of(file.initial_batch, file.max_batch)
        return CandidatePlans(1e3, {size: plans(size, batches, refusal) for size in sizes})


@pytest.fixture
def launches(monkeypatch):

    @contextlib.asynccontextmanager
    async def finder():
        yield Found()

    monkeypatch.setattr(profiling, "finder", finder)
    monkeypatch.setattr(served, "FakeAgent", Forgetful)
    monkeypatch.setattr(Forgetful, "launches", [], raising=False)
    monkeypatch.setattr(Forgetful, "tried", [], raising=False)
    return Forgetful.launches


def unbuilt(name, **more):
    return JobFile(**{"job_class": "a.b:C", "name": name, "initial_batch": 4, "max_batch": 8, "work": 1.0, **more})


def test_time_that_is_up_ends_measuring_and_what_there_was_none_for_is_predicted(tmp_path, launches, monkeypatch):
    """Of two models, each of which trains on one slot and stands still on two; nobody else would end that. What stands
    still takes half of the model's time, and leaves the rest to other plans.
    """
    monkeypatch.setattr(Forgetful, "stuck", True)
    path, said = tmp_path / "profile.json", list[str]()
    files = [unbuilt("first"), unbuilt("second")]
    made = add_to_profile(path, files, TaskBackend(2), HERE, BRIEF, said.append, Settings(profile_s=24.0))
    assert [each.name for each in made.models] == ["first", "second"]
    for model in read_profile(path).models.values():
        known = {(row.plan.gpus, row.plan.global_batch, row.predicted) for row in model.rows}
        assert known == {(1, 4, False), (1, 8, False), (2, 4, True), (2, 8, True)}
        assert [line.endswith(", predicted") for line in table(model)[1:]] == [False, False, True, True]
    assert made.remarks[0].startswith("first: left out, dp2 · 2×1: it was not measured after ")
    assert any("time was up before 4 more step times were measured; 2 of them are predict" in x for x in made.remarks)
    assert said[0].startswith("first: 1 on 1 × cpu (0 of 8 step times decided, ")
    assert said[2].startswith("first: dp2 on 2 × cpu (2 of 8 step times decided, ")
    assert "first: 2 of 8 step times measured" in said


def test_model_that_is_not_built_in_time_is_left_out(tmp_path, launches, monkeypatch):
    monkeypatch.setattr(Forgetful, "stuck", True)
    path = tmp_path / "profile.json"
    files = [unbuilt("small"), unbuilt("wide", arguments={"never": "built"})]

    async def never(self, file, sizes):
        if file.arguments:
            await asyncio.Event().wait()
        return CandidatePlans(1.0, {1: plans(1, [4], lambda plan: None), 2: []})

    monkeypatch.setattr(Found, "candidates", never)
    made = add_to_profile(path, files, TaskBackend(2), HERE, BRIEF, lambda _: None, Settings(profile_s=8.0))
    assert [each.name for each in made.models] == ["small"]
    assert made.remarks == ["wide could not be profiled: time was up before its model was built."]


def test_smaller_pieces_are_measured_where_memory_ran_out(tmp_path, launches):
    """Batch 32 on one slot is two pieces of 16, which do not fit; nor would the same on two replicas, which is not
    tried then; on two stages two pieces of 16 do not fit, and four of 8 do.
    """
    path = tmp_path / "profile.json"
    file = unbuilt("large", initial_batch=8, max_batch=32)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, BRIEF, lambda _: None, Settings())
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
        def measure(self, launch):
            if not left:
                left.append(launch.run)
                raise asyncio.CancelledError
            return super().measure(launch)

    monkeypatch.setattr(served, "FakeAgent", Leaving)
    path, file = tmp_path / "profile.json", unbuilt("small", max_batch=4)
    made = add_to_profile(path, [file], TaskBackend(2), HERE, BRIEF, lambda _: None, Settings(profile_s=60.0))
    assert made.remarks == []
    assert len(left) == 1
    assert {(row.plan.gpus, row.plan.pipeline) for row in made.models[0].rows} == {(1, 1), (2, 1), (2, 2)}


def test_command_measures_as_a_run_would(tmp_path, launches, monkeypatch, capfd):
    """On two nodes that reach the controller by another address than its own."""
    urls = []

    class Elsewhere(TaskBackend):
        async def start(self, node, meeting):
            urls.append(meeting.url)
            await super().start(node, meeting)

    monkeypatch.setattr(command, "get_backend", lambda name, options: Elsewhere(*[1] * options["nodes"]))
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps({"class": "a.b:C", "name": "small", "initial_batch": 4, "work": 1}))
    of_run = ["host=127.0.0.2", "interface=lo", "bfloat16=false", "memory_gb_per_slot=3", "start_s=77", "profile_s=60"]
    out = tmp_path / "profile.json"
    command.main([str(job), "--seconds", "0.1", "--out", str(out), "--option", "nodes=2", *of_run])
    assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.2"] * 2
    given = {(each.interface, each.bfloat16, each.memory_gb_per_slot, each.start_s) for each in launches}
    assert given == {("lo", False, 3.0, 77.0)}
    model = read_profile(out)["small"]
    assert {(row.nodes, row.plan.gpus) for row in model.rows} == {(1, 1), (2, 2)}
    assert read_profile(out).machine.endswith("local (nodes=2), float32")
    heard = capfd.readouterr().err.splitlines()
    assert heard[0] == "measuring small for at most 60 s (profile_s)"
    assert heard[1].startswith("small: 1 on 1 × cpu (0 of ")


# Which plans are measured: fewer than there are, without losing the fastest


def test_batches_double_and_sizes_are_powers_of_two_and_all():
    assert batches_of(8, 40) == [8, 16, 32]
    assert batches_of(8, 8) == [8]
    assert sizes_of(1) == [1]
    assert sizes_of(2) == [1, 2]
    assert sizes_of(6) == [1, 2, 4, 6]


@pytest.mark.parametrize("slots", [1, 2, 3, 4, 8])
def test_every_plan_fills_the_slots_at_a_batch_that_was_asked_for(slots):
    found = plans(slots, [16, 32], lambda plan: None)
    assert found
    for same_degrees in found:
        assert len({(each.data, each.tensor, each.pipeline, each.interleave, each.zero) for each in same_degrees}) == 1
        for each in same_degrees:
            assert each.gpus == slots
            assert each.global_batch in (16, 32)
            assert each.data > 1 or each.accumulation > 1  # else its noise could not be measured


BATCHES = [16, 32, 64, 128]
SLOTS = 8


def refused(plan):
    """As `admitted.plan_refusal` says of DDP and of interleaving, for a model of 24 blocks."""
    if plan.data > 1 and plan.tensor > 1 and not plan.zero:
        return "DDP fails on layers that are split"
    if plan.interleave > 1 and plan.accumulation % plan.pipeline:
        return "no multiple"
    return None if 24 % (plan.pipeline * plan.interleave) == 0 else "its blocks do not divide"


def candidates(slots=SLOTS):
    return {size: plans(size, BATCHES, refused) for size in sizes_of(slots)}


def task(there, effort, **more):
    return Task(part=Part("cpu", 0, 1, SLOTS), plans=there, effort=effort, **more)


def all_of(there):
    return [plan for lists in there.values() for same in lists for plan in same]


def planned(model, gpu):
    """Seconds of a step under every candidate, as the planner has them for GPUs that were measured."""
    there = all_of(candidates())
    family, architecture = architecture_named(model)
    machine, software = machine_named(gpu), software_named("megatron")
    columns = plans_of(list(there))
    work = family.work(architecture, columns, software)
    times = step_time(work, columns, machine, software, constants_for(machine, software))
    return dict(zip(there, times.total_s.tolist(), strict=True))


@pytest.mark.parametrize(("model", "gpu"), [("gpt-350m", "a100-80gb"), ("gpt-1.3b", "v100"), ("resnet-50", "v100")])
def test_on_eight_slots_a_third_is_measured_and_the_fastest_is_among_it(model, gpu):
    truth = planned(model, gpu)
    selection = Selection(task(candidates(), QUICK))
    found = {}
    while (plan := selection.next()) is not None:
        key = plan.gpus, plan.global_batch
        found[key] = min(truth[plan], found.get(key, inf))
        selection.measured(plan, truth[plan])
    measured = selection.plans - selection.left_out.total()
    assert measured < selection.plans / 3
    assert selection.undecided == 0
    best = {key: min(truth[plan] for plan in truth if (plan.gpus, plan.global_batch) == key) for key in found}
    assert len(best) == 2 * len(sizes_of(SLOTS))
    assert max(found[key] / best[key] for key in best) < 1.05


def test_what_jobs_fall_back_on_comes_first_then_the_fewest_slots():
    """The smallest and the largest batch of each, then those between; failed before: replicas at every batch took the
    time there was, and of a model with slow steps nothing else was measured.
    """
    selection, order = Selection(task(candidates(), Effort(hopeless=inf))), list[list[Plan]]()
    while (plan := selection.next()) is not None:
        if not order or degrees_of(order[-1][-1]) != degrees_of(plan):
            order.append([])
        order[-1].append(plan)
        selection.measured(plan, 1.0)
    kinds = len(order) // 2
    for half, batches in ((order[:kinds], {BATCHES[0], BATCHES[-1]}), (order[kinds:], {*BATCHES[1:-1]})):
        assert [same[0].degrees for same in half[:4]] == ["1", "dp2", "dp4", "dp8"]
        assert all(one[0].gpus <= other[0].gpus for one, other in pairwise(half[4:]))
        assert {plan.global_batch for same in half for plan in same} == batches
    assert selection.undecided == 0


def test_a_plan_that_was_never_tried_is_believed_to_be_as_fast_as_it_could_be():
    def one(batch):
        return Plan(micro_batch=batch // 2, accumulation=2)

    seen = [SeenPlan(one(batch), 1, 0.01 * batch) for batch in BATCHES]
    times = PlanTimes(seen)
    assert times.step_s(one(24), 1) == pytest.approx(0.24)
    split = Plan(tensor=2, micro_batch=16, accumulation=2)
    assert times.step_s(split, 1) == pytest.approx(0.16)
    slow = PlanTimes([*seen, SeenPlan(split, 1, 0.8)])
    assert slow.step_s(Plan(tensor=4, micro_batch=16, accumulation=2), 1) > 0.8
    assert slow.step_s(Plan(data=2, micro_batch=16), 1) == pytest.approx(0.16)
    exchanging = SeenPlan(Plan(data=2, micro_batch=16), 1, 0.4, sync_s=0.3)
    alone = PlanTimes([exchanging])
    assert alone.step_s(exchanging.plan, 1) == pytest.approx(0.4)
    assert alone.step_s(Plan(tensor=2, micro_batch=16, accumulation=2), 1) == pytest.approx(0.1, rel=0.05)
    assert alone.step_s(Plan(data=2, micro_batch=8), 1) == pytest.approx(0.35, rel=0.05)
    staged = times.step_s(Plan(pipeline=2, micro_batch=8, accumulation=4), 1)
    assert staged == pytest.approx(0.01 * 8 * (4 + 1) / 2)


def test_what_trains_in_too_much_memory_hides_no_plan_that_fits():
    there = candidates(2)
    selection = Selection(task(there, Effort(hopeless=1.25), memory_bytes=1.0))
    for plan in there[2][0][:2]:
        selection.measured(plan, 0.1, memory_bytes=2.0)
    sharded = next(same for same in there[2] if same[0].degrees == "dp2 zero3")
    selection.measured(sharded[0], 0.9)
    assert selection.worth(sharded[1])
    assert not selection.worth(there[2][0][2])
    assert (2, BATCHES[0]) not in {(plan.gpus, plan.global_batch) for plan, _ in selection.predicted()}


def test_weights_that_no_slot_can_hold_alone_are_not_tried_whole():
    there = candidates(4)
    selection = Selection(task(there, Effort(hopeless=inf), held_bytes=3e9, memory_bytes=1e9))
    worth = {plan.degrees for plan in all_of(there) if selection.worth(plan)}
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
