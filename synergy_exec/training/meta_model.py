"""Builds models on torch's meta device, where a tensor has a shape and no memory, and checks whether that is safe.

Such a model is first cut into stages, split and sharded. Only the part that a rank owns is then given memory, and
initial.py fills in the numbers.
"""

from __future__ import annotations

import copy
import hashlib
import random
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_leaves

from synergy_exec.training.job import TrainingJob

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SETTINGS = (bool, int, float, str)
_REGISTERED = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module keeps its parameters, buffers and submodules."""


class MetaModel(NamedTuple):
    """A model on the meta device. model: None if it cannot be built there. reason: why training cannot begin with it,
    as the end of a sentence; "" if it can. digest: digest of its structure.
    """

    model: nn.Module | None
    reason: str
    digest: str


def on_meta_device(job: TrainingJob) -> MetaModel:
    """Builds the job's model on the meta device. The state of all random generators stays as it was."""
    drawn = torch.get_rng_state()
    try:
        with keeping_random_state(), torch.device("meta"), warnings.catch_warnings():
            # Torch warns that values are not copied into meta tensors.
            warnings.simplefilter("ignore")
            model = job.build_model()
            same = torch.equal(torch.get_rng_state(), drawn)
    except Exception as error:  # the job's own code may raise anything
        text = " ".join(str(error).split())[:200]
        return MetaModel(None, f"its numbers are read as it is built ({type(error).__name__}: {text})", "")
    reason = _unfit(model) if same else "it draws random numbers on a device of its own choice"
    return MetaModel(model, reason, "" if reason else digest(model))


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restores the state of all random generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def digest(model: nn.Module) -> str:
    """Digest of a model's structure: equal for two models that differ only in the numbers of their tensors."""
    first: dict[int, str] = {}
    tensors = [
        (name, first.setdefault(id(each), name), tuple(each.shape), str(each.dtype), each.requires_grad)
        for name, each in named_tensors(model)
    ]
    settings = [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # Private attributes are notes of libraries, for instance that a module has been initialised.
        if isinstance(value, _SETTINGS) and not key.startswith("_")
    ]
    text = f"{tensors} {settings} {sorted(model.state_dict(keep_vars=True))} {_ADDRESS.sub('', str(model))}"
    return hashlib.sha256(text.encode()).hexdigest()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters, then buffers; a tensor with several names appears under each of them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def sharing(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters share memory with the original's and are all trainable."""
    same: dict[int, Any] = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    return copy.deepcopy(model, same)


def _unfit(model: nn.Module) -> str:
    tensors = [*model.parameters(), *(each for each in model.buffers() if each.is_meta)]
    for each in tensors:
        if type(each) not in (nn.Parameter, Tensor) or each.layout != torch.strided:
            return f"it has a tensor of the kind {type(each).__name__}, {each.layout}"
        if not each.is_meta:
            return "it has parameters whose numbers are not drawn by build_model"
        if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
            return "hooks are on its parameters"
    storages = Counter(each.untyped_storage()._cdata for each in tensors)
    if max(storages.values(), default=1) > 1:
        return "some of its tensors are parts of others"
    for module in model.modules():
        if is_parametrized(module):
            return "the tensors of a parametrization may depend on the numbers that it begins with"
        others = tree_leaves([value for key, value in vars(module).items() if key not in _REGISTERED])
        if any(isinstance(each, Tensor) and each.is_meta for each in others):
            return "it keeps tensors that are neither parameters nor buffers"
    return ""
