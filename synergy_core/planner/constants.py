"""What is fitted: a handful of constants per GPU type and training software, and the rule for what was never measured.

`catalog/constants/<software>.yaml` is written by bench/fit_planner.py: for each GPU type the constants, what they were
fitted to and how well; a software has none until it was measured. `Constants` are physical (how a GPU runs kernels) or
the software's own (how it launches and overlaps them); `PHYSICAL` names the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from synergy_core.catalog import read_yaml
from synergy_core.catalog.sheets import GpuSheet, gpu_sheets
from synergy_core.errors import InputError
from synergy_core.planner.machine import Machine
from synergy_core.planner.software import Software, software_named, software_names

_FOLDER = Path(__file__).parents[1] / "catalog" / "constants"


@dataclass(frozen=True, slots=True)
class Constants:
    """Numbers without unit, unless the name ends in _s. `kernels` and `step_time` say where each acts.

    gemm_efficiency: of the peak, of very large products. gemm_depth: of the summed dimension, lost per tile in filling
    and draining. wave_loss: how much of an unfilled last wave of tiles is lost. memory_efficiency: of the memory
    bandwidth. attention_efficiency: of the peak, of long fused attention; attention_fill: queries at which it has half
    of that; attention_backward: its backward pass ÷ forward. score_passes: of unfused attention's traffic, against the
    count of tensors. backward_traffic, backward_kernels: backward ÷ forward, of memory-bound operators. kernel_s:
    between kernels on the GPU; host_s: to launch one; host_jitter: more of it with each doubling of the tensor-parallel
    group, which waits for its slowest member; launch_norm: how sharply the slower of GPU and host rules.
    tensor_efficiency, network_efficiency: rate of collectives in training ÷ alone, tensor- and data-parallel.
    card_collisions: share of its rate that a data-parallel group loses to each other group on its node, where neither
    has a network card to itself per GPU. data_overlap: share of the backward pass behind which they hide; data_exposed:
    share of them that never hides.
    optimizer_bytes_factor: against the count of states. step_s: a step's fixed cost.
    """

    gemm_efficiency: float = 0.85
    gemm_depth: float = 64.0
    wave_loss: float = 0.7
    memory_efficiency: float = 0.85
    attention_efficiency: float = 0.4
    attention_fill: float = 256.0
    attention_backward: float = 3.0
    score_passes: float = 1.5
    backward_traffic: float = 1.7
    backward_kernels: float = 2.0
    kernel_s: float = 3e-6
    host_s: float = 2e-5
    host_jitter: float = 0.05
    launch_norm: float = 4.0
    tensor_efficiency: float = 0.9
    network_efficiency: float = 0.85
    card_collisions: float = 0.1
    data_overlap: float = 0.7
    data_exposed: float = 0.1
    optimizer_bytes_factor: float = 1.2
    step_s: float = 0.005


PHYSICAL = (
    "gemm_efficiency",
    "gemm_depth",
    "wave_loss",
    "memory_efficiency",
    "attention_efficiency",
    "attention_fill",
    "attention_backward",
    "kernel_s",
)


def constants_for(machine: Machine, software: Software) -> Constants:
    """Fitted constants of that software on that GPU type, else by rule.

    A GPU type measured under software like it keeps its physical constants and takes the rest from the software's. One
    that was never measured takes those of the type it is most like, its efficiency lower where its tensor cores do more
    per clock (`transferred`).
    """
    known = measured(software.fitted_as)
    gpu_type = constants_like(machine.gpu)
    if gpu_type in known:
        return known[gpu_type]
    likes = [measured(name) for name in _stand_ins(software)]
    here = next((each[gpu_type] for each in likes if gpu_type in each), None)
    elsewhere = known or next(each for each in (*likes, *map(measured, measured_software())) if each)
    source = nearest(machine.gpu, tuple(elsewhere))
    if here is not None:
        own = asdict(elsewhere[source])
        return replace(here, **{name: value for name, value in own.items() if name not in PHYSICAL})
    if software.precision == "fp32":  # No tensor cores to feed.
        return elsewhere[source]
    return transferred(elsewhere[source], gpu_sheets()[source], machine.gpu)


def transferred(constants: Constants, source: GpuSheet, target: GpuSheet) -> Constants:
    """The constants of a GPU type that was never measured.

    Tensor cores that do more per clock and multiprocessor are harder to feed and sooner limited by power: efficiency
    falls with (FLOPs per clock)^−x where that grows, x from the two generations that were measured (transfer.yaml), and
    stays where it falls.
    """
    more = max(work_per_clock(target) / work_per_clock(source), 1.0)
    rule = read_yaml(_FOLDER / "transfer.yaml")
    return replace(
        constants,
        **{name: getattr(constants, name) * more ** -float(power) for name, power in rule["powers"].items()},
    )


def work_per_clock(gpu: GpuSheet) -> float:
    """16-bit FLOPs per clock and multiprocessor at the peak."""
    peak = gpu.tensor_flops_per_s.get("bf16", gpu.tensor_flops_per_s.get("fp16", gpu.fp32_flops_per_s))
    return peak / (gpu.multiprocessors * gpu.clock_hz)


def nearest(gpu: GpuSheet, known: tuple[str, ...]) -> str:
    """The known GPU type that is nearest in work per clock; ties go by name."""
    sheets = gpu_sheets()
    return min(known, key=lambda name: (abs(work_per_clock(sheets[name]) / work_per_clock(gpu) - 1.0), name))


@cache
def measured(software: str) -> dict[str, Constants]:
    """Fitted constants by GPU type; empty for software that was not measured."""
    return {gpu_type: constants_of(each["constants"]) for gpu_type, each in content_of(software).items()}


@cache
def content_of(software: str) -> Mapping[str, Mapping[str, Any]]:
    """What a fit left of a software, by GPU type: `constants`, `errors` by file; empty where it was not measured."""
    path = _FOLDER / f"{software}.yaml"
    found: Mapping[str, Mapping[str, Any]] = read_yaml(path)["gpu_types"] if path.exists() else {}
    return found


@dataclass(frozen=True, slots=True)
class OwnConstants:
    """A user's constants, as `python -m synergy_core calibrate --out` writes them.

    software: whose; None where the file does not say. rows, mean_error: by GPU type, of the fit; None where unsaid.
    """

    path: Path
    software: str | None
    gpu_types: Mapping[str, Constants]
    rows: Mapping[str, int | None]
    mean_error: Mapping[str, float | None]

    def of(self, gpu: GpuSheet) -> Constants | None:
        """The constants of a GPU type; None where the file has none of it."""
        return self.gpu_types.get(constants_like(gpu))


def own_constants(path: Path) -> OwnConstants:
    """A file in the form of `catalog/constants/`. Raises InputError for anything else."""
    content = read_yaml(path)
    found = content.get("gpu_types")
    if not isinstance(found, dict) or not found:
        raise InputError(
            f"{path}: has no gpu_types; expected what `python -m synergy_core calibrate FILE.csv --out {path.name}` "
            "writes of training times of plans."
        )
    gpu_types: dict[str, Constants] = {}
    for gpu_type, each in found.items():
        if not isinstance(each, dict) or not isinstance(each.get("constants"), dict):
            raise InputError(
                f"{path}: gpu_types: {gpu_type} has no constants; python -m synergy_core calibrate writes them."
            )
        try:
            gpu_types[gpu_type] = constants_of(each["constants"])
        except InputError as error:
            raise InputError(f"{path}, {gpu_type}: {error}") from None
        rows, off = each.get("rows"), each.get("mean_error")
        if (rows, off) != (None, None) and not (type(rows) is int and isinstance(off, int | float) and off >= 0):
            raise InputError(
                f"{path}, {gpu_type}: rows: {rows}, mean_error: {off}; expected a whole number and a number from 0, as "
                "python -m synergy_core calibrate writes them, or neither."
            )
    return OwnConstants(
        path=path,
        software=content.get("software"),
        gpu_types=gpu_types,
        rows={gpu_type: each.get("rows") for gpu_type, each in found.items()},
        mean_error={gpu_type: each.get("mean_error") for gpu_type, each in found.items()},
    )


@cache
def measured_software() -> tuple[str, ...]:
    """Names of software with constants."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml") if path.stem != "transfer"))


def constants_of(values: dict[str, Any]) -> Constants:
    """Constants from a mapping. Raises InputError for names that are missing or unknown, and for what is no number."""
    names = {each.name for each in fields(Constants)}
    if set(values) != names:
        odd = sorted(set(values) ^ names)
        raise InputError(f"constants: missing or unknown {', '.join(odd)}; expected {', '.join(sorted(names))}.")
    for name, value in values.items():
        if type(value) not in (int, float) or not 0.0 <= value < float("inf"):
            raise InputError(f"{name}: {value}; expected a number of at least 0.")
    return Constants(**{name: float(value) for name, value in values.items()})


def _stand_ins(software: Software) -> tuple[str, ...]:
    """Whose constants stand in on a GPU type on which it was not measured."""
    name = software.fitted_as
    if name == software.name:
        like = software.like
    else:
        like = software_named(name).like if name in software_names() else ()
    return like or measured_software()


def constants_like(gpu: GpuSheet) -> str:
    """The type under which a GPU's constants stand: memory sizes of one chip share them."""
    return gpu.name.split("-")[0]
