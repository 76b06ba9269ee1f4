"""The parts of a worker and of a backend, one by one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from agents_controller import TOKEN, Controller
from torch import distributed

from synergy_core.cluster import Share
from synergy_core.errors import InputError
from synergy_exec.agent.slots import divide
from synergy_exec.backends import Meeting, backend_names, get_backend
from synergy_exec.backends.local import Local
from synergy_exec.messages import Hello, Kill, Launch, PlanMessage, Rebuild, Retune, Stop
from synergy_exec.wire import encode
from synergy_exec.worker.agreement import HeardOrders, Wishes, agree
from synergy_exec.worker.connection import AgentConnection
from synergy_exec.worker.failure import broken_device, from_peers, out_of_memory, sentence
from synergy_exec.worker.loop import MeasuredSteps
from synergy_exec.worker.pulse import Pulse
from synergy_exec.worker.start import Start
from synergy_exec.worker.steps import StepsFile


def test_each_order_is_carried_out_once_and_the_newest_counts() -> None:
    orders = HeardOrders()
    assert orders.next(orders.count) is None
    first, second = (Retune(run=0, micro_batch=batch, accumulation=1) for batch in (4, 8))
    orders.hear(first)
    orders.hear(second)
    assert orders.next(orders.count) == second
    assert orders.next(orders.count) is None
    rebuild = Rebuild(run=0, plan=PlanMessage(data=2), copies=[[0, 1], [2, 3]], steps=2, seconds=0.1)
    orders.hear(rebuild)
    assert orders.next(orders.count) == rebuild
    assert orders.done == 3


def test_rank_without_a_group_agrees_with_itself() -> None:
    own = Wishes(stop=True, hold=True, orders=3, step_s=0.5)
    assert agree(own) == own


def test_steps_are_measured_once_enough_are_done_and_the_first_ones_do_not_count() -> None:
    """Of three steps the last, and those after it until they took half a second."""
    measured = MeasuredSteps(Retune(run=0, micro_batch=1, accumulation=1, steps=3, seconds=0.5), now_s=0.0)
    assert [measured.step_s(now_s) for now_s in (9.0, 10.0, 10.2, 10.4)] == [0.0, 0.0, 0.0, 0.0]
    assert measured.step_s(10.6) == pytest.approx(0.2)
    one = MeasuredSteps(Retune(run=0, micro_batch=1, accumulation=1, steps=1), now_s=1.0)
    assert one.step_s(1.25) == 0.25
    endless = MeasuredSteps(Retune(run=0, micro_batch=1, accumulation=1), now_s=1.0)
    assert endless.step_s(100.0) == 0.0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_recognised(error: Exception) -> None:
    assert out_of_memory(error)
    assert not from_peers(error)


def test_a_device_that_says_it_is_broken_is_recognised() -> None:
    assert broken_device(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert not broken_device(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    ("error", "peers"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 8000ms for recv"), True),
        (distributed.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x4 and 5x2)"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_echo_of_another_ranks_death_is_told_from_an_own_error(error: Exception, peers: bool) -> None:
    assert from_peers(error) == peers
    assert not out_of_memory(error)


def _raised(job: str, text: str) -> BaseException:
    """An error that came up in a job's own code, or in torch's."""
    if job:
        try:
            exec(compile(f"raise ConnectionResetError({text!r})", job, "exec"))
        except ConnectionResetError as error:
            return error
    try:
        distributed.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=timedelta(seconds=0.01))  # type: ignore[attr-defined]
    except RuntimeError as error:
        return error
    raise AssertionError


def test_a_jobs_own_connection_error_is_its_own() -> None:
    """Its data may come over a connection, too; the words are the same."""
    own = _raised("/home/user/job.py", "Connection reset by peer")
    assert not from_peers(own)
    assert from_peers(RuntimeError(str(own)))
    assert from_peers(_raised(torch.__file__, "Connection reset by peer"))


def test_reason_is_one_line_of_bounded_length() -> None:
    text = sentence(3, "step 7", ValueError("line\n" * 1000))
    assert text.startswith("rank 3, step 7: ValueError: line line")
    assert "\n" not in text
    assert len(text) < 700
    assert sentence(0, "building", InputError("write 1")) == "rank 0, building: write 1"


def test_connection_reads_whole_lines_and_never_waits() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        connection = AgentConnection(theirs.detach())
        assert connection.heard() == []
        retune = Retune(run=1, micro_batch=4, accumulation=2)
        lines = f"{encode(retune)}\n{encode(Stop(run=1))}\n".encode()
        ours.sendall(lines[:-5])
        assert connection.heard() == [retune]
        ours.sendall(lines[-5:])
        assert connection.heard() == [Stop(run=1)]
        connection.say(Kill(run=1))
        assert ours.recv(100) == encode(Kill(run=1)).encode() + b"\n"


def test_pulse_is_seen_by_whoever_shares_its_memory() -> None:
    descriptor = Pulse.create()
    worker, agent = Pulse(descriptor), Pulse(descriptor)
    os.close(descriptor)
    assert agent.read() == (0, 0, False)
    worker.beat(8.0)
    worker.beat(9.0, patient=True)
    assert agent.read() == (2, 9.0, True)


def test_steps_file_has_one_heading_for_all_runs(tmp_path: Path) -> None:
    for run in (1, 2):
        file = StepsFile(tmp_path / "steps.csv", run)
        file.add(run, 8, 1.5, 0.25, 0.125)
        # Before it is closed: a killed worker closes nothing.
        lines = (tmp_path / "steps.csv").read_text().splitlines()
        file.close()
    assert lines == ["step,batch,rate,loss,seconds,run", "1,8,1.5,0.25,0.125,1", "2,8,1.5,0.25,0.125,2"]


def test_start_is_read_as_it_was_written() -> None:
    launch = Launch(
        run=1,
        job=2,
        job_class="a:B",
        arguments={"x": [1]},
        plan=PlanMessage(data=2),
        initial_batch=2,
        work=5.0,
        slots=[0, 1],
        first_rank=0,
        world=2,
        store_host="127.0.0.1",
        store_port=1,
        folder="/tmp",
        share=Share(1.5, 2e9),
    )
    start = Start(launch=launch, rank=1, cores=(0, 2), cpus=1.5, gpu=None, launched_s=1.5)
    assert Start.parse(start.text()) == start


def test_cores_are_divided_and_shared_only_when_they_must_be() -> None:
    assert [each.cores for each in divide([0, 1, 2, 3, 4], 2, gpus=False)] == [(0, 1), (2, 3)]
    assert [each.cores for each in divide([0, 1], 3, gpus=False)] == [(0,), (1,), (0,)]
    assert [each.cpus for each in divide([0, 1, 2, 3, 4], 2, gpus=False)] == [2, 2]
    assert [each.cpus for each in divide([0, 1], 3, gpus=False)] == [0.5, 1, 0.5]
    assert [each.gpu for each in divide([0, 1], 2, gpus=True)] == [0, 1]


def test_backends_are_found_by_their_files_and_options_by_their_names() -> None:
    assert "local" in backend_names()
    with pytest.raises(InputError, match="Did you mean 'local'"):
        get_backend("locale", {})
    with pytest.raises(InputError, match="Did you mean 'slots'"):
        get_backend("local", {"slot": 2})
    with pytest.raises(InputError, match="numbers from 1"):
        get_backend("local", {"nodes": 0})


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path) as controller:
        yield controller


def test_local_agent_comes_with_its_part_of_the_machine_and_leaves(controller: Controller) -> None:
    (controller.folder / "token").write_text(TOKEN)
    meeting = Meeting(
        url=f"http://127.0.0.1:{controller.port}", token_file=controller.folder / "token", folder=controller.folder
    )
    local = Local(2, None, [], [0, 1])

    async def come_and_go() -> Hello:
        await local.start(1, meeting)
        try:
            hello = await asyncio.to_thread(controller.wait, Hello, timeout_s=90)
            assert local.lost() == {}
        finally:
            await local.stop()
        return hello

    hello = asyncio.run(come_and_go())
    assert (hello.node, hello.slots, hello.gpu_type) == (1, 1, "cpu")


def test_local_agent_that_cannot_begin_is_lost_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    meeting = Meeting(url="http://127.0.0.1:1", token_file=tmp_path / "token", folder=tmp_path)
    local = Local(1, 1, [], [0])

    async def come() -> dict[int, str]:
        await local.start(0, meeting)
        for _ in range(300):
            if lost := local.lost():
                return lost
            await asyncio.sleep(0.1)
        await local.stop()
        return {}

    assert "exit code 2" in asyncio.run(come())[0]
    assert "no controller at http://127.0.0.1:1" in local.lost()[0]
