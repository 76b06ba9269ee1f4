"""The shipped catalog: applications with fitted constants, GPU and node data sheets, and layer sizes.

bench/fits.py writes the constants of `models/<application>.yaml`. `layers/<application>.yaml` is written by hand from
papers, `gpus/<type>.yaml` and `nodes/<type>.yaml` from vendors' pages. Adding a file to a folder registers it. The
planner reads the other folders.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from math import exp, isfinite, log
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.errors import InputError, same_product, unknown
from synergy_core.performance.goodput.calibration import Calibrated
from synergy_core.performance.goodput.compression._compressor import CONVOLUTIONAL, Gradients, LayerSizes
from synergy_core.performance.goodput.pipeline import Pipeline
from synergy_core.performance.goodput.throughput import BETA_C, form_named
from synergy_core.units import GB, Floats

T = TypeVar("T")

CATALOG = Path(__file__).parent
_FACTS = ("title", "initial_batch", "max_batch", "epochs", "total_work")


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The gradient noise scale φ over a training run; its logarithm is linear between knots.

    fractions: the knots, as fractions of total work, rising in [0, 1]. log_noise_scale: ln(φ in samples) at the knots.
    """

    fractions: Floats
    log_noise_scale: Floats

    def noise_scale(self, fraction: ArrayLike) -> Floats:
        """The noise scale φ, samples, at a fraction of total work; constant outside the knots."""
        return np.exp(np.interp(np.asarray(fraction, dtype=np.float64), self.fractions, self.log_noise_scale))


@dataclass(frozen=True, slots=True)
class ModelOnGpu:
    """Fitted step-time constants of one application on one GPU type.

    theta: (7,), constants of Pollux's form, which policies assume. calibrated: the form with the best predictions.
    min_local, max_local: measured range of samples per GPU that fit into memory. nodes, gpus: most that were measured.
    """

    theta: Floats
    calibrated: Calibrated
    min_local: int
    max_local: int
    nodes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """One application. Batches are in samples; total_work is in iterations at the initial batch.

    pipeline: how fast its training input is prepared; None if unknown.
    """

    name: str
    title: str
    initial_batch: int
    max_batch: int
    epochs: int
    total_work: float
    noise: NoiseCurve | None
    gpu_types: Mapping[str, ModelOnGpu]
    sources: tuple[str, ...]
    pipeline: Pipeline | None = None


def names_in(folder: str) -> list[str]:
    """The names of all files in a folder of the catalog."""
    return sorted(path.stem for path in (CATALOG / folder).glob("*.yaml"))


def file_in(folder: str, what: str, name: str) -> Path:
    """The path of a catalog file. what: what the file describes. Raises InputError for an unknown name."""
    if name not in names_in(folder):
        hint = f"A file synergy_core/performance/catalog/{folder}/<name>.yaml adds one."
        raise unknown(what, name, names_in(folder), hint=hint)
    return CATALOG / folder / f"{name}.yaml"


def model_names() -> list[str]:
    """The names of all applications in the catalog."""
    return names_in("models")


@cache
def load_model(name: str) -> CatalogModel:
    """Loads an application. Raises InputError for an unknown name, with the nearest match."""
    return model_from_yaml(file_in("models", "model", name))


def model_from_yaml(path: Path) -> CatalogModel:
    """Reads an application's file, shipped or written by `python -m synergy_core calibrate --out`."""
    content = read_yaml(path)
    missing = [key for key in _FACTS if content.get(key) is None]
    if missing:
        raise InputError(
            f"{path}: {', '.join(missing)} missing; fill in the values from the application's paper or code."
        )
    noise, pipeline = content.get("noise"), content.get("pipeline")
    try:
        return CatalogModel(
            name=path.stem,
            **{key: content[key] for key in _FACTS},
            noise=NoiseCurve(_array(noise["fractions"]), _array(noise["log_noise_scale"])) if noise else None,
            gpu_types={gpu_type: _gpu_profile(each) for gpu_type, each in content["gpu_types"].items()},
            sources=tuple(content["sources"]),
            pipeline=Pipeline(*(float(pipeline[each.name]) for each in fields(Pipeline))) if pipeline else None,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a model of the catalog; missing or misplaced: {error}.") from None


def _gpu_profile(content: Mapping[str, Any]) -> ModelOnGpu:
    best, ends = content["calibrated"], ("min_local", "max_local", "nodes", "gpus")
    theta, knots, log_factors = (_array(best[key]) for key in ("theta", "knots", "log_factors"))
    calibrated = Calibrated(form_named(best["form"]), theta, knots, log_factors, best["alone_log_factor"])
    return ModelOnGpu(_array(content["pollux"]["theta"]), calibrated, *(content[key] for key in ends))


def _array(values: Any) -> Floats:
    return np.array(values, dtype=np.float64)


@cache
def layers_of(name: str) -> LayerSizes | None:
    """The sizes of an application's layers; None if no file lists them."""
    if name not in names_in("layers"):
        return None
    path = CATALOG / "layers" / f"{name}.yaml"
    rows = read_yaml(path).get("matrices")
    numbers = isinstance(rows, list) and all(isinstance(each, list) and len(each) == 3 for each in rows)
    if not numbers or not rows or any(type(value) is not int for each in rows for value in each):
        raise InputError(f"{path}: expected matrices: [[rows, columns, how many], …], whole numbers; got {rows}.")
    return LayerSizes(*np.array(rows, dtype=np.int64).T)


@cache
def gradients_of(name: str) -> Gradients:
    """Assumed distribution of an application's gradients: of a CNN if its file is `convolutional`, else of a GPT."""
    known = name in names_in("layers") and read_yaml(CATALOG / "layers" / f"{name}.yaml").get("convolutional")
    return CONVOLUTIONAL if known else Gradients()


def facts(name: str) -> dict[str, Any]:
    """The facts about an application that do not depend on hardware, from its file; None for unknown facts."""
    known = read_yaml(CATALOG / "models" / f"{name}.yaml") if name in model_names() else {}
    return {key: known.get(key) for key in (*_FACTS, "noise", "pipeline")}


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a YAML file of keys and values. Raises InputError for anything else."""
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}: is no UTF-8 text; save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: is not YAML: {yaml_fault(error)}.") from None
    if not isinstance(content, dict):
        found = "is empty" if content is None else f"holds {_yaml_type(content)}"
        raise InputError(f"{path}: {found}; expected lines such as `name: value`.")
    for key in content:
        if not isinstance(key, str):
            raise InputError(f"{path}: the key {key} is {_yaml_type(key)}; expected names as keys.")
    return content


def _yaml_type(value: Any) -> str:
    """The type of a YAML value, in words."""
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def yaml_fault(error: Exception) -> str:
    """A phrase that describes what is wrong with a YAML text, with the line if it is known."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        if isinstance(error, UnicodeDecodeError):
            return "it is no UTF-8 text; save it as UTF-8"
        if isinstance(error, ValueError):
            return str(error)
        return "it has a character that no text has" if "character" in str(error) else "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def from_yaml(wanted: type[T], path: Path) -> T:
    """Reads a dataclass: its `name` is the file's name, its other fields are the file's keys. Raises like `filled`."""
    return filled(wanted, read_yaml(path), path, name=path.stem)


def filled(wanted: type[T], values: Mapping[str, Any], path: Path, **further: Any) -> T:
    """Builds a dataclass from the keys of a file and further fields; lists become tuples.

    Raises InputError for unknown or missing keys, for values of another type than the field's, and for numbers that
    YAML reads as text (`80e9`).
    """
    own = {each.name: each for each in fields(wanted) if each.name not in further}  # type: ignore[arg-type]
    hints = get_type_hints(wanted)
    for key, value in values.items():
        if key not in own:
            raise unknown(f"key in {path.name}", key, own)
        _check_type(f"{path}: {key}", value, hints[key])
    needed = [name for name, each in own.items() if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} missing; {inspect.getfile(wanted)} says what each is.")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return wanted(**plain, **further)


_YAML_TYPES = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text; put quotes around a number that is text"),
}
"""Accepted types of a YAML value, and their description, by the type of the field."""


def _check_type(where: str, value: Any, hint: Any) -> None:
    """Raises InputError if a value does not have the field's type: a scalar, a list of scalars, or numbers by name.

    In a file, a field that may be an array (`NDArray | int`) has a single value.
    """
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise InputError(f"{where}: {value}; expected a list, as in [one, another].")
        for each in value:
            _check_type(where, each, get_args(hint)[0])
        return
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{where}: {value}; expected `name: number` lines below it.")
        for name, each in value.items():
            _check_type(f"{where}: {name}", each, get_args(hint)[1])
        return
    field_type = next(each for each in _YAML_TYPES if each in (get_args(hint) or (hint,)))
    types, words = _YAML_TYPES[field_type]
    if type(value) in types and (field_type is not float or isfinite(value)):
        return
    if isinstance(value, str) and field_type is not bool and _is_number(value):
        raise InputError(f"{where}: {value} is text to YAML; write a number with a point, as in 80.0e+9.")
    raise InputError(f"{where}: {'nothing' if value is None else value}; expected {words}.")


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


# GPU data sheets. A file `gpus/<type>.yaml` registers a sheet; `add_gpu_sheet` registers a user's for this process.


NVIDIA = "NVIDIA"
"""The maker of every GPU on which a step was measured."""
FLASH_ATTENTION = 8.0
"""Least compute capability that FlashAttention supports (Dao-AILab/flash-attention, README: Ampere, Ada, Hopper)."""
HOPPER = 9.0
"""Compute capability of the H100. Since then, NVSwitch reduces in the network (third-generation NVLink SHARP), cuBLAS
allocates 32 MiB of workspace, and training software has FlashAttention."""


@dataclass(frozen=True, slots=True)
class GpuSheet:
    """A GPU type's data sheet."""

    name: str
    """The GPU type's name, which is the file's name."""
    title: str
    """Name in printed text, such as `A100 SXM4 80 GB`."""
    architecture: str
    """The maker's name of the generation, such as `ampere`."""
    fp32_flops_per_s: float
    """Peak fp32 rate without tensor cores."""
    memory_bandwidth_bytes_per_s: float
    """Peak bandwidth of the GPU's memory."""
    memory_bytes: float
    """Size of the GPU's memory."""
    tensor_flops_per_s: Mapping[str, float] = field(hash=False)
    """Dense peak of matrix products that accumulate in fp32, by supported precision: fp16, bf16, tf32, fp8, fp4."""
    multiprocessors: int
    """Number of streaming multiprocessors, or of another maker's equivalent."""
    clock_hz: float
    """Boost clock."""
    link_bytes_per_s: float
    """Rate of all NVLinks of one GPU, or of another maker's links, one way; 0 without links."""
    pcie_bytes_per_s: float
    """Rate of the link to the host, one way."""
    source: str
    """Documents that the figures come from."""
    aliases: tuple[str, ...] = ()
    """Other names of the GPU type, in lower case."""
    maker: str = NVIDIA
    """The manufacturer. Only NVIDIA's GPUs were measured."""
    compute_capability: float = 0.0
    """NVIDIA's number for the generation's features (developer.nvidia.com/cuda-gpus); 0 for other makers, which have
    none."""
    shared_lanes: bool = False
    """Whether half of the fp32 lanes also execute integer instructions."""
    inline_ecc: bool = False
    """Whether ECC bits occupy part of the memory (GDDR6 of data-centre cards)."""

    def __post_init__(self) -> None:
        for precision in self.tensor_flops_per_s:
            if precision not in _WIDER:
                raise unknown(f"precision in tensor_flops_per_s of data sheet {self.name}:", precision, _WIDER)
        tensor_rates = {f"tensor_flops_per_s.{precision}": rate for precision, rate in self.tensor_flops_per_s.items()}
        rates = {**tensor_rates, "fp32_flops_per_s": self.fp32_flops_per_s}
        figures = {
            **{name: (rate, 1e12, "FLOP/s; 312 TFLOP/s are 312.0e+12") for name, rate in rates.items()},
            "memory_bandwidth_bytes_per_s": (self.memory_bandwidth_bytes_per_s, 1e10, "bytes/s; 2 TB/s are 2.0e+12"),
            "memory_bytes": (self.memory_bytes, 1e9, "bytes; 80 GB are 80.0e+9"),
            "clock_hz": (self.clock_hz, 1e8, "Hz; 1,410 MHz are 1410.0e+6"),
            "pcie_bytes_per_s": (self.pcie_bytes_per_s, 1e8, "bytes/s; 31.5 GB/s are 31.5e+9"),
            "multiprocessors": (self.multiprocessors, 1, "a number of multiprocessors"),
        }
        if self.maker == NVIDIA:
            words = "NVIDIA's number, such as 8.0, or the maker's name, as in `maker: AMD`"
            figures["compute_capability"] = (self.compute_capability, 1, words)
        for name, (value, least, unit) in figures.items():
            if value < least:
                raise InputError(f"data sheet {self.name}: {name}: {value:g} is below {least:g}; expected {unit}.")
        if self.link_bytes_per_s < 0 or 0 < self.link_bytes_per_s < 1e9:
            raise InputError(
                f"data sheet {self.name}: link_bytes_per_s: {self.link_bytes_per_s:g}; expected NVLink's bytes/s, one "
                "way, of all links of a GPU (300 GB/s are 300.0e+9), or 0.0 without NVLink."
            )

    @property
    def has_fused_attention(self) -> bool:
        """Whether attention runs fused. Other makers have kernels of their own (ROCm, Gaudi's FusedSDPA)."""
        return self.maker != NVIDIA or self.compute_capability >= FLASH_ATTENTION

    @property
    def since_hopper(self) -> bool:
        """Whether the GPU is of the H100's generation or a later one."""
        return self.compute_capability >= HOPPER

    def matrix_flops_per_s(self, precision: str) -> float:
        """Peak FLOP/s of matrix products. An unsupported precision runs in the next wider supported one.

        The fp32 peak is half of the data sheet's if lanes are shared, because they also compute integer addresses
        (NVIDIA's GA102 whitepaper, 2020, and Ada whitepaper, 2022: 64 of 128 lanes do either).
        """
        for each in _WIDER.get(precision, ()):
            if each in self.tensor_flops_per_s:
                return self.tensor_flops_per_s[each]
        return self.fp32_flops_per_s * (0.5 if self.shared_lanes else 1.0)


_WIDER = {
    "fp4": ("fp4", "fp8", "bf16", "fp16"),
    "fp8": ("fp8", "bf16", "fp16"),
    "bf16": ("bf16",),
    "fp16": ("fp16",),
    "tf32": ("tf32",),
}


_added: dict[str, GpuSheet] = {}
"""Data sheets from a user's files, registered for this process."""


def gpu_sheets() -> Mapping[str, GpuSheet]:
    """All GPU data sheets, by GPU type."""
    return {**_shipped(), **_added} if _added else _shipped()


@cache
def _shipped() -> Mapping[str, GpuSheet]:
    return {name: from_yaml(GpuSheet, CATALOG / "gpus" / f"{name}.yaml") for name in names_in("gpus")}


def add_gpu_sheet(path: Path) -> GpuSheet:
    """Reads a user's own data sheet, in the form of those in `gpus/`, and registers it under the file's name.

    The file may be a copy of a sheet in the catalog, so aliases that the catalog has are ignored. Raises InputError if
    the file is not a data sheet, or if a sheet of the catalog has its name.
    """
    name = path.stem.lower().replace(" ", "_")
    sheet = filled(GpuSheet, read_yaml(path), path, name=name)
    taken = {each for own in _shipped().values() for each in (own.name, *own.aliases)}
    if name in taken:
        raise InputError(f"{path}: the catalog has a data sheet of {name}; rename the file, as in {name}-mine.yaml.")
    sheet = replace(sheet, aliases=tuple(each for each in sheet.aliases if each not in taken))
    _added[name] = sheet
    return sheet


def gpu_sheet(name: str) -> GpuSheet | None:
    """The data sheet of a GPU type by name or alias, ignoring case; None if there is none.

    A GPU type of a partition, such as `a100@short`, has the data sheet of its type.
    """
    plain = name.partition("@")[0].lower().replace(" ", "_")
    return next((each for each in gpu_sheets().values() if plain == each.name or plain in each.aliases), None)


def gpu_sheet_of_words(name: str) -> GpuSheet | None:
    """The data sheet of a GPU type as NVML, Slurm and Kubernetes print it, such as `NVIDIA A100-SXM4-80GB`.

    The words may come in any order. Memory and the board (sxm4, pcie) may be missing from our name, unless another
    sheet names them.
    """
    if found := gpu_sheet(name):
        return found
    words = _words(name.lower())
    for boards in ((), _BOARDS):
        rest = words - {*boards}
        for each in gpu_sheets().values():
            if {rest, rest - {f"{each.memory_bytes / GB:.0f}gb"}} & {*map(_words, (each.name, *each.aliases))}:
                return each
    return None


_BOARDS = ("sxm2", "sxm3", "sxm4", "sxm5", "sxm", "pcie")
_MAKERS = {"nvidia", "tesla", "geforce", "amd", "instinct", "intel"}


@cache
def _words(name: str) -> frozenset[str]:
    """The words and numbers in a GPU type's name, without those of its maker."""
    words = re.findall(r"\d+gb?(?![a-z])|sxm\d|hbm\d+e?|\d+|[a-z]+", name)
    return frozenset(re.sub(r"(\d)g$", r"\1gb", each) for each in words) - _MAKERS


def gpu_type_named(name: str) -> str:
    """The catalog's name of a GPU type, such as `t4` for the alias `aws`; an unknown type keeps its name."""
    found = gpu_sheet(name)
    _, at, partition = name.partition("@")
    return f"{found.name}{at}{partition}" if found else name


@dataclass(frozen=True, slots=True)
class NodeSheet:
    """Data sheet of a node type, `nodes/<type>.yaml`.

    usual: whether it is the default node of its GPU type. link: `nvswitch`, `nvlink` or `pcie`; link_group: number of
    GPUs it connects. network_bytes_per_s: all network cards, one way. cpus: number of cores. memory_bytes: host memory.
    """

    name: str
    title: str
    gpu: str
    gpus_per_node: int
    usual: bool
    link: str
    link_group: int
    network_bytes_per_s: float
    cpus: int
    memory_bytes: float
    source: str


@cache
def node_sheets() -> Mapping[str, NodeSheet]:
    """All node types, by name."""
    return {name: from_yaml(NodeSheet, CATALOG / "nodes" / f"{name}.yaml") for name in names_in("nodes")}


def node_sheet_of(gpu_type: str, gpus_per_node: int) -> NodeSheet | None:
    """A node type with this GPU type and number of GPUs, preferably a `usual` one; None if the catalog has none."""
    own = [each for each in node_sheets().values() if (each.gpu, each.gpus_per_node) == (gpu_type, gpus_per_node)]
    return min(own, key=lambda each: not each.usual, default=None)


# Predicts an application's step times on an unmeasured GPU type from a measured one, by their data sheets.
#
# Between measured types, the time per sample follows memory bandwidth (T4 → RTX 2080 Ti: bandwidth × 1.9, speed × 1.7
# to 2.3), while the network and a step's fixed costs (kernel launches, reading data) hardly depend on the GPU. So β_c,
# the compute time per sample, is divided by the ratio of bandwidths, and the other constants are unchanged. Of several
# measured types, the type nearest in bandwidth is used, with a preference for the same architecture.


_OTHER_ARCHITECTURE_PENALTY = log(1.5)
"""A GPU type of another architecture is preferred only if it is nearer by this much in log memory bandwidth."""


def nearest_type(wanted: str, known: Iterable[str]) -> str:
    """The known GPU type that is nearest to `wanted`; if `wanted` has no data sheet, the one of median bandwidth."""
    names = sorted(known)
    sheets = {each: sheet for each in names if (sheet := gpu_sheet(each)) is not None}
    target = gpu_sheet(wanted)
    if target is None or not sheets:
        bandwidths = {name: sheet.memory_bandwidth_bytes_per_s for name, sheet in sheets.items()}
        ordered = sorted(names, key=lambda each: (bandwidths.get(each, 0.0), each))
        return ordered[(len(ordered) - 1) // 2]

    def distance(name: str) -> tuple[float, str]:
        sheet = sheets[name]
        off = abs(log(target.memory_bandwidth_bytes_per_s / sheet.memory_bandwidth_bytes_per_s))
        return off + (_OTHER_ARCHITECTURE_PENALTY if sheet.architecture != target.architecture else 0.0), name

    return min(sheets, key=distance)


def transferred(model: Calibrated, known: str, wanted: str) -> tuple[Calibrated, float]:
    """Converts step-time constants from GPU type `known` to `wanted`. Also returns the factor on β_c, 1 if unknown."""
    source, target = gpu_sheet(known), gpu_sheet(wanted)
    if source is None or target is None:
        return model, 1.0
    factor = source.memory_bandwidth_bytes_per_s / target.memory_bandwidth_bytes_per_s
    theta = model.theta.copy()
    theta[BETA_C] *= factor
    return replace(model, theta=theta), factor


@dataclass(frozen=True, slots=True)
class RunTimeRatio:
    """Ratio of run times on two GPU types, for a job about which nothing else is known. low, high: the range of the
    ratio for most jobs. how, of: the method and the data behind the ratio, in words.
    """

    factor: float
    low: float
    high: float
    how: str
    of: str


@cache
def run_time_ratio(from_type: str, to_type: str) -> RunTimeRatio:
    """Run time on GPU type `to_type` ÷ run time on `from_type`, for a job about which nothing else is known.

    If applications of the catalog were measured on both types, the factor is the geometric mean of their step-time
    ratios on one GPU at the largest batch that fits on both; low and high are the smallest and largest ratio. Otherwise
    it is the ratio of the data sheets' memory bandwidths; low or high is then the ratio of FLOP/s, which holds for
    compute-bound jobs. Raises InputError for a type that has neither measurements nor a data sheet.
    """
    from_type, to_type = from_type.partition("@")[0], to_type.partition("@")[0]  # without the partition's name
    if from_type == to_type:
        return RunTimeRatio(1.0, 1.0, 1.0, "the same type", "")
    logs = []
    for model in map(load_model, model_names()):
        if {from_type, to_type} <= set(model.gpu_types):
            profiles = [model.gpu_types[each] for each in (from_type, to_type)]
            batch = min(each.max_local for each in profiles)
            before, after = (float(each.calibrated.step_time(1, 1, batch)) for each in profiles)
            logs.append(log(after / before))
    if logs:
        basis = f"mean of {len(logs)} applications"
        return RunTimeRatio(exp(sum(logs) / len(logs)), exp(min(logs)), exp(max(logs)), "as measured", basis)
    sheets = []
    for name in (from_type, to_type):
        if (sheet := gpu_sheet(name)) is None:
            hint = (
                f"Converting run times from {from_type} to {to_type} needs a data sheet: "
                f"cluster.gpu_sheets=[{name}.yaml]; trace.gpu_type=null keeps them unchanged."
            )
            raise unknown("GPU type", name, gpu_sheets(), hint=hint, alike=same_product)
        sheets.append(sheet)
    source, target = (each.memory_bandwidth_bytes_per_s for each in sheets)
    flops = [each.matrix_flops_per_s("fp16") for each in sheets]
    low, high = sorted((source / target, flops[0] / flops[1]))
    basis = f"{source / 1e9:,.0f} to {target / 1e9:,.0f} GB/s"
    return RunTimeRatio(source / target, low, high, "by the data sheets' memory bandwidth", basis)


def stand_in(wanted: str, known: str) -> str:
    """A phrase that says that times measured on GPU type `known` are used for the type `wanted`."""

    def spoken(name: str) -> str:
        """The common name of a GPU type, such as V100 or RTX 2080 Ti; its own name if it has no data sheet."""
        sheet = gpu_sheet(name)
        title = name if sheet is None else re.sub(r"^(NVIDIA|Tesla|GeForce) ", "", sheet.title)
        return re.split(r" SXM| PCIe| NVL|,", title)[0]

    if gpu_sheet(wanted) is None or gpu_sheet(known) is None:
        return f"{spoken(wanted)} not measured, and no data sheet: {spoken(known)} times as they are"
    return f"{spoken(wanted)} not measured: {spoken(known)} times scaled by data-sheet speed"
