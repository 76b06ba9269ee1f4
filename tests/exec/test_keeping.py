"""What is left of a job and its weights, over HTTP: for its user and for admins alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from exec.test_api import ask, job, served, until
from exec.test_users import TOKENS, written
from saved_jobs import checkpoint_of

from synergy_core.errors import InputError
from synergy_exec.client import Client
from synergy_exec.commands import export, prune
from synergy_exec.controller import keeping
from synergy_exec.controller.controller import Controller
from synergy_exec.job_folder import CHECKPOINTS

WEIGHTS = bytes(range(256)) * 10_000


def test_a_job_is_pruned_by_its_user_once_it_has_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(controller: Controller, owner: Client) -> None:
        ann, bob = (Client(owner.url, TOKENS[name]) for name in ("ann", "bob"))
        await ask(ann, "POST", "/jobs", job(name="hers"))
        with pytest.raises(InputError, match="only what is left of jobs that have ended"):
            await ask(ann, "POST", "/jobs/hers/prune", {"last_checkpoint": True, "yes": True})
        await ask(ann, "DELETE", "/jobs/hers")
        await until(lambda: controller.execution.runs.of_job(0) is None)
        checkpoints = tmp_path / "run" / "jobs" / "0" / CHECKPOINTS
        for step in (10, 20):
            checkpoint_of(checkpoints.parent, step, "hers")
        with pytest.raises(InputError, match="job hers is ann's"):
            await ask(bob, "POST", "/jobs/hers/prune", {"last_checkpoint": True, "yes": True})
        for wrong in (
            {"days": -1},
            {"days": True},
            {"yes": 1},
            {"all": True},
            {"days": 1, "last_checkpoint": True},
            [],
        ):
            with pytest.raises(InputError, match=r"expected \{"):
                await ask(ann, "POST", "/jobs/hers/prune", wrong)
        assert (await ask(ann, "POST", "/jobs/hers/prune", {}))["what"] == []  # retention=everything
        monkeypatch.setenv("SYNERGY_TOKEN", TOKENS["ann"])
        typed = ["hers", "--url", owner.url, "--last-checkpoint"]
        await asyncio.to_thread(prune.main, typed)
        said = capsys.readouterr().out
        assert "to remove: " in said
        assert "step-00000010" in said
        assert "nothing is removed yet" in said
        assert len(list(checkpoints.iterdir())) == 2
        await asyncio.to_thread(prune.main, [*typed, "--yes"])
        assert [each.name for each in checkpoints.iterdir()] == ["step-00000020"]
        capsys.readouterr()
        await asyncio.to_thread(prune.main, typed)
        assert "there is nothing to remove" in capsys.readouterr().out

    served(tmp_path / "run", work, 1, policy="fifo", users=written(tmp_path))


def test_weights_are_handed_to_the_jobs_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, str, str]] = []

    async def exported(folder: Path, out: Path, step: str) -> None:
        asked.append((folder, out.suffix, step))
        if step == "7":
            raise InputError("no whole checkpoint of step 7")
        out.write_bytes(WEIGHTS)

    async def work(controller: Controller, owner: Client) -> None:
        await ask(Client(owner.url, TOKENS["ann"]), "POST", "/jobs", job(name="hers"))
        for name, says in (("bob", "job hers is ann's"), ("eve", "eve is a reader")):
            with pytest.raises(InputError, match=says):
                await ask(Client(owner.url, TOKENS[name]), "GET", "/jobs/hers/weights")
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
            with pytest.raises(InputError, match="expected format=safetensors or format=pt"):
                await ask(owner, "GET", f"/jobs/hers/weights?{query}")
        assert not (tmp_path / "x.pt").exists()
        assert not list((tmp_path / "run").glob(".export-*"))
        await ask(owner, "DELETE", "/jobs/hers")

    monkeypatch.setattr(keeping, "_export", exported)
    served(tmp_path / "run", work, 1, policy="fifo", users=written(tmp_path))


def test_what_export_says_of_a_job_without_a_checkpoint_is_the_answer(tmp_path: Path) -> None:
    async def work(controller: Controller, owner: Client) -> None:
        await ask(owner, "POST", "/jobs", job(name="new"))
        await ask(owner, "DELETE", "/jobs/new")
        with pytest.raises(InputError, match="no whole checkpoint is in it"):
            await asyncio.to_thread(owner.fetch, "/jobs/new/weights", tmp_path / "w")

    served(tmp_path / "run", work, 1, policy="fifo")


def test_an_answer_that_is_cut_off_is_no_file(tmp_path: Path) -> None:
    async def through() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "token")
        with pytest.raises(InputError, match="cut off, 96 bytes before its end"):
            await asyncio.to_thread(client.fetch, "/jobs/a/weights", tmp_path / "w")
        server.close()

    asyncio.run(asyncio.wait_for(through(), 30))
    assert not list(tmp_path.iterdir())
