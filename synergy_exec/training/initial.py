"""The parts of a model that a rank has under a plan, as training begins with them.

A plan that leaves each rank a part of the weights has the model made without numbers (bare.py), cut, split, and given
memory for what the rank owns. Of a job that goes on from a checkpoint the numbers are read from that, straight into
their places. Of one that begins they are what a single process draws: rank 0 draws the whole model, once, in the memory
of its host, and hands it out block by block. Of a model that cannot be made without numbers every rank makes the whole,
and keeps its part of it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from synergy_core.errors import InputError
from synergy_core.planner.plan import Plan
from synergy_exec.training.admitted import Admission
from synergy_exec.training.bare import Generators, constants, digest, lasting, named_tensors
from synergy_exec.training.checkpoint import block
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.parallel import share_out, split
from synergy_exec.training.pipeline import Ends, cut, ends, owned_stages
from synergy_exec.training.ranks import Ranks

_SMALL_BYTES = 1 << 16
"""Rank 0 sends tensors below this size together, and larger ones one by one."""


class Outline(NamedTuple):
    """Of a whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_small(self) -> bool:
        """Whether it is sent with others."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize < _SMALL_BYTES


def _hand_out(
    given: dict[str, Tensor], outlines: Sequence[Outline], taken: Mapping[str, Sequence[Tensor]], ranks: Ranks
) -> None:
    """Sends these tensors from rank 0 to all ranks, each of which keeps its part. All call it together.

    given: on rank 0, the whole tensors by name; those that are sent are let go. taken: what this rank has of them, by
    name, whole or, as DTensors, its part.
    """
    assert ranks.group is not None
    small = [each for each in outlines if each.is_small]
    for together in ([small] if small else []) + [[each] for each in outlines if not each.is_small]:
        wholes = [
            given.pop(name).detach().contiguous() if ranks.rank == 0 else torch.empty(shape, dtype=dtype)
            for name, shape, dtype in together
        ]
        distributed._broadcast_coalesced(ranks.group, wholes, _SMALL_BYTES, 0)  # type: ignore[attr-defined]
        for outline, whole in zip(together, wholes, strict=True):
            for each in taken.get(outline.name, ()):
                _, offset, values = block(each)
                values.copy_(whole[tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))])


# Weights that training begins with, from a file that plain PyTorch or `export` wrote.


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
        values = load_file(path) if path.suffix == SAFETENSORS else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # of whatever kind: both libraries have their own
        text = " ".join(str(error).split())[:200]
        raise InputError(f"weights: {path} cannot be read ({type(error).__name__}: {text}).") from error
    if not isinstance(values, dict) or not all(isinstance(each, Tensor) for each in values.values()):
        raise InputError(f"weights: {path} holds a {type(values).__name__}; expected a state_dict, tensors by name.")
    return values


_log = logging.getLogger(__name__)


class _Verdict(NamedTuple):
    """A rank's. reason: why not from a model without numbers, "" for nothing. digest: of the model's form."""

    reason: str
    digest: str


class Initial:
    """What a rank of a plan has to begin with. mesh: None of one rank. weights: as `Trainer` has it."""

    def __init__(
        self,
        job: TrainingJob,
        plan: Plan,
        mesh: DeviceMesh | None,
        device: torch.device,
        admission: Admission,
        seed: int,
        weights: Path | None,
    ) -> None:
        self._job, self._plan, self._mesh, self._device = job, plan, mesh, device
        self._admission, self._seed, self._weights = admission, seed, weights
        self._drawn: dict[str, Tensor] = {}

    def parts(self, *, begun: bool, beat: Callable[[], None]) -> list[nn.Module]:
        """One for each stage of the rank's. Under FSDP2 the blocks are shared out already.

        begun: a checkpoint will be loaded, so tensors that it has may hold anything where that saves making them.
        beat: called while this rank waits for others. All ranks of the plan call it together.
        """
        plan = self._plan
        if self._mesh is None or (plan.gpus == plan.data and not plan.zero):
            return self._whole()
        ranks = Ranks()
        verdicts = [_Verdict(*each) for each in ranks.together(lambda: self._verdict(ranks.rank, begun), beat)]
        reasons = [each.reason for each in verdicts if each.reason]
        if not reasons and len({each.digest for each in verdicts}) > 1:
            reasons = ["it has another form on other ranks"]
        if reasons:
            if ranks.rank == 0:
                _log.warning("every rank makes the whole model before it keeps its part of it, since %s", reasons[0])
            return self._whole()
        return self._filled(ranks, begun)

    def _whole(self) -> list[nn.Module]:
        job, plan = self._job, self._plan
        torch.manual_seed(self._seed)
        model = job.build_model()
        if self._weights is not None:
            read_into(model, self._weights)
        parts = self._cut(model, ends(model, job.blocks, self._admission.inputs) if plan.pipeline > 1 else None)
        for part in parts:
            part.to(self._device)
            if self._mesh is not None and plan.tensor > 1:
                split(part, job.tensor_plan, self._mesh["tensor"])
        return parts

    def _verdict(self, rank: int, begun: bool) -> _Verdict:
        """On rank 0 with the numbers drawn that it is to hand out."""
        job, plan, bare = self._job, self._plan, self._admission.bare
        if bare.model is None or bare.reason:
            return _Verdict(bare.reason, "")
        if plan.pipeline > 1 and not self._admission.runs_bare:
            return _Verdict("its forward pass reads numbers", "")
        wanted = set() if rank else self._wanted(bare.model, begun)
        if not wanted:
            bare.after.restore()
            return _Verdict("", bare.digest)
        if begun and (found := constants(copy.copy(job))) is not None:
            bare.after.restore()
            self._drawn = {name: found[name] for name in wanted}
            return _Verdict("", bare.digest)
        before = Generators.now()
        try:
            torch.manual_seed(self._seed)
            # What the job keeps of its model must be the one that is trained.
            model = copy.copy(job).build_model()
            if self._weights is not None:
                read_into(model, self._weights)
        except Exception as error:  # every rank then raises its own
            before.restore()
            return _Verdict(f"building it failed: {error}", "")
        if digest(model) != bare.digest:
            before.restore()
            return _Verdict("it has another form when it is made without numbers", "")
        # Only numbers tell whether the stages compute what the model does.
        if plan.pipeline > 1 and ends(model, job.blocks, self._admission.inputs) != self._admission.edges:
            return _Verdict("its stages follow from its numbers", "")
        self._drawn = {name: each for _, name, each in _in_order(model, job.blocks) if name in wanted}
        for module in model.modules():
            # Whatever else still holds the model, its numbers are let go as they are handed out.
            module._parameters.clear()
            module._buffers.clear()
        return _Verdict("", bare.digest)

    def _wanted(self, model: nn.Module, begun: bool) -> set[str]:
        """The names of the bare model's tensors that rank 0 draws."""
        kept = lasting(model) if begun else set()
        empty = {name for name, each in named_tensors(model) if each.is_meta}
        return {name for _, name, _ in _in_order(model, self._job.blocks) if name in empty and name not in kept}

    def _filled(self, ranks: Ranks, begun: bool) -> list[nn.Module]:
        job, plan, model = self._job, self._plan, self._admission.bare.model
        assert model is not None
        assert self._mesh is not None
        wanted = self._wanted(model, begun)
        units: dict[str, list[Outline]] = {}
        for unit, name, each in _in_order(model, job.blocks):
            units.setdefault(unit, []).append(Outline(name, tuple(each.shape), each.dtype))
        names = _first_names(model, job.blocks)
        parts = self._cut(model, self._admission.edges if plan.pipeline > 1 else None)
        for part in parts:
            for module in part.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = buffer.to(self._device)
            if plan.tensor > 1:
                split(part, job.tensor_plan, self._mesh["tensor"])
        empty = _empty(parts, names)
        blocks = [{name: module for name, module in part.named_modules() if name in units} for part in parts]
        for unit, outlines in units.items():
            here = {outline.name: empty.pop(outline.name) for outline in outlines if outline.name in empty}
            for tensors in here.values():
                for each in tensors:
                    _give_memory(each, self._device)
            _hand_out(self._drawn, [outline for outline in outlines if outline.name in wanted], here, ranks)
            del here
            if plan.data > 1 and plan.zero and unit:
                for of_part in blocks:
                    if unit in of_part:
                        share_out(of_part[unit], plan.zero, self._mesh["data"])
        return parts

    def _cut(self, model: nn.Module, edges: Ends | None) -> list[nn.Module]:
        if edges is None or self._mesh is None:
            return [model]
        count = self._plan.pipeline * self._plan.interleave
        owned = owned_stages(self._mesh["pipeline"].get_local_rank(), self._plan)
        return [cut(model, self._job.blocks, edges, stage, count) for stage in owned]


def _in_order(model: nn.Module, blocks: str) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor once, block by block and then the rest: its block's name, or "", its first name, and itself."""
    seen = set()
    for unit, name, each in _all_names(model, blocks):
        if id(each) not in seen:
            seen.add(id(each))
            yield unit, name, each


def _first_names(model: nn.Module, blocks: str) -> dict[str, str]:
    """For every name of a tensor the first that it has in that order."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(each), name) for _, name, each in _all_names(model, blocks)}


def _all_names(model: nn.Module, blocks: str) -> list[tuple[str, str, Tensor]]:
    found = []
    for name, each in named_tensors(model):
        block = name.removeprefix(f"{blocks}.") if blocks and name.startswith(f"{blocks}.") else ""
        found.append((f"{blocks}.{block.partition('.')[0]}" if block else "", name, each))
    # Stable, so blocks stay in their order.
    return sorted(found, key=lambda each: not each[0])


def _empty(parts: list[nn.Module], names: dict[str, str]) -> dict[str, list[Tensor]]:
    """The tensors without memory of all parts, by the first name that each has in the whole model."""
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, each in named_tensors(part):
            known = found.setdefault(names[name], []) if each.is_meta else []
            if not any(each is other for other in known):
                known.append(each)
    return found


def _give_memory(tensor: Tensor, device: torch.device) -> None:
    """In place, so that whatever holds the tensor has it; its numbers may be any."""
    real = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]
