"""The parts of a worker and of its agent, one by one: orders, errors, steps and their times, cores, GPUs."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from exec.pretended import launch_of, refuses
from exec.real import Controller
from exec.served import through
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_core.scheduling.jobs.cluster import Share
from synergy_exec.agent.cores import Cores, divide
from synergy_exec.backends import local
from synergy_exec.messages import Launch, MemoryUse, Reshare
from synergy_exec.run import recorded
from synergy_exec.wire import decode, encode
from synergy_exec.worker import rank, resources
from synergy_exec.worker.network import talk_over
from synergy_exec.worker.rank import from_peers, lost_device, out_of_memory, sentence
from synergy_exec.worker.start import FAILED, Descriptors, Heartbeat, Start, see_only
from synergy_exec.worker.steps import WARM_UP_STEPS, WINDOW_STEPS, Meter, Pace, StepClock, StepMedians, StepsFile


def test_messages_are_read_as_written_older_ones_too_and_odd_ones_refused():
    launch = launch_of(arguments={"x": [1]}, plan=Plan(data=2), slots=[0, 1], world=2, share=Share(1.5, 2e9))
    reshare = Reshare(run=1, share=Share(0.5, 0.0))
    assert [decode(encode(each)) for each in (launch, reshare)] == [launch, reshare]
    older = encode(launch).replace(',"share":[1.5,2000000000.0]', "")
    assert '"share"' not in older
    found = decode(older)
    assert isinstance(found, Launch)
    assert found.share is None
    assert decode('{"kind":"Retune","run":1,"micro_batch":4,"accumulation":2}').compressor == "none"
    for odd in ("[1.5]", '["a",0]', "3"):
        refuses("Reshare", decode, f'{{"kind":"Reshare","run":1,"share":{odd}}}')


# Errors


@pytest.mark.parametrize(
    ("error", "memory", "peers"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"), True, False),
        (MemoryError(), True, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True, False),
        (OSError(12, "Cannot allocate memory"), True, False),
        # Of a thread whose stack is beyond memory_gb_per_slot, such as the one that flushes a checkpoint.
        (RuntimeError("can't start new thread"), True, False),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), False, True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv"), False, True),
        (distributed.DistNetworkError("The client socket has timed out"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)"), False, False),
        (ValueError("Connection closed by peer"), False, False),
        (
            RuntimeError("NCCL Error 1: unhandled cuda error. Last error: Cuda failure 2 'out of memory'"),
            True,
            False,
        ),
        (RuntimeError("NCCL error: unhandled system error, remote process exited"), False, True),
    ],
)
def test_errors_of_memory_and_echoes_of_another_ranks_death_are_recognised(error, memory, peers):
    assert (out_of_memory(error), from_peers(error)) == (memory, peers)


@pytest.mark.parametrize(
    "says",
    [
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "No CUDA GPUs are available",
        "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "CUDA error: unknown error",
        "no CUDA-capable device is detected",
        "CUDA error: unspecified launch failure",
    ],
)
def test_a_device_that_is_gone_is_no_fault_of_the_job(says):
    assert lost_device(RuntimeError(says))


@pytest.mark.parametrize("says", ["CUDA error: device-side assert triggered", "unknown error in the job's own file"])
def test_other_errors_are_the_jobs_own(says):
    assert not lost_device(RuntimeError(says))


def failure_of(monkeypatch, **more):
    """The message of a rank on GPU 0 that fails."""
    said, (ours, theirs) = [], socket.socketpair()
    monkeypatch.setattr(rank, "AgentConnection", lambda _: SimpleNamespace(say=said.append))
    monkeypatch.setattr(rank.resources, "move", lambda *_: None)
    start = Start(launch=launch_of(**more), rank=0, cores=(0,), cpus=1.0, gpus=(0,), launched_s=0.0)
    code = rank.run(start, Descriptors(theirs.fileno(), Heartbeat.create(), 1, 0))
    ours.close()
    return code, said[0]


def test_any_error_while_a_gpu_is_taken_is_its_nodes(monkeypatch, capsys):
    def gone(_):
        raise RuntimeError("a text that nobody knows")

    monkeypatch.setattr(torch.cuda, "set_device", gone)
    monkeypatch.setattr(rank.faulthandler, "register", lambda _: None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    code, said = failure_of(monkeypatch)
    assert (code, said.unsaved, said.broken_device) == (FAILED, True, True)
    assert "taking GPU 0" in said.reason


def test_reason_is_one_line_of_bounded_length():
    text = sentence(3, "step 7", ValueError("line\n" * 1000))
    assert text.startswith("rank 3, step 7: ValueError: line line")
    assert "\n" not in text
    assert len(text) < 700
    assert sentence(0, "building", InputError("write 1")) == "rank 0, building: write 1"


# Steps: their file, whose last line a full disk may cut off, and their times


def test_the_run_after_a_full_disk_begins_a_line_of_its_own(tmp_path):
    """As `bench/chaos.py 103 60` found it: step 821 of the next run stood as 8821. Rates are kept to the last bit: six
    digits had made ReLU networks drift apart by 0.02 in a few hundred steps.
    """
    path, rate = tmp_path / "steps.csv", 1.0 + 1.0 / 3.0
    first = StepsFile(path, 303)
    first.add(848, 8, 1.0, 0.05, 0.08)
    first.close()
    with path.open("a") as file:
        file.write("8")
    second = StepsFile(path, 306)
    for step in (821, 822):
        second.add(step, 8, rate, 0.02, 0.09)
    second.close()
    found = recorded(path)
    steps = list(zip(found["step"], found["run"], found["rate"], strict=True))
    assert steps == [(821, 306, rate), (822, 306, rate), (848, 303, 1.0)]


def test_a_file_of_steps_larger_than_the_memory_of_a_worker_is_cut_to_lines(tmp_path):
    path = tmp_path / "steps.csv"
    with path.open("wb") as file:
        file.seek(2**30)
        file.write(b"\nhalf a line")
    limited = "import pathlib, resource, sys; from synergy_exec.wire import cut_to_lines as cut\n"
    limited += "resource.setrlimit(resource.RLIMIT_DATA, (2**29, 2**29)); cut(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", limited, path], check=True)
    assert path.stat().st_size == 2**30 + 1


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), StepMedians()),
        (((8, 1, 30.0, WARM_UP_STEPS),), StepMedians(0.0, 0.0, 0)),
        (((8, 1, 30.0, WARM_UP_STEPS), (8, 1, 1.0, 1)), StepMedians(1.0, 0.0, 1)),
        # A retune begins with warming up, and reports its own batch.
        (((8, 1, 1.0, WARM_UP_STEPS + 4), (8, 2, 50.0, WARM_UP_STEPS)), StepMedians(0.0, 0.0, 0)),
        (((8, 1, 1.0, 9), (8, 2, 50.0, WARM_UP_STEPS), (8, 2, 2.0, 3)), StepMedians(2.0, 0.0, 3)),
        # Steps of a batch that comes back still count; old ones leave the window.
        (tuple((batch, 1, 1.0, WARM_UP_STEPS + 5) for batch in (8, 16, 8)), StepMedians(1.0, 0.0, 10)),
        (((8, 1, 1.0, WARM_UP_STEPS + 300), (8, 1, 3.0, WINDOW_STEPS)), StepMedians(3.0, 0.0, WINDOW_STEPS)),
    ],
)
def test_step_times_are_medians_of_a_window_after_warming_up(steps, expected):
    clock = StepClock()
    for micro_batch, accumulation, seconds, times in steps:
        for _ in range(times):
            clock.add(micro_batch, accumulation, seconds)
    assert clock.take() == expected


# A rank on a part of a core takes no more than that part, and no less than it may


class Core:
    """A made-up one: `compute` takes so long, of which the rank has the core for a part."""

    def __init__(self):
        self.now_s = self.used_s = 0.0

    def compute(self, cpu_s, beside):
        self.used_s += cpu_s
        self.now_s += cpu_s / (1 - beside)

    def sleep(self, seconds):
        self.now_s += seconds * 1.01 + 1e-4  # later than it was to


def steps_take(part, beside):
    core = Core()
    pace = Pace(part, lambda: core.used_s, lambda: core.now_s, core.sleep)
    for others in beside:
        pace.begin()
        core.compute(0.01, others)
        pace.rest()
    return core.now_s


def test_steps_take_as_long_beside_idle_slots_as_beside_busy_ones():
    """Failed before: twice as fast beside an idle slot, so that no profile foretold a queue's end."""
    assert steps_take(0.5, [0.0] * 100) == pytest.approx(steps_take(0.5, [0.5] * 100), rel=0.02)
    assert steps_take(0.5, [0.5] * 100) == pytest.approx(2.0)  # nothing is slept where the kernel shares the core out
    assert steps_take(0.25, [0.5] * 100) == pytest.approx(4.0, rel=0.02)


def test_cores_are_divided_and_shared_only_when_they_must_be():
    for cores, slots, owned, cpus in (
        ([0, 1, 2, 3, 4], 2, [(0, 1), (2, 3)], [2, 2]),
        ([0, 1], 3, [(0,), (1,), (0,)], [0.5, 1, 0.5]),
    ):
        found = divide(cores, slots, gpus=False)
        assert ([each.cores for each in found], [each.cpus for each in found]) == (owned, cpus)
    assert [each.gpu for each in divide([0, 1], 2, gpus=True)] == [0, 1]


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(st.integers(0, 5), st.one_of(st.integers(0, 5000), st.integers(0, 4).map((1000).__mul__))),
        max_size=30,
    ),
)
def test_no_core_is_given_twice_and_nothing_stays_free_while_somebody_lacks_it(count, changes):
    """0 thousandths: the owner leaves. Those that a change does not name have what they had."""
    cores, asked, whole = Cores(range(count)), {}, True
    for number, thousandths in changes:
        owner = (number, 0)
        before = {each: cores.grant(each) for each in asked}
        if thousandths:
            changed = cores.take(owner, thousandths / 1000)
            asked[owner] = thousandths / 1000
        else:
            changed = cores.leave(owner)
            asked.pop(owner, None)
        grants = {each: cores.grant(each) for each in asked}
        assert all(each.cpus <= len(each.cores) <= count for each in grants.values())
        given_out = sum(round(each.cpus * 1000) for each in grants.values())
        assert given_out == min(sum(round(each * 1000) for each in asked.values()), count * 1000)
        for each in grants.keys() - changed:
            if grants[each].cpus:
                assert grants[each] == before[each]
        whole &= thousandths % 1000 == 0
        own = [core for each in grants.values() if each.cpus for core in each.cores]
        assert not whole or len(own) == len(set(own))


# Which GPUs each process sees


@pytest.mark.parametrize(
    ("environment", "slots", "seen"),
    [
        ({}, [1], {"CUDA_VISIBLE_DEVICES": "1"}),
        ({}, range(2, 4), {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, [1], {"CUDA_VISIBLE_DEVICES": "6"}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}, range(2), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}),
        ({"HIP_VISIBLE_DEVICES": "4,6"}, [1], {"HIP_VISIBLE_DEVICES": "6"}),
    ],
)
def test_each_rank_and_each_node_sees_its_own_gpus_alone(environment, slots, seen):
    assert see_only(slots, environment) == seen


@pytest.mark.parametrize(("store_host", "interface"), [("", "lo"), ("127.0.0.1", "lo")])
def test_nccl_takes_the_interfaces_whole_name(monkeypatch, store_host, interface):
    for each in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(each, raising=False)
    talk_over(None, store_host)
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (interface, f"={interface}")


def test_local_agent_that_cannot_begin_is_lost_with_the_reason(tmp_path):
    controller = Controller(tmp_path)
    with controller:
        pass  # it is gone before its agent comes
    backend = local.Local(1, 1, [], [0])

    async def come():
        await backend.start(0, controller.meeting)
        while not (lost := backend.lost()):
            await asyncio.sleep(0.1)
        return lost

    lost = through(come)[0]
    assert "exit code 2" in lost
    assert f"no controller at {controller.meeting.url}" in lost


def test_waiting_for_a_gpu_is_no_cpu_work_of_the_input(monkeypatch):
    """CUDA keeps a core busy while it waits."""

    def busy_s():
        meter = Meter()
        meter.step_s(0, steady=True)
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        return meter.step_s(1, steady=True)

    assert busy_s() >= 0.05
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert busy_s() == 0


def test_memory_of_a_gpu_is_reported_with_what_no_tensor_can_have(monkeypatch):
    gpu = {"is_initialized": True, "mem_get_info": (70, 100), "memory_reserved": 25, "max_memory_reserved": 28}
    for name, value in (gpu | {"max_memory_allocated": 20}).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    found = resources.memory_use(bare_bytes=7)
    assert found == MemoryUse(used_bytes=20, reserved_bytes=28, outside_bytes=100 - 70 - 25, limit_bytes=95)
