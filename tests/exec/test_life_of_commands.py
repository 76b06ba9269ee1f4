"""The life of a command, with real processes: its environment, how it is stopped, hangs, ends, and is tried again."""

import json
import re
import signal
import sys
import venv

import pytest
from exec.pretended import refuses, staged
from exec.real import Service, answer, typed

from synergy_exec.job_file import job_of, read_job_file

PYTHON = sys.executable
SERVE = ("serve=true", "policy=[priority]", "backend.options.slots=2", "round_s=0.2", "figures=false")
THREADS = ("OPENBLAS_NUM_THREADS", "THP_MEM_ALLOC_ENABLE")
"""What Synergy sets for its own workers."""
OF_A_STEP = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID", "PMI_RANK")
"""What Slurm says of the step that the controller or its agent is."""
URGENT = {"command": [PYTHON, "-c", "pass"], "slots": 2, "priority": 5}

SHOWS = """
import importlib.util, json, os, shutil, sys
seen = {"environment": dict(os.environ), "path": sys.path, "prefix": sys.prefix, "torchrun": shutil.which("torchrun")}
seen["torch"] = importlib.util.find_spec("torch") is not None
print("SEEN", json.dumps(seen), flush=True)
"""
SAVES = """
import multiprocessing, os, signal, sys, time

def load():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(600)

loader = multiprocessing.get_context("fork").Process(target=load)
loader.start()
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("start", os.environ["SYNERGY_RESTART_COUNT"], *sys.argv[1:], flush=True)
while not stop:
    time.sleep(0.05)
time.sleep(float(sys.argv[1]))
print(f"saved with a loader that lives: {loader.is_alive()}", flush=True)
loader.kill()
os._exit(int(sys.argv[2]))
"""
SHELL = """
# as a batch script of Slurm: the training is a child of a child
echo prepared "$0" "$1"
{trap}
(
    {python} saves.py {save_s} {code}
)
echo ended
"""
FINISHES = """
import signal, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print("trains", flush=True)
while not heard:
    time.sleep(0.05)
time.sleep(0.5)
print("finished", flush=True)
"""
STEPS = """
import os, signal, sys, time
stop, path = [], sys.argv[1]
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
step = int(open(path).read()) if os.path.exists(path) else 0
print("from", step, flush=True)
while step < 30 and not stop:
    time.sleep(0.1)
    step += 1
if stop:
    open(path, "w").write(str(step))
    print("saved", step, flush=True)
else:
    print("all 30 steps", flush=True)
"""
LEAVES = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("[rank: 0] Received SIGTERM: 15", flush=True) or sys.exit())
print("start", os.environ["SYNERGY_RESTART_COUNT"], flush=True)
time.sleep(0 if os.environ["SYNERGY_RESTART_COUNT"] == "1" else 600)
"""
FORWARDS = """
import os, signal, subprocess, sys, time

child = subprocess.Popen([sys.executable, "-c", '''
import signal, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
print("ready", flush=True)
while not heard:
    time.sleep(0.05)
time.sleep(0.5)
print("heard", len(heard), flush=True)
'''])
signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.2) or child.terminate())
child.wait()
os._exit(1)
"""
RANKS = """
import os, subprocess, sys
sys.exit(max([subprocess.Popen([sys.executable, "stuck.py"], env=os.environ | {"RANK": rank}, start_new_session=True)
              for rank in "01"], key=lambda each: each.wait()).returncode)
"""
STUCK = """
import json, os, threading

def waits_for_ever():
    threading.Event().wait()

if os.environ["RANK"] == "0":
    for step in (1, 2, 3):
        with open(os.environ["SYNERGY_REPORT"], "a") as file:
            file.write(json.dumps({"step": step, "loss": 0.5}) + "\\n")
waits_for_ever()
"""
FAILS = "import os, sys; sys.exit(0 if os.environ['SYNERGY_RESTART_COUNT'] == '2' else int(sys.argv[1]))"


def shell(save_s: float, code: int, trap: str = "") -> list[str]:
    return ["bash", "-c", SHELL.format(python=PYTHON, save_s=save_s, code=code, trap=trap), "", "{folder}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("commands")
    scripts = {"shows": SHOWS, "saves": SAVES, "finishes": FINISHES, "steps": STEPS, "leaves": LEAVES}
    for name, text in (scripts | {"forwards": FORWARDS, "ranks": RANKS, "stuck": STUCK}).items():
        (where / f"{name}.py").write_text(text)
    venv.create(where / "own")
    return where


@pytest.fixture(scope="module")
def service(folder):
    """A controller that was started with a path of its own, and no program of its environment on PATH."""
    with Service(folder / "r") as service, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder / "mine"))
        patch.setenv("PATH", "/usr/bin:/bin")
        patch.setenv("SYNERGY_TOKEN", "of-another-controller")
        patch.setenv("SLURM_JOB_ID", "7")
        for name in OF_A_STEP:
            patch.setenv(name, "1")
        for name in THREADS:
            patch.delenv(name, raising=False)
        service.start(*SERVE, f"results_dir={folder / 'r'}", "ports=23100-23101")
        patch.undo()
        yield service


class Jobs:
    """Submits jobs to a service and waits for what becomes of them."""

    def __init__(self, service: Service, folder):
        self.service, self.folder = service, folder

    def submit(self, name, **job):
        (self.folder / f"{name}.yaml").write_text(json.dumps({"name": name, **job}))
        answer("submit", self.folder / f"{name}.yaml", "--dir", self.service.results)

    def log(self, name):
        return answer("logs", name, "--dir", self.service.results)

    def until_said(self, name, text):
        self.service.until(lambda: self.service.jobs()[name]["state"] == "running" and text in self.log(name), 60)

    def until(self, name, *states):
        return self.service.until(lambda: (job := self.service.jobs()[name])["state"] in states and job, 60)


@pytest.fixture
def jobs(service, folder):
    return Jobs(service, folder)


def test_command_has_the_environment_of_its_own(jobs, folder):
    jobs.submit("own", command=["python", "shows.py"], venv="own", env={"MODE": "off", "SIZE": 3, "AT": "{folder}"})
    jobs.until("own", "done")
    seen = json.loads(jobs.log("own").partition("SEEN ")[2].splitlines()[0])
    environment, own = seen["environment"], str(folder / "own")
    assert (seen["prefix"], environment["VIRTUAL_ENV"], seen["torch"]) == (own, own, False)
    assert environment["PYTHONPATH"] == str(folder / "mine")
    assert not [each for each in seen["path"] if "site-packages" in each and not each.startswith(own)]
    assert (environment["MODE"], environment["SIZE"], environment["AT"]) == ("off", "3", environment["SYNERGY_FOLDER"])
    assert environment["PATH"].startswith(f"{own}/bin:/usr/bin")
    # The controller's torchrun is found, after everything else.
    assert seen["torchrun"] == str(folder.joinpath(PYTHON).parent / "torchrun")
    assert environment["SYNERGY_RESTART_COUNT"] == "0"
    token = next(folder.glob("r/**/token")).read_text().strip()
    assert not {"of-another-controller", token} & set(environment.values())
    assert not {*THREADS, *OF_A_STEP, "SYNERGY_PYTHONPATH"} & set(environment)
    assert environment["SLURM_JOB_ID"] == "7"


def test_training_below_a_shell_saves_when_it_is_moved_cancelled_or_out_of_time(jobs):
    again = {"resume_command": [PYTHON, "saves.py", "0", "0", "again"], "resume_if": "saves.py"}
    jobs.submit("moved", command=shell(0.3, 1), exit_0_when_stopped="paused", **again)
    jobs.until_said("moved", "start 0 0.3 1")
    jobs.submit("urgent", **URGENT)
    jobs.until("urgent", "done")
    jobs.until_said("moved", "start 1 0 0 again")
    answer("cancel", "moved", "--dir", jobs.service.results)
    jobs.submit("limited", command=shell(0.3, 0, trap="trap 'echo trapped' TERM"), max_seconds=1.5)
    assert "max_seconds=1.5" in jobs.until("limited", "failed")["reason"]
    for name, times in (("moved", 2), ("limited", 1)):
        jobs.service.until(
            lambda name=name, times=times: jobs.log(name).count("saved with a loader that lives: True") == times, 30
        )


def test_script_that_finishes_while_it_is_stopped_is_done(jobs):
    jobs.submit("finishes", command=[PYTHON, "finishes.py"])
    jobs.submit("pauses", command=[PYTHON, "finishes.py"], exit_0_when_stopped="paused")
    for name in ("finishes", "pauses"):
        jobs.until_said(name, "trains")
    jobs.submit("urgent-2", **URGENT)
    jobs.until("urgent-2", "done")
    assert jobs.until("finishes", "done")["restarts"] == 0
    assert "SIGTERM" in jobs.until("finishes", "done")["note"]
    jobs.service.until(lambda: jobs.log("pauses").count("trains") == 2, 30)
    answer("cancel", "pauses", "--dir", jobs.service.results)
    answer("retry", "finishes", "--dir", jobs.service.results)  # if it was not done after all
    jobs.service.until(lambda: jobs.log("finishes").count("trains") == 2, 30)
    answer("cancel", "finishes", "--dir", jobs.service.results)


def test_script_that_saves_when_it_is_stopped_and_leaves_with_0_goes_on(jobs):
    jobs.submit("steps", command=[PYTHON, "steps.py", "{folder}/saved"])
    jobs.until_said("steps", "from 0")
    jobs.submit("urgent-3", **URGENT)
    jobs.until("urgent-3", "done")
    jobs.until("steps", "done")
    assert [jobs.log("steps").count(each) for each in ("saved", "from 0", "all 30 steps")] == [1, 1, 1]


def test_script_that_says_that_it_leaves_at_sigterm_goes_on_though_it_saved_nothing(jobs):
    """Lightning ends a training with exit code 0 at SIGTERM, and by itself it saves nothing."""
    jobs.submit("leaves", command=[PYTHON, "leaves.py"])
    jobs.until_said("leaves", "start 0")
    jobs.submit("urgent-4", **URGENT)
    jobs.until("urgent-4", "done")
    jobs.until("leaves", "done")
    assert [jobs.log("leaves").count(each) for each in ("start 0", "start 1")] == [1, 1]


def test_launcher_that_passes_the_signal_on_may_hear_it_alone(jobs):
    jobs.submit("forwards", command=[PYTHON, "forwards.py"], sigterm_to="first")
    jobs.until_said("forwards", "ready")
    answer("cancel", "forwards", "--dir", jobs.service.results)
    jobs.service.until(lambda: "heard 1" in jobs.log("forwards"), 30)


def test_hung_ranks_are_found_by_their_steps_and_show_where_they_stand(jobs, folder):
    python = str(folder / "own" / "bin" / "python")
    jobs.submit("hangs", command=[python, "ranks.py"], hang_s=1)
    job = jobs.until("hangs", "failed")
    assert "it hung twice after step 3" in job["reason"]
    assert "waits_for_ever" in job["reason"]
    log = jobs.log("hangs")
    for rank in (0, 1):
        stack = log.rpartition(f"rank {rank} stands at:\n")[2].partition("stands at:")[0]
        assert "in waits_for_ever" in stack


def test_command_is_tried_again_after_the_exit_codes_that_its_job_file_names(jobs):
    again = {"retries": 2, "retry_exit_codes": [3]}
    jobs.submit("recovers", command=[PYTHON, "-c", FAILS, "3"], **again)
    jobs.submit("gives-up", command=[PYTHON, "-c", FAILS, "4"], **again)
    assert "exit code 4" in jobs.until("gives-up", "failed")["reason"]
    assert jobs.until("recovers", "done")["restarts"] == 2


def test_exit_0_without_a_step_is_noted_with_the_last_line_of_the_log(jobs):
    jobs.submit("early", command=["bash", "-c", "echo Unable to locate 2 gpus"], work=100)
    jobs.submit("silent", command=["bash", "-c", "echo nothing was declared"])
    jobs.submit("as-declared", command=["bash", "-c", "sleep 1"], work=2)
    assert "Unable to locate 2 gpus" in jobs.until("early", "done")["note"]
    for name in ("silent", "as-declared"):
        assert not jobs.until(name, "done")["note"]


def test_commands_on_one_node_meet_at_different_ports_of_the_range(jobs):
    for name in ("one", "two"):
        jobs.submit(name, command=["bash", "-c", "echo at $MASTER_ADDR:$MASTER_PORT; sleep 60"])
    for name in ("one", "two"):  # a port that the first gives back may be the second's
        jobs.until_said(name, "at ")
    for name in ("one", "two"):
        answer("cancel", name, "--dir", jobs.service.results)
    found = {re.search(r"at 127.0.0.1:(\d+)", jobs.log(name))[1] for name in ("one", "two")}
    assert found == {"23100", "23101"}


def test_missing_folders_are_named_when_a_command_is_submitted(jobs, folder):
    for given in ({"directory": "not/there"}, {"venv": "mine"}, {"conda": "not/there"}, {"conda": "nobodys"}):
        (folder / "lost.yaml").write_text(json.dumps({"command": ["true"], **given}))
        ended = typed("submit", folder / "lost.yaml", "--dir", jobs.service.results)
        assert ended.returncode == 2
        ((name, place),) = given.items()
        assert name in ended.stderr
        assert place in ended.stderr


def test_ctrl_c_leaves_each_command_its_grace_and_a_second_one_shortens_it(jobs):
    """The last test of this service."""
    jobs.submit("slow-save", command=shell(17, 1), grace_s=60, resume_command=[PYTHON, "saves.py", "0", "1"])
    jobs.until_said("slow-save", "start")
    assert jobs.service.leave() == 130
    assert "saved with a loader that lives: True" in jobs.log("slow-save")
    jobs.service.start(*SERVE, f"results_dir={jobs.service.results}", "ports=23100-23101")
    jobs.until_said("slow-save", "start 1")
    assert jobs.service.jobs()["slow-save"]["stopped"]["kind"] == "CONTROLLER_ENDED"
    answer("cancel", "slow-save", "--dir", jobs.service.results)
    jobs.submit(
        "stubborn", command=["bash", "-c", "trap '' TERM; echo deaf; while true; do sleep 1; done"], grace_s=600
    )
    jobs.service.until(lambda: "deaf" in jobs.log("stubborn"))
    said = jobs.service.said
    jobs.service._process.send_signal(signal.SIGINT)
    jobs.service.until(lambda: said.read_text().count("another Ctrl-C") == 2, 30)
    assert jobs.service.leave() == 130
    assert "interrupted again" in said.read_text()


def test_only_a_reported_step_counts_as_progress(tmp_path):
    stage = staged(tmp_path, "fifo")
    (job,) = stage.submit(1e9)
    stage.advance(0.0, 1.0)
    report = stage.agents[0].pass_time(stage.now_s)[-1]
    stage.heard(0, report)
    stage.now_s, moved_s = stage.now_s + 50.0, job.moved_s
    stage.heard(0, report)
    assert job.moved_s == moved_s
    assert stage.now_s - job.moved_s >= 50.0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "train.py", "--lr", "0.1"], "train.py"),
        (["bash", "jobs/run.sh", "a.yaml"], "run.sh"),
        (["torchrun", "-m", "mine.train", "3"], "mine.train"),
        (["/opt/bin/solve", "7"], "solve"),
        (["bash", "-c", "python train.py"], "bash"),
    ],
)
def test_command_is_named_after_its_script(words, name):
    assert job_of({"command": words}, "the job").name == name


def test_conda_environment_is_found_by_its_name(tmp_path, monkeypatch):
    for program in ("bin/conda", "envs/vision/bin/python"):
        (tmp_path / program).parent.mkdir(parents=True)
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "job.yaml").write_text("command: [python, train.py]\nconda: vision\n")
    assert read_job_file(tmp_path / "job.yaml").command.conda == str(tmp_path / "envs" / "vision")


def test_words_may_be_empty_and_of_several_lines_and_gpus_are_slots():
    words = ["bash", "-c", "set -e\n\tpython train.py\n", ""]
    job = job_of({"command": words, "gpus": 2}, "the job")
    assert (job.command.words, job.slots) == (words, 2)
    assert job_of(job.values(), "again") == job


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gpus": 2, "slots": 2}, "another name of slots"),
        ({"env": {"SYNERGY_SLOTS": "9"}}, "set for each run"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0"}}, "set for each run"),
        ({"env": {"DEBUG": True}}, "in quotes"),
        ({"venv": "a", "conda": "b"}, "one environment"),
        ({"sigterm_to": "last"}, "Known: all, first"),
    ],
)
def test_job_files_that_contradict_themselves_are_refused(given, says):
    refuses(says, job_of, {"command": ["a"], **given}, "the job")
