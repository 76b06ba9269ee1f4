"""Checkpoints that any plan reads whatever plan wrote them; see docs/executor.md.

torch.distributed.checkpoint writes and re-shards. Here is what it leaves out: a checkpoint is there whole or not at
all, damage is found before it is loaded, a full disk is an error a user can read.

All ranks call `save`, `save_later` and `load` together, with or without an initialised process group for one rank.
Of each job, one run at a time does: the newest (shelf.py). The folder is trusted: torch reads pickles from it.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.optim import Optimizer

from synergy_core.errors import InputError
from synergy_exec.training import integrity, shelf
from synergy_exec.training.integrity import DamagedError, Manifest, Progress
from synergy_exec.training.ranks import Ranks
from synergy_exec.training.shelf import Desk

# Copies in the host's memory of what is to be saved, which a thread writes while training goes on.
#
# What is done on a GPU has never run on one.


def staged(tree: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
    """The copies, and what to call before they are read.

    From a GPU they are made behind what it has to do already and before what it is told to do next, into pinned memory
    that is kept for the next checkpoint, and nobody waits for them but who reads them: so one at a time is in use.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        stager = StateDictStager()
        copies: dict[str, Any] = stager.stage(tree)
        # Else a circle would keep the copies.
        stager.close()  # type: ignore[no-untyped-call]
        return copies, lambda: None
    copies = _pinned().stage(tree, non_blocking=True)
    made = torch.cuda.Event()  # type: ignore[no-untyped-call]
    made.record()
    return copies, made.synchronize


@cache
def _pinned() -> StateDictStager:
    return StateDictStager(pin_memory=True)


# A job's state as one flat dictionary in which every tensor has its original parameter's name, under any plan.


_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

Shapes = dict[str, tuple[tuple[int, ...], int]]
"""By a tensor's name: its global shape, and its bytes over all ranks."""


class State:
    """The tensors of these parts, live: what is loaded into `tree` has reached the parameters, `apply` does the rest.

    parts, optimizers: one per stage that this rank owns. with_optimizer: False before the first step, when optimizers
    have no state: torch would make it by a step of zero gradients, which Adam counts.
    """

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer], *, with_optimizer: bool) -> None:
        self._parts, self._optimizers = list(parts), list(optimizers)
        self._models = [get_model_state_dict(part) for part in self._parts]
        self._optimizer_states: list[dict[str, Any]] = []
        self.tree: dict[str, Any] = {"model": _merged(self._models)}
        if with_optimizer:
            for part, optimizer in zip(self._parts, self._optimizers, strict=True):
                self._optimizer_states.append(get_optimizer_state_dict(part, optimizer, options=_OPTIONS))
            self.tree["optimizer"] = _merged(self._optimizer_states)

    def apply(self) -> None:
        """Make what was loaded into `tree` the state of parts and optimizers; learning rates stay as they are."""
        for part, values in zip(self._parts, self._models, strict=True):
            set_model_state_dict(part, {name: self.tree["model"][name] for name in values})
        for part, optimizer, values in zip(self._parts, self._optimizers, self._optimizer_states, strict=False):
            # Saved rates have the batch's factor in them; the worker multiplies those of `build_optimizer` anew.
            rates = [copy.copy(group["lr"]) for group in optimizer.param_groups]
            loaded = {name: self.tree["optimizer"][name] for name in values}
            set_optimizer_state_dict(part, optimizer, loaded, options=_OPTIONS)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate


def shapes(tree: dict[str, Any]) -> Shapes:
    """The shapes of all tensors in a `State.tree`, by the names that torch.distributed.checkpoint gives them."""
    return {
        f"{kind}.{name}": (tuple(value.shape), value.numel() * value.element_size())
        for kind, values in tree.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def seed_generators(saved: Tensor, step: int, replica: int) -> None:
    """Set torch's generators from rank 0's saved CPU state; see `checkpoint.load` for what that promises."""
    text = f"{hashlib.sha256(saved.numpy().tobytes()).hexdigest()} {step} {replica}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big", signed=True))
    if replica == 0:
        torch.set_rng_state(saved)


def _merged(dictionaries: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for each in dictionaries for name, value in each.items()}


_log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]
_HELD = "compression"
_DATA = "data"

# torch says on every call that there is no process group; for one rank that is as it should be.
warnings.filterwarnings("ignore", message="torch.distributed is disabled", module="torch.distributed.checkpoint")


class Saving:
    """A checkpoint on its way to disk."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._error: Exception | None = None
        self.waited_for = False
        # A daemon: a process that leaves on an error does not wait for it, and what is partial is not visible.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete on disk. Raises what `save` raises."""
        self._thread.join()
        self.waited_for = True
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._error = error


_in_flight: Saving | None = None


def save(
    folder: Path,
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    progress: Progress,
    keep: int = 2,
    held: Tensors | None = None,
    data: Tensor | None = None,
    job: str = "",
    desk: Desk | None = None,
) -> None:
    """Write `folder`/step-…, complete on disk when this returns, and delete all but the newest `keep`.

    held: what compression holds back (`Exchange.held`), equal on the replicas of each layer. data: where the stream of
    samples is (`Supply.state`), of rank 0. job: whose it is, which it says from then on; "" for nobody that has to be
    told from others. desk: of the run that saves, None where no other can. Raises InputError, the same on all ranks, if
    it cannot be written; earlier checkpoints are then as they were. Raises FencedError where a newer run has taken the
    folder over.
    """
    _settle()
    tree = _tree(parts, optimizers, progress, held, data)
    _write(Ranks(), Path(folder), tree, Progress(**_fields(progress)), keep, job, desk)


def save_later(
    folder: Path,
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    progress: Progress,
    keep: int = 2,
    held: Tensors | None = None,
    data: Tensor | None = None,
    job: str = "",
    desk: Desk | None = None,
) -> Saving:
    """Copy everything to the host's memory, return, and write it in a thread while training goes on; see `staged`.

    One is in flight at most: the next `save` or `save_later` first waits for this one and raises its error if `wait`
    has not.
    """
    global _in_flight
    _settle()
    ranks = Ranks()
    copies, made = staged(_tree(parts, optimizers, progress, held, data))
    then = Progress(**_fields(progress))

    def write() -> None:
        made()
        _write(ranks, Path(folder), copies, then, keep, job, desk)

    _in_flight = Saving(write)
    return _in_flight


def load(
    folder: Path,
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    replica: int = 0,
    held: Tensors | None = None,
    data: Callable[[Tensor | None], None] | None = None,
    job: str = "",
    saved_step: int = 0,
) -> Progress | None:
    """Load the newest whole checkpoint into parts and optimizers; None if there is none at all.

    Damaged ones are named in the log and passed over; nothing live is touched before a whole one is found. Learning
    rates stay as they are. Raises InputError if all are damaged, if the checkpoint is of another model or optimizer,
    or of another job than `job`, and where there is none though `saved_step` had been saved. After any other error the
    state may be half loaded: the process must end.

    replica: this rank's data-parallel index. Of torch's random numbers it is promised that those of replica 0 on CPU
    go on where rank 0's stopped, and that every other replica, and every GPU, starts a new stream that depends only on
    that state, the step and the replica: ranks of one replica draw alike, no stream is drawn twice.

    held: tensors that what compression held back is read into (`Exchange.wanted`). Those that the checkpoint does not
    have in that shape, of another compressor, are taken out of it.

    data: is given where the stream of samples was, None where the checkpoint does not say.
    """
    _settle()
    ranks = Ranks()
    folder = Path(folder)
    damaged = []
    for path in ranks.first(lambda: shelf.newest_first(folder)):
        try:
            manifest = _verified(ranks, path)
            _check_whose(path, manifest.job, job)
        except DamagedError as error:
            damaged.append(f"{path.name} ({error})")
            if ranks.rank == 0:
                _log.warning("checkpoint %s is damaged and passed over: %s", path, error)
            continue
        _read(ranks, path, parts, optimizers, manifest.progress, replica, {} if held is None else held, data)
        return manifest.progress
    if saved_step and not damaged:
        raise InputError(
            f"{folder} has no checkpoint, and step {saved_step} had been saved there. Put it back and type python -m "
            "synergy_exec retry JOB; to begin again from step 0, add --from-start."
        )
    if damaged:
        raise InputError(
            f"no checkpoint in {folder} is whole: {', '.join(damaged)}. "
            "Restore one of them; to train from the beginning, delete the folder, or have the executor put it aside: "
            "python -m synergy_exec retry JOB --from-start."
        )
    return None


def _check_whose(path: Path, found: str, wanted: str) -> None:
    if found and wanted and found != wanted:
        raise InputError(
            f"checkpoint {path} is of another job: it says {found}, and this one is {wanted}. Put the folder back that "
            "was here and type python -m synergy_exec retry JOB; to begin again from step 0, add --from-start."
        )


def _settle() -> None:
    global _in_flight
    earlier, _in_flight = _in_flight, None
    if earlier is not None and not earlier.waited_for:
        earlier.wait()


def _fields(progress: Progress) -> dict[str, Any]:
    return {name: getattr(progress, name) for name in Progress.__slots__}


def _tree(
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    progress: Progress,
    held: Tensors | None,
    data: Tensor | None,
) -> dict[str, Any]:
    tree = State(parts, optimizers, with_optimizer=progress.step > 0).tree | ({_HELD: held} if held else {})
    tree |= {_DATA: {"state": data}} if data is not None else {}
    return tree | ({"random": {"rank0": torch.get_rng_state()}} if Ranks().rank == 0 else {})


def _write(
    ranks: Ranks, folder: Path, tree: dict[str, Any], progress: Progress, keep: int, job: str, desk: Desk | None
) -> None:
    union: Shapes = {}
    for each in ranks.together(lambda: shapes(tree)):
        union |= each
    needed_bytes = sum(size for _, size in union.values())
    partial: Path | None = None
    try:
        partial = ranks.first(lambda: _begin(folder, desk, progress.step, needed_bytes))
        writer = FileSystemWriter(partial)
        writer.fs = _Files()
        save_distributed(tree, storage_writer=writer, process_group=ranks.group)
        files: dict[str, integrity.Digest] = {}
        for digests in ranks.together(lambda: _digests(partial, ranks.rank)):
            files |= digests
        ranks.first(lambda: _complete(folder, partial, Manifest(progress, files, torch.__version__, job), keep))
    except (Exception, CheckpointException) as error:
        if partial is not None and ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if desk is not None:
            desk.require()
        raise _explained(error, folder, progress.step, needed_bytes) from error


class _Files(FileSystem):
    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Not again, and not its parents: where it is gone, a newer run has taken it away."""


def _begin(folder: Path, desk: Desk | None, step: int, needed_bytes: int) -> Path:
    if desk is None:
        folder.mkdir(parents=True, exist_ok=True)
    partial = shelf.begin(folder, folder if desk is None else desk.path, step)
    if shutil.disk_usage(folder).free < needed_bytes:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError("too little room")
    return partial


def _digests(partial: Path, rank: int) -> dict[str, integrity.Digest]:
    # Each rank reads back what it wrote, from the page cache of its own machine.
    own = [*partial.glob(f"__{rank}_*"), *(partial.glob(".metadata") if rank == 0 else ())]
    return {path.name: integrity.digest(path) for path in own}


def _complete(folder: Path, partial: Path, manifest: Manifest, keep: int) -> None:
    integrity.write(partial, manifest)
    shelf.publish(folder, partial, manifest.progress.step)
    shelf.prune(folder, partial.parent, manifest.progress.step, keep)


_ZIP_WRITER = ("PytorchStreamWriter", "inline_container.cc")
"""By what errors of torch's zip writer are known, which loses the OSError of the stream below it."""


def _explained(error: BaseException, folder: Path, step: int, needed_bytes: int) -> Exception:
    """InputError if the file system refused; otherwise an ordinary exception (torch's own is a BaseException)."""
    causes = [error]
    if isinstance(error, CheckpointException):
        causes = [cause for cause, _ in error.failures.values()]
    for cause in causes:
        if isinstance(cause, OSError) or any(name in str(cause) for name in _ZIP_WRITER):
            try:
                free = f"{shutil.disk_usage(folder).free / 1e6:,.1f} MB are free"
            except OSError:
                free = "how much is free cannot be told"
            return InputError(
                f"cannot write checkpoint {shelf.name(step)} in {folder}: {cause}. It takes about "
                f"{needed_bytes / 1e6:,.1f} MB, {free}. Make room there; earlier checkpoints are as they were."
            )
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"checkpoint {shelf.name(step)} in {folder} was not written: {error}")


def _verified(ranks: Ranks, path: Path) -> Manifest:
    manifest = ranks.first(lambda: integrity.read(path))
    share = dict(list(manifest.files.items())[ranks.rank :: ranks.world])
    damages = [each for each in ranks.together(lambda: integrity.damage(path, share)) if each]
    if damages:
        raise DamagedError(damages[0])
    return manifest


def _read(
    ranks: Ranks,
    path: Path,
    parts: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    progress: Progress,
    replica: int,
    held: Tensors,
    data: Callable[[Tensor | None], None] | None,
) -> None:
    state = State(parts, optimizers, with_optimizer=progress.step > 0)
    found = _found(path)
    _compare(ranks, path, shapes(state.tree), found)
    if lost := [name for name, tensor in held.items() if found.get(f"{_HELD}.{name}") != tuple(tensor.shape)]:
        _log.info("checkpoint %s has nothing held back of %s, among %d", path, lost[0], len(lost))
    for name in lost:
        del held[name]
    if not held and any(name.startswith(f"{_HELD}.") for name in found):
        _log.info("what compression held back is let go: this plan's compressor holds nothing of that kind")
    random = torch.get_rng_state()
    size = found.get(f"{_DATA}.state") if data is not None else None
    where = None if size is None else torch.zeros(size, dtype=torch.uint8)
    beside = ({_HELD: held} if held else {}) | ({} if where is None else {_DATA: {"state": where}})
    try:
        load_distributed(
            state.tree | {"random": {"rank0": random}} | beside,
            storage_reader=FileSystemReader(path),
            process_group=ranks.group,
        )
    except CheckpointException as error:
        raise RuntimeError(f"checkpoint {path} was not loaded: {error}") from error
    state.apply()
    if data is not None:
        data(where)
    seed_generators(random, progress.step, replica)


def _found(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of a checkpoint's tensors."""
    metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    return {name: tuple(each.size) for name, each in metadata.items() if isinstance(each, TensorStorageMetadata)}


def _compare(ranks: Ranks, path: Path, own: Shapes, found: dict[str, tuple[int, ...]]) -> None:
    """Raise InputError unless checkpoint and ranks together have the same tensors of model and optimizer."""
    wanted: dict[str, tuple[int, ...]] = {}
    for each in ranks.together(lambda: own):
        wanted |= {name: shape for name, (shape, _) in each.items()}
    found = {name: shape for name, shape in found.items() if not name.startswith(("random.", f"{_HELD}.", f"{_DATA}."))}
    if odd := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        raise InputError(
            f"checkpoint {path} is of another model or optimizer: {odd[0]} is {found.get(odd[0], 'missing')} in it and "
            f"{wanted.get(odd[0], 'missing')} in the job ({len(odd)} differ). "
            "Give the job its former class and arguments, or delete the folder to train from the beginning."
        )
