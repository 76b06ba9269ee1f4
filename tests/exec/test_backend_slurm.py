from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from backends_controller import TOKEN, Controller

from synergy_core.errors import InputError
from synergy_exec.backends import get_backend, slurm
from synergy_exec.backends._agents import AgentPlace
from synergy_exec.messages import Shutdown

HELLO_S = 90.0
"""An agent imports torch first, on a busy machine."""

SCONTROL = """#!/bin/sh
case "$1 $2 $3" in
    "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
    "show hostnames "*) echo "$3" ;;
    "show job --details") cat "{folder}/job" ;;
    *) echo "what is $*" >&2; exit 1 ;;
esac
"""
# As srun does: its own options first, a signal passed on, the task's exit code its own.
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/srun-$$"
env > "{folder}/environment-$$"
while [ "${{1#--}}" != "$1" ]; do shift; done
"$@" &
task=$!
trap 'kill -TERM $task' TERM
wait $task
code=$?
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""
CPU_JOB = "JobId=7 JobName=x\n   JOB_GRES=(null)\n     Nodes=n[1-2] CPU_IDs=0-1 Mem=100 GRES=\n"
GPU_JOB = """JobId=7 JobName=x
   JOB_GRES=gpu:a100:6
     Nodes=n1 CPU_IDs=0-1 Mem=100 GRES=gpu:a100:4(IDX:0,2,4,6)
     Nodes=n2 CPU_IDs=0-1 Mem=100 GRES=gpu:a100:2(IDX:0-1)
"""


@pytest.fixture
def allocation(tmp_path, monkeypatch) -> Path:
    """Of nodes n1 and n2 with 2 CPUs each; `job` in the folder is what scontrol says of it."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, text in {"scontrol": SCONTROL, "srun": SRUN}.items():
        (folder / name).write_text(text.format(folder=folder))
        (folder / name).chmod(0o755)
    (folder / "job").write_text(CPU_JOB)
    for name in [each for each in os.environ if each.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "2(x2)")
    return folder


@pytest.mark.usefixtures("allocation")
def test_cpus_of_every_node_are_slots():
    assert get_backend("slurm", {}).places == [AgentPlace("n1", 2, "cpu"), AgentPlace("n2", 2, "cpu")]
    assert get_backend("slurm", {"slots": 1}).places == [AgentPlace("n1", 1, "cpu"), AgentPlace("n2", 1, "cpu")]


@pytest.mark.usefixtures("allocation")
def test_nodes_may_have_different_numbers_of_cpus(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "16,8")
    assert [place.slots for place in get_backend("slurm", {}).places] == [16, 8]


def test_gpus_of_every_node_are_slots(allocation):
    (allocation / "job").write_text(GPU_JOB)
    assert get_backend("slurm", {}).places == [AgentPlace("n1", 4, "a100"), AgentPlace("n2", 2, "a100")]
    assert get_backend("slurm", {"gpu_type": "a100-80gb"}).places[1] == AgentPlace("n2", 2, "a100-80gb")
    with pytest.raises(InputError, match=r"slots=4, but n2 has 2 GPUs in this allocation"):
        get_backend("slurm", {"slots": 4})


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("gpu:3(IDX:0-2)", {"n1": ("gpu", 3)}),
        ("gpu:v100:2(IDX:0-1),shard:4", {"n1": ("v100", 2)}),
        ("gpu:v100:1(IDX:0),gpu:v100:1(IDX:1)", {"n1": ("v100", 2)}),
        ("", {}),
        ("shard:2(IDX:0)", {}),
    ],
)
@pytest.mark.usefixtures("allocation")
def test_numbers_of_gpus_are_read_from_what_scontrol_says(resources, expected):
    assert slurm.gpus_of(f"JobId=7\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES={resources}\n   Power=\n") == expected


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (GPU_JOB.replace("GRES=gpu:a100:2(IDX:0-1)", "GRES="), r"n2 has no GPU in this allocation, other nodes have"),
        (GPU_JOB.replace("a100:2(IDX:0-1)", "a100:1(IDX:0),gpu:v100:1(IDX:1)"), r"n2: GPUs of several types"),
        ("JobId=7\n", r"job 7 has GPUs, but `scontrol show job --details 7` does not say how many on which node"),
    ],
)
def test_gpus_that_cannot_be_slots_are_refused(allocation, monkeypatch, job, message):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    (allocation / "job").write_text(job)
    with pytest.raises(InputError, match=message):
        get_backend("slurm", {})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SLURM_JOB_ID", None, r"no Slurm allocation .* Type `salloc --nodes=2"),
        ("SLURM_JOB_NUM_NODES", "3", r"SLURM_JOB_NUM_NODES=3, but n\[1-2\] are 2 nodes"),
        ("SLURM_JOB_CPUS_PER_NODE", "2", r"SLURM_JOB_CPUS_PER_NODE='2' does not say what 2 nodes have"),
        ("SLURM_JOB_CPUS_PER_NODE", "2(x2", r"does not say what 2 nodes have"),
        ("PATH", "", r"no scontrol on the PATH"),
    ],
)
@pytest.mark.usefixtures("allocation")
def test_an_odd_environment_is_an_error_that_says_what_to_do(monkeypatch, name, value, message):
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        get_backend("slurm", {})


@pytest.mark.usefixtures("allocation")
def test_a_controller_on_loopback_is_refused(tmp_path):
    controller = Controller(tmp_path)
    with controller, pytest.raises(InputError, match=r"which n1 cannot reach\. Start it with host=ADDRESS"):
        asyncio.run(get_backend("slurm", {}).start(0, controller.meeting))


def test_agents_in_steps_dial_in_are_noticed_when_lost_start_again_and_leave(allocation, tmp_path, monkeypatch):
    # Both nodes are this machine.
    monkeypatch.setattr(slurm, "_here", lambda: {"n1", "n2"})
    for name in ("SLURM_NTASKS", "SLURM_GPUS", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_CPU"):
        monkeypatch.setenv(name, "4")
    backend = get_backend("slurm", {"slots": 1})
    with Controller(tmp_path) as controller:
        try:
            for node in range(2):
                asyncio.run(backend.start(node, controller.meeting))
            controller.wait(lambda: len(controller.hellos) == 2, HELLO_S)
            assert [controller.hellos[node].slots for node in range(2)] == [1, 1]
            assert backend.lost() == {}
            os.kill(controller.hellos[1].pid, signal.SIGKILL)
            until_s = time.monotonic() + 10.0
            while not (lost := backend.lost()):
                assert time.monotonic() < until_s
                time.sleep(0.05)
            assert list(lost) == [1]
            assert lost[1].startswith("n2: agent left with exit code 137; ")
            controller.wait(lambda: 1 not in controller.hellos, 10.0)
            asyncio.run(backend.start(1, controller.meeting))
            controller.wait(lambda: 1 in controller.hellos, HELLO_S)
            agents = [hello.pid for hello in controller.hellos.values()]
            for node in range(2):
                controller.say(node, Shutdown())
        finally:
            asyncio.run(backend.stop())
        assert not any(Path(f"/proc/{pid}").exists() for pid in agents)
    commands = sorted(path.read_text().splitlines() for path in allocation.glob("srun-*"))
    assert len(commands) == 3
    assert commands[0] == [
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=n1",
        "--export=ALL",
        "--overlap",
        "--kill-on-bad-exit=0",
        "--mem=0",
        "--cpu-bind=none",
        sys.executable,
        "-m",
        "synergy_exec.agent",
        f"--url={controller.meeting.url}",
        "--node=0",
        "--slots=1",
        "--gpu-type=cpu",
    ]
    for environment in (path.read_text() for path in allocation.glob("environment-*")):
        assert f"SYNERGY_TOKEN={TOKEN}\n" in environment
        assert "SLURM_JOB_ID=7\n" in environment
        assert not any(f"{name}=" in environment for name in ("TASKS", "SLURM_GPUS", "CPUS_PER_TASK", "MEM_PER_CPU"))


def test_a_step_on_gpus_asks_for_those_of_its_node():
    assert "--gpus-per-node=4" in slurm._srun(AgentPlace("n1", 4, "a100"))


def test_a_step_that_cannot_start_says_why(allocation, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_here", lambda: {"n1", "n2"})
    (allocation / "srun").write_text("#!/bin/sh\necho 'srun: error: Unable to create step' >&2\nexit 1\n")
    backend = get_backend("slurm", {})
    with Controller(tmp_path) as controller:
        asyncio.run(backend.start(0, controller.meeting))
        until_s = time.monotonic() + 10.0
        while not backend.lost():
            assert time.monotonic() < until_s
            time.sleep(0.05)
    assert backend.lost()[0].endswith("agent-0.txt ends in:\nsrun: error: Unable to create step")
    asyncio.run(backend.stop())


def test_the_script_for_sbatch():
    text = slurm.script(
        ["python", "-m", "synergy_exec", "+trace=demo", "results_dir=my results"],
        nodes=2,
        cpus_per_node=16,
        gpus_per_node=4,
        time="12:00:00",
        options={"partition": "gpu", "exclusive": ""},
    )
    head, _, body = text.partition("\n\n")
    assert head.splitlines() == [
        "#!/bin/bash",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --signal=B:TERM@120",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --time=12:00:00",
        "#SBATCH --partition=gpu",
        "#SBATCH --exclusive",
    ]
    assert body.splitlines()[0] == (
        "python -m synergy_exec +trace=demo 'results_dir=my results' backend.name=slurm \"host=$(hostname -f)\" &"
    )


def test_the_page_shows_the_script_as_it_is_written():
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    command = ["python", "-m", "synergy_exec", "+trace=demo", "results_dir=results"]
    assert slurm.script(command, nodes=2, cpus_per_node=32, gpus_per_node=4, time="12:00:00") in page


@pytest.mark.parametrize("options", [{"wrap": "rm -r x"}, {"x\n": ""}, {"partition": "a\necho"}])
def test_options_that_would_be_more_than_one_are_refused(options):
    with pytest.raises(InputError, match="no option of sbatch"):
        slurm.script(["python"], nodes=1, cpus_per_node=1, options=options)


def test_the_script_passes_sigterm_on_and_leaves_with_the_controllers_exit_code(tmp_path):
    saving = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.3), print('saved'), sys.exit(3)))\n"
    saving += "print(*sys.argv[1:], flush=True)\ntime.sleep(60)"
    text = slurm.script([sys.executable, "-c", saving], nodes=1, cpus_per_node=1)
    # `hostname` need not be installed here.
    hostname = tmp_path / "hostname"
    hostname.write_text(f"#!/bin/sh\necho {socket.gethostname()}\n")
    hostname.chmod(0o755)
    (tmp_path / "script").write_text(text)
    path = f"{tmp_path}:{os.environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", tmp_path / "script"], stdout=subprocess.PIPE, text=True, env=os.environ | {"PATH": path}
    )
    with shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == f"backend.name=slurm host={socket.gethostname()}\n"
        shell.terminate()
        assert shell.stdout.read() == "saved\n"
    assert shell.returncode == 3
