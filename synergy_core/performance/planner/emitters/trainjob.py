"""A patch of a Kubeflow TrainJob: nodes, processes, GPUs, and the arguments of the training software.

    kubectl patch trainjob NAME --type merge --patch-file FILE

Names: kubeflow-trainer-api 2.3.0, `trainer.kubeflow.org/v1alpha1`, spec.trainer. The arguments are those of `megatron`
or, as command-line settings, `torchtitan`. If Megatron-LM requires a single connection to the device, the patch sets
it. A merge replaces whole lists: put the job's own `args` and `env` in front of those here.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError
from synergy_core.performance.planner.emitters import PlannedLaunch, megatron, torchtitan
from synergy_core.performance.planner.options import Stated, arguments_of, content_of

SUMMARY = "a patch of a Kubeflow TrainJob (YAML)"
SOFTWARE = (*megatron.SOFTWARE, *torchtitan.SOFTWARE)
GPU = "nvidia.com/gpu"


def emit(launch: PlannedLaunch) -> str:
    """Writes the patch as YAML. Raises InputError if the software cannot run the plan, or nodes would differ."""
    import yaml  # type: ignore[import-untyped]

    gpus, per_node = launch.plan.gpus, launch.gpus_per_node
    if gpus > per_node and gpus % per_node:
        raise InputError(
            f"--emit trainjob: all nodes of a TrainJob are equal, but {gpus} GPUs do not fill nodes of {per_node}; use "
            f"gpus={gpus // per_node * per_node} or {-(-gpus // per_node) * per_node}."
        )
    nodes, processes = max(gpus // per_node, 1), min(gpus, per_node)
    trainer: dict[str, Any] = {
        "numNodes": nodes,
        "numProcPerNode": processes,
        "resourcesPerNode": {"limits": {GPU: processes}},
        "args": _arguments(launch),
    }
    if launch.software.name in megatron.SOFTWARE and megatron.one_connection(launch.plan):
        trainer["env"] = [{"name": megatron.ONE_CONNECTION, "value": "1"}]
    content = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "spec": {"trainer": trainer}}
    result: str = yaml.safe_dump(content, sort_keys=False, default_flow_style=False, width=118)
    return result


def beside(launch: PlannedLaunch) -> str:
    """Says what the job and its runtime have to add to the patch."""
    yours = megatron.YOURS if launch.software.name in megatron.SOFTWARE else torchtitan.beside(launch)
    return f"runtime, image and command come from the job; of the arguments, {yours}"


def recognises(text: str) -> bool:
    """Whether a text is a TrainJob."""
    return bool(re.search(r"^kind: *[\"']?TrainJob\b", text, re.MULTILINE))


def read(text: str, gpus: int, folder: Path) -> Stated:
    """Reads the plan of a whole TrainJob or a patch."""
    content = content_of(text)
    if not content:
        raise InputError("is not YAML of keys and values.")
    spec = content.get("spec")
    trainer = spec.get("trainer") if isinstance(spec, dict) else None
    if not isinstance(trainer, dict):
        raise InputError("has no spec.trainer; expected a TrainJob of trainer.kubeflow.org/v1alpha1.")
    nodes, processes = trainer.get("numNodes", 1), trainer.get("numProcPerNode", 1)
    if type(nodes) is not int or type(processes) is not int or nodes * processes != gpus:
        raise InputError(f"numNodes: {nodes} × numProcPerNode: {processes} is not gpus={gpus}.")
    arguments = []
    for words in (trainer.get("command"), trainer.get("args")):
        if not isinstance(words, list | None):
            raise InputError(f"args: {words}; expected a list of words.")
        arguments += [str(each) for each in words or ()]
    if any(each.startswith("--parallelism.") for each in arguments):
        return torchtitan.plan_of(_tables(arguments), gpus)
    return megatron.read(shlex.join(arguments), gpus, folder)


def _arguments(launch: PlannedLaunch) -> list[str]:
    """The plan as command-line arguments of its software. torchtitan takes each inner list as a word with commas."""
    if launch.software.name in megatron.SOFTWARE:
        return megatron.emit(launch).split()
    result = []
    for name, table in torchtitan.tables(launch).items():
        for key, value in table.items():
            result.append(f"--{name}.{key}")
            if isinstance(value, list):
                result += [",".join(each) for each in value]
            else:
                result.append(value if isinstance(value, str) else json.dumps(value))
    return result


def _tables(words: Sequence[str]) -> dict[str, Any]:
    """Reads torchtitan's options from `--table.key value`, `--table.key=value` and `--table.key value value`."""
    result: dict[str, Any] = {}
    for name, values in arguments_of(words).items():
        option = name.replace("-", "_")
        if option == "parallelism.module_fqns_per_model_part":
            result[option] = [each.split(",") for each in values]
        elif values:
            result[option] = values[0]
            with suppress(ValueError):  # A value that is not JSON is a plain word.
                result[option] = json.loads(values[0])
    return result
