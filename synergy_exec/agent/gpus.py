"""Which GPUs are here: the type of each, its NUMA node, and how processes are told to see it.

An instance of a GPU that is divided by MIG counts as a GPU of its own. torch cannot count instances: a CUDA process
sees one of them at most, or with drivers from 570 on one of each GPU instance (NVIDIA's MIG User Guide, "CUDA Device
Enumeration"). So `nvidia-smi -L` is asked for them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_exec.worker.start import see_only, visible

UNTYPED = "gpu"
"""What Slurm and Ray call GPUs whose type nobody has configured."""
_DRIVERS = ("/proc/driver/nvidia", "/dev/kfd")
"""Files of NVIDIA's driver and of AMD's; with ROCm torch shows AMD's GPUs as CUDA devices."""
_ASKING: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120.0}
_ASK_TORCH = """
import torch
for each in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
    address = tuple(getattr(each, f"pci_{part}_id", -1) for part in ("domain", "bus", "device"))
    print(each.name, "%04x:%02x:%02x.0" % address, sep="\\t")
"""
"""Prints names and PCI addresses. Versions of torch that do not know the addresses print ones that do not exist."""
# The lines of `nvidia-smi -L`: a GPU, and below it the instances that it is divided into.
_GPU = re.compile(r"^\s*GPU (\d+): (.+?) \(UUID: (\S+)\)", re.MULTILINE)
_INSTANCE = re.compile(r"^\s*(MIG \S+)\s+Device\s+\d+: \(UUID: (\S+)\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that a process may use, or an instance of one.

    gpu_type: its name in lower case, such as a100-sxm4-40gb or a100-sxm4-40gb-mig-1g.5gb. numa: its NUMA node; -1 if
    that is unknown, as in virtual machines. uuid: its name in CUDA_VISIBLE_DEVICES; empty if its index will do.
    """

    gpu_type: str
    numa: int = -1
    uuid: str = ""


def gpus_here(sysfs: Path = Path("/sys")) -> list[Gpu]:
    """The GPUs that processes of this one can use, in the order in which `see_only` counts them.

    Takes seconds, because another process imports torch, so that this one need not do so. Prints a message if there
    are GPU drivers but torch can use no GPU. Raises InputError.
    """
    driver = shutil.which("nvidia-smi") or next((each for each in _DRIVERS if Path(each).exists()), None)
    name, named = visible(os.environ)
    if driver is None or os.environ.get(name) == "":
        return []
    if driver not in _DRIVERS and (instances := _mig_instances(named)):
        return instances
    # CUDA sees nothing at all if a device is named twice. Here such a device has several slots.
    once = list(dict.fromkeys(named))
    environment = os.environ | ({name: ",".join(once)} if named else {})
    asked = _asked("torch", [sys.executable, "-c", _ASK_TORCH], environment)
    if asked.returncode:
        raise InputError(f"torch cannot say which GPUs are here:\n{asked.stderr[-1000:]}")
    lines = [line.split("\t") for line in asked.stdout.splitlines()]
    found = [Gpu(_type(each), _numa(sysfs, address)) for each, address in lines]
    if not found:
        print(f"{driver} is here, but this torch can use no GPU: slots are CPU cores.", file=sys.stderr, flush=True)
    return [found[index] for index in map(once.index, named) if index < len(found)] if named else found


def _asked(name: str, command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """What a command says of the GPUs. name: of what is asked. Raises InputError if it cannot be started or hangs."""
    try:
        return subprocess.run(command, env=environment, **_ASKING)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(
            f"{name} does not answer which GPUs are here ({error}). Mend or restart the GPUs' driver, or set "
            "CUDA_VISIBLE_DEVICES to nothing to compute on CPU cores."
        ) from error


def _mig_instances(named: list[str]) -> list[Gpu]:
    """The MIG instances and the undivided GPUs beside them; [] if there are none of the former.

    named: what CUDA_VISIBLE_DEVICES names, indices of GPUs, UUIDs or their beginnings; only these count. [] means that
    all do.
    """
    said = _asked("nvidia-smi", ["nvidia-smi", "-L"], os.environ).stdout
    here = [
        (Gpu(_type(f"{name} {profile}"), uuid=uuid), index, gpu, uuid)
        for block in re.split(r"^(?=\s*GPU )", said, flags=re.MULTILINE)
        for index, name, gpu in _GPU.findall(block)
        for profile, uuid in _INSTANCE.findall(block) or [("", gpu)]
    ]
    named = named or [uuid for *_, uuid in here]
    found = [each for name in named for each, *names in here if _names(name, names)]
    return found if any(each.uuid.startswith("MIG-") for each in found) else []


def _names(name: str, names: Sequence[str]) -> bool:
    """Whether a name in CUDA_VISIBLE_DEVICES, which may be the beginning of a UUID, is one of these."""
    return name in names or (name.startswith(("GPU-", "MIG-")) and any(each.startswith(name) for each in names))


def _type(name: str) -> str:
    return name.strip().lower().removeprefix("nvidia ").replace(" ", "-")


def _numa(sysfs: Path, address: str) -> int:
    file = sysfs / "bus/pci/devices" / address / "numa_node"
    return int(file.read_text()) if file.exists() else -1


def seen_by(gpus: Sequence[Gpu]) -> dict[str, str]:
    """The environment variable with which `see_only` counts these GPUs; none if it does so anyway."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(each.uuid for each in gpus)} if any(each.uuid for each in gpus) else {}


def type_of_node(gpus: Sequence[Gpu], indices: Sequence[int]) -> str:
    """The type of a node that has those of the GPUs.

    Raises InputError if there are fewer, or if they differ, because all GPUs of a node count as equally fast.
    """
    if len(gpus) <= max(indices):
        raise InputError(
            f"{max(indices) + 1} GPUs are needed, but {len(gpus)} can be used here. Start with more of them visible "
            "(CUDA_VISIBLE_DEVICES; under Slurm without --gpu-bind and --gpus-per-task), or take fewer slots or nodes."
        )
    types: dict[str, list[int]] = {}
    for index in indices:
        types.setdefault(gpus[index].gpu_type, []).append(index)
    if len(types) > 1:
        seen = [see_only(those, os.environ | seen_by(gpus)).popitem() for those in types.values()]
        raise InputError(
            f"one node would have GPUs of several types: {', '.join(types)}. Take those of one type, with "
            f"{' or '.join(map('='.join, seen))}, or make nodes that have one type each: backend.options.nodes and "
            ".slots, or --gpus-per-node=TYPE:N under Slurm."
        )
    return types.popitem()[0]
