"""Users with tokens and roles: who may look, who may change what, and that no token is shown."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from exec.test_api import FAST, ask, controller_of, job, served, until

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.client import Client
from synergy_exec.commands import _asking
from synergy_exec.controller.controller import Controller
from synergy_exec.controller.journal import Journal
from synergy_exec.users import User, read_users

TOKENS = {name: f"{name}-0123456789abcdefghij" for name in ("root", "ann", "bob", "eve")}
ENTRIES: list[dict[str, Any]] = [
    {"name": "root", "role": "admin", "token_sha256": hashlib.sha256(TOKENS["root"].encode()).hexdigest()},
    {"name": "ann", "role": "user", "token": TOKENS["ann"], "virtual_cluster": "vision", "most_priority": 5},
    {"name": "bob", "role": "user", "token": TOKENS["bob"]},
    {"name": "eve", "role": "reader", "token": TOKENS["eve"]},
]


def written(folder: Path, entries: Any = None, mode: int = 0o600) -> Path:
    path = folder / "users.yaml"
    path.write_text(entries if isinstance(entries, str) else yaml.safe_dump(ENTRIES if entries is None else entries))
    path.chmod(mode)
    return path


def test_users_are_told_apart_by_their_tokens(tmp_path: Path) -> None:
    users = read_users(written(tmp_path))
    assert len(users) == 4
    assert users.of(TOKENS["ann"].encode()) == User("ann", "user", "vision", 5)
    assert users.of(TOKENS["root"].encode()) == User("root", "admin")
    assert users.of(TOKENS["ann"][:-1].encode()) is None
    assert users.of(b"") is None
    assert read_users(None).of(b"") is None


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
def test_a_file_that_cannot_be_is_refused_and_shows_no_token(
    tmp_path: Path, wrong: dict[str, object], says: str
) -> None:
    entries = [dict(each) for each in ENTRIES]
    entries[1] |= wrong
    with pytest.raises(InputError, match=says) as caught:
        read_users(written(tmp_path, entries))
    assert "0123456789" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_file_that_is_none_or_that_others_read_is_refused(tmp_path: Path) -> None:
    for text in (f"- token: {TOKENS['ann']}\n  - [", "ann: user", "[7]"):
        with pytest.raises(InputError, match=r"users\.yaml") as caught:
            read_users(written(tmp_path, text))
        assert "0123456789" not in str(caught.value)
    with pytest.raises(InputError, match="cannot be read"):
        read_users(tmp_path / "none.yaml")
    for mode in (0o640, 0o604, 0o620):
        with pytest.raises(InputError, match="chmod 600"):
            read_users(written(tmp_path, mode=mode))
    settings = dataclasses.replace(FAST, serve=True, users=written(tmp_path, mode=0o644))
    with pytest.raises(InputError, match="chmod 600"):
        Controller(get_policy("fifo"), [], None, settings, tmp_path, Profile())  # type: ignore[arg-type]


def test_what_each_role_may(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Readers look, users change what is theirs, admins all; agents come with the run's own token alone."""
    folder = tmp_path / "run"
    folder.mkdir()
    said: list[str] = []

    async def work(controller: Controller, owner: Client) -> None:
        root, ann, bob, eve = (Client(owner.url, TOKENS[name]) for name in TOKENS)
        assert (await ask(ann, "POST", "/jobs", job(name="hers")))["job"] == 0
        assert (await ask(bob, "POST", "/jobs", job(name="his", virtual_cluster="speech")))["job"] == 1
        assert (await ask(root, "POST", "/jobs", job(name="for-ann", user="ann")))["job"] == 2
        assert (await ask(owner, "POST", "/jobs", job(name="nobodys")))["job"] == 3
        for client in (eve, ann, root, owner):
            jobs = await ask(client, "GET", "/jobs")
            listed = {each["name"]: (each["user"], each["virtual_cluster"]) for each in jobs}
            assert listed == {
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
            with pytest.raises(InputError, match=says) as caught:
                await ask(client, *what)
            said.append(str(caught.value))
        assert len(controller.execution.jobs) == 4
        async with aiohttp.ClientSession() as session:
            for name in ("root", "ann"):
                headers = {"Authorization": f"Bearer {TOKENS[name]}"}
                assert (await session.get(f"{owner.url}/agents", headers=headers)).status == 401
            for given in (TOKENS["root"], f"Basic {TOKENS['root']}", "Bearer "):
                assert (await session.get(f"{owner.url}/jobs", headers={"Authorization": given})).status == 401
            answer = await session.post(
                f"{owner.url}/jobs", json=job(), headers={"Authorization": f"Bearer {TOKENS['eve']}"}
            )
            assert answer.status == 403
        assert (await ask(ann, "DELETE", "/jobs/hers"))["reason"] == "cancelled by ann"
        assert (await ask(root, "DELETE", "/jobs/his"))["reason"] == "cancelled by root"
        assert (await ask(owner, "DELETE", "/jobs/nobodys"))["reason"] == "cancelled by its user"
        await until(lambda: controller.execution.runs.of_job(0) is None)
        assert (await ask(ann, "POST", "/jobs/hers/retry", {"from_start": True}))["state"] == "waiting"
        for each in (0, 2):
            await ask(root, "DELETE", f"/jobs/{each}")
        said.append(json.dumps([await ask(root, "GET", path) for path in ("/jobs", "/state", "/alerts")]))

    served(folder, work, 2, policy="fifo", users=written(tmp_path))
    files = [path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for text in (*said, *files, *capfd.readouterr()):
        assert not any(token in text for token in TOKENS.values())
    rows = Journal(folder / "journal.sqlite").jobs()
    assert [(row.job_file.user, row.job_file.virtual_cluster) for row in rows][:2] == [
        ("ann", "vision"),
        ("bob", "speech"),
    ]


def test_whose_a_job_is_outlives_the_controller(tmp_path: Path) -> None:
    async def begun(controller: Controller, owner: Client) -> None:
        await ask(Client(owner.url, TOKENS["ann"]), "POST", "/jobs", job(name="hers"))

    async def resumed(controller: Controller, owner: Client) -> None:
        with pytest.raises(InputError, match="job hers is ann's"):
            await ask(Client(owner.url, TOKENS["bob"]), "DELETE", "/jobs/hers")
        await ask(Client(owner.url, TOKENS["ann"]), "DELETE", "/jobs/hers")

    for work in (begun, resumed):
        served(tmp_path / "run", work, 1, policy="fifo", users=written(tmp_path))


def test_list_shows_whose_jobs_are_where_they_are_anybodys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(controller: Controller, owner: Client) -> None:
        def listed() -> str:
            capsys.readouterr()
            _asking.main("list", ["--url", owner.url])
            return capsys.readouterr().out

        monkeypatch.setenv("SYNERGY_TOKEN", TOKENS["eve"])
        await ask(owner, "POST", "/jobs", job(name="nobodys"))
        assert "user" not in await asyncio.to_thread(listed)
        await ask(Client(owner.url, TOKENS["ann"]), "POST", "/jobs", job(name="hers"))
        first, _, second = (await asyncio.to_thread(listed)).splitlines()
        assert first.split()[-3:] == ["user", "virtual", "cluster"]
        assert second.split()[-2:] == ["ann", "vision"]
        for each in (0, 1):
            await ask(owner, "DELETE", f"/jobs/{each}")

    served(tmp_path / "run", work, 1, policy="fifo", users=written(tmp_path))


def test_without_a_file_there_is_one_token(tmp_path: Path) -> None:
    controller, _ = controller_of(tmp_path, 1)
    assert controller.who(TOKENS["ann"].encode()) is None
