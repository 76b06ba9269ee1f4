"""A cgroup for each run, where there can be one: in a tree that only pretends, and in this machine's own."""

from __future__ import annotations

import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agents_controller import Controller, gone, workers
from family import children

from synergy_exec.agent.cgroups import Cgroups, family_of, own_folder
from synergy_exec.messages import Failure, Hello, Kill, Started


def tree(folder: Path, *, controllers: str = "cpu memory pids", enabled: str = "", processes: str = "") -> Path:
    """What the kernel would have in a cgroup's folder; writing changes it as any file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {"controllers": controllers, "subtree_control": enabled, "procs": processes}.items():
        (folder / f"cgroup.{name}").write_text(text)
    return folder


def test_own_folder_is_found_among_mounts(tmp_path: Path) -> None:
    mounts, own = tmp_path / "mounts", tmp_path / "cgroup"
    v1 = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    mounts.write_text(v1)
    own.write_text("4:memory:/a\n0::/b/c\n")
    assert own_folder(mounts, own) is None
    mounts.write_text(f"{v1}cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n")
    assert own_folder(mounts, own) == Path("/sys/fs/cgroup/unified/b/c")
    own.write_text("0::/b/c/synergy-own\n")
    assert own_folder(mounts, own) == Path("/sys/fs/cgroup/unified/b/c")


def test_where_no_cgroup_can_be_made_the_reason_is_said_and_runs_have_none(tmp_path: Path) -> None:
    for own, reason in ((None, "no cgroup2 file system"), (tmp_path / "absent", "may not be divided (No such file")):
        cgroups = Cgroups(own)
        assert reason in cgroups.lacking
        assert reason in cgroups.no_limit
        assert cgroups.of_run(1, 1 << 30) is None


def test_agents_that_start_at_once_clear_away_together_what_killed_ones_left(tmp_path: Path) -> None:
    own, gone_by = tree(tmp_path / "own"), 2**22  # more than the kernel has numbers for processes
    for number in range(300):
        (own / f"synergy-{gone_by + number}" / "run-0" / "rank-0").mkdir(parents=True)
    with ThreadPoolExecutor(4) as pool:
        assert [each.lacking for each in pool.map(Cgroups, [own] * 4)].count("") == 1
    assert [each.name for each in own.iterdir() if each.is_dir()] == [f"synergy-{os.getpid()}"]


def test_where_memory_has_no_controller_runs_have_a_cgroup_without_a_limit(tmp_path: Path) -> None:
    cgroups = Cgroups(tree(tmp_path / "own", controllers="hugetlb"))
    assert cgroups.lacking == ""
    assert "no controller of memory" in cgroups.no_limit
    run = cgroups.of_run(1, 1 << 30)
    assert run is not None
    assert Path(run.of_rank(0)).is_dir()
    assert not list(tmp_path.rglob("memory.max"))
    assert run.used_up() == ""


def test_limit_is_the_runs_and_using_it_up_is_told_from_a_full_machine(tmp_path: Path) -> None:
    own = tree(tmp_path / "own")
    cgroups = Cgroups(own)
    assert (cgroups.lacking, cgroups.no_limit) == ("", "")
    run = cgroups.of_run(7, 3_000_000_000)
    assert run is not None
    folder = Path(run.of_rank(0)).parent
    limits = {name: (folder / name).read_text() for name in ("memory.max", "memory.oom.group", "memory.swap.max")}
    assert limits == {"memory.max": "3000000000", "memory.oom.group": "1", "memory.swap.max": "0"}
    for each in (own, folder.parent):
        assert (each / "cgroup.subtree_control").read_text() == "+memory"
    for oom, kills, said in (
        (0, 0, ""),
        (0, 2, ""),
        (1, 2, "its ranks on this node used more than the 3 GB of memory"),
    ):
        (folder / "memory.events").write_text(f"low 0\noom {oom}\noom_kill {kills}\n")
        assert run.used_up()[: len(said) or None] == said


@pytest.mark.parametrize(("others", "moved"), [("", True), ("1\n", False)])
def test_own_processes_are_moved_apart_if_they_are_alone(tmp_path: Path, others: str, moved: bool) -> None:
    own = tree(tmp_path / "own", processes=f"{os.getpid()}\n{os.getppid()}\n{others}")
    Cgroups(own, family={os.getppid()})
    assert (own / "synergy-own").exists() == moved


def test_family_is_the_parent_and_all_below_it() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert {os.getpid(), child.pid} <= family_of(os.getpid())
        assert os.getpid() not in family_of(child.pid)
        child.kill()
    assert family_of(None) == {os.getpid(), *children(os.getpid())}


@pytest.fixture
def real() -> Path:
    """A cgroup of this machine's."""
    own = own_folder()
    cgroups = Cgroups(own)
    cgroups.close()
    if own is None or cgroups.lacking:
        pytest.skip(f"no cgroup can be made here: {cgroups.lacking}")
    return own


def test_each_rank_has_a_cgroup_of_its_own_which_is_gone_with_the_run(real: Path, tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=2)
        mine = real / f"synergy-{agent.pid}"
        note = tmp_path / "note"
        note.mkdir()
        arguments = {"way": "bomb", "note": str(note), "then": "wait"}
        launch = controller.launch("Straying", arguments)
        controller.wait(Started)
        until_s = time.monotonic() + 60
        while not any(note.iterdir()):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        (rank,) = mine.glob("run-*/rank-*")
        assert rank.name == "rank-0"
        assert len((rank / "cgroup.procs").read_text().split()) > 1
        controller.say(Kill(run=launch.run))
        assert controller.ended(launch).outcome == "lost"
        assert list(mine.glob("run-*")) == []
    agent.wait(30)
    assert not mine.exists()


def test_killed_agents_cgroups_are_removed_by_the_next(real: Path, tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        agent = controller.start_agent(slots=1)
        launch = controller.launch("Plain", {"pause_s": 0.02}, work=1e6)
        controller.started(launch)
        mine, pids = real / f"synergy-{agent.pid}", workers(agent.pid)
        assert mine.exists()
        agent.kill()
        agent.wait(30)
        assert gone(pids)
    until_s = time.monotonic() + 30
    while mine.exists():
        # While a thread of what was in it is on its way out, the kernel keeps it.
        assert time.monotonic() < until_s
        Cgroups(real).close()


def test_agent_says_whether_it_can_limit_memory_and_job_that_uses_more_fails(tmp_path: Path) -> None:
    with Controller(tmp_path) as controller:
        controller.start_agent(slots=1)
        reason = controller.wait(Hello).no_limit
        if reason:
            pytest.skip(f"no limit of memory can be kept here: {reason}")
        launch = controller.launch("Straying", {"way": "hoard", "note": str(tmp_path)}, memory_gb_per_slot=0.75)
        ended = controller.ended(launch)
        assert ended.outcome == "failed"
        assert "used more than the 0.75 GB of memory" in ended.reason
        assert controller.of(launch, Failure)[0].out_of_memory
