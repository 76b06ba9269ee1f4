"""The initial model of a rank under a plan.

If a plan shards the weights, the model is built on torch's meta device, without numbers (meta_model.py), then cut into
stages, split, sharded, and given memory only for what the rank owns. A job that continues reads the numbers from its
checkpoint straight into place. A new job must begin with the weights that a single process would draw: rank 0 draws the
whole model once in its host's memory and broadcasts it tensor by tensor. If the model cannot be built on the meta
device, every rank builds the whole model and keeps its part.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh

from synergy_core.errors import InputError
from synergy_core.performance.planner.plan import Plan
from synergy_exec.training import trees
from synergy_exec.training.checkpoint import block
from synergy_exec.training.job import TrainingJob
from synergy_exec.training.meta_model import digest, keeping_random_state, named_tensors, on_meta_device
from synergy_exec.training.parallel import share_out, split
from synergy_exec.training.pipeline import cut, owned_stages, used_by_head
from synergy_exec.training.ranks import Ranks

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Initial:
    """Builds the parts that a rank begins with.

    mesh: None for one rank. weights: as in `Trainer`. begun: whether a checkpoint will be loaded; the tensors that it
    contains then need no initial values. low: as in `share_out`.
    """

    job: TrainingJob
    plan: Plan
    mesh: DeviceMesh | None
    device: torch.device
    seed: int
    weights: Path | None
    begun: bool
    low: torch.dtype | None = None
    _outline: nn.Module | None = None
    _drawn: dict[str, Tensor] = field(default_factory=dict)

    def parts(self) -> list[nn.Module]:
        """One part per stage that the rank owns; FSDP2 may have sharded them already.

        All ranks of the plan call it together.
        """
        plan = self.plan
        if self.mesh is None or (plan.gpus == plan.data and not plan.zero):
            return self._whole()
        ranks = Ranks()
        verdicts = ranks.together(lambda: self._verdict(ranks.rank))
        reasons = [reason for reason, _, _ in verdicts if reason]
        if not reasons and len({form for _, form, _ in verdicts}) > 1:
            reasons = ["its structure differs between ranks"]
        if reasons:
            if ranks.rank == 0:
                _log.warning("every rank builds the whole model and then keeps its part, because %s", reasons[0])
            return self._whole()
        assert self._outline is not None
        return self._filled(self._outline, verdicts[0][2], ranks)

    def _whole(self) -> list[nn.Module]:
        model = self._built(self.job)
        parts = self._cut(model, self._of_head(model))
        for part in parts:
            part.to(self.device)
            self._split(part)
        return parts

    def _built(self, job: TrainingJob) -> nn.Module:
        """Builds the model with the weights that a single process would draw."""
        torch.manual_seed(self.seed)
        model = job.build_model()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                # An expanded buffer (stride 0) cannot be written in place.
                if buffer is not None and buffer.layout == torch.strided and 0 in buffer.stride():
                    module._buffers[name] = buffer.contiguous()
        if self.weights is not None:
            read_into(model, self.weights)
        return model

    def _of_head(self, model: nn.Module, device: str = "cpu") -> list[str] | None:
        """The parameters that go with a pipeline's last stage; None without a pipeline."""
        if self.plan.pipeline == 1:
            return None
        inputs, _ = self.job.batch(0, 1)
        return used_by_head(model, self.job.blocks, trees.moved(inputs, torch.device(device)))

    def _verdict(self, rank: int) -> tuple[str, str, list[str] | None]:
        """Builds the model on the meta device. Returns why that is impossible ("" if it worked), a digest of its
        structure, and on rank 0 `_of_head`. After this, rank 0 has drawn the weights that it will send.
        """
        outline, reason, form = on_meta_device(self.job)
        if outline is None or reason:
            return reason, "", None
        self._outline = outline
        if rank:
            return "", form, None
        wanted = self._wanted(outline)
        if not wanted:
            try:
                return "", form, self._of_head(outline, "meta")
            except (RuntimeError, NotImplementedError, TypeError):
                return "its forward pass reads numbers", "", None
        try:
            # Build from a copy of the job: if the job keeps a reference to its model, that must be the trained one.
            with keeping_random_state():
                model = self._built(copy.copy(self.job))
        except Exception as error:  # every rank then builds the model itself and raises its own error
            return f"building it failed: {error}", "", None
        if digest(model) != form:
            return "its structure differs when it is built on the meta device", "", None
        of_head = self._of_head(model)
        self._drawn = {name: each for name, each in named_tensors(model) if name in wanted}
        for module in model.modules():
            # Each tensor is then freed once it is sent, even if something else still refers to the model.
            module._parameters.clear()
            module._buffers.clear()
        return "", form, of_head

    def _wanted(self, model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Shape and type of each tensor that rank 0 sends: all on the meta device that the checkpoint does not have."""
        saved = model.state_dict(keep_vars=True) if self.begun else {}
        tensors = {id(each): (name, each) for name, each in reversed(list(named_tensors(model)))}
        missing = ((name, each) for name, each in reversed(tensors.values()) if each.is_meta and name not in saved)
        return {name: (each.shape, each.dtype) for name, each in missing}

    def _filled(self, model: nn.Module, of_head: list[str] | None, ranks: Ranks) -> list[nn.Module]:
        plan = self.plan
        assert self.mesh is not None
        wanted = self._wanted(model)
        first: dict[int, str] = {}
        names = {name: first.setdefault(id(each), name) for name, each in named_tensors(model)}
        parts = self._cut(model, of_head)
        places: dict[str, list[Tensor]] = {}
        for part in parts:
            for module in part.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = buffer.to(self.device)
            self._split(part)
            if plan.data > 1 and plan.zero:
                share_out(part, self.job.blocks, plan.zero, self.mesh["data"], self.low)
            for name, each in named_tensors(part):
                if each.is_meta:
                    _give_memory(each, self.device)
                    places.setdefault(names[name], []).append(each)
        for name, (shape, dtype) in wanted.items():
            whole = self._drawn.pop(name).detach().contiguous() if ranks.rank == 0 else torch.empty(shape, dtype=dtype)
            distributed.broadcast(whole.view(-1).view(torch.uint8), 0, group=ranks.group)
            for each in places.get(name, ()):
                _, offset, values = block(each)
                own = tuple(slice(at, at + size) for at, size in zip(offset, values.shape, strict=True))
                values.copy_(whole[own])
        return parts

    def _cut(self, model: nn.Module, of_head: list[str] | None) -> list[nn.Module]:
        plan = self.plan
        if self.mesh is None or of_head is None:
            return [model]
        owned, count = owned_stages(self.mesh["pipeline"].get_local_rank(), plan), plan.pipeline * plan.interleave
        return [cut(model, self.job.blocks, of_head, stage, count) for stage in owned]

    def _split(self, part: nn.Module) -> None:
        if self.mesh is not None and self.plan.tensor > 1:
            split(part, self.job.tensor_plan, self.mesh["tensor"])


def _give_memory(tensor: Tensor, device: torch.device) -> None:
    """Replaces a meta tensor in place by an uninitialised one, so that every reference to it has memory."""
    real = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    vars(real).update(vars(tensor))
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


# Initial weights from a file that plain PyTorch or `export` wrote.


SAFETENSORS = ".safetensors"


def read_into(model: nn.Module, path: Path) -> None:
    """Sets all parameters and buffers of the whole model. Raises InputError unless the file has exactly these.

    path: a state_dict with the model's own names, as safetensors or written by torch.save.
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
    except Exception as error:  # both libraries raise errors of their own classes
        text = " ".join(str(error).split())[:200]
        raise InputError(f"weights: {path} cannot be read ({type(error).__name__}: {text}).") from error
    if not isinstance(values, dict) or not all(isinstance(each, Tensor) for each in values.values()):
        raise InputError(f"weights: {path} holds a {type(values).__name__}; expected a state_dict, tensors by name.")
    return values
