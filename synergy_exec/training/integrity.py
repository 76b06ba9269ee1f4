"""`progress.json`: how far a job had come at a checkpoint, what the checkpoint holds, and whether it is undamaged."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

FEWEST_NOISE_STEPS = 10
"""Before that many measured steps the gradient statistics count as unknown."""


@dataclass(slots=True)
class Progress:
    """How far a job has come.

    step: steps done, the argument of the next `batch`. samples: trained on. work: iterations at the initial batch.

    grad_sqr, grad_var: sums of the smoothed gradient statistics, and noise_weight their common weight (0: none yet).
    batch: step, size and digest of a batch that was trained on, by which a later run knows its data again; [] for none.
    """

    step: int = 0
    samples: int = 0
    work: float = 0.0
    grad_sqr: float = 0.0
    grad_var: float = 0.0
    noise_weight: float = 0.0
    batch: list[int] = field(default_factory=list)


NAME = "progress.json"
FORMAT = 2
"""Version of the checkpoint's format; other versions are not read."""

_CHECKSUM = ', "crc32": '
_READ_BYTES = 1 << 20


class DamagedError(Exception):
    """The checkpoint cannot be used; the message says which file is not as it was written, and how it differs."""


class Digest(NamedTuple):
    """A file's length and its CRC-32."""

    size_bytes: int
    crc32: int


class Piece(NamedTuple):
    """A block of a tensor. file: which has it, under the tensor's name. offset: where in the whole tensor it begins."""

    file: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Stored(NamedTuple):
    """A tensor of a checkpoint. dtype: as torch names it. pieces: they cover the whole, and none overlaps another."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[Piece]


class Trained(NamedTuple):
    """How a parameter is trained. optimizer: its class. group, state: numbers in its group, and in its own state."""

    optimizer: str
    group: dict[str, float]
    state: dict[str, float]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `progress.json` says. files: by name, every other file of the checkpoint. tensors: by name.

    trained: by the parameter's name, once any step was done. job: the UUID of the job that wrote it, "" where that had
    none.
    """

    progress: Progress
    files: dict[str, Digest]
    tensors: dict[str, Stored] = field(default_factory=dict)
    trained: dict[str, Trained] = field(default_factory=dict)
    job: str = ""

    def check(self, folder: Path, *, sizes_only: bool = False, share: slice = slice(None)) -> None:
        """Raises DamagedError unless the files in the folder are as they were written. share: looks only at these."""
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
    """The digest of the file as it reads now."""
    crc = size = 0
    with path.open("rb") as file:
        while read := file.read(_READ_BYTES):
            crc = zlib.crc32(read, crc)
            size += len(read)
    return Digest(size, crc)


def write(folder: Path, manifest: Manifest) -> None:
    """Add `progress.json` to the folder, on disk when this returns. It ends with the checksum of all that is before."""
    fields = {each.name: getattr(manifest, each.name) for each in dataclasses.fields(manifest)}
    values = {"format": FORMAT, **fields, "progress": dataclasses.asdict(manifest.progress)}
    text = json.dumps(values).removesuffix("}")
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(f"{text}{_CHECKSUM}{zlib.crc32(text.encode())}}}\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """What `progress.json` says, if it is byte for byte as it was written. Raises DamagedError."""
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
                name: Stored(dtype, tuple(shape), [Piece(file, tuple(at), tuple(size)) for file, at, size in pieces])
                for name, (dtype, shape, pieces) in values["tensors"].items()
            },
            trained={name: Trained(*each) for name, each in values["trained"].items()},
            job=values["job"],
        )
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{NAME} cannot be read ({type(error).__name__}: {error})") from None
