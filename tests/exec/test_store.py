"""Where the ranks of a run meet: nobody but their user reads or writes it, and what they exchange is data."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import groups
import pytest
from agents_controller import Controller

from synergy_exec.messages import Kill
from synergy_exec.training.integrity import Digest, Manifest
from synergy_exec.training.progress import Progress
from synergy_exec.training.ranks import Ranks
from synergy_exec.worker import offspring

NOBODY = 65534
TWO = 2
TOLD = (Path("a"), frozenset({"b"}), [None, True, 0.1], Manifest(Progress(step=3), {"f": Digest(5, 7)}, "2"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """Both ranks of a run that trains, by process number."""
    with Controller(tmp_path_factory.mktemp("run")) as controller:
        controller.start_agent(slots=TWO)
        launch = controller.launch("Plain", world=TWO, work=1e9)
        controller.reached(launch, 2)
        yield [pid for pid in offspring.descendants(os.getpid()) if stores(pid)]
        controller.say(Kill(run=launch.run))
        controller.ended(launch)


def stores(pid: int) -> list[Path]:
    """What a process has open of the ranks' store."""
    try:
        return [each for each in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(each).startswith("/memfd:store")]
    except OSError:
        return []


def tried(paths: list[str]) -> list[str]:
    """How opening each for reading, and for writing, ends for another user of this machine."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            found = []
            for path in paths:
                for flags in (os.O_RDONLY, os.O_WRONLY):
                    try:
                        os.close(os.open(path, flags))
                        found.append("opened")
                    except OSError as error:
                        found.append(type(error).__name__)
            os.write(writing, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as answer:
        found_by_other: list[str] = json.loads(answer.read())
    return found_by_other


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_neither_read_nor_write_the_store_of_a_running_job(workers: list[int], tmp_path: Path) -> None:
    assert len(workers) == TWO
    paths = [str(each) for pid in workers for each in stores(pid)]
    # The owner can: what is refused below is there.
    assert all(Path(path).read_bytes() for path in paths)
    assert tried(paths) == ["PermissionError"] * (2 * len(paths))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_others_may_open_is_opened_by_them() -> None:
    """So that a refusal above is one."""
    assert tried(["/dev/null"]) == ["opened", "opened"]


def test_ranks_on_one_machine_listen_on_its_loopback_interface_alone(workers: list[int]) -> None:
    listening = [address for pid in workers for address in listens(pid)]
    assert listening  # gloo's own connections between ranks
    assert {address.partition(":")[0] for address in listening} == {"0100007F"}


def listens(pid: int) -> list[str]:
    """Addresses on which a process listens over TCP, as the kernel writes them."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.exists() or each.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


class OddError(Exception):
    """One that neither Python nor Synergy has."""


def exchanged(case: str) -> Any:
    ranks = Ranks()
    if case == "values":
        return [str(each) for each in ranks.together(lambda: {ranks.rank: TOLD})]

    def fail() -> None:
        if ranks.rank == 1:
            raise {"known": OSError(28, "No space left"), "odd": OddError("why")}[case]

    try:
        ranks.together(fail)
    except Exception as error:
        return [ranks.rank, type(error).__name__, str(error), getattr(error, "errno", None)]
    return None


def test_ranks_tell_each_other_values_and_errors() -> None:
    cases = [(case, "exec.test_store:exchanged", (case,)) for case in ("values", "known", "odd")]
    found = groups.run({TWO: cases}, timeout_s=120)
    assert found["values"] == [str({rank: TOLD}) for rank in range(TWO)]
    assert found["known"] == [0, "OSError", "[Errno 28] No space left", 28]
    assert found["odd"] == [0, "RuntimeError", "OddError: why", None]
