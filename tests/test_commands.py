"""Every documented command that does not say what it needs runs in a clone of HEAD, as for someone new.

All of them under `--thorough`; by default the first of every program of simulator and planner, and the executor's demo.
Commit first: what is not in HEAD is not in the clone. `documented` reads the commands off the pages.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from documented import NEEDS, Command, commands, documented

from synergy_runs.filing import is_unended

ROOT = Path(__file__).resolve().parents[1]
THEIRS = Path(__file__).with_name("documented_files")
"""What readers are told to bring, small: logs, measurements, a profile."""
PLACEHOLDERS = {
    "FILE": "jobs.csv",
    "FILE.csv": "mine.csv",
    "NAME": "philly",
    "DIR": "results",
    "RUN": "results/philly/*-*_*/synergy-0",
    "RUN.work": "results/demo/*-*_*/synergy-0.work",
    "TIME": "1h",
}
WHEN_S = 3_600.0
"""At which pages ask why: the job asked about is one that is there then."""
SHORTER = (
    # what is typed · what the test adds to it, None: it is left out · why it is the same command still
    (r"^\. ", None, "an empty environment has no packages; this one is used"),
    (r"^python3 -m venv", "--without-pip", "nothing is installed into it"),
    (r"^pip install", "--dry-run --no-deps --no-build-isolation", "the package is built, and its extras are looked up"),
    (r"trace\.path=|experiment=pollux", "figures=false", "the files are small"),
    (r"models=llm|experiment=llm", "trace.window=2017-11-21/2h figures=false", "few jobs, all policies"),
    (r"experiment=synergy_osdi22", "trace.jobs=200 trace.measured_jobs=50-149 figures=false", "fewer jobs"),
    (r"\[tiresias,sia,synergy\]", "trace.window=2017-10-02/3h figures=false", "as above"),
    (r"synergy_sim \+trace=philly$", "trace.window=2017-11-21/3h trace.carry_in=false", "with figures and report"),
    (r"synergy_sim .*\+trace=philly", "trace.window=2017-11-21/3h trace.carry_in=false figures=false", "fewer jobs"),
    (r"\+trace=saturn", "trace.window=12h figures=false", "as above"),
    (r"bench/compression_hooks", "--width 64 --depth 2 --steps 2", "every hook still"),
    (r"bench/compression_training", "--steps 10 --seeds 1 --jobs gpt cnn", "every compressor on both models"),
    (r"synergy_exec \+trace=demo$", "trace.window=5s profile=null", "a job of each model; measuring takes minutes"),
    (r"synergy_exec \+trace=demo", "trace.window=2s profile=null figures=false", "one job under each policy"),
)
PROGRAM = re.compile(r"python -m synergy_\S+( [a-z]+(?= ))?")
"""And its subcommand."""
SERVE, DEMO = "serve=true", "synergy_exec +trace=demo"
TIMEOUT_S = 600
LEAVES_S = 60
SIMULATOR, EXECUTOR = "simulator and planner", "executor"
FEWEST, FEWEST_PROGRAMS = {SIMULATOR: 32, EXECUTOR: 8}, 9
"""Commands that run, lest reading the pages should one day find none."""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """HEAD and what readers bring; nothing else."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("needs git, and the repository to clone")
    made = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(made)], check=True)
    shutil.copytree(THEIRS, made, dirs_exist_ok=True)
    readme = (made / "README.md").read_text(encoding="utf-8")
    for _, name, text in re.findall(r"```(python|yaml)\n# (mine.py|job.yaml)\n(.*?)```", readme, re.DOTALL):
        (made / name).write_text(text.replace("work: 2000", "work: 40"), encoding="utf-8")
    policy = next(text for text in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "def narrow(" in text)
    (made / "synergy_core" / "policies" / "narrow.py").write_text(policy, encoding="utf-8")
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("part", FEWEST)
def test_documented_commands_run_in_a_clone(clone: Path, part: str) -> None:
    assert len(_run([each for each in _free(clone) if _part(each) == part], clone)) >= FEWEST[part]


def test_first_command_of_every_program_runs_in_a_clone(clone: Path) -> None:
    """Of the executor one: tests/exec/ has its other programs."""
    first: dict[str, Command] = {}
    for command in _free(clone):
        if (_part(command) == SIMULATOR or command.typed.endswith(DEMO)) and (program := PROGRAM.match(command.typed)):
            first.setdefault(program[0], command)
    assert len(_run(list(first.values()), clone)) >= FEWEST_PROGRAMS


def _free(clone: Path) -> list[Command]:
    """The commands that say neither what they need nor how many minutes they take."""
    return [each for each in documented(clone) if not each.needs and not each.minutes]


def _run(chosen: list[Command], clone: Path) -> set[str]:
    """In the order of the pages, for what one writes another reads; the lines that ran, none of them wrong."""
    wrong, runs = [], set[str]()
    with ExitStack() as stack:
        for command in chosen:
            for typed in command.typed.split(" && "):
                line = shortened(_with_names(typed, clone))
                if line is None or line in runs:
                    continue
                runs.add(line)
                whole = _whole(clone)
                if SERVE in typed:
                    stack.enter_context(_served(line, clone))
                elif said := _fault(line, clone) or (_undone(clone) if DEMO in typed else ""):
                    wrong.append(f"{command.page}:{command.line}: {typed}\nran as: {line}\n{said}")
                if changed := [
                    str(path) for path, text in whole.items() if not path.is_file() or text != _digest(path)
                ]:
                    wrong.append(f"{command.page}:{command.line}: {typed}\nchanged results that were whole: {changed}")
        assert not wrong, "\n\n".join(wrong)
    return runs


def _whole(clone: Path) -> dict[Path, str]:
    """Every file of every run that is whole, by its contents: of what no later command may change."""
    runs = [each.parent for each in (clone / "results").rglob("run.yaml") if not is_unended(each.parent)]
    return {path: _digest(path) for run in runs for path in run.rglob("*") if path.is_file()}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_commands_need_is_said_in_known_words() -> None:
    """Who reads a mark knows what it means, and a mistyped one hides no command."""
    found = documented(ROOT)
    assert {word for each in found for word in each.needs} <= set(NEEDS)
    assert all(each.minutes is None or each.minutes > 0 for each in found)


def test_every_way_to_shorten_is_needed() -> None:
    typed = [part for each in documented(ROOT) for part in each.typed.split(" && ") if not each.needs]
    used = {next((at for at, (pattern, *_) in enumerate(SHORTER) if re.search(pattern, each)), -1) for each in typed}
    assert used >= set(range(len(SHORTER)))


def test_commands_are_found_with_what_is_said_of_them() -> None:
    page = """
A new user types `python -m synergy_sim --help`, or
`python bench/a.py` (needs: data; minutes: 5); `python -m synergy_sim` is a name.

    pip install x && python -m synergy_sim \\
      policy='[a,b]'        # two; needs: ray

Later `python bench/a.py --more`, and in the script (needs: slurm):

```bash
echo
python -m synergy_sim &
```

```python
python -m no_command x
```
"""
    assert [(each.line, each.typed, sorted(each.needs), each.minutes) for each in commands("page", page)] == [
        (2, "python -m synergy_sim --help", [], None),
        (3, "python bench/a.py", ["data"], 5.0),
        (5, "pip install x && python -m synergy_sim policy='[a,b]'", ["ray"], None),
        (8, "python bench/a.py --more", ["data"], 5.0),
        (12, "python -m synergy_sim &", ["slurm"], None),
    ]
    with pytest.raises(ValueError, match=r"page:1: needs: dat; known: data"):
        _ = commands("page", "`python bench/a.py` (needs: dat)")[0].needs


def _part(command: Command) -> str:
    executors = any(each in command.typed for each in ("synergy_exec", "+trace=demo", "RUN.work"))
    return EXECUTOR if executors else SIMULATOR


def shortened(typed: str) -> str | None:
    """What is run for it; None for nothing."""
    for pattern, more, _ in SHORTER:
        if re.search(pattern, typed):
            return None if more is None else f"{typed} {more}"
    return typed


def _with_names(typed: str, clone: Path) -> str:
    """Without what is optional, and with names of what is there in place of words in capitals."""
    words = re.sub(r" \[-[^\]]*\]", "", typed).split(" ")
    names = {name: _there(path, clone) for name, path in PLACEHOLDERS.items()}
    if "JOB" in words:
        run = next((word for word in words if word.startswith("results/")), names["RUN"])
        jobs = pq.read_table(clone / run / "jobs.parquet", columns=["job_name", "submit_time_s", "finish_s"])
        there = [each for each in jobs.to_pylist() if each["submit_time_s"] <= WHEN_S]
        names["JOB"] = str(max(there, key=lambda job: job["finish_s"])["job_name"])
    return " ".join(names.get(word, word) for word in words)


def _there(path: str, clone: Path) -> str:
    """The path; of one with stars the first that was made of those that it means."""
    found = sorted(clone.glob(path)) if "*" in path else []
    return str(found[0].relative_to(clone)) if found else path


def _environment(clone: Path) -> dict[str, str]:
    """Of someone new: no data, this Python, and the clone's code wherever a script lies."""
    kept = {name: value for name, value in os.environ.items() if name != "SYNERGY_DATA"}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "PYTHONPATH": str(clone)}


def _fault(line: str, clone: Path) -> str:
    """What is wrong with how the command ended; nothing: nothing."""
    began_s = time.monotonic()
    shell = subprocess.Popen(
        ["bash", "-c", line],
        cwd=clone,
        env=_environment(clone),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, signal.SIGKILL)
        said, _ = shell.communicate()
        return f"had not ended after {TIMEOUT_S} s; said:\n{said[-1500:]}"
    print(f"{time.monotonic() - began_s:6.1f} s  {line}")
    if shell.returncode or "Traceback" in said or "does not provide the extra" in said:
        return f"status {shell.returncode}:\n{said[-1500:]}"
    return ""


def _undone(clone: Path) -> str:
    """Which runs of the demo did not end with every job done."""
    found = {
        path.parent.name: json.loads(path.read_text())
        for path in (clone / "results" / "demo").glob("*-*_*/*/summary.json")
    }
    undone = [
        f"{name}: {each['jobs']} jobs, {each['jobs_failed']} failed, {each['jobs_unfinished']} unfinished"
        for name, each in found.items()
        if not each["jobs"] or each["jobs_failed"] or each["jobs_unfinished"]
    ]
    return "; ".join(undone) if found else "the demo left no results"


@contextmanager
def _served(line: str, clone: Path) -> Iterator[None]:
    """A controller in another terminal, until what was submitted to it is done; then Ctrl-C."""
    log = clone / "served.txt"
    with log.open("w") as stream:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {line}"],
            cwd=clone,
            env=_environment(clone),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(lambda: _states(clone) is not None, f"{line}: nobody answers", log)
        yield
        _wait(lambda: _states(clone) == {"done"}, f"{line}: what was submitted does not end", log)
        server.send_signal(signal.SIGINT)
        server.wait(LEAVES_S)
        assert "Traceback" not in log.read_text(), log.read_text()
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _states(clone: Path) -> set[str] | None:
    """Of the jobs of the controller that runs; None where none answers."""
    command = [sys.executable, "-m", "synergy_exec", "list", "--json"]
    said = subprocess.run(command, cwd=clone, env=_environment(clone), capture_output=True, text=True)
    return None if said.returncode else {each["state"] for each in json.loads(said.stdout)}


def _wait(true: Callable[[], bool], otherwise: str, log: Path) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < until_s, f"{otherwise}; said:\n{log.read_text()}"
        time.sleep(0.5)
