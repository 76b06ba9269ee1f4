"""What is known before anything is measured here: applications with fitted constants, and GPU data sheets.

`models/<application>.yaml` is written by bench/make_catalog.py or bench/fit_sensitivity.py; `gpus/<type>.yaml` by hand,
from vendors' pages (`synergy_core.catalog.sheets`); `layers/<application>.yaml` by bench/make_layers.py. Being in the
folder registers any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import ArrayLike

from synergy_core.arrays import Floats
from synergy_core.errors import InputError, unknown
from synergy_core.goodput.calibration import Calibrated
from synergy_core.goodput.compression import CONVOLUTIONAL, Gradients, LayerSizes
from synergy_core.goodput.forms import form_named
from synergy_core.goodput.pipeline import Pipeline

T = TypeVar("T")

_HERE = Path(__file__).parent
_FACTS = ("title", "initial_batch", "max_batch", "epochs", "total_work")


@dataclass(frozen=True, slots=True)
class NoiseCurve:
    """The gradient noise scale over a training: straight lines of its logarithm between knots.

    fractions: of total work, rising in [0, 1]. log_noise_scale: natural logarithm of φ in samples, at the knots.
    rms_log_error: against the runs that it was fitted to.
    """

    fractions: Floats
    log_noise_scale: Floats
    rms_log_error: float

    def noise_scale(self, fraction: ArrayLike) -> Floats:
        """φ, samples, at a fraction of total work; constant outside the knots."""
        result: Floats = np.exp(np.interp(np.asarray(fraction, dtype=np.float64), self.fractions, self.log_noise_scale))
        return result


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """One application on one GPU type.

    theta: (7,), Pollux's form, what policies believe. calibrated: the form that predicts best.
    theta_error, calibrated_error: of step times on the rows fitted: n, mape, median, p90, max; fractions.
    min_local, max_local: samples per GPU that were measured to fit. nodes, gpus: the largest measured.
    """

    theta: Floats
    theta_error: Mapping[str, float]
    calibrated: Calibrated
    calibrated_error: Mapping[str, float]
    min_local: int
    max_local: int
    nodes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """One application. Batches in samples; total_work in iterations at the initial batch.

    pipeline: how fast its input is prepared; None where nobody knows.
    """

    name: str
    title: str
    initial_batch: int
    max_batch: int
    epochs: int
    total_work: float
    noise: NoiseCurve | None
    gpu_types: Mapping[str, GpuProfile]
    sources: tuple[str, ...]
    pipeline: Pipeline | None = None


def model_names() -> list[str]:
    """Every application in the catalog."""
    return sorted(path.stem for path in (_HERE / "models").glob("*.yaml"))


@cache
def load_model(name: str) -> ModelProfile:
    """An application. Raises InputError with the nearest match for an unknown one."""
    if name not in model_names():
        raise unknown("model", name, model_names(), hint="A file synergy_core/catalog/models/<name>.yaml adds one.")
    return model_from_yaml(_HERE / "models" / f"{name}.yaml")


def model_from_yaml(path: Path) -> ModelProfile:
    """A file in the catalog's form, shipped or written by `python -m synergy_core calibrate --out`."""
    content = read_yaml(path)
    missing = [key for key in _FACTS if content.get(key) is None]
    if missing:
        raise InputError(
            f"{path}: {', '.join(missing)} missing; fill in what the application's own paper or code says."
        )
    try:
        noise = content.get("noise")
        return ModelProfile(
            name=path.stem,
            title=content["title"],
            initial_batch=content["initial_batch"],
            max_batch=content["max_batch"],
            epochs=content["epochs"],
            total_work=content["total_work"],
            noise=NoiseCurve(_array(noise["fractions"]), _array(noise["log_noise_scale"]), noise["rms_log_error"])
            if noise
            else None,
            gpu_types={gpu_type: _gpu_profile(each) for gpu_type, each in content["gpu_types"].items()},
            sources=tuple(content["sources"]),
            pipeline=_pipeline(content["pipeline"]) if content.get("pipeline") else None,
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: is not a model of the catalog; missing or misplaced: {error}.") from None


@cache
def layers_of(name: str) -> LayerSizes | None:
    """The parameters of an application; None where nobody wrote them down."""
    path = _layers_path(name)
    return layers_from_yaml(path) if path.is_file() else None


@cache
def gradients_of(name: str) -> Gradients:
    """How an application's gradients are taken to be spread: as a CNN's where its file says so, else as a GPT's."""
    path = _layers_path(name)
    return CONVOLUTIONAL if path.is_file() and read_yaml(path).get("convolutional") else Gradients()


def _layers_path(name: str) -> Path:
    return _HERE / "layers" / f"{name}.yaml"


def layers_from_yaml(path: Path) -> LayerSizes:
    """A file of `layers/`. Raises InputError for anything else."""
    rows = read_yaml(path).get("matrices")
    numbers = isinstance(rows, list) and all(isinstance(each, list) and len(each) == 3 for each in rows)
    if not numbers or not rows or any(type(value) is not int for each in rows for value in each):
        raise InputError(f"{path}: expected matrices: [[rows, columns, how many], …], whole numbers; got {rows}.")
    return LayerSizes(*np.array(rows, dtype=np.int64).T)


def facts(name: str) -> dict[str, Any]:
    """What is known of an application whatever it runs on, as in its file; None for each fact of an unknown one."""
    known = read_yaml(_HERE / "models" / f"{name}.yaml") if name in model_names() else {}
    return {key: known.get(key) for key in (*_FACTS, "noise", "pipeline")}


def _pipeline(content: Mapping[str, Any]) -> Pipeline:
    return Pipeline(*(float(content[each.name]) for each in fields(Pipeline)))


def _gpu_profile(content: Mapping[str, Any]) -> GpuProfile:
    best = content["calibrated"]
    return GpuProfile(
        theta=_array(content["pollux"]["theta"]),
        theta_error=content["pollux"]["error"],
        calibrated=Calibrated(
            form_named(best["form"]),
            _array(best["theta"]),
            _array(best["knots"]),
            _array(best["log_factors"]),
            best["alone_log_factor"],
        ),
        calibrated_error=best["error"],
        min_local=content["min_local"],
        max_local=content["max_local"],
        nodes=content["nodes"],
        gpus=content["gpus"],
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values. Raises InputError for anything else."""
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
        found = "is empty" if content is None else f"holds {_called(content)}"
        raise InputError(f"{path}: {found}; expected lines such as `name: value`.")
    odd = [key for key in content if not isinstance(key, str)]
    if odd:
        raise InputError(f"{path}: the key {odd[0]} is {_called(odd[0])}; expected names as keys.")
    return content


def yaml_fault(error: Exception) -> str:
    """What is wrong with a YAML text, in a phrase: the line, and what was found there."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        if isinstance(error, UnicodeDecodeError):
            return "it is no UTF-8 text; save it as UTF-8"
        if isinstance(error, ValueError):
            return str(error)
        return "it has a character that no text has" if "character" in str(error) else "it cannot be read"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def from_yaml(wanted: type[T], path: Path) -> T:
    """A dataclass whose `name` is the file's; the file's keys are its other fields. Raises InputError as `filled`."""
    return filled(wanted, read_yaml(path), path, name=path.stem)


def filled(wanted: type[T], values: Mapping[str, Any], path: Path, **given: Any) -> T:
    """A dataclass from the keys of a file and what is given beside them; lists become tuples.

    Raises InputError for keys that are unknown or missing, for values of another kind than the field, and for numbers
    that YAML takes for text (`80e9`).
    """
    own = {each.name: each for each in fields(wanted) if each.name not in given}  # type: ignore[arg-type]
    hints = get_type_hints(wanted)
    for key, value in values.items():
        if key not in own:
            raise unknown(f"key in {path.name}", key, own)
        _check_kind(f"{path}: {key}", value, hints[key])
    needed = [name for name, each in own.items() if each.default is MISSING and each.default_factory is MISSING]
    missing = [name for name in needed if name not in values]
    if missing:
        where = wanted.__module__.replace(".", "/")
        raise InputError(f"{path}: {', '.join(missing)} missing; {where}.py says what each is.")
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    return wanted(**plain, **given)


_KINDS: tuple[tuple[type, Callable[[Any], bool], str], ...] = (
    (bool, lambda value: isinstance(value, bool), "true or false"),
    (int, lambda value: type(value) is int, "a whole number"),
    (float, lambda value: type(value) in (int, float) and isfinite(value), "a number"),
    (str, lambda value: isinstance(value, str), "text; numbers as text stand in quotes"),
)
"""By a field's type, what a value of YAML must be, and that in words."""


def _check_kind(where: str, value: Any, hint: Any) -> None:
    """Raises InputError for a value of another kind than the field's: a scalar, a list of texts, or numbers by name.

    Of a field that may be an array (`NDArray | int`) a file gives one value.
    """
    if hint == tuple[str, ...]:
        if not isinstance(value, list):
            raise InputError(f"{where}: {value}; expected a list, as in [one, another].")
        for each in value:
            _check_kind(where, each, str)
        return
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise InputError(f"{where}: {value}; expected `name: number` lines below it.")
        for name, each in value.items():
            _check_kind(f"{where}: {name}", each, get_args(hint)[1])
        return
    leaves = get_args(hint) or (hint,)
    holds, words = next((each[1], each[2]) for each in _KINDS if each[0] in leaves)
    if holds(value):
        return
    if isinstance(value, str) and words != "true or false" and _is_number(value):
        raise InputError(f"{where}: {value} is text to YAML; a number has a point, as in 80.0e+9.")
    raise InputError(f"{where}: {'nothing' if value is None else value}; expected {words}.")


def _is_number(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _called(value: Any) -> str:
    """What a person calls a value of YAML."""
    names = {list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "nothing" if value is None else type(value).__name__)


def _array(values: Any) -> Floats:
    return np.array(values, dtype=np.float64)
