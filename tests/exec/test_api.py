"""The controller on its port: submitted, listed, explained and cancelled by HTTP, with the token and without."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from exec.controllers_backend import TaskBackend
from exec.controllers_jobs import file_of

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.client import Client, client_for
from synergy_exec.controller.controller import Arrival, Controller
from synergy_exec.controller.journal import Journal
from synergy_exec.settings import Settings

FAST = Settings(round_s=0.1, nodes_s=20.0, leave_s=5.0)


def controller_of(folder: Path, *slots: int, policy: str = "synergy", arrivals: tuple[Arrival, ...] = (), **more: Any):
    backend, settings = TaskBackend(*slots), dataclasses.replace(FAST, **more)
    return Controller(get_policy(policy), arrivals, backend, settings, folder, Profile()), backend


def served(folder: Path, work: Callable[[Controller, Client], Awaitable[None]], *slots: int, **more: Any) -> None:
    """Does the work while a controller serves."""

    async def through() -> None:
        controller, _ = controller_of(folder, *slots, serve=True, **more)
        running = asyncio.ensure_future(controller.run())
        try:
            while controller.execution is None:
                await asyncio.sleep(0.02)
                assert not running.done(), running
            await work(controller, client_for(folder, None))
        finally:
            controller._interrupt()
            await running

    asyncio.run(asyncio.wait_for(through(), 60))


def ask(client: Client, *what: Any) -> Awaitable[Any]:
    return asyncio.to_thread(client.ask, *what)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


def job(**more: object) -> dict[str, object]:
    return {**file_of(work=10_000.0).values(), **more}


def test_submitted_listed_explained_cancelled(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        made = await ask(client, "POST", "/jobs", job(name="mine"))
        assert made == {"job": 0, "name": "mine"}
        assert [row.name for row in Journal(tmp_path / "journal.sqlite").jobs()] == ["mine"]
        await until(lambda: controller.execution.jobs[0].state == "running")
        (listed,) = await ask(client, "GET", "/jobs")
        degrees = [int(each) for each in re.findall(r"[tpd]p(\d+)", listed["plan"])]  # which won was measured just now
        assert (listed["state"], listed["slots"]) == ("running", math.prod(degrees))
        found = await ask(client, "GET", "/jobs/mine/explain")
        assert "job mine" in found["text"]
        state = await ask(client, "GET", "/state")
        assert (state["policy"], state["slots"], len(state["jobs"])) == ("synergy", 3, 1)
        assert (await ask(client, "DELETE", "/jobs/0"))["state"] == "cancelled"
        with pytest.raises(InputError, match="has ended: cancelled"):
            await ask(client, "DELETE", "/jobs/mine")
        with pytest.raises(InputError, match=r"unknown job 'mime'. Did you mean 'mine'"):
            await ask(client, "DELETE", "/jobs/mime")
        await until(lambda: controller.execution.idle)

    served(tmp_path, work, 2, 1)


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        for wrong, says in (
            (job(slots=9), "slots=9; the cluster has 1"),
            (job(wrok=3), "Did you mean 'work'"),
            (job(work=-1), "above 0"),
            ([], "expected a mapping"),
        ):
            with pytest.raises(InputError, match=says):
                await ask(client, "POST", "/jobs", wrong)
        with pytest.raises(InputError, match="too large"):
            await ask(client, "POST", "/jobs", job(name="x" * 200_000))
        with pytest.raises(InputError, match="/nowhere"):
            await ask(client, "GET", "/nowhere")
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.token}"}) as session:
            answer = await session.post(f"{client.url}/jobs", data=b"{not json")
            assert answer.status == 400
            assert "not JSON" in (await answer.json())["error"]
        assert not controller.execution.jobs

    served(tmp_path, work, 1)


def test_nobody_without_the_token(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
        stranger = Client(client.url, "guess")
        for what in (("GET", "/jobs"), ("POST", "/jobs", job()), ("DELETE", "/jobs/0"), ("GET", "/state")):
            with pytest.raises(InputError, match="token is missing or wrong"):
                await ask(stranger, *what)
        async with aiohttp.ClientSession() as session:
            answer = await session.get(f"{client.url}/agents")
            assert answer.status == 401
            with pytest.raises(aiohttp.WSServerHandshakeError, match="401"):
                await session.ws_connect(f"{client.url}/agents", headers={"Authorization": "Bearer ü"})

    served(tmp_path, work, 1)


def test_slots_are_given_away_when_a_job_ends_not_at_the_next_round(tmp_path: Path) -> None:
    """Failed before: the second job would have begun an hour after the first."""
    arrivals = tuple(Arrival(0.0, f"j{number}", file_of(work=5.0)) for number in range(3))

    async def through() -> Controller:
        controller, _ = controller_of(tmp_path, 1, policy="fifo", arrivals=arrivals, round_s=3_600.0)
        await controller.run()
        return controller

    controller = asyncio.run(asyncio.wait_for(through(), 60))
    assert controller.execution is not None
    assert [job.state for job in controller.execution.jobs.values()] == ["done"] * 3


def test_trace_arrives_by_the_clock_and_the_run_ends_by_itself(tmp_path: Path) -> None:
    arrivals = tuple(Arrival(0.3 * number, f"j{number}", file_of(work=5.0)) for number in range(3))

    async def through() -> Controller:
        controller, _ = controller_of(tmp_path, 1, 1, policy="fifo", arrivals=arrivals)
        await controller.run()
        return controller

    controller = asyncio.run(asyncio.wait_for(through(), 60))
    assert controller.execution is not None
    assert [each.state for each in controller.execution.jobs.values()] == ["done"] * 3
    for number, each in controller.execution.jobs.items():
        assert 0.3 * number <= each.submit_time_s < 0.3 * number + 2.0
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.meta()["over"] is True
    assert not journal.agents()
    assert not (tmp_path / "controller.json").exists()


def test_lost_agent_is_started_again_and_its_job_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def through() -> Controller:
        arrivals = (Arrival(0.0, "j", file_of(work=30.0)),)
        controller, backend = controller_of(tmp_path, 1, policy="fifo", arrivals=arrivals)
        running = asyncio.ensure_future(controller.run())
        await until(lambda: controller.execution is not None and controller.execution.jobs[0].state == "running")
        backend.agents[0].cancel()
        await running
        return controller

    controller = asyncio.run(asyncio.wait_for(through(), 60))
    assert controller.execution is not None
    only = controller.execution.jobs[0]
    assert (only.state, only.restarts) == ("done", 1)
    assert [run.outcome for run in Journal(tmp_path / "journal.sqlite").runs()] == ["lost", "done"]
    assert "node 0: its agent was lost: " in (said := capsys.readouterr().err)
    assert "its task ended\nstarting another" in said


@pytest.mark.parametrize("limit_gb", [4.0, None])
def test_limit_of_memory_that_a_node_cannot_keep_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], limit_gb: float | None
) -> None:
    async def nothing(controller: Controller, client: Client) -> None:
        pass

    served(tmp_path, nothing, 1, memory_gb_per_slot=limit_gb)
    said = "node 0: memory_gb_per_slot=4 is not kept there: this agent only pretends\n"
    assert capsys.readouterr().err.count(said) == (limit_gb is not None)


def test_agent_that_never_comes_back_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    """It leaves before it has said hello, so that no connection tells; nothing waits for ever."""

    class Once(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            again = node in self.agents
            await super().start(node, meeting)
            if again:
                self.agents[node].cancel()

    async def through() -> None:
        arrivals = (Arrival(0.0, "j", file_of(work=1e6)),)
        backend = Once(1)
        controller = Controller(get_policy("fifo"), arrivals, backend, FAST, tmp_path, Profile())
        running = asyncio.ensure_future(controller.run())
        await until(lambda: controller.execution is not None and controller.execution.jobs[0].state == "running")
        backend.agents[0].cancel()
        await running

    with pytest.raises(
        InputError, match=r"was lost 4 times within an hour; at last: its task ended\nWhat was done is kept"
    ):
        asyncio.run(asyncio.wait_for(through(), 60))


def test_agent_that_talks_nonsense_is_cut_off(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        headers = {"Authorization": f"Bearer {client.token}"}
        hello = '{"kind":"hello","node":%d,"host":"h","pid":1,"slots":1,"gpu_type":"cpu"}'
        async with aiohttp.ClientSession(headers=headers) as session:
            for said in ("nonsense", '{"kind":"stop","run":1}', hello % 7, hello % 0):
                channel = await session.ws_connect(f"{client.url}/agents")
                await channel.send_str(said)
                answer = await channel.receive(timeout=5)
                assert answer.type == aiohttp.WSMsgType.CLOSE
                assert answer.data == 1008

    served(tmp_path, work, 1)
