"""A controller watched by a monitor: whether it is well, and its figures."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from exec.controllers_backend import TaskBackend
from exec.controllers_jobs import file_of
from exec.test_api import FAST, ask, job, served, until
from prometheus_client.parser import text_string_to_metric_families

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.client import Client, client_for
from synergy_exec.controller.controller import Arrival, Controller

ODD = 'a "quoted" \\ name\nsynergy_slots 1e9'


async def got(client: Client, path: str, token: str = "") -> tuple[int, str, str]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(client.url + path) as answer:
        return answer.status, answer.headers["Content-Type"], await answer.text()


def samples(text: str) -> dict[tuple[str, ...], float]:
    """By name and the labels' values."""
    families = text_string_to_metric_families(text)
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_a_stranger_learns_that_it_is_well_and_no_more(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        await ask(client, "POST", "/jobs", job(name="secret"))
        status, kind, text = await got(client, "/healthz")
        assert (status, kind) == (200, "application/json; charset=utf-8")
        assert text == '{"ok": true, "agents": 2, "agents_expected": 2}'
        assert (await got(client, "/metrics"))[0] == 401

    served(tmp_path, work, 1, 1)


def test_it_is_not_well_while_agents_are_awaited(tmp_path: Path) -> None:
    class Late(TaskBackend):
        def __init__(self, *slots: int) -> None:
            super().__init__(*slots)
            self.asked = asyncio.Event()

        async def start(self, node: int, meeting: Any) -> None:
            await self.asked.wait()
            await super().start(node, meeting)

    async def through() -> None:
        backend = Late(1)
        settings = dataclasses.replace(FAST, serve=True)
        controller = Controller(get_policy("fifo"), [], backend, settings, tmp_path, Profile())
        running = asyncio.ensure_future(controller.run())
        await until(lambda: (tmp_path / "controller.json").exists())
        client = client_for(tmp_path, None)
        assert await got(client, "/healthz") == (
            503,
            "application/json; charset=utf-8",
            '{"ok": false, "agents": 0, "agents_expected": 1}',
        )
        early = samples((await got(client, "/metrics", client.token))[2])
        assert (early["synergy_agents",], early["synergy_agents_expected",]) == (0, 1)
        assert ("synergy_slots",) not in early
        assert (await got(client, "/jobs", client.token))[0] == 503
        with pytest.raises(InputError, match="waits for its agents"):
            await ask(client, "GET", "/state")
        backend.asked.set()
        await until(lambda: controller.execution is not None)
        assert (await got(client, "/healthz"))[0] == 200
        backend.asked.clear()
        backend.agents[0].cancel()
        await until(lambda: not controller.agents.links)
        assert (await got(client, "/healthz"))[0] == 503
        backend.asked.set()
        await until(lambda: bool(controller.agents.links))
        assert (await got(client, "/healthz"))[0] == 200
        assert samples((await got(client, "/metrics", client.token))[2])["synergy_agent_losses_total",] == 1
        controller._interrupt()
        await running

    asyncio.run(asyncio.wait_for(through(), 60))


def test_figures_are_read_by_prometheus(tmp_path: Path) -> None:
    arrivals = (
        Arrival(0.0, ODD, file_of(work=1e9, max_batch=32)),
        *(Arrival(0.0, "j", file_of(work=1e9, slots=2)),) * 3,
    )

    async def work(controller: Controller, client: Client) -> None:
        execution = controller.execution
        assert execution is not None
        await until(lambda: len(execution.jobs) == 4 and execution.jobs[0].seen.step > 0)
        status, kind, text = await got(client, "/metrics", client.token)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        found = samples(text)
        states = {key[1]: value for key, value in found.items() if key[0] == "synergy_jobs"}
        assert sum(states.values()) == 4
        assert states["waiting"] == 3
        assert (found["synergy_slots",], found["synergy_slots_used",]) == (2, 1)
        assert found["synergy_decision_seconds_count",] >= 1
        assert 0 < found["synergy_decision_seconds_sum",] < 60
        assert found["process_resident_memory_bytes",] > 1e6
        name = ODD.replace("\n", r"\n")
        of_jobs = {key[0]: key[1:] for key in found if key[0].startswith("synergy_job_")}
        assert of_jobs == {f"synergy_job_{each}": ("0", name) for each in ("slots", "step", "loss", "goodput")}
        assert found["synergy_job_step", "0", name] > 0
        assert found["synergy_job_goodput", "0", name] == pytest.approx(execution.jobs[0].goodput(32))

    served(tmp_path, work, 2, policy="fifo", arrivals=arrivals)
