"""A model made without its numbers, and whether training may begin with it as if it had been made with them.

On torch's meta device a tensor has a shape and no memory. A model that is made there is cut, split and shared out
first, and only what a rank owns of it is given memory; its numbers come from elsewhere (initial.py).
"""

from __future__ import annotations

import copy
import gc
import hashlib
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from synergy_exec.training.job import TrainingJob

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_SETTINGS = (bool, int, float, str)


class Generators(NamedTuple):
    """The states of the generators of random numbers that are not torch's."""

    python: Any
    numpy: Any

    @staticmethod
    def now() -> Generators:
        """As they are."""
        return Generators(random.getstate(), np.random.get_state())

    def restore(self) -> None:
        """They go on from here."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class Bare(NamedTuple):
    """model: without numbers, None where it cannot be made so. reason: why it cannot stand for one that has numbers,
    as the end of a sentence; "" where it can. digest: of its form. after: the generators as making it left them.
    """

    model: nn.Module | None
    reason: str
    digest: str
    after: Generators


def bare(job: TrainingJob) -> Bare:
    """The job's model without numbers. No generator goes on."""
    before, drawn = Generators.now(), torch.get_rng_state()
    try:
        with (
            _young_objects() as young,
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            warnings.catch_warnings(),
        ):
            # That values are not copied into it.
            warnings.simplefilter("ignore")
            model = job.build_model()
            same = torch.equal(torch.get_rng_state(), drawn)
            strays = _strays(model, young())
        after = Generators.now()
    except Exception as error:  # of whatever kind: it is the job's own code
        text = " ".join(str(error).split())[:200]
        return Bare(None, f"its numbers are read as it is built ({type(error).__name__}: {text})", "", before)
    finally:
        before.restore()
    reason = "it draws random numbers on a device of its own choice" if not same else _unfit(model)
    if not reason and strays:
        reason = "it keeps tensors that are neither parameters nor buffers"
    return Bare(model, reason, "" if reason else digest(model), after)


def constants(job: TrainingJob) -> dict[str, Tensor] | None:
    """The buffers of the job's model by their names, made without its parameters' numbers; None if they draw any, or
    take any from the parameters.
    """
    before, drawn = Generators.now(), torch.get_rng_state()
    register = nn.Module.register_parameter

    def without_numbers(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nn.Module.register_parameter = without_numbers  # type: ignore[assignment,method-assign]
            model = job.build_model()
            same = torch.equal(torch.get_rng_state(), drawn)
    except Exception:  # of whatever kind: it is the job's own code
        return None
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        before.restore()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return buffers if same and not any(each.is_meta for each in buffers.values()) else None


def digest(model: nn.Module) -> str:
    """Of all that two models have in common which differ in their numbers alone."""
    first: dict[int, str] = {}
    tensors = [
        (name, first.setdefault(id(each), name), tuple(each.shape), str(each.dtype), each.requires_grad)
        for name, each in named_tensors(model)
    ]
    settings = [
        (name, key, value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        # What begins so are notes of libraries, as of having drawn a module's numbers.
        if isinstance(value, _SETTINGS) and not key.startswith("_")
    ]
    text = f"{tensors} {settings} {sorted(lasting(model))} {_ADDRESS.sub('', str(model))}"
    return hashlib.sha256(text.encode()).hexdigest()


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers; one that has several names under each of them."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def lasting(model: nn.Module) -> set[str]:
    """The names of the tensors that a checkpoint has."""
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    return {name for name, _ in named_tensors(model)} - passing


def sharing(model: nn.Module) -> nn.Module:
    """A copy that has the same parameters' numbers, in the same memory, all of them trainable."""
    same: dict[int, Any] = {id(each): nn.Parameter(each.detach()) for each in model.parameters()}
    return copy.deepcopy(model, same)


def _unfit(model: nn.Module) -> str:
    parameters = list(model.parameters())
    if not parameters:
        return "it has no parameters"
    if any(isinstance(each, torch.jit.ScriptModule) for each in model.modules()):
        return "it is compiled"
    tensors = [*parameters, *(each for each in model.buffers() if each.is_meta)]
    for each in tensors:
        if type(each) not in (nn.Parameter, Tensor) or each.layout != torch.strided:
            return f"it has a tensor of the kind {type(each).__name__}, {each.layout}"
        if not each.is_meta:
            return "it has parameters whose numbers are not drawn by build_model"
        if each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None):
            return "hooks are on its parameters"
    most = Counter(each.untyped_storage()._cdata for each in tensors).most_common(1)
    return "some of its tensors are parts of others" if most[0][1] > 1 else ""


@contextmanager
def _young_objects() -> Iterator[Callable[[], list[Any]]]:
    """What gives the objects made since then, without looking through all there are."""
    enabled = gc.isenabled()
    gc.disable()
    # Held, so that no new one takes the place of one of them.
    older = gc.get_objects(generation=0)
    known = {id(older), *map(id, older)}
    try:
        yield lambda: [each for each in gc.get_objects(generation=0) if id(each) not in known]
    finally:
        if enabled:
            gc.enable()


def _strays(model: nn.Module, objects: list[Any]) -> bool:
    """Whether among these is a tensor without numbers that will get none. No `isinstance`, which asks proxies."""
    own = {id(each) for _, each in named_tensors(model)}
    tensors = [each for each in objects if issubclass(type(each), Tensor) and each.is_meta]
    return any(id(each) not in own for each in tensors)
