"""Which GPUs are here, of which types, and the cores near them. There is none where this runs: programs pretend."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from exec.pretended import refuses
from exec.real import AGENT_S, TOKEN, Controller, log_of

from synergy_exec.agent import gpus
from synergy_exec.agent.cores import divide, near_gpus
from synergy_exec.agent.gpus import Gpu, gpus_here, seen_by, type_of_node
from synergy_exec.backends import Meeting, local, slurm
from synergy_exec.backends._agents import Processes
from synergy_exec.job_file import job_of

REPOSITORY = Path(gpus.__file__).parents[2]
# Sees what CUDA would: devices up to the first that is not there, and none if one is named twice.
TORCH = """
import json, os, pathlib, types
HERE = [types.SimpleNamespace(**each) for each in json.loads({here!r})]
NAMED = os.environ.get("CUDA_VISIBLE_DEVICES")
SEEN = HERE
if NAMED is not None:
    SEEN = []
    for each in NAMED.split(","):
        if not each.isdigit() or int(each) >= len(HERE):
            break
        SEEN.append(HERE[int(each)])
    SEEN = SEEN if len(set(NAMED.split(","))) == len(NAMED.split(",")) else []
cuda = types.SimpleNamespace(device_count=lambda: len(SEEN), get_device_properties=SEEN.__getitem__)
"""
A100, V100 = "NVIDIA A100-SXM4-40GB", "Tesla V100-PCIE-16GB"
# Of NVIDIA's MIG User Guide, with the UUIDs cut.
MIG = f"""GPU 0: {A100} (UUID: GPU-5d5b)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba6)
GPU 1: {A100} (UUID: GPU-0aa1)
  MIG 1c.3g.20gb  Device  0: (UUID: MIG-79c6)
GPU 2: {A100} (UUID: GPU-0827)
"""
FIFTH, WHOLE = "a100-sxm4-40gb-mig-1g.5gb", "a100-sxm4-40gb"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes this machine one with such GPUs, as torch and `nvidia-smi -L` show them."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "here").mkdir()

    def make(*names, listed="", buses=()):
        here = [{"name": name} for name in names]
        for each, bus in zip(here, buses, strict=False):
            each |= {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
        (tmp_path / "here" / "torch.py").write_text(TORCH.format(here=json.dumps(here)))
        (tmp_path / "here" / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && /bin/cat <<'END'\n{listed}END\n")
        (tmp_path / "here" / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'here'}:{REPOSITORY}")
        monkeypatch.setenv("PATH", f"{tmp_path / 'here'}:{os.environ['PATH']}")

    return make


# Counts and types


@pytest.mark.parametrize("driver", ["nvidia-smi", "kfd", None])
@pytest.mark.parametrize("finds", [["AMD Instinct MI250X"] * 2, []])
def test_gpus_of_any_driver_are_found_and_what_torch_cannot_use_is_said(
    machine, tmp_path, monkeypatch, capsys, driver, finds
):
    machine(*finds)
    monkeypatch.setenv("PATH", str(tmp_path / "here" if driver == "nvidia-smi" else tmp_path))
    monkeypatch.setattr(gpus, "_DRIVERS", (str(tmp_path / "here" if driver == "kfd" else tmp_path / "none"),))
    assert gpus_here() == ([Gpu("amd-instinct-mi250x")] * len(finds) if driver else [])
    assert ("can use no GPU" in capsys.readouterr().err) == (driver is not None and not finds)


def test_a_gpus_numa_node_is_that_of_its_pci_address(machine, tmp_path):
    machine(A100, A100, A100, buses=(0x07, 0xBD))  # a torch of old says no address
    for address, numa in (("0000:07:00.0", "3\n"), ("0000:bd:00.0", "-1\n")):
        (tmp_path / f"bus/pci/devices/{address}").mkdir(parents=True)
        (tmp_path / f"bus/pci/devices/{address}/numa_node").write_text(numa)
    assert gpus_here(tmp_path) == [Gpu(WHOLE, 3), Gpu(WHOLE, -1), Gpu(WHOLE, -1)]


@pytest.mark.parametrize(
    ("named", "types"),
    [
        (None, [WHOLE, WHOLE, "tesla-v100-pcie-16gb"]),
        ("2,0", ["tesla-v100-pcie-16gb", WHOLE]),
        ("0,0,1", [WHOLE] * 3),  # several slots on one GPU
        ("0,9,1", [WHOLE]),
        ("", []),
    ],
)
def test_gpus_count_as_often_as_they_are_named_and_no_more_than_there_are(machine, monkeypatch, named, types):
    machine(A100, A100, V100)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [each.gpu_type for each in gpus_here()] == types


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (
            None,
            {"MIG-c6d4": FIFTH, "MIG-cba6": FIFTH, "MIG-79c6": "a100-sxm4-40gb-mig-1c.3g.20gb", "GPU-0827": WHOLE},
        ),
        ("0", {"MIG-c6d4": FIFTH, "MIG-cba6": FIFTH}),
        ("GPU-0aa1", {"MIG-79c6": "a100-sxm4-40gb-mig-1c.3g.20gb"}),
        ("GPU-0a", {"MIG-79c6": "a100-sxm4-40gb-mig-1c.3g.20gb"}),
        ("MIG-cba6, MIG-c6", {"MIG-cba6": FIFTH, "MIG-c6d4": FIFTH}),
    ],
)
def test_each_mig_instance_is_a_gpu_of_its_own(machine, monkeypatch, named, found):
    machine(A100, listed=MIG)  # CUDA sees one
    if named:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert [(each.uuid, each.gpu_type) for each in gpus_here()] == list(found.items())
    assert seen_by(gpus_here()) == {"CUDA_VISIBLE_DEVICES": ",".join(found)}


@pytest.mark.parametrize("what", ["nvidia-smi", "torch"])
def test_a_driver_that_hangs_is_said(machine, tmp_path, monkeypatch, what):
    machine(A100)
    if what == "torch":
        (tmp_path / "here" / "torch.py").write_text("import time\ntime.sleep(60)\n")
    else:
        (tmp_path / "here" / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setitem(gpus._ASKING, "timeout", 1.0)
    refuses(f"{what} does not answer", gpus_here)


@pytest.mark.parametrize("named", ["2", "GPU-0827", "", "NoDevFiles"])
def test_torch_counts_gpus_that_are_not_divided(machine, monkeypatch, named):
    machine(V100, V100, V100, listed=MIG)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert gpus_here() == ([Gpu("tesla-v100-pcie-16gb")] if named == "2" else [])


def test_gpus_of_several_types_or_too_few_are_no_node(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    here = [Gpu("a100"), Gpu("v100"), Gpu("a100")]
    said = refuses("a100, v100", type_of_node, here, range(3))
    assert "CUDA_VISIBLE_DEVICES=4,7" in said
    assert "CUDA_VISIBLE_DEVICES=5" in said
    assert type_of_node(here, [0, 2]) == "a100"
    refuses("4 GPUs .* 3", type_of_node, here, range(4))


# The local backend


def environments(monkeypatch, backend):
    """The GPUs that each node's agent would see, and its cores."""
    started = {}

    async def run(_, node, meeting, command, environment):
        (cores,) = [word.removeprefix("--cores=") for word in command if word.startswith("--cores=")]
        started[node] = environment["CUDA_VISIBLE_DEVICES"], [int(core) for core in cores.split(",")]

    monkeypatch.setattr(Processes, "run", run)
    for node in range(backend.nodes):
        asyncio.run(backend.start(node, Meeting(url="http://127.0.0.1:1", token=TOKEN, folder=Path())))
    return started


def test_nodes_of_the_local_backend_have_their_own_instances(machine, monkeypatch):
    machine(A100, listed=MIG)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    backend = local.backend(nodes=2)
    assert [(place.slots, place.gpu_type) for place in backend.places] == [(1, FIFTH)] * 2
    found = environments(monkeypatch, backend)
    assert [seen for seen, _ in found.values()] == ["MIG-c6d4", "MIG-cba6"]


def test_local_nodes_have_one_type_each(machine):
    machine(A100, A100, V100)
    assert "CUDA_VISIBLE_DEVICES=0,1" in refuses("tesla-v100-pcie-16gb", local.backend)
    refuses("4 GPUs .* 3", local.backend, nodes=2, slots=2)
    refuses("4 GPUs .* 3", local.backend, nodes=4)
    assert [place.gpu_type for place in local.backend(slots=2).places] == [WHOLE]
    assert [place.gpu_type for place in local.backend(nodes=3).places] == [WHOLE, WHOLE, "tesla-v100-pcie-16gb"]


# Agents


def agent(*words, url="http://127.0.0.1:1"):
    command = [sys.executable, "-m", "synergy_exec.agent", f"--url={url}", "--node=0", *words]
    return subprocess.Popen(command, env=os.environ | {"SYNERGY_TOKEN": TOKEN}, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("here", "says"), [([A100], ["2 GPUs", "1 can be used"]), ([A100, V100], [WHOLE, "tesla-v100-pcie-16gb"])]
)
def test_an_agent_with_too_few_or_unlike_gpus_does_not_begin(machine, here, says):
    """Nobody listens at its URL: it looks at its GPUs first."""
    machine(*here)
    with agent("--slots=2", "--gpu-type=a100") as ended:
        _, said = ended.communicate(timeout=AGENT_S)
    assert ended.returncode == 2
    assert all(each in said for each in says), said
    assert "Traceback" not in said


@pytest.mark.parametrize(("named", "told"), [("gpu", FIFTH), ("a100_1g.5gb", "a100_1g.5gb")])
def test_an_agent_tells_the_type_that_nobody_named_and_commands_see_their_instances(
    machine, tmp_path, monkeypatch, named, told
):
    machine(listed=MIG)
    (tmp_path / "here" / "torch.py").unlink()  # its workers' parent imports the true one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cba6,MIG-c6d4" if named == "gpu" else "0")
    with Controller(tmp_path) as controller:
        controller.agent = agent("--slots=2", f"--gpu-type={named}", url=controller.meeting.url)
        controller.until(lambda: controller.hellos, AGENT_S)
        hello = controller.hellos[0]
        assert (hello.gpu_type, hello.slots) == (told, 2)
        command = job_of({"command": ["sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES"], "name": "seen"}, "")
        launch = controller.launch("", file=command, slots=[1])
        controller.ends(launch, "done")
        assert f"sees {'MIG-c6d4' if named == 'gpu' else 'MIG-cba6'}" in log_of(launch)


# Cores


def tree(folder, siblings, nodes):
    """A folder like /sys. siblings: the hyperthreads of each physical core. nodes: the CPU list of each NUMA node."""
    for each in siblings:
        for core in each:
            (folder / f"devices/system/cpu/cpu{core}/topology").mkdir(parents=True)
            listed = ",".join(map(str, each))
            (folder / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list").write_text(f"{listed}\n")
    for node, cpus in nodes.items():
        (folder / f"devices/system/node/node{node}").mkdir(parents=True)
        (folder / f"devices/system/node/node{node}/cpulist").write_text(f"{cpus}\n")
    return folder


def shares(folder, cores, numas):
    return [set(slot.cores) for slot in divide(near_gpus(cores, numas, folder), len(numas), gpus=True)]


def both(first, last, apart):
    """Physical cores first to last, with both hyperthreads of each."""
    return {*range(first, last + 1), *range(first + apart, last + apart + 1)}


def test_gpus_get_whole_cores_of_their_own_socket(tmp_path):
    folder = tree(tmp_path, [(core, core + 64) for core in range(64)], {0: "0-31,64-95", 1: "32-63,96-127"})
    found = shares(folder, range(128), [0, 0, 1, 1, 1, 1, 0, 0])
    places = [0, 1, 4, 5, 6, 7, 2, 3]
    assert found == [both(8 * place, 8 * place + 7, 64) for place in places]


@pytest.mark.parametrize("numas", [[-1] * 8, [0] * 8])
def test_hyperthreads_of_a_core_stay_together_where_nothing_else_is_known(tmp_path, numas):
    folder = tree(tmp_path, [(core, core + 64) for core in range(64)], {0: "0-127"})
    assert shares(folder, range(128), numas) == [both(8 * slot, 8 * slot + 7, 64) for slot in range(8)]


# `nvidia-smi topo -m` of a DGX A100 (github.com/NVIDIA/nccl/issues/1505): no GPU is at nodes 0, 2, 4 and 6.
DGX_A100 = {node: f"{16 * node}-{16 * node + 15},{16 * node + 128}-{16 * node + 143}" for node in range(8)}


def test_gpus_of_a_numa_node_share_it_equally_and_take_the_rest_elsewhere(tmp_path):
    folder = tree(tmp_path, [(core, core + 128) for core in range(128)], DGX_A100)
    numas = [3, 3, 1, 1, 7, 7, 5, 5]
    found = shares(folder, range(256), numas)
    assert set().union(*found) == set(range(256))
    for gpu, (cores, numa) in enumerate(zip(found, numas, strict=True)):
        own = 16 * numa + 8 * (gpu % 2)
        assert both(own, own + 7, 128) < cores
        assert len(cores) == 32
        assert {core % 128 // 64 for core in cores} == {numa // 4}, "the rest is of the same socket here"


def test_what_a_container_may_use_is_shared_as_far_as_it_goes(tmp_path):
    folder = tree(tmp_path, [(core, core + 8) for core in range(8)], {0: "0-3,8-11", 1: "4-7,12-15"})
    # GPU 1's node has one core here, and three hyperthreads have no sibling here.
    assert shares(folder, [0, 1, 2, 3, 4, 8], [0, 1]) == [{0, 8, 1}, {4, 2, 3}]
    assert shares(folder, [4, 5], [1, 1, 0]) == [{4}, {5}, {4}]


def test_local_nodes_have_the_cores_near_their_gpus(tmp_path, monkeypatch):
    here = [Gpu("a100", numa) for numa in (1, 1, 0, 0)]
    folder = tree(tmp_path, [(core, core + 4) for core in range(4)], {0: "0-1,4-5", 1: "2-3,6-7"})
    monkeypatch.setattr(local, "near_gpus", lambda cores, numas: near_gpus(cores, numas, folder))
    found = environments(monkeypatch, local.Local(2, None, here, list(range(8))))
    assert {node: (seen, set(cores)) for node, (seen, cores) in found.items()} == {
        0: ("0,1", {2, 3, 6, 7}),
        1: ("2,3", {0, 1, 4, 5}),
    }


# Slurm


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ("gpu:(null):3(IDX:0-7)", ("gpu", 3)),
        ("gpu:(null):0(IDX:N/A)", None),
        ("gpu:8(IDX:0-7)", ("gpu", 8)),
        ("gpu:a100_1g.5gb:2(IDX:0,3)", ("a100_1g.5gb", 2)),
    ],
)
def test_types_of_gpus_are_read_from_what_scontrol_says(monkeypatch, resources, expected):
    monkeypatch.setattr(slurm, "_scontrol", lambda *_: "n1\n")
    assert slurm.gpus_of(f"     Nodes=n1 CPU_IDs=0-111 Mem=0 GRES={resources}\n").get("n1") == expected
