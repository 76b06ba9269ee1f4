"""The page in a browser: it shows jobs as text, knows the token only from its reader, and talks to nobody else."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest
from exec.controllers_jobs import file_of
from exec.test_api import ask, job, served, until

from synergy_exec.client import Client
from synergy_exec.controller import page
from synergy_exec.controller.controller import Arrival, Controller
from synergy_exec.controller.curve import MOST_POINTS, Curve

PAGE = Path(page.__file__).with_name("page.html").read_text(encoding="utf-8")
MARKUP = '<img src=x onerror="document.title=1">'
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def shown_by_browser(address: str, folder: Path) -> str:
    """The page's elements after its first answers. They are not the file's own: its script has made them."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    patient = [*command, "--virtual-time-budget=4000", "--dump-dom", address]
    return subprocess.run(patient, capture_output=True, text=True, timeout=50, check=True).stdout.split("</script>")[0]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_browser_shows_jobs_as_text_and_keeps_the_token_to_itself(tmp_path: Path) -> None:
    asked: list[str] = []
    arrivals = (Arrival(0.0, MARKUP, file_of(work=1e9)), Arrival(0.0, "second", file_of(work=1e9)))

    async def work(controller: Controller, client: Client) -> None:
        execution = controller.execution
        assert execution is not None
        await until(lambda: len(execution.jobs) == 2 and len(execution.jobs[0].curve.points) > 3)
        execution.jobs[1].seen.note = MARKUP
        execution.decider.aside.slots[0, 0] = MARKUP
        found = await asyncio.to_thread(shown_by_browser, f"{client.url}/#{client.token}", tmp_path)
        table = found[found.index("<tbody>") :]
        assert "<li>node 0, slot 0 is set aside: &lt;img src=x onerror" in found
        assert "&lt;img src=x onerror" in table
        assert "<img" not in table
        assert "<polyline points=" in table
        assert "asks for 1 of 1 slots, 0 of them free" in table
        assert "fifo · 1 of 1 slots · 1 waiting, 1 running · " in found
        assert client.token not in found
        asked.extend(re.findall(r"<title>(.*)</title>", found))

    served(tmp_path, work, 1, policy="fifo", arrivals=arrivals)
    assert asked == ["Synergy"]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
def test_a_stranger_is_shown_no_job(tmp_path: Path) -> None:
    async def work(_: Controller, client: Client) -> None:
        await ask(client, "POST", "/jobs", job(name="hidden-job"))
        found = await asyncio.to_thread(shown_by_browser, f"{client.url}/#guess", tmp_path)
        assert "the token is missing or wrong" in found
        assert "hidden-job" not in found

    served(tmp_path, work, 1)


def test_only_its_own_script_runs_and_it_asks_only_its_controller(tmp_path: Path) -> None:
    async def work(_: Controller, client: Client) -> None:
        async with aiohttp.ClientSession() as session, session.get(client.url + "/") as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
            rules = dict(each.split(" ", 1) for each in answer.headers["Content-Security-Policy"].split("; "))
            text = await answer.text()
        for element, rule in (("script", "script-src"), ("style", "style-src")):
            (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            assert rules[rule] == f"'sha256-{digest}'"
        assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
        assert client.token not in text

    served(tmp_path, work, 1)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on[a-z]+=", PAGE)
    assert set(re.findall(r"https?://[^\"]*", PAGE)) == {"http://www.w3.org/2000/svg"}


def test_state_of_so_many_jobs_has_those_with_slots_first(tmp_path: Path) -> None:
    async def work(controller: Controller, client: Client) -> None:
        for name in ("runs", "waits", "ended", "ended last"):
            await ask(client, "POST", "/jobs", job(name=name))
        for name in ("ended", "ended last"):
            await ask(client, "DELETE", f"/jobs/{name.replace(' ', '%20')}")
        await until(lambda: controller.execution.jobs[0].state == "running")
        state = await ask(client, "GET", "/state?most=100")
        assert [each["name"] for each in state["jobs"]] == ["runs", "waits", "ended last", "ended"]
        assert {name: number for name, number in state["counts"].items() if number} == {
            "running": 1,
            "waiting": 1,
            "cancelled": 2,
        }
        assert [each["name"] for each in (await ask(client, "GET", "/state?most=1"))["jobs"]] == ["runs"]
        every = await ask(client, "GET", "/state")
        assert [each["name"] for each in every["jobs"]] == ["runs", "waits", "ended", "ended last"]

    served(tmp_path, work, 1, policy="fifo")


def test_a_curve_keeps_few_points_from_first_to_last() -> None:
    curve = Curve()
    for loss in [float("nan"), *map(float, range(10_000)), float("inf")]:
        curve.add(loss)
    distances = {b - a for a, b in zip(curve.points, curve.points[1:], strict=False)}
    assert MOST_POINTS // 2 <= len(curve.points) <= MOST_POINTS
    assert curve.points[0] == 0
    (distance,) = distances
    assert curve.points[-1] > 10_000 - 1 - distance
