"""Models measured for real, and when they are measured again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exec.controllers_backend import TaskBackend
from exec.waiting import wait_until
from family import children

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import NoiseFrom, Profile, ProfiledCosts, ProfiledModel
from synergy_exec.backends import get_backend
from synergy_exec.commands.profile import table
from synergy_exec.controller import processes
from synergy_exec.job_file import JobFile
from synergy_exec.profiling import profile as profiling
from synergy_exec.profiling.finder import CandidatePlans, finder
from synergy_exec.profiling.machine import machine
from synergy_exec.profiling.measure import Effort, noise_curve
from synergy_exec.profiling.profile import Made, add_to_profile, current_profile
from synergy_exec.settings import Settings
from synergy_runs.profiles import read_profile, write_profile

HERE = "this machine"
TINY = Effort(seconds=0.1, hopeless=1e9, noise_s=0.0)
"""Everything is measured, however slow it is."""
LONG = Settings(profile_s=600.0)


def file_of(name: str, **more: Any) -> JobFile:
    values = {"job_class": "synergy_exec.examples.mlp:Mlp", "arguments": {"width": 16, "depth": 2}, **more}
    return JobFile(**{"name": name, "initial_batch": 8, "max_batch": 16, "work": 1.0, **values})


def test_two_slots_are_measured_under_every_plan(tmp_path: Path) -> None:
    path, said = tmp_path / "profile.json", list[str]()
    files = [file_of("small"), file_of("broken", job_class="synergy_exec.examples.mlp:Nothing")]
    made = add_to_profile(path, files, get_backend("local", {"slots": 2}), HERE, TINY, said.append, LONG)
    assert [each.name for each in made.models] == ["small"]
    assert any("Nothing" in each for each in made.remarks)
    model = read_profile(path)["small"]
    shapes = {(row.plan.gpus, row.plan.global_batch) for row in model.rows}
    assert shapes == {(1, 8), (1, 16), (2, 8), (2, 16)}
    degrees = {(row.plan.data, row.plan.tensor, row.plan.pipeline) for row in model.rows}
    assert {(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1)} <= degrees
    assert all(0 < row.step_s < 10 and row.memory_bytes > 0 for row in model.rows)
    assert 0 < model.costs.exit_s < 30
    assert 0 < model.costs.restart_s < 30
    assert model.noise[:2] == (NoiseFrom(0.0, 0.0), NoiseFrom(10.0, model.noise[1].ratio))
    assert said[0].startswith("small: 1 on 1 × cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["profile.json"]


def test_input_is_measured_in_cpu_seconds_whatever_else_the_machine_does(tmp_path: Path) -> None:
    """Of a job whose samples take 10 ms of CPU to prepare, and whose model takes little beside."""
    path, said = tmp_path / "profile.json", list[str]()
    file = file_of(
        "pictures",
        job_class="synergy_exec.examples.pictures:Pictures",
        arguments={"cpu_s": 0.01, "pictures": 32, "channels": 4},
        initial_batch=4,
        max_batch=4,
    )
    made = add_to_profile(path, [file], get_backend("local", {"slots": 1}), HERE, TINY, said.append, LONG)
    assert made.remarks == []
    model = read_profile(path)["pictures"]
    given = model.input
    assert given is not None
    cores = len(os.sched_getaffinity(0))
    assert {1.0, float(cores)} <= {each.cpus for each in given.steps}
    assert [each for each in said if each.startswith(f"pictures: input with {cores} CPUs (1 of 1 step times decided, ")]
    assert 0.009 < given.cpu_s < 0.018
    assert all(each.step_s >= 4 * 0.009 / each.cpus and each.waited_s < each.step_s for each in given.steps)
    assert (given.batch, given.sample_bytes, given.data_bytes) == (4, 832.0, 32 * 832.0)
    heading, *lines = table(model)[-1 - len(given.steps) :]
    assert heading.startswith(f"  input on 1 × cpu, batch 4: {given.cpu_s * 1e3:.2f} ms of CPU per sample, ")
    assert [line.split()[0] for line in lines] == [f"{each.cpus:g}" for each in given.steps]


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """What waits for ever fails, instead of holding all other tests up."""

    def late(*_: object) -> None:
        raise AssertionError(f"it has not ended within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def agents() -> list[int]:
    """Of this process."""
    return [pid for pid in children(os.getpid()) if b"synergy_exec.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_killed_agent_is_replaced_and_what_waited_for_it_is_measured(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Killed between two plans, so that the next waits for it; and again while one trains."""
    path, said = tmp_path / "profile.json", list[str]()

    def kill() -> None:
        os.kill(agents()[0], signal.SIGKILL)

    def say(words: str) -> None:
        said.append(words)
        if len(said) == 2:
            kill()
        if len(said) == 4:
            asyncio.get_running_loop().call_later(1.5, kill)

    with limit(240):
        made = add_to_profile(path, [file_of("small")], get_backend("local", {"slots": 2}), HERE, TINY, say, LONG)
    assert made.remarks == []
    shapes = {(row.plan.gpus, row.plan.global_batch) for row in read_profile(path)["small"].rows}
    assert shapes == {(1, 8), (1, 16), (2, 8), (2, 16)}
    heard = capfd.readouterr().err
    assert "node 0: its agent was lost: its connection broke; agent left with exit code -9" in heard
    assert "starting another" in heard


def test_agent_that_is_lost_for_good_ends_profiling_with_what_to_type(tmp_path: Path) -> None:
    class Dying(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            await super().start(node, meeting)
            asyncio.get_running_loop().call_later(0.2, self.agents[node].cancel)

    says = "profiling ended: node 0: its agent was lost 4 times within an hour; at last: .*nothing was measured .*again"
    with limit(120), pytest.raises(InputError, match=re.compile(says, re.DOTALL)):
        add_to_profile(tmp_path / "profile.json", [file_of("small")], Dying(2), HERE, TINY, lambda _: None, LONG)


def test_agents_of_a_profile_come_to_the_address_of_the_run(tmp_path: Path) -> None:
    """Where nodes are other machines, they reach no other."""

    class Refusing(TaskBackend):
        async def start(self, node: int, meeting: Any) -> None:
            raise InputError(f"told to come to {meeting.url}")

    given = (tmp_path / "profile.json", [file_of("small")], lambda: Refusing(1), HERE, lambda _: None)
    with pytest.raises(InputError, match=r"told to come to http://127\.0\.0\.2:"):
        current_profile(*given, Settings(host="127.0.0.2"))


def test_models_are_built_outside_the_process_that_listens_and_once(tmp_path: Path) -> None:
    (tmp_path / "noted.py").write_text(
        "import os, pathlib\n"
        "from synergy_exec.examples.mlp import Mlp\n"
        "class Noted(Mlp):\n"
        "    def build_model(self):\n"
        "        print('what the user prints')\n"
        "        with pathlib.Path(__file__).with_name('noted.txt').open('a') as notes:\n"
        "            notes.write(f'{os.getpid()}\\n')\n"
        "        return super().build_model()\n"
        "class Broken(Mlp):\n"
        "    def build_model(self):\n"
        "        raise OSError('no data here')\n"
        "class Fatal(Mlp):\n"
        "    def build_model(self):\n"
        "        os._exit(7)\n"
    )

    async def through() -> list[CandidatePlans | str]:
        async with finder() as find:
            found: list[CandidatePlans | str] = []
            for name in ("Broken", "Fatal", "Noted"):
                file = file_of(name, job_class=f"{tmp_path / 'noted.py'}:{name}")
                try:
                    found.append(await find.candidates(file, [1, 2]))
                except InputError as error:
                    found.append(str(error))
            return found

    broken, fatal, noted = asyncio.run(asyncio.wait_for(through(), 120))
    assert isinstance(noted, CandidatePlans)
    assert "its model cannot be built: OSError: no data here" in str(broken)
    assert "Fatal: the process that builds its model left with exit code 7" in str(fatal)
    assert noted.parameters > 100
    assert {plan.world for lists in noted.plans.values() for plans in lists for plan in plans} == {1, 2}
    (pid,) = (tmp_path / "noted.txt").read_text().split()
    assert int(pid) != os.getpid()


ASKING = (
    "import os, subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-m', 'synergy_exec.profiling.candidates', str(os.getpid())], stdin=0)\n"
    "time.sleep(600)"
)


def test_what_finds_plans_dies_with_who_asked_whatever_it_is_building(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os, time\n"
        "from pathlib import Path\n"
        "from synergy_exec.examples.mlp import Mlp\n"
        "class Endless(Mlp):\n"
        "    def build_model(self):\n"
        "        Path(__file__).with_name('pid').write_text(f'{os.getpid()} ')\n"
        "        time.sleep(600)\n"
    )
    question = {"job_class": f"{tmp_path / 'endless.py'}:Endless", "arguments": {}, "batches": [4], "sizes": [1]}
    asking = subprocess.Popen([sys.executable, "-c", ASKING], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert asking.stdin is not None
    asking.stdin.write(json.dumps(question) + "\n")
    asking.stdin.flush()
    noted = tmp_path / "pid"
    wait_until(lambda: noted.exists() and noted.read_text().endswith(" "), 120)
    asking.kill()
    wait_until(lambda: not processes.began(int(noted.read_text())), 60)
    asking.wait()
    assert asking.stderr is not None
    assert asking.stderr.read() == ""


def test_what_finds_plans_leaves_quietly_where_nobody_reads_its_answer() -> None:
    command = [sys.executable, "-m", "synergy_exec.profiling.candidates", str(os.getpid())]
    asked = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert asked.stdin is not None
    assert asked.stdout is not None
    assert asked.stderr is not None
    asked.stdout.close()
    question = {"job_class": "synergy_exec.examples.mlp:Mlp", "arguments": {}, "batches": [4], "sizes": [1]}
    asked.stdin.write(json.dumps(question) + "\n")
    asked.stdin.flush()
    assert asked.wait(120) == 0
    assert "BrokenPipe" not in asked.stderr.read()
    asked.stdin.close()
    asked.stderr.close()


def test_noise_is_the_median_of_stretches_and_unknown_before() -> None:
    seen = [
        NoiseFrom(12.0, 1.0),
        NoiseFrom(13.0, 3.0),
        NoiseFrom(14.0, 2.0),
        NoiseFrom(16.0, 5.0),
        NoiseFrom(40.0, 9.0),
    ]
    assert noise_curve(seen) == (NoiseFrom(0, 0), NoiseFrom(10.0, 2.0), NoiseFrom(15.0, 5.0), NoiseFrom(33.75, 9.0))
    assert noise_curve([]) == (NoiseFrom(0, 0),)
    assert noise_curve([NoiseFrom(30.0, 4.0)]) == (NoiseFrom(0, 0), NoiseFrom(10.0, 4.0))


def test_models_are_measured_once_and_again_where_something_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, measured = tmp_path / "profile.json", list[str]()

    def measure(
        path: Path, files: list[JobFile], backend: Any, where: str, effort: Effort, say: Any, settings: Any
    ) -> Made:
        measured.extend(each.name for each in files)
        made = [_model(each) for each in files if each.name != "broken"]
        older = read_profile(path).models if path.is_file() and read_profile(path).machine == where else {}
        write_profile(Profile({**older, **{each.name: each for each in made}}, where, "now"), path)
        return Made(made, [])

    monkeypatch.setattr(profiling, "add_to_profile", measure)

    def names(*files: JobFile, where: str = HERE) -> list[str]:
        measured.clear()
        profile, _ = current_profile(path, list(files), lambda: None, where, lambda _: None, Settings())  # type: ignore[arg-type]
        assert {each.name for each in files} - {"broken"} <= set(profile)
        return list(measured)

    assert names(file_of("a"), file_of("b")) == ["a", "b"]
    assert names(file_of("a"), file_of("b")) == []
    assert names(file_of("a"), file_of("c")) == ["c"]
    assert names(file_of("a", max_batch=31)) == []
    assert names(file_of("a", max_batch=32)) == ["a"]
    assert names(file_of("b", initial_batch=4)) == ["b"]
    assert names(file_of("c", arguments={"width": 32})) == ["c"]
    assert names(file_of("a", max_batch=32), where="another machine") == ["a"]
    assert names(file_of("broken")) == ["broken"]


def _model(file: JobFile) -> ProfiledModel:
    noise = (NoiseFrom(0.0, 0.0),)
    costs, application = ProfiledCosts(1.0, 1.0, 1.0), file.application
    return ProfiledModel(file.name, file.initial_batch, file.max_batch, 1.0, noise, costs, (), application=application)


def test_what_was_measured_in_another_precision_is_another_machine() -> None:
    assert machine("local", {"slots": 2}, bfloat16=False) == machine("local", {"slots": 2}, bfloat16=True) + ", float32"


def test_what_is_no_profile_is_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text('{"format": 1}')
    with pytest.raises(InputError, match="profile again"):
        current_profile(path, [file_of("a")], lambda: None, HERE, lambda _: None, Settings())  # type: ignore[arg-type]
