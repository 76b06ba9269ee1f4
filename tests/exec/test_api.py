"""The controller on its port: submitted, listed, explained and cancelled by HTTP; alerts, metrics and the page."""

import asyncio
import math
import os
import re
import shutil
import stat
import subprocess

import aiohttp
import pytest
from exec.pretended import file_of
from exec.served import TaskBackend, arriving, ask, controller_of, job, refused, served, through, until
from prometheus_client.parser import text_string_to_metric_families

from synergy_core.errors import InputError
from synergy_core.scheduling.decisions.reasons import Stopped
from synergy_exec.commands._asking import client_for
from synergy_exec.controller.controller import Arrival
from synergy_exec.controller.journal import Journal
from synergy_exec.folders import lock


def on_slots(*slots, **more):
    """A test of a controller that serves, and of its client. more: of `controller_of`."""

    def as_test(work):
        def test(tmp_path):
            served(tmp_path, work, *slots, **more)

        return test

    return as_test


@on_slots(2, 1, policy="synergy")
async def test_submitted_listed_explained_cancelled_and_again(controller, client):
    folder = controller.execution.folder
    assert await ask(client, "POST", "/jobs", job(name="mine")) == {"job": 0, "name": "mine", "note": ""}
    assert [row.name for row in Journal(folder / "journal.sqlite").jobs()] == ["mine"]
    await until(lambda: controller.execution.jobs[0].state == "running")
    (listed,) = await ask(client, "GET", "/jobs")
    degrees = [int(each) for each in re.findall(r"[tpd]p(\d+)", listed["plan"])]  # which won was measured just now
    assert (listed["state"], listed["slots"]) == ("running", math.prod(degrees))
    assert listed["folder"] == str(folder / "jobs" / "0")
    assert "job mine" in (await ask(client, "GET", "/jobs/mine/explain"))["text"]
    state = await ask(client, "GET", "/state")
    assert (state["policy"], state["slots"], len(state["jobs"])) == ("synergy", 3, 1)
    await refused("has not ended", client, "POST", "/jobs/mine/retry", {})
    assert (await ask(client, "DELETE", "/jobs/0"))["state"] == "cancelled"
    await refused("cancelled", client, "DELETE", "/jobs/mine")
    await until(lambda: not controller.execution.runs.of_job(0))
    assert (await ask(client, "POST", "/jobs/0/retry", {"from_start": True}))["state"] == "waiting"
    await until(lambda: controller.execution.jobs[0].state == "running")


@on_slots(1)
async def test_list_and_state_say_why_jobs_wait_or_were_stopped_and_have_those_with_slots_first(controller, client):
    for name in ("runs", "waits", "ended", "last"):
        await ask(client, "POST", "/jobs", job(name=name))
    for name in ("ended", "last"):
        await ask(client, "DELETE", f"/jobs/{name}")
    runs = controller.execution.jobs[0]
    await until(lambda: runs.state == "running")
    runs.stopped_for = Stopped.EVICTED
    states = {query: await ask(client, "GET", f"/state{query}") for query in ("?most=100", "?most=1", "")}
    assert [[each["name"] for each in state["jobs"]] for state in states.values()] == [
        ["runs", "waits", "last", "ended"],
        ["runs"],
        ["runs", "waits", "ended", "last"],
    ]
    counts = {name: number for name, number in states[""]["counts"].items() if number}
    assert counts == {"running": 1, "waiting": 1, "cancelled": 2}
    for rows in (await ask(client, "GET", "/jobs"), states["?most=100"]["jobs"]):
        running, waiting, *_ = rows
        (why,) = waiting["why"]
        assert (why["kind"], waiting["stopped"]) == ("NO_FREE_GPUS", None)
        assert "it needs 1" in why["text"]
        assert (running["why"], running["stopped"]) == ([], {"kind": "EVICTED", "text": Stopped.EVICTED.text})
    told = await ask(client, "GET", "/jobs/waits/explain")
    assert (told["why"], told["text"]) == ([why], why["text"])
    assert Stopped.EVICTED.text in (await ask(client, "GET", "/jobs/runs/explain"))["text"]


@on_slots(1, 1)
async def test_on_a_full_disk_requests_are_refused_at_once_for_good_and_the_service_goes_on_by_itself(
    controller, client
):
    await ask(client, "POST", "/jobs", job(name="ends", work=30.0))
    await ask(client, "POST", "/jobs", job(name="stays"))
    jobs, connection = controller.execution.jobs, controller._journal._connection
    await until(lambda: all(each.state == "running" for each in jobs.values()))
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages}")
    large = job(name="refused", arguments={"text": "x" * 50_000})
    assert "No space left on device" in await refused("was not carried out", client, "POST", "/jobs", large)
    controller._journal.set_meta("large", "x" * 50_000)  # from now on something waits to be written
    await refused("No space left on device", client, "DELETE", "/jobs/stays")
    await refused("No space left on device", client, "POST", "/jobs", job(name="refused"))
    step = jobs[1].seen.step
    await until(lambda: jobs[0].state == "done" and jobs[1].seen.step > step)
    assert {each["name"]: each["state"] for each in await ask(client, "GET", "/jobs")} == {
        "ends": "done",
        "stays": "running",
    }
    assert [row.state for row in Journal(controller.execution.folder / "journal.sqlite").jobs()] == ["waiting"] * 2
    connection.execute("PRAGMA max_page_count=100000")
    await until(lambda: not controller._journal.is_behind)
    assert (await ask(client, "POST", "/jobs", job(name="after")))["job"] == 2
    await until(lambda: jobs[2].state == "running")
    rows = Journal(controller.execution.folder / "journal.sqlite").jobs()
    assert [(row.name, row.state) for row in rows] == [("ends", "done"), ("stays", "waiting"), ("after", "waiting")]
    assert (await ask(client, "DELETE", "/jobs/stays"))["state"] == "cancelled"


def test_nobody_else_reads_token_journal_or_jobs(tmp_path):
    folder = tmp_path / "demo" / "synergy-0.work"
    private = ("token", "journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm", "controller.json", "lock")

    async def work(controller, client):
        await ask(client, "POST", "/jobs", job())
        await until(lambda: controller.execution.jobs[0].state == "running")
        for name in (".", "jobs/0", *private):
            mode = stat.S_IMODE((folder / name).stat().st_mode)
            assert mode == (0o600 if name in private else 0o700), name

    before = os.umask(0o022)
    try:
        with lock(folder):
            served(folder, work, 1)
    finally:
        os.umask(before)


def test_slots_are_given_away_when_a_job_ends_not_at_the_next_round(tmp_path, caplog):
    """Failed before: the second job would have begun an hour after the first."""
    controller = controller_of(tmp_path, 1, arrivals=arriving(5.0, 5.0, 5.0), round_s=3_600.0)
    through(controller.run)
    assert [job.state for job in controller.execution.jobs.values()] == ["done"] * 3
    assert not caplog.records  # no connection ended in an error


class Deaf(TaskBackend):
    """A backend whose first agent never connects."""

    starts = 0

    async def start(self, node, meeting):
        self.starts += 1
        if self.starts > 1:
            await super().start(node, meeting)


@on_slots(backend=Deaf(1), nodes_s=0.5)
async def test_a_service_starts_an_agent_again_that_does_not_come(controller, client):
    assert controller.agents.losses == 1


class Once(TaskBackend):
    """Later agents leave before they have said hello, so that no connection tells."""

    async def start(self, node, meeting):
        again = node in self.agents
        await super().start(node, meeting)
        if again:
            self.agents[node].cancel()


def test_agent_that_never_comes_back_ends_the_run_with_the_reason(tmp_path):
    async def work():
        controller = controller_of(tmp_path, backend=Once(1), arrivals=arriving(1e6))
        running = asyncio.ensure_future(controller.run())
        await until(lambda: controller.execution is not None and controller.execution.jobs[0].state == "running")
        controller.agents.backend.agents[0].cancel()
        await running

    with pytest.raises(InputError, match=r"lost 4 times within an hour; at last: its task ended"):
        through(work)


async def got(client, path, token=""):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(client.url + path) as answer:
        return answer.status, answer.headers, await answer.text()


@on_slots(1)
async def test_agent_that_talks_nonsense_is_cut_off(controller, client):
    hello = '{"kind":"Hello","node":%d,"host":"h","pid":1,"slots":1,"gpu_type":"cpu"}'
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {client.token}"}) as session:
        for said in ("nonsense", '{"kind":"Stop","run":1}', hello % 7, hello % 0):
            channel = await session.ws_connect(f"{client.url}/agents")
            await channel.send_str(said)
            answer = await channel.receive(timeout=5)
            assert (answer.type, answer.data) == (aiohttp.WSMsgType.CLOSE, 1008)


async def samples(client):
    families = text_string_to_metric_families((await got(client, "/metrics", client.token))[2])
    return {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}


def test_it_is_not_well_while_agents_are_awaited(tmp_path, capsys):
    async def work():
        asked = asyncio.Event()
        backend = TaskBackend(1, starting=lambda *_: asked.wait())
        controller = controller_of(tmp_path, backend=backend, serve=True)
        running = asyncio.ensure_future(controller.run())
        await until(lambda: (tmp_path / "controller.json").exists())
        client = client_for(tmp_path, None)

        async def health():
            return (await got(client, "/healthz"))[0]

        assert (await got(client, "/healthz"))[2] == '{"ok": false, "agents": 0, "agents_expected": 1}'
        early = await samples(client)
        assert (early["synergy_agents",], early["synergy_agents_expected",]) == (0, 1)
        assert ("synergy_slots",) not in early
        assert await health() == (await got(client, "/jobs", client.token))[0] == 503
        await refused("for its agents", client, "GET", "/state")
        asked.set()
        await until(lambda: controller.execution is not None)
        assert await health() == 200
        asked.clear()
        backend.agents[0].cancel()
        await until(lambda: not controller.agents.links)
        assert await health() == 503
        asked.set()
        await until(lambda: bool(controller.agents.links))
        assert await health() == 200
        assert (await samples(client))["synergy_agent_losses_total",] == 1
        assert "node 0: its agent was lost: " in (said := capsys.readouterr().err)
        assert "its task ended" in said
        controller._interrupt()
        await running

    through(work)


ODD = 'a "quoted" \\ name\nsynergy_slots 1e9'
WIDE = (Arrival(0.0, "j", file_of(work=1e9, slots=2)),) * 3


@on_slots(2, arrivals=(Arrival(0.0, ODD, file_of(work=1e9, max_batch=32)), *WIDE))
async def test_figures_are_read_by_prometheus(controller, client):
    execution = controller.execution
    await until(lambda: len(execution.jobs) == 4 and execution.jobs[0].seen.step > 0)
    status, headers, _ = await got(client, "/metrics", client.token)
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    found = await samples(client)
    states = {key[1]: value for key, value in found.items() if key[0] == "synergy_jobs"}
    assert (sum(states.values()), states["waiting"]) == (4, 3)
    assert (found["synergy_slots",], found["synergy_slots_used",]) == (2, 1)
    assert found["synergy_decisions_total",] >= 1
    assert 0 < found["synergy_decision_seconds_total",] < 60
    assert found["process_resident_memory_bytes",] > 1e6
    name = ODD.replace("\n", r"\n")
    figures = ("slots", "step", "loss", "goodput", "seconds_since_step")
    assert {key for key in found if key[0].startswith("synergy_job_")} == {
        (f"synergy_job_{each}", "0", name) for each in figures
    }
    assert found["synergy_job_step", "0", name] > 0
    assert found["synergy_job_goodput", "0", name] == pytest.approx(execution.jobs[0].goodput(32))


# The page shows jobs as text, knows the token only from its reader, and talks to nobody else


@on_slots(1)
async def test_only_its_own_script_runs_and_it_asks_only_its_controller(controller, client):
    status, headers, text = await got(client, "/")
    assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/html")
    rules = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
    (nonce,) = re.findall(r'<script nonce="([^"]+)">', text)
    assert rules["script-src"] == f"'nonce-{nonce}'"
    assert (rules["default-src"], rules["connect-src"]) == ("'none'", "'self'")
    assert client.token not in text


MARKUP = '<img src=x onerror="document.title=1">'
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def shown_by_browser(address, folder):
    """The page's elements after its first answers. They are not the file's own: its script has made them."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout.split("<script")[0]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@on_slots(1, arrivals=tuple(Arrival(0.0, name, file_of(work=1e9)) for name in (MARKUP, "hidden-job")))
async def test_a_browser_shows_jobs_as_text_and_nothing_to_strangers(controller, client):
    execution = controller.execution
    await until(lambda: len(execution.jobs) == 2 and execution.jobs[0].seen.step > 3)
    rows = [f"{step},32,1,{4 - step},0.1,0" for step in range(1, 5)]
    (execution.jobs_folder / "0" / "steps.csv").write_text("\n".join(["step,batch,rate,loss,seconds,run", *rows, ""]))
    told = await ask(client, "GET", "/history")
    assert told["jobs"]["0"]["loss"] == [[1, 3.0], [2, 2.0], [3, 1.0], [4, 0.0]]
    assert [value for _, value in told["jobs"]["0"]["batch"]] == [32]
    assert [(each["job"], each["node"], each["slots"], each["until_s"]) for each in told["spans"]] == [
        (0, 0, [0], None)
    ]
    found = await asyncio.to_thread(shown_by_browser, f"{client.url}/#{client.token}", execution.folder)
    assert "&lt;img src=x onerror" in found
    assert "<img" not in found
    assert re.search(r"<rect [^>]*><title>0 &lt;img src=x", found), "what runs where"
    assert re.search(r'aria-label="loss by step"><text.*?<polyline points="1,16 ', found), (
        "the first loss is the highest"
    )
    assert '<svg width="280" height="122" role="img" aria-label="batch over time">' in found
    assert "plans: 1 from " in found
    assert "it needs 1" in found  # why the other waits
    assert "fifo · 1 of 1 slots used · 1 waiting · 1 running" in found
    assert client.token not in found
    found = await asyncio.to_thread(shown_by_browser, f"{client.url}/#guess", execution.folder)
    assert "the token is missing or wrong" in found
    assert "hidden-job" not in found
