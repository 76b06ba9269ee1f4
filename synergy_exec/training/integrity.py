"""How far a job has come, and `progress.json`, which says it of a checkpoint and how its files must look."""

from __future__ import annotations

import dataclasses
import json
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
FORMAT = 1
"""Version of the file's format; a reader passes over any other."""

_PIECE_BYTES = 1 << 20


class DamagedError(Exception):
    """The checkpoint is not as it was written; the message says which file, and how."""


@dataclass(frozen=True, slots=True)
class Digest:
    """A file's length and its CRC-32."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `progress.json` says. files: by name, every other file of the checkpoint. torch: the version that wrote.

    job: the UUID of the job that wrote it, "" where that had none.
    """

    progress: Progress
    files: dict[str, Digest]
    torch: str
    job: str = ""


def digest(path: Path) -> Digest:
    """The digest of the file as it reads now."""
    crc = size = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
            size += len(piece)
    return Digest(size, crc)


def write(folder: Path, manifest: Manifest) -> None:
    """Add `progress.json` to the folder, on disk when this returns."""
    with (folder / NAME).open("w", encoding="utf-8") as file:
        file.write(_text({"format": FORMAT, **dataclasses.asdict(manifest)}))
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> Manifest:
    """What `progress.json` says, if it is byte for byte as it was written. Raises DamagedError."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        values = json.loads(text)
        values.pop("crc32")
        if _text(values) != text:
            raise DamagedError(f"{NAME} is not as it was written")
        if values["format"] != FORMAT:
            raise DamagedError(f"{NAME} is of format {values['format']}, this version of Synergy reads {FORMAT}")
        files = {name: Digest(**each) for name, each in values["files"].items()}
        return Manifest(Progress(**values["progress"]), files, values["torch"], values.get("job", ""))
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedError(f"{NAME} cannot be read ({type(error).__name__}: {error})") from None


def damage(folder: Path, files: dict[str, Digest], *, sizes_only: bool = False) -> str:
    """The first of these files that is not as it was written, in words; "" if all are."""
    for name, expected in files.items():
        try:
            size = (folder / name).stat().st_size
            if size != expected.size_bytes:
                return f"{name} has {size} bytes instead of {expected.size_bytes}"
            if not sizes_only and digest(folder / name) != expected:
                return f"the contents of {name} have changed since they were written (CRC-32)"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return ""


def _text(values: dict[str, Any]) -> str:
    # The file ends with the checksum of the rest, and only one text stands for given values.
    crc = zlib.crc32(json.dumps(values, sort_keys=True).encode())
    return json.dumps({**values, "crc32": crc}, sort_keys=True, indent=1) + "\n"
