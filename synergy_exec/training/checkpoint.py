"""Checkpoints: written under one plan, read under any other.

A checkpoint is a folder (checkpoint_folder.py). Each rank writes its pieces of the tensors into a file of its own,
`rank-0.safetensors` and so on, and `progress.json` (integrity.py) says where in the whole tensor each piece belongs.
Tensors are named after the parameters of the whole model, so a reader finds its part under any plan. A checkpoint
appears whole or not at all, damage is found before anything is loaded, and a full disk gives an error in words.

All ranks call `save`, `save_later` and `load` together. A single rank needs no process group.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import numpy.ctypeslib  # noqa: F401  safetensors would import it at the first save; import it before ranks are forked
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from synergy_core.errors import InputError
from synergy_exec.training import checkpoint_folder, integrity
from synergy_exec.training.checkpoint_folder import Staging
from synergy_exec.training.integrity import DamagedError, Digest, Manifest, Progress, Stored, TensorPiece, Trained
from synergy_exec.training.ranks import Ranks
from synergy_runs.files import flush

MODEL = "model."
_OPTIMIZER = "optimizer."
_HELD = "compression."
_MOST_MAPPED_BYTES = 8 << 20
"""Files are opened again after this many bytes, because pages that were read count as memory of the rank."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class State:
    """The state of one rank that a checkpoint keeps.

    parts, optimizers: one of each for every pipeline stage that the rank owns. held: error feedback of compression, by
    KIND.PARAMETER, equal on all replicas of a layer (`Exchange.held`). `load` sets `held` for the rank's own
    parameters, in the host's memory.
    """

    parts: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    held: dict[str, Tensor] = field(default_factory=dict)


class Checkpoints:
    """A job's folder of checkpoints. It keeps the newest `keep` of them.

    job: UUID of the job, written into each checkpoint so that no other job loads it; "" for no such check. staging: the
    staging folder of the run that saves; None if only one process can save here.
    """

    def __init__(self, folder: Path, *, keep: int = 2, job: str = "", staging: Staging | None = None) -> None:
        self._folder, self._keep, self._job, self._staging = folder, keep, job, staging
        self._latest: Future[None] | None = None

    def save(self, state: State, progress: Progress) -> None:
        """Writes a checkpoint and deletes old ones. The checkpoint is complete on disk when this returns.

        Raises InputError on all ranks if it cannot be written; earlier checkpoints then stay as they were. Raises
        FencedError if a newer run has taken the folder over.
        """
        self.save_later(state, progress, goes_on=False).result()

    def save_later(self, state: State, progress: Progress, *, goes_on: bool = True) -> Future[None]:
        """Copies everything to the host's memory and returns; a thread then writes it while training goes on.

        Checkpoints are written one after another. The future ends as `save` does. goes_on: whether training may change
        the tensors meanwhile.
        """
        # While training goes on, it communicates in the default group.
        ranks, progress = Ranks(aside=goes_on), replace(progress)
        blocks, are_copied = _on_host(_tensors(state, trained=progress.step > 0), copied=goes_on)
        trained = _trained(state, progress)
        before, future = self._latest, Future[None]()

        def write() -> None:
            if before is not None:
                before.exception()
            try:
                are_copied()
                self._write(ranks, blocks, trained, progress)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        self._latest = future
        # A daemon thread: a process that fails does not wait for it, and a partial checkpoint is not visible.
        Thread(target=write, name="checkpoint", daemon=True).start()
        return future

    def load(self, state: State, *, saved_step: int = 0) -> Progress | None:
        """Loads the newest undamaged checkpoint; returns None if there is no checkpoint. Learning rates stay unchanged.

        Damaged checkpoints are named in the log and skipped; the state is not touched before an undamaged one is found.
        Raises InputError if all are damaged, if the checkpoint is of another model, optimizer or job, or if there is
        none although `saved_step` had been saved. After any other error the state may be half loaded, and the process
        must end.
        """
        ranks, damaged = Ranks(), []
        for name in ranks.first(lambda: [path.name for path in checkpoint_folder.newest_first(self._folder)]):
            path = self._folder / name
            try:
                manifest = _verified(ranks, path)
            except DamagedError as error:
                damaged.append(f"{name} ({error})")
                if ranks.rank == 0:
                    _log.warning("checkpoint %s is damaged and skipped: %s", path, error)
                continue
            if manifest.job and self._job and manifest.job != self._job:
                raise InputError(
                    f"checkpoint {path} is of another job: it says {manifest.job}, and this one is {self._job}. Put "
                    "the folder back that was here and type python -m synergy_exec retry JOB; to begin again from step "
                    "0, add --from-start."
                )
            _load(ranks, path, manifest, state)
            return manifest.progress
        if damaged:
            raise InputError(
                f"no checkpoint in {self._folder} is whole: {', '.join(damaged)}. "
                "Restore one of them; to train from the beginning, delete the folder, or have the executor put it "
                "aside: python -m synergy_exec retry JOB --from-start."
            )
        if saved_step:
            raise InputError(
                f"{self._folder} has no checkpoint, and step {saved_step} had been saved there. Put it back and type "
                "python -m synergy_exec retry JOB; to begin again from step 0, add --from-start."
            )
        return None

    def _write(
        self, ranks: Ranks, blocks: Mapping[str, TensorShard], trained: dict[str, Trained], progress: Progress
    ) -> None:
        offers = ranks.together(lambda: ([_offer(name, own) for name, own in blocks.items()], trained))
        tensors, needed_bytes = _shared_out([offered for offered, _ in offers])
        trained = {name: Trained(*each) for _, of_rank in offers for name, each in of_rank.items()}
        path: Path | None = None
        try:
            path = Path(ranks.first(lambda: str(self._begin(progress.step, needed_bytes))))
            digests = ranks.together(lambda: _written(path / _file(ranks.rank), blocks, tensors))
            files = {_file(rank): Digest(*each) for rank, each in enumerate(digests)}
            manifest = Manifest(progress, files, tensors, trained, self._job)
            ranks.first(lambda: self._complete(path, manifest))
        except Exception as error:
            if path is not None and ranks.rank == 0:
                shutil.rmtree(path, ignore_errors=True)
            if self._staging is not None:
                self._staging.check()
            if isinstance(error, OSError):
                raise InputError(
                    f"cannot write checkpoint {checkpoint_folder.name(progress.step)} in {self._folder}: {error}. It "
                    f"takes about {needed_bytes / 1e6:,.1f} MB. Make room there; earlier checkpoints are as they were."
                ) from error
            raise

    def _begin(self, step: int, needed_bytes: int) -> Path:
        if self._staging is None:
            self._folder.mkdir(parents=True, exist_ok=True)
        path = checkpoint_folder.begin(self._folder if self._staging is None else self._staging.path, step)
        if shutil.disk_usage(self._folder).free < needed_bytes:
            shutil.rmtree(path, ignore_errors=True)
            raise OSError("too little room")
        return path

    def _complete(self, path: Path, manifest: Manifest) -> None:
        step = manifest.progress.step
        integrity.write(path, manifest)
        checkpoint_folder.publish(self._folder, path, step)
        checkpoint_folder.prune(self._folder, path.parent, step, self._keep)


# The tensors to save, by name. They are the live tensors, not copies. Optimizers have no state before the first step.


def check_state(state: State) -> None:
    """Raises InputError if a checkpoint cannot hold the state. Call it after a step, when optimizers have state."""
    _tensors(state, trained=True)


def _tensors(state: State, *, trained: bool) -> dict[str, Tensor]:
    tensors = {f"{MODEL}{name}": each for part in state.parts for name, each in part.state_dict().items()}
    if trained:
        for _, parameter, name, optimizer in _parameters(state):
            values = optimizer.state.get(parameter, {})
            found = {_name(key, name): value for key, value in values.items() if not _is_number(value)}
            tensors |= {key: value for key, value in found.items() if value is not None}
    tensors |= {f"{_HELD}{name}": each for name, each in state.held.items()}
    for name, each in tensors.items():
        if not isinstance(each, Tensor) or each.layout != torch.strided:
            described = f"tensor of layout {each.layout}" if isinstance(each, Tensor) else type(each).__name__
            raise InputError(f"{name} is a {described}; checkpoints hold dense tensors and numbers.")
    for optimizer in state.optimizers:
        # A checkpoint names state after parameters, as KEY.PARAMETER.
        keys = [key for key in optimizer.state if not isinstance(key, Tensor)]
        keys += [
            key for each in optimizer.state.values() if isinstance(each, Mapping) for key in each if "." in str(key)
        ]
        if keys:
            raise InputError(
                f"{type(optimizer).__name__} keeps state as '{keys[0]}'; checkpoints hold only state of single "
                "parameters, under names without dots."
            )
    return tensors


def _trained(state: State, progress: Progress) -> dict[str, Trained]:
    """This rank's entries of `Manifest.trained`."""
    if progress.step == 0:
        return {}
    return {
        name: Trained(type(optimizer).__name__, _numbers(group), _numbers(optimizer.state.get(parameter, {})))
        for group, parameter, name, optimizer in _parameters(state)
    }


def _parameters(state: State) -> Iterator[tuple[dict[str, Any], Tensor, str, Optimizer]]:
    """Yields every trained parameter: its group in the optimizer, the parameter, its name, and the optimizer."""
    for part, optimizer in zip(state.parts, state.optimizers, strict=True):
        names = {parameter: name for name, parameter in part.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield group, parameter, names[parameter], optimizer


def _name(key: str, parameter: str) -> str:
    return f"{_OPTIMIZER}{key}.{parameter}"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    # Not learning rates: those in use include the factor of the batch size, which the trainer applies again.
    return {key: value for key, value in values.items() if _is_number(value) and key != "lr"}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


class TensorShard(NamedTuple):
    """This rank's part of a tensor. whole: shape of the whole tensor. offset: where in it the block begins."""

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def block(tensor: Tensor) -> TensorShard:
    """This rank's block of a tensor: the local part of a DTensor, or the whole of any other tensor."""
    if not isinstance(tensor, DTensor):
        return TensorShard(tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return TensorShard(tuple(tensor.shape), tuple(offset), tensor.to_local().detach())


_ALIGNED_BYTES = 64


def packed(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Packs blocks of these sizes into few buffers, because torch rounds each piece of pinned memory up to a power of
    two. Returns the size of every buffer, a power of two, and the buffer and offset of every block; all in bytes.
    """
    aligned = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    most = max(_power_of_two(max(aligned, default=0)), _power_of_two(sum(aligned) // 16))
    used, places = list[int](), [(0, 0)] * len(sizes)
    for at in sorted(range(len(sizes)), key=lambda at: -aligned[at]):
        buffer = next((each for each, there in enumerate(used) if there + aligned[at] <= most), len(used))
        used += [0] * (buffer == len(used))
        places[at] = buffer, used[buffer]
        used[buffer] += aligned[at]
    return [_power_of_two(each) for each in used], places


def _power_of_two(size: int) -> int:
    """The smallest power of two of at least this size."""
    return 1 << max(size - 1, 0).bit_length()


def _on_host(tensors: Mapping[str, Tensor], *, copied: bool) -> tuple[dict[str, TensorShard], Callable[[], None]]:
    """Returns this rank's blocks in the host's memory, and a function to call before they are read.

    copied: whether to copy tensors that are in the host's memory already. Copies from a GPU are queued on its stream
    after the work that is queued now and before any later work. They go into pinned memory, which torch reuses for the
    next checkpoint; only the reader waits for them. This has never run on a GPU.
    """
    blocks = {name: block(tensor) for name, tensor in tensors.items()}
    if copied:
        here = {name: each for name, each in blocks.items() if each.values.is_cpu}
        blocks |= {name: each._replace(values=each.values.clone()) for name, each in here.items()}
    away = {name: each for name, each in blocks.items() if not each.values.is_cpu}
    sizes, places = packed([each.values.nbytes for each in away.values()])
    buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    for (name, own), (buffer, at) in zip(away.items(), places, strict=True):
        copy = buffers[buffer][at : at + own.values.nbytes].view(own.values.dtype).view(own.values.shape)
        blocks[name] = own._replace(values=copy.copy_(own.values, non_blocking=True))
    if not away:
        return blocks, lambda: None
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record()
    return blocks, made.synchronize


# Which rank writes which pieces.


def _offer(name: str, block: TensorShard) -> tuple[Any, ...]:
    """A block's description for other ranks: name, type, shape of the whole, offset, shape of the block, and bytes."""
    dtype = str(block.values.dtype).removeprefix("torch.")
    return name, dtype, block.whole, block.offset, block.values.shape, block.values.nbytes


def _shared_out(offers: Sequence[Sequence[Sequence[Any]]]) -> tuple[dict[str, Stored], int]:
    """Decides who writes what: returns every tensor with its pieces, and the total bytes. offers: one list per rank.

    A block that several ranks have is written by the one with the fewest bytes to write so far.
    """
    holders: dict[tuple[Any, ...], list[int]] = {}
    for rank, offered in enumerate(offers):
        for name, dtype, whole, offset, shape, size_bytes in offered:
            key = name, dtype, tuple(whole), tuple(offset), tuple(shape), size_bytes
            holders.setdefault(key, []).append(rank)
    tensors: dict[str, Stored] = {}
    to_write = [0] * len(offers)
    for (name, dtype, whole, offset, shape, size_bytes), ranks in holders.items():
        pieces = tensors.setdefault(name, Stored(dtype, whole, [])).pieces
        if size_bytes:
            writer = min(ranks, key=to_write.__getitem__)
            to_write[writer] += size_bytes
            pieces.append(TensorPiece(_file(writer), offset, shape))
    return tensors, sum(to_write)


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def _written(path: Path, blocks: Mapping[str, TensorShard], tensors: Mapping[str, Stored]) -> Digest:
    """Writes one rank's file. Raises OSError."""
    written = [name for name, stored in tensors.items() if any(piece.file == path.name for piece in stored.pieces)]
    own = {name: blocks[name].values.contiguous() for name in written}
    end = 0
    for name, values in sorted(own.items(), key=lambda each: each[1].data_ptr()):
        if values.data_ptr() < end:  # safetensors refuses tensors that overlap, such as tied weights
            own[name] = values.clone()
        end = max(end, values.data_ptr() + values.nbytes)
    try:
        save_file(own, path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    with ThreadPoolExecutor(1) as aside:  # the disk works while the checksum is computed
        flushed = aside.submit(flush, path)
        digest = integrity.digest(path)
        flushed.result()
    return digest


def _verified(ranks: Ranks, path: Path) -> Manifest:
    """Reads the manifest and checks every file; ranks share the files out. Raises DamagedError on all ranks."""
    found: list[Manifest] = []

    def look() -> None:
        found.append(integrity.read(path))
        found[0].check(path, share=slice(ranks.rank, None, ranks.world))

    ranks.together(look)
    return found[0]


@torch.no_grad()
def _load(ranks: Ranks, path: Path, manifest: Manifest, state: State) -> None:
    """Loads this rank's state. Raises InputError if the checkpoint is of another model or optimizer."""
    _compare(ranks, path, manifest, state)
    own = {name for part in state.parts for name, _ in part.named_parameters()}
    held = {name.removeprefix(_HELD): each for name, each in manifest.tensors.items() if name.startswith(_HELD)}
    state.held = {name: empty(each) for name, each in held.items() if name.partition(".")[2] in own}
    _make_optimizer_states(state, manifest)
    tensors = _tensors(state, trained=bool(manifest.trained))
    read(path, manifest, tensors)
    for part in state.parts:
        live = dict(part.named_parameters(remove_duplicate=False)) | dict(part.named_buffers(remove_duplicate=False))
        values = {name: tensors[f"{MODEL}{name}"] for name in part.state_dict()}
        # Most tensors were read in place. A module with a state_dict of its own has to load it.
        if any(name not in live or _memory(live[name]) != _memory(each) for name, each in values.items()):
            part.load_state_dict(values)


def _compare(ranks: Ranks, path: Path, manifest: Manifest, state: State) -> None:
    """Raises InputError unless the checkpoint has the tensors and optimizers that all ranks have together."""

    def own() -> dict[str, Any]:
        found: dict[str, Any] = {
            f"{MODEL}{name}": tuple(each.shape) for part in state.parts for name, each in part.state_dict().items()
        }
        for _, _, name, optimizer in _parameters(state) if manifest.trained else ():
            found[f"the optimizer of {name}"] = type(optimizer).__name__
        return found

    wanted = {name: each for of_rank in ranks.together(own) for name, each in of_rank.items()}
    wanted = {name: tuple(each) if isinstance(each, list) else each for name, each in wanted.items()}
    found: dict[str, Any] = {name: each.shape for name, each in manifest.tensors.items() if name.startswith(MODEL)}
    found |= {f"the optimizer of {name}": each.optimizer for name, each in manifest.trained.items()}
    if odd := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise InputError(
            f"checkpoint {path} is of another model or optimizer: {odd[0]} is {found.get(odd[0], 'missing')} in it and "
            f"{wanted.get(odd[0], 'missing')} in the job ({len(odd)} differ). "
            "Give the job its former class and arguments, or delete the folder to train from the beginning."
        )


def _make_optimizer_states(state: State, manifest: Manifest) -> None:
    """Creates the entries of every optimizer's state that the checkpoint has; `read` fills the tensors afterwards."""
    keys: dict[str, list[str]] = {}
    for name in manifest.tensors:
        if name.startswith(_OPTIMIZER):
            _, key, owner = name.split(".", 2)
            keys.setdefault(owner, []).append(key)
    for group, parameter, name, optimizer in _parameters(state):
        if (trained := manifest.trained.get(name)) is None:
            continue
        group.update(trained.group)
        values: dict[str, Any] = dict(trained.state)
        for key in keys.get(name, ()):
            stored = manifest.tensors[_name(key, name)]
            # Torch's optimizers keep the step counter on the host unless they are capturable or fused.
            on_host = key == "step" and not (group.get("capturable") or group.get("fused"))
            values[key] = empty(stored) if on_host else _empty_beside(parameter, stored)
        optimizer.state[parameter] = values


def _memory(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def _empty_beside(parameter: Tensor, stored: Stored) -> Tensor:
    """An empty tensor for an optimizer's state, on the parameter's device.

    It is split like the parameter if it has the same shape; otherwise every rank has the whole.
    """
    if not isinstance(parameter, DTensor):
        return empty(stored).to(parameter.device)
    mesh = parameter.device_mesh
    if stored.shape == tuple(parameter.shape):
        local = torch.empty_like(parameter.to_local(), dtype=getattr(torch, stored.dtype))
        return DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    return DTensor.from_local(empty(stored).to(parameter.device), mesh, [Replicate()] * mesh.ndim)


def empty(stored: Stored) -> Tensor:
    """An uninitialised whole tensor to `read` into."""
    return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))


def read(path: Path, manifest: Manifest, into: Mapping[str, Tensor]) -> None:
    """Fills tensors from an undamaged checkpoint; of a DTensor, this rank's part."""
    files: dict[str, Any] = {}
    mapped_bytes = 0
    for name, tensor in into.items():
        _, begin, values = block(tensor)
        for piece in manifest.tensors[name].pieces:
            spans = [
                (max(at, start), min(at + size, start + length))
                for at, size, start, length in zip(begin, values.shape, piece.offset, piece.shape, strict=True)
            ]
            if all(first < last for first, last in spans):
                if piece.file not in files:
                    files[piece.file] = safe_open(path / piece.file, "pt")
                found = files[piece.file].get_slice(name)[_within(spans, piece.offset)]
                values[_within(spans, begin)].copy_(found)
                mapped_bytes += found.nbytes
        if mapped_bytes > _MOST_MAPPED_BYTES:
            files.clear()
            mapped_bytes = 0


def _within(spans: Sequence[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """Slices of the block that begins at `offset` for `spans` of the whole tensor, (begin, end) per dimension."""
    return tuple(slice(first - at, last - at) for (first, last), at in zip(spans, offset, strict=True))
