"""`progress.json`: the job's progress at a checkpoint, the list of its tensors, and checksums of its files."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FEWEST_NOISE_STEPS = 10
"""Gradient statistics count as unknown before this many steps have been measured."""


@dataclass(slots=True)
class Progress:
    """Progress of a job."""

    step: int = 0
    """Number of steps done, which is the argument of the next `batch`."""
    samples: int = 0
    """Number of samples trained on."""
    work: float = 0.0
    """Work done, in iterations at the initial batch."""
    grad_sqr: float = 0.0
    """Weighted sum of the gradient's squared norm over the measured steps (`noise.observe`)."""
    grad_var: float = 0.0
    """Weighted sum of the gradient's variance at the initial batch over the measured steps."""
    noise_weight: float = 0.0
    """Sum of the weights in `grad_sqr` and `grad_var`; 0 before the first measured step."""
    batch: list[int] = field(default_factory=list)
    """Step, size and digest of a batch of data, so that a later run can check its data; [] before the first. The size
    is 1 for a `LoadedJob`, whose samples are prepared one by one."""
    loss_scale: float = 0.0
    """Loss scale of the last run in float16 (`LossScale.value`); 0 before the first."""
    finite_steps: int = 0
    """Number of steps since that loss scale last changed (`LossScale.finite_steps`)."""

    @property
    def totals(self) -> dict[str, Any]:
        """The fields of `messages.OfProgress`."""
        return {"step": self.step, "samples": self.samples, "work": self.work}


NAME = "progress.json"
FORMAT = 2
"""Version of the checkpoint's format; other versions are not read."""

_CHECKSUM = ', "crc32": '
_READ_BYTES = 1 << 20


class DamagedError(Exception):
    """The checkpoint is damaged. The message says which file differs from what was written, and how."""


class Digest(NamedTuple):
    """A file's length and its CRC-32."""

    size_bytes: int
    crc32: int


class TensorPiece(NamedTuple):
    """A block of a tensor, stored in `file` under the tensor's name. offset: where in the whole tensor it begins."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of a checkpoint. dtype: torch's name. pieces: they cover the whole tensor without overlap."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[TensorPiece]


class Trained(NamedTuple):
    """Optimizer settings of a parameter. optimizer: its class. group, state: the numbers in its group and state."""

    optimizer: str
    group: dict[str, float]
    state: dict[str, float]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of `progress.json`.

    files: all other files of the checkpoint, by name. tensors: by name. trained: by the parameter's name; empty before
    the first step. job: UUID of the job that wrote it, or "".
    """

    progress: Progress
    files: dict[str, Digest]
    tensors: dict[str, Stored] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)
    job: str = ""

    def check(self, folder: Path, *, sizes_only: bool = False, share: slice = slice(None)) -> None:
        """Raises DamagedError unless the folder's files are as they were written. share: slice of files to check."""
        for name, expected in list(self.files.items())[share]:
            try:
                size = (folder / name).stat().st_size
                if size != expected.size_bytes:
                    raise DamagedError(f"{name} has {size} bytes instead of {expected.size_bytes}")
                if not sizes_only and digest(folder / name) != expected:
                    raise DamagedError(f"the contents of {name} have changed since they were written (CRC-32)")
            except OSError as error:
                raise DamagedError(f"{name} cannot be read ({error.strerror})") from None


def digest(path: Path) -> Digest:
    """Length and checksum of the file as it is now."""
    crc = size = 0
    with path.open("rb") as file:
        while read := file.read(_READ_BYTES):
            crc = zlib.crc32(read, crc)
            size += len(read)
    return Digest(size, crc)


def write(folder: Path, manifest: Manifest) -> None:
    """Writes `progress.json`; it is on disk when this returns. The file ends with the checksum of its text."""
    fields = {each.name: getattr(manifest, each.name) for each in dataclasses.fields(manifest)}
    values = {"format": FORMAT, **fields, "progress": dataclasses.asdict(manifest.progress)}
    text = json.dumps(values).removesuffix("}")
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(f"{text}{_CHECKSUM}{zlib.crc32(text.encode())}}}\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """Reads `progress.json`. Raises DamagedError unless it is byte for byte as it was written."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        values = json.loads(text)
        if values["format"] != FORMAT:
            raise DamagedError(
                f"{NAME} is of format {values['format']} and this version of Synergy reads format {FORMAT}: go on with "
                "the version that wrote it"
            )
        summed, _, checksum = text.rpartition(_CHECKSUM)
        if checksum != f"{zlib.crc32(summed.encode())}}}\n":
            raise DamagedError(f"{NAME} is not as it was written")
        return Manifest(
            progress=Progress(**values["progress"]),
            files={name: Digest(*each) for name, each in values["files"].items()},
            tensors={
                name: Stored(
                    dtype, tuple(shape), [TensorPiece(file, tuple(at), tuple(size)) for file, at, size in pieces]
                )
                for name, (dtype, shape, pieces) in values["tensors"].items()
            },
            trained={name: Trained(*each) for name, each in values["trained"].items()},
            job=values["job"],
        )
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{NAME} cannot be read ({type(error).__name__}: {error})") from None
