"""Connections encrypted by files: agents and commands trust the one they are told to, and nobody talks in the clear."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
from exec.test_api import FAST, ask

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.backends.local import Local
from synergy_exec.client import Client, client_for
from synergy_exec.controller.controller import Controller
from synergy_exec.run import _check
from synergy_exec.settings import Settings
from synergy_exec.tls import AUTHORITY, Tls, tls_of, trusting

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="there is no openssl here")


def made(folder: Path, name: str, *more: str) -> tuple[str, str]:
    """A certificate for this machine, signed by itself, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    for_here = ["-subj", "/CN=synergy", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    subprocess.run([*command, *for_here, *files, *(more or ["-nodes"])], check=True, capture_output=True)
    return str(certificate), str(key)


@needs_openssl
def test_agents_and_commands_trust_the_certificate_they_are_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(AUTHORITY, raising=False)
    certificate, key = made(tmp_path, "own")
    other, _ = made(tmp_path, "other")

    async def through() -> None:
        settings = dataclasses.replace(FAST, serve=True, nodes_s=60.0, tls_certificate=certificate, tls_key=key)
        local = Local(1, 1, [], [0])
        controller = Controller(get_policy("fifo"), [], local, settings, tmp_path, Profile())
        running = asyncio.ensure_future(controller.run())
        while controller.execution is None:
            await asyncio.sleep(0.02)
            assert not running.done(), running
        client = client_for(tmp_path, None)
        assert client.url.startswith("https://127.0.0.1:")
        assert (await ask(client, "GET", "/state"))["slots"] == 1
        for wrong in (dataclasses.replace(client, authority=""), dataclasses.replace(client, authority=other)):
            with pytest.raises(InputError, match="certificate verify failed"):
                await ask(wrong, "GET", "/jobs")
        with pytest.raises(InputError, match="no controller answers"):
            await ask(Client(client.url.replace("https", "http"), client.token), "GET", "/jobs")
        before = tmp_path / "before.pem"
        shutil.copy(certificate, before)
        trusting_before = dataclasses.replace(client, authority=str(before))
        shutil.copy(other, certificate)  # and the key is not its
        with pytest.raises(InputError, match="KEY_VALUES_MISMATCH"):
            controller.reread()
        assert (await ask(trusting_before, "GET", "/state"))["slots"] == 1
        made(tmp_path, "own")  # renewed, in its place
        controller.reread()
        assert (await ask(client, "GET", "/state"))["slots"] == 1
        with pytest.raises(InputError, match="certificate verify failed"):
            await ask(trusting_before, "GET", "/state")
        controller._interrupt()
        await running

    asyncio.run(asyncio.wait_for(through(), 120))


@needs_openssl
def test_files_that_are_no_certificate_and_its_key_are_said(tmp_path: Path) -> None:
    certificate, key = (Path(each) for each in made(tmp_path, "own"))
    _, other = (Path(each) for each in made(tmp_path, "other"))
    _, locked = (Path(each) for each in made(tmp_path, "locked", "-passout", "pass:secret"))
    for wrong, says in (
        (Tls(certificate, tmp_path / "none", certificate), "No such file"),
        (Tls(certificate, other, certificate), "KEY_VALUES_MISMATCH"),
        (Tls(key, key, certificate), "expected a certificate and its key, in PEM"),
        (Tls(certificate, locked, certificate), "it has a password"),
        (Tls(certificate, key, key), "no certificates can be read"),
    ):
        with pytest.raises(InputError, match=says):
            wrong.shown()
    with pytest.raises(InputError, match="no certificates can be read"):
        trusting(str(tmp_path / "none"))


def test_keys_belong_together(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="belong together"):
        _check(Settings(serve=True, tls_certificate="a.pem"))
    assert tls_of(Settings()) is None
    found = tls_of(Settings(tls_certificate=f"{tmp_path}/a.pem", tls_key=f"{tmp_path}/a.key"))
    assert found == Tls(tmp_path / "a.pem", tmp_path / "a.key", tmp_path / "a.pem")
