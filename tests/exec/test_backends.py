"""Agents as steps of an allocation of Slurm or as actors of Ray: what is given, how they come, go and are lost."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from exec.pretended import refuses
from exec.real import AGENT_S, JOBS, TOKEN, Controller, asked, descendants, wait_until

from synergy_core.errors import InputError
from synergy_exec.backends import Meeting, _agents, backend_names, get_backend, slurm
from synergy_exec.backends._agents import AgentPlace, require_reachable
from synergy_exec.backends.ray import bundles_of
from synergy_exec.commands import sbatch
from synergy_exec.messages import Ended, Report
from synergy_exec.worker import processes
from synergy_exec.worker.network import addresses

SCONTROL = """#!/bin/sh
case "$1 $2 $3" in
    "show hostnames n[1-2]") printf 'n1\\nn2\\n' ;;
    "show hostnames "*) echo "$3" ;;
    "show job --details") cat "{folder}/job" ;;
    *) echo "what is $*" >&2; exit 1 ;;
esac
"""
# One that notes what it was given, and cannot start a step.
SRUN = """#!/bin/sh
printf '%s\\n' "$@" > "{folder}/srun-words"
env > "{folder}/srun-environment"
echo 'srun: error: Unable to create step' >&2
exit 1
"""
CPU_JOB = "JobId=7 JobName=x\n   JOB_GRES=(null)\n     Nodes=n[1-2] CPU_IDs=0-1 Mem=100 GRES=\n"
GPU_JOB = """JobId=7 JobName=x
   JOB_GRES=gpu:a100:6
     Nodes=n1 CPU_IDs=0-1 Mem=100 GRES=gpu:a100:4(IDX:0,2,4,6)
     Nodes=n2 CPU_IDs=0-1 Mem=100 GRES=gpu:a100:2(IDX:0-1)
"""


@pytest.fixture
def allocation(tmp_path, monkeypatch):
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
def test_cpus_of_every_node_are_slots(monkeypatch):
    assert get_backend("slurm", {}).places == [AgentPlace("n1", 2, "cpu"), AgentPlace("n2", 2, "cpu")]
    assert get_backend("slurm", {"slots": 1}).places == [AgentPlace("n1", 1, "cpu"), AgentPlace("n2", 1, "cpu")]
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "16,8")
    assert [place.slots for place in get_backend("slurm", {}).places] == [16, 8]


def test_gpus_of_every_node_are_slots(allocation):
    (allocation / "job").write_text(GPU_JOB)
    assert get_backend("slurm", {}).places == [AgentPlace("n1", 4, "a100"), AgentPlace("n2", 2, "a100")]
    assert get_backend("slurm", {"gpu_type": "a100-80gb"}).places[1] == AgentPlace("n2", 2, "a100-80gb")
    refuses(r"slots=4, but n2 has 2 GPUs in this allocation", get_backend, "slurm", {"slots": 4})
    assert "--gpus-per-node=4" in slurm._srun(AgentPlace("n1", 4, "a100"))


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
    ("name", "value", "message"),
    [
        ("job", GPU_JOB.replace("gpu:a100:2(IDX:0-1)", ""), r"n2 has no GPU in this allocation, other nodes have"),
        ("job", GPU_JOB.replace("2(IDX:0-1)", "1(IDX:0),gpu:v100:1(IDX:1)"), r"n2: GPUs of several types"),
        ("SLURM_GPUS_ON_NODE", "4", r"7 has GPUs, but `scontrol show job --details 7` does not say how many on which"),
        ("SLURM_JOB_ID", None, r"no Slurm allocation .* Type `salloc --nodes=2"),
        ("SLURM_JOB_NUM_NODES", "3", r"SLURM_JOB_NUM_NODES=3, but n\[1-2\] are 2 nodes"),
        ("SLURM_JOB_CPUS_PER_NODE", "2", r"SLURM_JOB_CPUS_PER_NODE='2' does not say what 2 nodes have"),
        ("SLURM_JOB_CPUS_PER_NODE", "2(x2", r"does not say what 2 nodes have"),
        ("PATH", "", r"no scontrol on the PATH"),
    ],
)
def test_an_odd_allocation_is_an_error_that_says_what_to_do(allocation, monkeypatch, name, value, message):
    """name: of a variable, or the job as scontrol shows it."""
    if name == "job":
        (allocation / "job").write_text(value)
    elif value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    refuses(message, get_backend, "slurm", {})


@pytest.mark.usefixtures("allocation")
def test_a_controller_on_loopback_is_refused(tmp_path):
    starting = get_backend("slurm", {}).start(0, Meeting(url="http://127.0.0.1:1", token=TOKEN, folder=tmp_path))
    refuses(r"which n1 cannot reach\. Start it with host=ADDRESS", asyncio.run, starting)


def test_a_step_has_its_nodes_options_the_token_in_its_environment_and_says_why_it_cannot_start(
    allocation, tmp_path, monkeypatch
):
    # Both nodes are this machine.
    monkeypatch.setattr(slurm, "_here", lambda: {"n1", "n2"})
    for name in ("SLURM_NTASKS", "SLURM_GPUS", "SRUN_CPUS_PER_TASK", "SLURM_MEM_PER_CPU", "SLURM_GPU_BIND"):
        monkeypatch.setenv(name, "4")
    backend, meeting = get_backend("slurm", {"slots": 1}), Meeting(url="http://n1:1", token=TOKEN, folder=tmp_path)
    asyncio.run(backend.start(0, meeting))
    wait_until(backend.lost, 10.0)
    assert backend.lost()[0].startswith("n1: agent left with exit code 1")
    assert backend.lost()[0].endswith("agent-0.txt ends in:\nsrun: error: Unable to create step")
    asyncio.run(backend.stop())
    step = "--nodes=1 --ntasks=1 --nodelist=n1 --export=ALL --overlap --kill-on-bad-exit=0 --mem=0 --cpu-bind=none"
    agent = f"-m synergy_exec.agent --url={meeting.url} --node=0 --slots=1 --gpu-type=cpu"
    assert (allocation / "srun-words").read_text().splitlines() == [*step.split(), sys.executable, *agent.split()]
    environment = (allocation / "srun-environment").read_text()
    assert f"SYNERGY_TOKEN={TOKEN}\n" in environment
    assert "SLURM_JOB_ID=7\n" in environment
    assert not any(
        f"{name}=" in environment for name in ("TASKS", "SLURM_GPUS", "CPUS_PER_TASK", "MEM_PER_CPU", "GPU_BIND")
    )


def test_a_step_that_still_saves_is_waited_for_before_any_signal(allocation, tmp_path, monkeypatch):
    # At SIGTERM Slurm kills the whole step.
    monkeypatch.setattr(slurm, "_here", lambda: {"n1", "n2"})
    (allocation / "srun").write_text("#!/bin/sh\ntrap 'echo killed; exit 1' TERM\necho saving\nsleep 1\necho saved\n")
    backend, log = get_backend("slurm", {"slots": 1}), tmp_path / "agent-0.txt"
    asyncio.run(backend.start(0, Meeting(url="http://n1:1", token=TOKEN, folder=tmp_path)))
    wait_until(lambda: log.read_text() == "saving\n", 10.0)
    asyncio.run(backend.stop())
    assert log.read_text() == "saving\nsaved\n"


def test_a_stopped_process_of_a_killed_agent_is_not_left(tmp_path):
    log = tmp_path / "agent-0.txt"
    agent = _agents.started(["sh", "-c", "sleep 1000 & echo $!; wait"], os.environ, log)
    wait_until(lambda: log.read_text().endswith("\n"), 10.0)
    left = int(log.read_text())
    os.kill(left, signal.SIGSTOP)
    agent.kill()
    _agents.end(agent)
    wait_until(lambda: processes.began(left) == 0, 10.0)


def script_of(capsys, *words):
    sbatch.main([*words])
    return capsys.readouterr().out


def test_the_script_for_sbatch(capsys):
    options = ["--nodes=2", "--cpus-per-task=16", "--partition=gpu", "--exclusive"]
    head, _, body = script_of(capsys, *options, "--", "+trace=demo", "results_dir=my results").partition("\n\n")
    asked = [*options, "--ntasks-per-node=1", "--signal=B:TERM@120"]
    assert head.splitlines() == ["#!/bin/bash", *(f"#SBATCH {each}" for each in asked)]
    assert body.splitlines()[0] == (
        f"{sys.executable} -m synergy_exec +trace=demo 'results_dir=my results' "
        'backend.name=slurm "host=$(hostname -f)" &'
    )


@pytest.mark.parametrize("option", ["--wrap=rm -r x", "--x\n", "--partition=a\necho", "-N2"])
def test_options_that_would_be_more_than_one_are_refused(option):
    refuses("no option of sbatch", sbatch.main, [option, "--", "serve=true"])


def test_the_script_passes_sigterm_on_and_leaves_with_the_controllers_exit_code(tmp_path, capsys):
    saving = "import signal, sys, time\nsignal.signal(15, lambda *_: (time.sleep(0.3), print('saved'), sys.exit(3)))\n"
    saving += "print(*sys.argv[1:], flush=True)\ntime.sleep(60)"
    program = shlex.join([sys.executable, "-c", saving])
    text = script_of(capsys, "--", "serve=true").replace(f"{sys.executable} -m synergy_exec serve=true", program)
    # `hostname` need not be installed here.
    hostname = tmp_path / "hostname"
    hostname.write_text(f"#!/bin/sh\necho {socket.gethostname()}\n")
    hostname.chmod(0o755)
    (tmp_path / "script").write_text(text)
    path = f"{tmp_path}:{os.environ['PATH']}"
    given = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | {"PATH": path}}
    with subprocess.Popen(["bash", tmp_path / "script"], **given) as shell:
        assert shell.stdout.readline() == f"backend.name=slurm host={socket.gethostname()}\n"
        shell.terminate()
        assert shell.stdout.read() == "saved\n"
    assert shell.returncode == 3


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_refuses_options_that_it_does_not_have(name):
    refuses(f"unknown option of backend {name} 'none_such'", get_backend, name, {"none_such": 1})


@pytest.mark.parametrize("options", [{"nodes": 0}, {"slots": -1}])
@pytest.mark.parametrize("name", ["local", "ray"])
def test_backends_want_a_node_and_a_slot(name, options):
    refuses("write numbers from 1", get_backend, name, options)


NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol", "sinfo", "squeue")
READY_S = 60.0
CONFIGURATION = """ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> list[str]:
    paths = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    return [each for each in NEEDED if shutil.which(each, path=paths) is None]


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[dict[str, str]]:
    """The environment in which Slurm's commands speak to it: nodes n1 and n2 of one CPU each, both this machine."""
    with contextlib.ExitStack() as ends:
        # Not pytest's own: names of sockets have at most 107 characters, and munge wants a folder that all may enter.
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        folder.chmod(0o755)
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
        environment = os.environ | {"PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
        text = CONFIGURATION.format(folder=folder, user=getpass.getuser(), host=socket.gethostname(), ports=_ports(3))
        (folder / "slurm.conf").write_text(text)
        for each in ("state", "spool-n1", "spool-n2"):
            (folder / each).mkdir()
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o400)
        munge = ["munged", "--foreground", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
        munge += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")]
        for command in (munge, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
            ends.enter_context(_daemon(command, environment, folder))
            if command is munge:
                wait_until((folder / "munge.socket").exists, READY_S, lambda: (folder / "munged.txt").read_text())

        def said():
            return "\n".join(each.read_text()[-1000:] for each in folder.glob("*.log"))

        wait_until(lambda: slurms(environment, "sinfo", "--noheader", "--format=%T %D") == "idle 2", READY_S, said)
        yield environment


def slurms(environment: dict[str, str], *command: str) -> str:
    """The output of a Slurm command; "" if Slurm's controller does not answer."""
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=READY_S)
    return answer.stdout.strip()


@contextlib.contextmanager
def _daemon(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.txt").open("ab") as output:
        daemon = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        yield
    finally:
        daemon.terminate()
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _ports(number: int) -> list[int]:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in taken]


ADDRESS = next((str(each) for _, each in addresses() if not (each.is_loopback or each.is_link_local)), "")
LONG_S = 150.0
"""Two agents import torch on a machine that does other things too."""


class Submitted:
    """The script that docs/backends.md shows, submitted as often as need be."""

    def __init__(self, folder, environment, *keys):
        self.folder = folder
        command = [sys.executable, "-m", "synergy_exec", "sbatch", "--nodes=2", "--cpus-per-task=1", "--", *keys]
        command += ["profile=null", "figures=false", f"results_dir={folder}/results"]
        (folder / "script").write_text(subprocess.check_output(command, text=True))
        # The script asks for this machine's name, which may mean 127.0.0.1 here.
        (folder / "hostname").write_text(f"#!/bin/sh\necho {ADDRESS}\n")
        (folder / "hostname").chmod(0o755)
        self.environment = environment | {"PATH": f"{folder}:{environment['PATH']}"}

    def submit(self):
        output = f"--output={self.folder}/said.txt"
        command = ["sbatch", "--parsable", "--open-mode=append", output, str(self.folder / "script")]
        return subprocess.check_output(command, env=self.environment, text=True, timeout=30).strip()

    def ask(self, method, path, body=None):
        return asked(self.folder / "results", method, path, body)

    def until(self, such):
        return wait_until(such, LONG_S, self.told)

    def told(self):
        logs = [self.folder / "said.txt", *(self.folder / "results").rglob("*.txt")]
        return "\n".join(f"{log}:\n{log.read_text()[-2000:]}" for log in logs if log.exists())


@pytest.mark.skipif(bool(lacking()), reason=f"Slurm is not installed here: no {', '.join(lacking())}")
@pytest.mark.skipif(not ADDRESS, reason="this machine has no address but loopback, which nodes cannot share")
def test_a_service_saves_when_its_time_is_up_goes_on_and_does_without_a_node(tmp_path, slurm_cluster):
    service = Submitted(tmp_path, slurm_cluster, "serve=true", "policy=fifo", "checkpoint_interval_s=1000")
    first = service.submit()
    body = {"class": f"{JOBS}:Plain", "arguments": {"pause_s": 0.01}, "name": "over-two-nodes"}
    body |= {"initial_batch": 4, "work": 1e6, "slots": 2}
    service.until(lambda: service.ask("GET", "/state"))
    assert service.ask("POST", "/jobs", body) is not None

    def job():
        return (service.ask("GET", "/jobs") or [{}])[0]

    assert service.until(lambda: job().get("step", 0) > 20)
    # As Slurm does two minutes before the time is up.
    slurms(service.environment, "scancel", "--signal=TERM", "--batch", first)
    service.until(lambda: not slurms(service.environment, "squeue", "--noheader"))
    (saved,) = (tmp_path / "results").rglob("progress.json")
    assert json.loads(saved.read_text())["progress"]["step"] > 20
    assert "Killed" not in service.told()
    second = service.submit()
    service.until(lambda: job().get("step", 0) > json.loads(saved.read_text())["progress"]["step"])
    service.ask("DELETE", "/jobs/over-two-nodes")
    # A job step of the other node cannot be had any more.
    slurms(service.environment, "scontrol", "update", f"JobId={second}", "NumNodes=1")
    for name in ("one", "other"):
        assert service.ask("POST", "/jobs", {**body, "name": name, "slots": 1, "work": 20}) is not None
    service.until(lambda: [each["state"] for each in service.ask("GET", "/jobs")] == ["cancelled", "done", "done"])
    service.until(lambda: ["node 1" in each for each in service.ask("GET", "/state")["aside"]] == [True])
    slurms(service.environment, "scancel", "--signal=TERM", "--batch", second)
    service.until(lambda: not slurms(service.environment, "squeue", "--noheader"))
    assert json.loads((tmp_path / "results" / "served" / "latest" / "fifo-0" / "summary.json").read_text())["jobs"] == 3


DETECTION_S = 10.0
SMALL = {"object_store_memory": 80 * 2**20}
HEAD = {
    "num_cpus": 0,
    "include_dashboard": False,
    # By default Ray takes some 15 s to call a node dead; a busy one still gets as long as that.
    "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
    **SMALL,
}


def there(*resources):
    return [{"Alive": True, "Resources": each} for each in resources]


A100 = {"GPU": 4, "CPU": 2, "accelerator_type:A100": 1}
V100 = {"GPU": 2, "CPU": 16, "accelerator_type:V100": 1}
DEAD = {"Alive": False, "Resources": {"CPU": 64}}


@pytest.mark.parametrize(
    ("nodes", "asked", "bundles"),
    [
        # All GPUs of all nodes, the most first, and of their type; CPUs are slots where no node has GPUs.
        (
            there({"CPU": 8}, V100, A100),
            (None, None),
            [A100 | {"accelerator_type:A100": 0.001}, V100 | {"CPU": 2, "accelerator_type:V100": 0.001}],
        ),
        (there({"CPU": 2}, {}, {"CPU": 8}), (None, None), [{"CPU": 8}, {"CPU": 2}]),
        # Dead nodes and small ones are passed over.
        ([*there({"CPU": 2}, {"CPU": 4}), DEAD], (1, 3), [{"CPU": 3}]),
    ],
)
def test_slots_are_gpus_or_else_cpus_of_nodes_that_live(nodes, asked, bundles):
    assert bundles_of(nodes, *asked) == bundles


def test_what_cannot_be_had_is_an_error_that_says_what_there_is():
    with pytest.raises(InputError, match=r"1 nodes have 3 CPUs or more, 2 are asked for; .* have 2, 4\."):
        bundles_of(there({"CPU": 2}, {"CPU": 4}), 2, 3)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_a_controller_on_loopback_is_refused_by_nodes_elsewhere(name):
    with pytest.raises(InputError, match=r"which b cannot reach\. Start it with host=ADDRESS"):
        require_reachable(f"http://{name}:80", ["a", "b"], {"a"})
    require_reachable(f"http://{name}:80", ["a"], {"a"})
    require_reachable("http://10.0.0.1:80", ["a", "b"], {"a"})


def test_a_missing_ray_says_what_to_type(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refuses(r"pip install 'synergy-cluster\[ray\]'", get_backend, "ray", {})


@pytest.fixture
def ray_cluster():
    """A head without CPUs and two nodes of one, all on this machine; none of their processes outlives it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'synergy-cluster[ray]'")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, **SMALL)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.thorough
def test_jobs_of_a_trace_end_on_two_nodes_of_ray(ray_cluster, tmp_path):
    (tmp_path / "jobs.csv").write_text("submit_s,model,iterations,job,gpus\n0,cnn,10,a,1\n0.1,cnn,10,b,2\n")
    keys = ["backend.name=ray", f"backend.options.address={ray_cluster.address}", f"results_dir={tmp_path}"]
    keys += ["+trace=file", f"trace.path={tmp_path / 'jobs.csv'}", "policy=[fifo]", "profile=null", "figures=false"]
    subprocess.run([sys.executable, "-m", "synergy_exec", *keys], check=True, timeout=LONG_S)
    (summary,) = tmp_path.glob("file/2*/fifo-0/summary.json")
    values = json.loads(summary.read_text())
    assert (values["jobs"], values["jobs_failed"], values["jobs_unfinished"]) == (2, 0, 0)


def test_agents_on_ray_nodes_train_together_are_noticed_when_lost_and_come_back(ray_cluster, tmp_path):
    from ray.util.placement_group import placement_group_table

    backend = get_backend("ray", {"address": ray_cluster.address, "patience_s": 30.0})
    with Controller(tmp_path) as controller:

        def launched(work):
            """A data-parallel run with one rank on each node."""
            launch = controller.launch("Plain", world=2, slots=[0], work=work)
            controller.say(replace(launch, node=replace(launch.node, first_rank=1)), 1)
            return launch

        try:
            assert backend.nodes == 2
            assert [(place.slots, place.gpu_type) for place in backend.places] == [(1, "cpu")] * 2
            with pytest.raises(InputError, match=r"Ray did not give 1 nodes .* within 0\.5 s"):
                get_backend("ray", {"address": ray_cluster.address, "nodes": 1, "patience_s": 0.5})
            for node in range(2):
                asyncio.run(backend.start(node, controller.meeting))
            controller.until(lambda: len(controller.hellos) == 2, AGENT_S)
            assert backend.lost() == {}

            run = launched(5.0)
            for node in range(2):
                (ended,) = controller.until(lambda node=node: controller.of(run, Ended, node), 120.0)
                assert ended.outcome == "done"
            assert controller.of(run, Report)[-1].step == 5

            run = launched(1e6)
            controller.reached(run, 1)
            mine = descendants(controller.hellos[1].pid)
            assert len(mine) == 4, "the agent, its forkserver and resource tracker, and a worker"
            wanted = placement_group_table(backend._group)["bundles_to_node_id"][1]
            (lost,) = [each for each in ray_cluster.worker_nodes if each.node_id == wanted]
            ray_cluster.remove_node(lost, allow_graceful=False)
            assert list(wait_until(backend.lost, DETECTION_S)) == [1]
            assert "the Ray actor on" in backend.lost()[1]
            controller.until(lambda: 1 not in controller.hellos, DETECTION_S)
            wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in mine), DETECTION_S)
            # The other rank's agent sees the loss by itself, and lives.
            assert controller.ended(run, timeout_s=30).outcome == "lost"

            with ThreadPoolExecutor() as pool:
                starting = pool.submit(asyncio.run, backend.start(1, controller.meeting))
                ray_cluster.add_node(num_cpus=1, **SMALL)
                starting.result(AGENT_S)
            controller.until(lambda: 1 in controller.hellos, AGENT_S)
            assert backend.lost() == {}
            agents = [hello.pid for hello in controller.hellos.values()]
        finally:
            asyncio.run(backend.stop())
    assert not any(Path(f"/proc/{pid}").exists() for pid in agents)
    assert not sys.modules["ray"].is_initialized()
