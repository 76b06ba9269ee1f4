"""Users with tokens and roles, quotas and priorities, files read again, what each may take or remove, and TLS."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import subprocess

import aiohttp
import pytest
from exec.pretended import cluster_of, execution_of, file_of, refuses, staged
from exec.saved import checkpoint_of
from exec.served import TOKENS, USERS, ask, job, refused, served, through, until, users_file

from synergy_core.errors import InputError
from synergy_exec.backends.local import Local
from synergy_exec.client import Client
from synergy_exec.commands import _asking, export, prune
from synergy_exec.controller import api
from synergy_exec.controller.controller import resume
from synergy_exec.job_folder import CHECKPOINTS
from synergy_exec.rereading import CHANGED, given
from synergy_exec.run import _check
from synergy_exec.settings import QuotaSettings, Settings
from synergy_exec.users import read_users
from synergy_exec.wire import AUTHORITY, Tls, trusting
from synergy_runs.settings import build, defaults


def clients(owner):
    return [Client(owner.url, TOKENS[name]) for name in TOKENS]


# The file


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"role": "boss"}, "role=boss; expected reader, user, admin"),
        ({"role": []}, "expected reader, user, admin"),
        ({"nmae": "x"}, "Did you mean 'name'"),
        ({"name": ""}, "name is missing"),
        ({"name": "a\x1b[2J"}, "on one line"),
        ({"name": "root"}, "root stands there twice"),
        ({"token": TOKENS["bob"]}, "ann and bob have the same token"),
        ({"token": "hunter2"}, "20 characters or more"),
        ({"token": 12345678901234567890}, "20 characters or more"),
        ({"token": None}, "expected token, or token_sha256"),
        ({"token_sha256": "ab"}, "expected token, or token_sha256"),
        ({"token": None, "token_sha256": "ab"}, "64 digits"),
        ({"most_priority": -1}, "0 to 1000"),
        ({"most_priority": True}, "0 to 1000"),
    ],
)
def test_a_file_that_cannot_be_is_refused_and_shows_no_token(tmp_path, wrong, says):
    entries = [dict(each) for each in USERS]
    entries[1] |= wrong
    with pytest.raises(InputError, match=says) as caught:
        read_users(users_file(tmp_path, entries))
    assert "0123456789" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_none_or_that_others_read_is_refused(tmp_path):
    for text in (f"- token: {TOKENS['ann']}\n  - [", "ann: user", "[7]"):
        with pytest.raises(InputError, match=r"users\.yaml") as caught:
            read_users(users_file(tmp_path, text))
        assert "0123456789" not in str(caught.value)
    refuses("cannot be read", read_users, tmp_path / "none.yaml")
    for mode in (0o640, 0o604, 0o620):
        refuses("chmod 600", read_users, users_file(tmp_path, mode=mode))


# Who may look, who may change what


def test_what_each_role_may(tmp_path, capfd):
    """Readers look, users change what is theirs, admins all; agents come with the run's own token alone."""
    folder, said = tmp_path / "run", []
    folder.mkdir()

    async def work(controller, owner):
        root, ann, bob, eve = clients(owner)
        submitted = ((ann, "hers", {}), (bob, "his", {"virtual_cluster": "speech"}), (root, "for-ann", {"user": "ann"}))
        for number, (client, name, more) in enumerate((*submitted, (owner, "nobodys", {}))):
            assert (await ask(client, "POST", "/jobs", job(name=name, **more)))["job"] == number
        for client in (eve, ann, root, owner):
            jobs = await ask(client, "GET", "/jobs")
            assert {each["name"]: (each["user"], each["virtual_cluster"]) for each in jobs} == {
                "hers": ("ann", "vision"), "his": ("bob", "speech"), "for-ann": ("ann", ""), "nobodys": ("", ""),
            }  # fmt: skip
        forbidden = (
            (eve, ("POST", "/jobs", job()), "eve is a reader"),
            (eve, ("DELETE", "/jobs/hers"), "eve is a reader"),
            (eve, ("POST", "/jobs/hers/retry", {}), "eve is a reader"),
            (ann, ("DELETE", "/jobs/his"), "job his is bob's; ann may change"),
            (bob, ("POST", "/jobs/hers/retry", {}), "job hers is ann's"),
            (bob, ("DELETE", "/jobs/nobodys"), "job nobodys is no user's"),
            (ann, ("POST", "/jobs", job(user="bob")), "ann submits jobs of ann alone"),
            (ann, ("POST", "/jobs", job(virtual_cluster="speech")), "jobs of ann go to vision"),
            (ann, ("POST", "/jobs", job(priority=6)), "ann may ask for 5 at most"),
            (bob, ("POST", "/jobs", job(priority=1)), "bob may ask for 0 at most"),
        )
        for client, what, says in forbidden:
            said.append(await refused(says, client, *what))
        assert len(controller.execution.jobs) == 4
        async with aiohttp.ClientSession() as session:
            for method, path, given, status in (
                ("GET", "/agents", f"Bearer {TOKENS['root']}", 401),
                ("GET", "/agents", f"Bearer {TOKENS['ann']}", 401),
                ("GET", "/jobs", TOKENS["root"], 401),
                ("GET", "/jobs", f"Basic {TOKENS['root']}", 401),
                ("GET", "/jobs", "Bearer ", 401),
                ("POST", "/jobs", f"Bearer {TOKENS['eve']}", 403),
            ):
                headers = {"Authorization": given}
                answer = await session.request(method, f"{owner.url}{path}", headers=headers, json=job())
                assert answer.status == status
        for client, name, who in ((ann, "hers", "ann"), (root, "his", "root"), (owner, "nobodys", "its user")):
            assert (await ask(client, "DELETE", f"/jobs/{name}"))["reason"] == f"cancelled by {who}"
        await until(lambda: controller.execution.runs.of_job(0) is None)
        assert (await ask(ann, "POST", "/jobs/hers/retry", {"from_start": True}))["state"] == "waiting"
        for each in (0, 2):
            await ask(root, "DELETE", f"/jobs/{each}")
        said.append(json.dumps([await ask(root, "GET", path) for path in ("/jobs", "/state", "/alerts")]))

    served(folder, work, 2, users=users_file(tmp_path))
    files = [path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for text in (*said, *files, *capfd.readouterr()):
        assert not any(token in text for token in TOKENS.values())


def test_whose_a_job_is_outlives_the_controller(tmp_path):
    async def begun(controller, owner):
        await ask(clients(owner)[1], "POST", "/jobs", job(name="hers"))

    async def resumed(controller, owner):
        _, ann, bob, _ = clients(owner)
        await refused("job hers is ann's", bob, "DELETE", "/jobs/hers")
        await ask(ann, "DELETE", "/jobs/hers")

    for work in (begun, resumed):
        served(tmp_path / "run", work, 1, users=users_file(tmp_path))


# What is left of a job and its weights: for its user and for admins alone


def test_a_job_is_pruned_by_its_user_once_it_has_ended(tmp_path, capsys, monkeypatch):
    async def work(controller, owner):
        _, ann, bob, _ = clients(owner)
        asked = ("POST", "/jobs/hers/prune")
        await ask(ann, "POST", "/jobs", job(name="hers"))
        await refused("jobs that have ended", ann, *asked, {"last_checkpoint": True, "yes": True})
        await ask(ann, "DELETE", "/jobs/hers")
        await until(lambda: controller.execution.runs.of_job(0) is None)
        checkpoints = tmp_path / "run" / "jobs" / "0" / CHECKPOINTS
        for step in (10, 20):
            checkpoint_of(checkpoints.parent, step, "hers")
        await refused("job hers is ann's", bob, *asked, {"last_checkpoint": True, "yes": True})
        once = {"days": 1, "last_checkpoint": True}
        for wrong in ({"days": -1}, {"days": True}, {"yes": 1}, {"all": True}, once, []):
            await refused(r"expected \{", ann, *asked, wrong)
        assert (await ask(ann, *asked, {}))["what"] == []  # retention=everything
        monkeypatch.setenv("SYNERGY_TOKEN", TOKENS["ann"])
        typed = ["hers", "--url", owner.url, "--last-checkpoint"]
        await asyncio.to_thread(prune.main, typed)
        assert "step-00000010" in capsys.readouterr().out
        assert len(list(checkpoints.iterdir())) == 2
        await asyncio.to_thread(prune.main, [*typed, "--yes"])
        assert [each.name for each in checkpoints.iterdir()] == ["step-00000020"]

    served(tmp_path / "run", work, 1, users=users_file(tmp_path))


WEIGHTS = bytes(range(256)) * 10_000


def test_weights_are_handed_to_the_jobs_user(tmp_path, capsys, monkeypatch):
    asked = []

    async def exported(folder, out, step):
        asked.append((folder, out.suffix, step))
        if step == "7":
            raise InputError("no whole checkpoint of step 7")
        out.write_bytes(WEIGHTS)

    async def work(controller, owner):
        _, ann, bob, eve = clients(owner)
        await ask(ann, "POST", "/jobs", job(name="hers"))
        for client, says in ((bob, "job hers is ann's"), (eve, "eve is a reader")):
            await refused(says, client, "GET", "/jobs/hers/weights")
        assert not asked
        monkeypatch.setenv("SYNERGY_TOKEN", TOKENS["ann"])
        monkeypatch.chdir(tmp_path)
        typed = ["hers", "--url", owner.url]
        await asyncio.to_thread(export.main, typed)
        assert (tmp_path / "hers.safetensors").read_bytes() == WEIGHTS
        assert f"{len(WEIGHTS):,} bytes" in capsys.readouterr().out
        await asyncio.to_thread(export.main, [*typed, "--out", "w.pt", "--step", "5"])
        assert asked == [(tmp_path / "run/jobs/0", ".safetensors", ""), (tmp_path / "run/jobs/0", ".pt", "5")]
        with pytest.raises(InputError, match="no whole checkpoint of step 7"):
            await asyncio.to_thread(export.main, [*typed, "--out", "x.pt", "--step", "7"])
        for query in ("format=exe", "step=-1", "step=%D9%A7", "step=" + "9" * 50):
            await refused("expected format=safetensors or format=pt", owner, "GET", f"/jobs/hers/weights?{query}")
        assert not (tmp_path / "x.pt").exists()
        assert not list((tmp_path / "run").glob(".export-*"))

    monkeypatch.setattr(api, "_export", exported)
    served(tmp_path / "run", work, 1, users=users_file(tmp_path))


def test_what_export_says_of_a_job_without_a_checkpoint_is_the_answer(tmp_path):
    async def work(controller, owner):
        await ask(owner, "POST", "/jobs", job(name="new"))
        await ask(owner, "DELETE", "/jobs/new")
        with pytest.raises(InputError, match="no whole checkpoint"):
            await asyncio.to_thread(owner.fetch, "/jobs/new/weights", tmp_path / "w")

    served(tmp_path / "run", work, 1)


def test_an_answer_that_is_cut_off_is_no_file(tmp_path):
    async def work():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "token")
        with pytest.raises(InputError, match="96 bytes before its end"):
            await asyncio.to_thread(client.fetch, "/jobs/a/weights", tmp_path / "w")
        server.close()

    through(work)
    assert not list(tmp_path.iterdir())


# Files read again while a controller runs: by SIGHUP and by a command, all of it or nothing


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("round_s: -1", "round_s=-1"),
        ("round_s: soon", "round_s=soon"),
        ("rond_s: 1", "Did you mean 'round_s'"),
        ("port: 80", "port cannot change while a controller runs"),
        ("cluster: {virtual_clusters: null}", "cluster cannot change"),
        ("round_s 5", "expected keys with their values"),
        ("[: }", "not YAML"),
        ("x" * 200_000, "200,000 bytes"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, says):
    path = tmp_path / "changes.yaml"
    refuses(rf"{path}.*No such file", given, path)
    path.write_text("# nothing yet\n")
    assert given(path) == given(None) == {}
    path.write_text(text)
    with pytest.raises(InputError, match=says) as caught:
        given(path)
    assert str(path) in str(caught.value)


def test_settings_change_at_a_signal_and_by_the_command(tmp_path, capsys):
    changes = tmp_path / "changes.yaml"
    changes.write_text("round_s: 600\n")

    async def work(controller, client):
        execution = controller.execution
        assert controller.settings.round_s == execution.settings.round_s == 600.0
        await ask(client, "POST", "/jobs", job(name="a"))
        changes.write_text("round_s: 0.1\nhang_s: 33\nretention: remove\nretention_days: 2\nagents_per_hour: 7\n")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: execution.jobs[0].state == "running")  # rounds go at the new pace at once
        assert (execution.settings.hang_s, controller.settings.retention_days) == (33.0, 2.0)
        assert (controller.agents.at_once, execution.blame.most) == (7, 7)
        said = capsys.readouterr().err.splitlines()
        assert {"round_s: 600.0 → 0.1", "hang_s: 60.0 → 33.0", "retention: everything → remove"} <= set(said)
        assert execution._launch_of(execution.runs.runs[0]).hang_s == 33.0
        assert controller._journal.meta()[CHANGED]["retention"] == "remove"

        for wrong, says in (("hang_s: 5\nround_s: never", "round_s=never"), ("hang_s: 5\nseed: 3", "seed cannot")):
            changes.write_text(wrong)
            os.kill(os.getpid(), signal.SIGHUP)
            await refused(says, client, "POST", "/reload")
            told = capsys.readouterr().err
            assert says in told
            assert "Nothing has changed." in told
            assert controller.settings.hang_s == 33.0

        changes.write_text("hang_s: 33\n")
        await asyncio.to_thread(_asking.main, "reload", ["--dir", str(tmp_path)])
        assert "round_s: 0.1 → 0.2" in capsys.readouterr().out  # what was typed counts again
        assert await ask(client, "POST", "/reload") == ["nothing has changed"]
        assert controller._journal.meta()[CHANGED] == {"hang_s": 33.0}
        await ask(client, "DELETE", "/jobs/a")

    served(tmp_path / "s" / "fifo-0.work", work, 1, changes=changes, round_s=0.2)


def test_users_come_and_go_without_a_restart(tmp_path):
    users = users_file(tmp_path)

    async def work(controller, owner):
        root, ann, *_ = clients(owner)
        new = Client(owner.url, "a-new-0123456789abcdefghij")
        await ask(ann, "POST", "/jobs", job(name="hers"))
        await refused("missing or wrong", new, "GET", "/jobs")
        await refused("for admins", ann, "POST", "/reload")
        users_file(tmp_path, [*USERS[2:], {"name": "new", "role": "reader", "token": new.token}])
        assert await ask(root, "POST", "/reload") == ["users: 3"]
        assert len(await ask(new, "GET", "/jobs")) == 1
        await refused("missing or wrong", ann, "GET", "/jobs")
        for text, mode in (("[7]", 0o600), ("- token: " + TOKENS["bob"], 0o600), (None, 0o644)):
            users_file(tmp_path, text, mode)
            await refused(r"entry 1|chmod 600", owner, "POST", "/reload")
            assert len(await ask(new, "GET", "/jobs")) == 1  # as before

    served(tmp_path / "run", work, 1, users=users)


# Quotas of virtual clusters and priorities of jobs


SHARED = QuotaSettings(virtual_clusters={"vision": 2, "speech": 1})


@pytest.mark.parametrize("policy", ["fifo", "priority", "las", "synergy", "fifo+proportional"])
def test_nobody_holds_more_than_the_quota(tmp_path, policy):
    """Under each kind of scheduler: three jobs of one tenant get its two slots, however many are idle."""
    cluster = dataclasses.replace(cluster_of(2, 2), virtual_clusters=SHARED.virtual_clusters)
    if "+" in policy:
        nodes = tuple(dataclasses.replace(each, cpus=4.0, memory_bytes=8e9) for each in cluster.node_types)
        cluster = dataclasses.replace(cluster, node_types=nodes)
    execution = execution_of(tmp_path, policy, cluster)
    for tenant in ("vision", "vision", "vision", "speech"):
        execution.submit(tenant, file_of(virtual_cluster=tenant, max_batch=32), 0.0)
    for now_s in (0.0, 60.0, 120.0):
        execution.decide(now_s)
        held = [each.held_gpus for each in execution.jobs.values()]
        assert (sum(held[:3]), held[3]) == (2, 1)


def test_what_can_never_have_a_place_is_refused(tmp_path):
    async def work(controller, client):
        for wrong, says in (
            (job(), "virtual_cluster is missing; expected one of speech, vision"),
            (job(virtual_cluster="visoin"), "Did you mean 'vision'"),
            (job(virtual_cluster="speech", slots=2), "slots=2; virtual cluster speech has 1"),
            (job(virtual_cluster="vision", priority=3), "policy fifo does not look at priorities.*: priority"),
        ):
            await refused(says, client, "POST", "/jobs", wrong)
        await ask(client, "POST", "/jobs", job(virtual_cluster="vision", slots=2))
        await until(lambda: controller.execution.jobs[0].state == "running")
        state = await ask(client, "GET", "/state")
        assert state["virtual_clusters"] == {"vision": {"slots": 2, "used": 2}, "speech": {"slots": 1, "used": 0}}
        text = api.Metrics(controller.agents).text(controller.execution).decode().splitlines()
        assert {f'synergy_quota{each}{{virtual_cluster="vision"}} 2.0' for each in ("", "_used")} <= set(text)
        await ask(client, "DELETE", "/jobs/0")

    served(tmp_path, work, 3, cluster=SHARED)


def test_quotas_are_typed_as_in_the_simulator_and_fit_the_cluster(tmp_path):
    typed = {**defaults(Settings), "cluster": {"virtual_clusters": {"vision": 2}, "borrowing": True}}
    assert build(Settings, typed).cluster == QuotaSettings(virtual_clusters={"vision": 2}, borrowing=True)

    async def never(controller, client):
        raise AssertionError("it began")

    with pytest.raises((InputError, AssertionError), match="add up to 3 GPUs"):
        served(tmp_path, never, 2, cluster=SHARED)


def test_a_job_whose_tenant_is_gone_fails_with_the_reason_when_a_controller_begins(tmp_path):
    before = dataclasses.replace(cluster_of(2), virtual_clusters={"vision": 1, "speech": 1})
    execution = execution_of(tmp_path, "fifo", before)
    for name in ("vision", "speech"):
        execution.submit(name, file_of(virtual_cluster=name), 0.0)
    execution.journal.close()
    after = execution_of(tmp_path, "fifo", dataclasses.replace(before, virtual_clusters={"vision": 2}))
    resume(after, 1.0)
    assert [each.state for each in after.jobs.values()] == ["waiting", "failed"]
    assert "unknown virtual cluster" in after.jobs[1].reason
    after.decide(1.0)


def test_the_higher_priority_goes_first_and_takes_slots(tmp_path):
    stage = staged(tmp_path, "priority")
    execution = stage.execution

    def holding(now_s):
        execution.decide(now_s)
        return [each.name for each in execution.jobs.values() if each.held_gpus]

    for priority in (0, 0, 5):
        stage.submit(1e6, priority=priority)
    assert holding(0.0) == ["j2"]
    execution.cancel(execution.jobs[2], 1.0)
    assert holding(2.0) == ["j0"]
    stage.submit(1e6, priority=1)
    assert holding(4.0) == ["j3"]


# Connections encrypted by files: agents and commands trust the one they are told to, and nobody talks in the clear

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")


def made(folder, name, *more):
    """A certificate for this machine, signed by itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    for_here = ["-subj", "/CN=synergy", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    subprocess.run([*command, *for_here, *files, *(more or ["-nodes"])], check=True, capture_output=True)
    return certificate, key


@needs_openssl
def test_agents_and_commands_trust_the_certificate_they_are_told_to(tmp_path, monkeypatch):
    monkeypatch.delenv(AUTHORITY, raising=False)
    certificate, key = map(str, made(tmp_path, "own"))
    other, _ = map(str, made(tmp_path, "other"))

    async def work(controller, client):
        assert client.url.startswith("https://127.0.0.1:")
        assert (await ask(client, "GET", "/state"))["slots"] == 1
        for wrong in (dataclasses.replace(client, authority=""), dataclasses.replace(client, authority=other)):
            await refused("certificate verify failed", wrong, "GET", "/jobs")
        await refused(
            "no controller answers", Client(client.url.replace("https", "http"), client.token), "GET", "/jobs"
        )
        before = tmp_path / "before.pem"
        shutil.copy(certificate, before)
        trusting_before = dataclasses.replace(client, authority=str(before))
        shutil.copy(other, certificate)  # and the key is not its
        refuses("KEY_VALUES_MISMATCH", controller.reread)
        assert (await ask(trusting_before, "GET", "/state"))["slots"] == 1
        made(tmp_path, "own")  # renewed, in its place
        controller.reread()
        assert (await ask(client, "GET", "/state"))["slots"] == 1
        await refused("certificate verify failed", trusting_before, "GET", "/state")

    files = {"tls_certificate": certificate, "tls_key": key}
    served(tmp_path, work, backend=Local(1, 1, [], [0]), nodes_s=60.0, **files)


@needs_openssl
def test_files_that_are_no_certificate_and_its_key_are_said(tmp_path):
    certificate, key = made(tmp_path, "own")
    _, other = made(tmp_path, "other")
    _, locked = made(tmp_path, "locked", "-passout", "pass:secret")
    for wrong, says in (
        (Tls(certificate, tmp_path / "none", certificate), "No such file"),
        (Tls(certificate, other, certificate), "KEY_VALUES_MISMATCH"),
        (Tls(key, key, certificate), "expected a certificate and its key, in PEM"),
        (Tls(certificate, locked, certificate), "it has a password"),
        (Tls(certificate, key, key), "no certificates can be read"),
    ):
        refuses(says, wrong.shown)
    refuses("no certificates can be read", trusting, str(tmp_path / "none"))
    refuses("belong together", _check, Settings(serve=True, tls_certificate="a.pem"))
