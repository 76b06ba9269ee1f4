"""Every documented command that does not say what it needs runs in a clone of HEAD, as for someone new.

All of them under `--thorough`; by default the first of every program of simulator and planner.
Commit first: what is not in HEAD is not in the clone. `documented` reads the commands off the pages. Simulator and
planner are imported once for all their commands (`copies`).
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from copies import Programs, environment_of
from documented import NEEDS, Command, documented, files

ROOT = Path(__file__).resolve().parents[1]
THEIRS = Path(__file__).with_name("documented_files")
"""Small versions of the files that pages tell readers to bring: logs, measurements, a profile."""
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
"""Instant at which pages ask why a job waits; the job must be in the cluster then."""
SHORTER = (
    # what is typed · what the test adds to it, None: it is left out · why it is the same command still
    (r"^\. ", None, "an empty environment has no packages; this one is used"),
    (r"^python3 -m venv", "--without-pip", "nothing is installed into it"),
    (r"^pip install", "--dry-run --no-deps --no-build-isolation", "the package is built, and its extras are looked up"),
    (r"trace\.path=|experiment=pollux", "figures=false", "the files are small"),
    (r"models=llm|experiment=llm", "trace.window=2017-11-21/1h figures=false", "few jobs, all policies"),
    (r"experiment=classical", "trace.window=2017-10-09/1d figures=false", "as above"),
    (r"experiment=synergy_osdi22", "trace.jobs=200 trace.measured_jobs=50-149 figures=false", "fewer jobs"),
    (r"\[tiresias,sia,synergy\]", "trace.window=2017-10-02/3h figures=false", "as above"),
    (r"synergy_sim \+trace=philly$", "trace.window=2017-11-21/3h trace.carry_in=false", "with figures and report"),
    (r"synergy_sim .*\+trace=philly", "trace.window=2017-11-21/3h trace.carry_in=false figures=false", "fewer jobs"),
    (r"\+trace=saturn", "trace.window=2h figures=false", "as above"),
    (r"experiment=compression", "trace.window=1h figures=false", "as above"),
    (r"synergy_core compression", "network_gbps=10", "one bandwidth of them all"),
    (r"serve=true", "profile=null", "what it learned would replace the profile that readers bring"),
    (r"synergy_exec \+trace=demo$", "trace.window=5s profile=null", "a job of each model; measuring takes minutes"),
    (r"synergy_exec \+trace=demo", "trace.window=2s profile=null figures=false", "one job under each policy"),
)
FEW = "trace.window=2017-11-21/3h trace.carry_in=false policy=[fifo,synergy]"
FIRST = ((r"synergy_sim \+trace=philly$", FEW, "with figures and report"), *SHORTER)
"""Replacements for the first commands, used if not all commands are run."""
PROGRAM = re.compile(r"python -m synergy_\S+( [a-z]+(?= ))?")
"""And its subcommand."""
POLICY_PAGE = "docs/allocation_policies.md"
TUTORIAL = ("docs/index.md", POLICY_PAGE, "docs/python.md")
KEPT = re.compile(r"```text\n(marginal: keeps the rules.*?)```", re.DOTALL)
MISTAKE = re.compile(r"^`([^`]+)` in place of `([^`]+)`: [^\n]*\n\n```text\n(.*?)```$", re.MULTILINE | re.DOTALL)
SERVE, DEMO = "serve=true", "synergy_exec +trace=demo"
PLAIN = re.compile(r"python -m synergy_(sim|core)\S*( [^|<>;&$~]*)?")
"""Needs no shell, and no process of its own."""
TIMEOUT_S = 600
LEAVES_S = 60
SIMULATOR, EXECUTOR = "simulator and planner", "executor"
FEWEST, FEWEST_PROGRAMS = {SIMULATOR: 32, EXECUTOR: 8}, 9
"""Commands that run, lest reading the pages should one day find none."""


@pytest.fixture
def clone(tmp_path):
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
    (made / "synergy_core" / "scheduling" / "policies" / "narrow.py").write_text(policy, encoding="utf-8")
    for name, text in files(made).items():
        (made / name).write_text(text, encoding="utf-8")
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("part", FEWEST)
def test_documented_commands_run_in_a_clone(clone, part):
    assert len(_run([each for each in _free(clone) if _part(each) == part], clone)) >= FEWEST[part]


def test_first_command_of_every_program_runs_in_a_clone(clone):
    first: dict[str, Command] = {}
    for command in _free(clone):
        if _part(command) == SIMULATOR and (program := PROGRAM.match(command.typed)):
            first.setdefault(program[0], command)
    assert len(_run(list(first.values()), clone, FIRST)) >= FEWEST_PROGRAMS


def test_tutorial_runs_part_by_part(clone):
    """With the policies of each kind and the figure that it tells readers to write."""
    typed = [each for each in _free(clone) if each.page in TUTORIAL and re.search(r"synergy_|\w+\.py", each.typed)]
    assert {each.page for each in typed} == set(TUTORIAL)
    _run(typed, clone, FIRST)
    assert (clone / "waits.pdf").stat().st_size
    compared = {path.parent.name for path in clone.glob("results/*/*-*_*/*/summary.json")}
    assert {"area-0", "shortest_left-0", "marginal-0", "as-logged-0"} <= compared


def test_page_on_allocation_policies_quotes_what_check_answers(clone):
    page, policy = clone / POLICY_PAGE, clone / "synergy_core" / "scheduling" / "policies" / "marginal.py"
    right, text = policy.read_text(encoding="utf-8"), page.read_text(encoding="utf-8")
    mistakes, kept = MISTAKE.findall(text), KEPT.findall(text)
    assert len(mistakes) >= 3
    assert len(kept) == 1
    with Programs(clone) as programs:
        for wrong, instead_of, answer in [("", "", kept[0]), *mistakes]:
            assert instead_of in right
            policy.write_text(right.replace(instead_of, wrong) if wrong else right, encoding="utf-8")
            _, said, _ = programs.run(["synergy_core", "check", "marginal"])
            assert said.replace(f"{clone}{os.sep}", "").split() == answer.split()


def _free(clone):
    """The commands that say neither what they need nor how many minutes they take."""
    return [each for each in documented(clone) if not each.needs and not each.minutes]


def _run(chosen, clone, shorter=SHORTER):
    """Runs commands in the order of the pages, as one reads what another writes; returns those that ran."""
    wrong, runs = [], set[str]()
    with ExitStack() as stack, Programs(clone) as programs:
        for command in chosen:
            for typed in command.typed.split(" && "):
                line = _as_run(typed, clone, shorter)
                if line is None or line in runs:
                    continue
                runs.add(line)
                if SERVE in typed:
                    stack.enter_context(_served(line, clone))
                elif said := _fault(line, clone, programs) or (_undone(clone) if DEMO in typed else ""):
                    wrong.append(f"{command.page}:{command.line}: {typed}\nran as: {line}\n{said}")
        assert not wrong, "\n\n".join(wrong)
    return runs


def test_what_commands_need_is_said_in_known_words():
    found = documented(ROOT)
    assert {word for each in found for word in each.needs} <= set(NEEDS)
    assert all(each.minutes is None or each.minutes > 0 for each in found)


def _part(command):
    executors = any(each in command.typed for each in ("synergy_exec", "+trace=demo", "RUN.work", "results/demo"))
    return EXECUTOR if executors else SIMULATOR


def _as_run(typed, clone, shorter):
    """The command with placeholders filled in and optional parts removed, shortened; None if it is not run."""
    words = re.sub(r" \[-[^\]]*\]", "", typed).split(" ")
    names = {}
    for name, path in PLACEHOLDERS.items():
        made = sorted(clone.glob(path)) if "*" in path else []
        names[name] = str(made[0].relative_to(clone)) if made else path
    if "JOB" in words:
        run = next((word for word in words if word.startswith("results/")), names["RUN"])
        jobs = pq.read_table(clone / run / "jobs.parquet", columns=["job_name", "submit_time_s", "finish_s"])
        there = [each for each in jobs.to_pylist() if each["submit_time_s"] <= WHEN_S]
        names["JOB"] = str(max(there, key=lambda job: job["finish_s"])["job_name"])
    line = " ".join(names.get(word, word) for word in words)
    for pattern, more, _ in shorter:
        if re.search(pattern, line):
            return None if more is None else f"{line} {more}"
    return line


def _shell(line, clone, **more):
    given = {"cwd": clone, "env": environment_of(clone), "stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["bash", "-c", line], **given, **more, start_new_session=True)


def _fault(line, clone, programs):
    """Describes how the command failed; "" if it succeeded."""
    began = os.times()
    if PLAIN.fullmatch(line):
        status, said, cpu_s = programs.run(shlex.split(line)[2:])
    else:
        shell = _shell(line, clone, stdout=subprocess.PIPE, text=True)
        try:
            said, _ = shell.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            said, _ = shell.communicate()
            return f"had not ended after {TIMEOUT_S} s; said:\n{said[-1500:]}"
        status, ended = shell.returncode, os.times()
        cpu_s = ended.children_user + ended.children_system - began.children_user - began.children_system
    print(f"{cpu_s:6.1f} CPU s  {line}")
    if status or "Traceback" in said or "does not provide the extra" in said:
        return f"status {status}:\n{said[-1500:]}"
    return ""


def _undone(clone):
    """The runs of the demo in which some job did not finish."""
    found = sorted((clone / "results" / "demo").glob("*-*_*/*/summary.json"))
    undone = []
    for path in found:
        each = json.loads(path.read_text())
        counts = [each[name] for name in ("jobs", "jobs_failed", "jobs_unfinished")]
        if not counts[0] or any(counts[1:]):
            undone.append("{}: {} jobs, {} failed, {} unfinished".format(path.parent.name, *counts))
    return "; ".join(undone) if found else "the demo left no results"


@contextmanager
def _served(line, clone):
    """Runs a controller in another terminal until all submitted jobs are done, then ends it as Ctrl-C does."""
    log = clone / "served.txt"
    with log.open("w") as stream:
        server = _shell(f"exec {line}", clone, stdout=stream)
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


def _states(clone):
    """The states of the controller's jobs; None if no controller answers."""
    command = [sys.executable, "-m", "synergy_exec", "list", "--json"]
    said = subprocess.run(command, cwd=clone, env=environment_of(clone), capture_output=True, text=True)
    return None if said.returncode else {each["state"] for each in json.loads(said.stdout)}


def _wait(true, otherwise, log):
    until_s = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < until_s, f"{otherwise}; said:\n{log.read_text()}"
        time.sleep(0.5)
