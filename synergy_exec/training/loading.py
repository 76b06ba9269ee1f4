"""Loads the job that `package.module:Class` or `/path/file.py:Class` names.

A job given as a file is read from the copy made when it was submitted (`job_folder.freeze`), and imports what lies
beside it from that copy, or else from its own folder. A package is used as it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from synergy_core.errors import InputError, unknown
from synergy_exec.training.job import TrainingJob


def load_job(job_class: str, arguments: Mapping[str, Any], code: Path | None = None) -> TrainingJob:
    """Creates the job that a job file names; `job_file` has checked the form of the name.

    code: the copy of its file to read instead; its `__file__` stays that of the original, because data may lie beside
    it. Raises InputError if there is no such class or it takes other arguments. Exceptions of the class's own code pass
    through.
    """
    place, _, name = job_class.rpartition(":")
    module = _file(Path(place), code) if place.endswith(".py") else _module(place)
    found_class = _class(module, name, job_class)
    signature = inspect.signature(found_class)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise InputError(f"{job_class}: {error}; its arguments are {signature}.") from None
    job = found_class(**arguments)
    assert isinstance(job, TrainingJob)
    return job


def _class(module: ModuleType, name: str, job_class: str) -> type:
    job_classes = {
        key: each
        for key, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, TrainingJob) and not inspect.isabstract(each)
    }
    if name in job_classes:
        return job_classes[name]
    found = getattr(module, name, None)
    if isinstance(found, type) and issubclass(found, TrainingJob):
        raise InputError(f"{job_class} lacks {', '.join(sorted(found.__abstractmethods__))}; write them.")
    if found is not None:
        raise InputError(f"{job_class} is no TrainingJob; derive it from synergy_exec.training.job.TrainingJob.")
    raise unknown("class", name, job_classes, hint=f"These are the jobs in {module.__name__}.")


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise InputError(
            f"class: there is no module '{name}' (no '{error.name}' on the Python path); "
            "install it, or give the file as /path/file.py:Class."
        ) from None


def _file(path: Path, code: Path | None) -> ModuleType:
    source = code or path
    if not source.is_file():
        raise InputError(f"class: there is no file {source.absolute()}; give its absolute path.")
    name = f"synergy_job_{path.stem}"
    specification = importlib.util.spec_from_file_location(name, source)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    module.__file__ = str(path)
    # Dataclasses and pickle find the module by its name.
    sys.modules[name] = module
    _look_beside(source, path)
    specification.loader.exec_module(module)
    return module


_BESIDE: list[str] = []
"""The folders on the Python path in which the file of the last job lies."""


def _look_beside(*files: Path) -> None:
    """Puts the folders of these files on the Python path, in place of those of another job and of its modules."""
    sys.path[:] = [each for each in sys.path if each not in _BESIDE]
    for name, module in list(sys.modules.items()) if _BESIDE else ():
        if any(Path(getattr(module, "__file__", None) or "/").is_relative_to(each) for each in _BESIDE):
            del sys.modules[name]
    _BESIDE[:] = [each for each in dict.fromkeys(str(file.absolute().parent) for file in files) if each not in sys.path]
    sys.path[:0] = _BESIDE
