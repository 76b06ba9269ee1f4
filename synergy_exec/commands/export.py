"""`export`: writes a job's weights as one safetensors file under the model's own names; reading it needs no Synergy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from synergy_core.cli import Parser
from synergy_core.errors import InputError
from synergy_exec import job_folder
from synergy_exec.folders import find_job
from synergy_exec.settings import Settings
from synergy_exec.training import checkpoint, checkpoint_folder, integrity
from synergy_exec.training.integrity import DamagedError, Progress
from synergy_runs.files import atomic_file, flush

SAFETENSORS = ".safetensors"


def weights(folder: Path, step: int | None = None) -> tuple[dict[str, Tensor], Progress]:
    """Reads a model's state_dict and progress from a folder's newest undamaged checkpoint, or from that of `step`.

    Parameters and buffers are whole, on the CPU, under their original names, whatever plan wrote them. The folder is
    not changed, and a job may be writing to it. Raises InputError if there is no checkpoint or it is damaged.
    """
    skipped: list[str] = []
    for path in checkpoint_folder.newest_first(folder):
        if step is not None and path.name != checkpoint_folder.name(step):
            continue
        try:
            manifest = integrity.read(path)
            manifest.check(path)
            stored = {name: each for name, each in manifest.tensors.items() if name.startswith(checkpoint.MODEL)}
            tensors = {name: checkpoint.empty(each) for name, each in stored.items()}
            checkpoint.read(path, manifest, tensors)
            return {name.removeprefix(checkpoint.MODEL): each for name, each in tensors.items()}, manifest.progress
        except (DamagedError, FileNotFoundError) as error:  # damaged, or deleted meanwhile because of a newer one
            skipped.append(f"{path.name} ({error})")
    there = ", ".join(path.name for path in checkpoint_folder.newest_first(folder)) or "none"
    of_step = "" if step is None else f" of step {step}"
    damaged = f"; damaged: {', '.join(skipped)}" if skipped else ""
    raise InputError(f"{folder} has no undamaged checkpoint{of_step}; there are: {there}{damaged}.")


def main(arguments: Sequence[str]) -> None:
    """Writes the file and prints what it contains. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec export", description=__doc__)
    parser.add_argument("job", help="its name, its number, or its folder")
    parser.add_argument("--dir", type=Path, default=Settings().results_dir, help="results_dir, or RUN.work")
    parser.add_argument(
        "--step", type=int, default=None, help="step of the checkpoint; by default the newest undamaged one"
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FILE", help=f"by default JOB{SAFETENSORS}")
    given = parser.parse_args(arguments)
    out = given.out if given.out is not None else Path(f"{Path(given.job).name}{SAFETENSORS}")
    if out.suffix != SAFETENSORS:
        raise InputError(f"--out {out}: expected a file that ends in {SAFETENSORS}.")
    if out.exists():
        raise InputError(f"--out {out}: it is there already; remove it, or name another file.")
    folder = Path(given.job)
    if not (folder / job_folder.DESCRIPTION).is_file():
        folder = find_job(given.dir, given.job).folder
    filed = job_folder.described(folder)
    if (trained := filed.file.trained) is None:
        where = f"{folder} and {folder / job_folder.SOURCE}"
        raise InputError(f"{given.job} is a command, and its files are its own: copy what it wrote from {where}.")
    tensors, progress = weights(folder / job_folder.CHECKPOINTS, given.step)
    told = {"job": filed.name, "uuid": filed.uuid, "step": str(progress.step), "class": trained.job_class}
    with atomic_file(out) as partial:
        save_file(tensors, partial, metadata={"format": "pt", **told})
        flush(partial)
    numbers = sum(each.numel() for each in tensors.values())
    print(f"{out}: {len(tensors)} tensors, {numbers:,} numbers, of job {filed.name} at step {progress.step}")
