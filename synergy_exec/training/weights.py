"""Weights that training begins with, from a file that plain PyTorch or `export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from synergy_core.errors import InputError

SAFETENSORS = ".safetensors"


def read_into(model: nn.Module, path: Path) -> None:
    """Sets all parameters and buffers of the whole model; raises InputError unless the file has just these.

    path: a state_dict by the model's own names, as safetensors or by torch.save.
    """
    given = _read(path)
    own = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    found = {name: tuple(each.shape) for name, each in given.items()}
    if odd := sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name)):
        raise InputError(
            f"weights: {path} is of another model: {odd[0]} is {found.get(odd[0], 'missing')} in it and "
            f"{own.get(odd[0], 'missing')} in the job ({len(odd)} differ)."
        )
    model.load_state_dict(given)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"weights: there is no file {path.absolute()}; give its absolute path.")
    try:
        values = _safetensors(path) if path.suffix == SAFETENSORS else torch.load(path, "cpu", weights_only=True)
    except InputError:
        raise
    except Exception as error:  # of whatever kind: both libraries have their own
        text = " ".join(str(error).split())[:200]
        raise InputError(f"weights: {path} cannot be read ({type(error).__name__}: {text}).") from error
    if not isinstance(values, dict) or not all(isinstance(each, Tensor) for each in values.values()):
        raise InputError(f"weights: {path} holds a {type(values).__name__}; expected a state_dict, tensors by name.")
    return values


def _safetensors(path: Path) -> Any:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise InputError(f"weights: {path} needs safetensors; type: pip install safetensors") from error
    return load_file(path)
