"""Pictures read from files and decoded by CPUs: a job whose input can take much longer than its model."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from synergy_exec.examples.cnn import ResidualNetwork
from synergy_exec.training.job import LoadedJob

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
_COLOURS = 3
_ZLIB_BYTES = 64
"""Upper bound of the bytes that zlib adds to an incompressible picture of these sizes."""
_FIELDS = 4
"""A pattern is a grid of this many uniform fields in each direction."""
_STRENGTH = 40.0
"""Amplitude of a pattern's brightness around the middle of 0 to 255. The standard deviation of the noise is half."""


class OnAccelerator(ResidualNetwork):
    """The network and a wait, which stands for an accelerator that computes without this machine's CPUs."""

    def __init__(self, channels: int, depths: Iterable[int], classes: int, sample_s: float) -> None:
        super().__init__(channels, depths, classes)
        self.sample_s = sample_s

    def embed(self, x: Tensor) -> Tensor:
        time.sleep(len(x) * self.sample_s)
        return super().embed(x)


class Pictures(LoadedJob):
    """The job. cpu_s: minimum CPU-seconds to prepare a picture. accelerator_s: seconds that the model waits per sample,
    in place of an accelerator. pictures: number of pictures. side: pixels of a side, a multiple of 4.
    """

    learning_rate_rule = "adascale"

    def __init__(
        self,
        cpu_s: float = 0.0,
        accelerator_s: float = 0.0,
        pictures: int = 2048,
        side: int = 16,
        channels: int = 8,
        classes: int = 10,
        learning_rate: float = 0.05,
    ) -> None:
        self.cpu_s, self.accelerator_s = cpu_s, accelerator_s
        self.samples, self.side = pictures, side
        self.channels, self.classes, self.learning_rate = channels, classes, learning_rate
        self.item_bytes = _COLOURS * side * side + _ZLIB_BYTES
        fields = np.random.default_rng(1).choice((-1.0, 1.0), (classes, _COLOURS, _FIELDS, _FIELDS))
        self._patterns = np.kron(fields, np.ones((side // _FIELDS, side // _FIELDS)))
        self._folder: Path | None = None

    def make_data(self, folder: Path) -> None:
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for number in range(self.samples):
                (partial / f"{number}.z").write_bytes(self._made(number))
            partial.rename(folder)
        self._folder = folder

    def item(self, number: int) -> bytes:
        if self._folder is None:
            return self._made(number)
        with (self._folder / f"{number}.z").open("rb") as file:
            item = file.read()
            # Drop it from the kernel's page cache: only the memory that the job was given should cache it.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return item

    def sample(self, item: bytes, number: int, epoch: int) -> tuple[Tensor, Tensor]:
        """The picture, randomly shifted by a pixel and changed in brightness, and the class of its pattern."""
        began_s = time.thread_time()
        picture = self._prepared(item, number, epoch)
        # Repeat the work, to cost as much CPU time as a more expensive decoder.
        while time.thread_time() - began_s < self.cpu_s:
            self._prepared(item, number, epoch)
        return picture, torch.tensor(number % self.classes)

    def _prepared(self, item: bytes, number: int, epoch: int) -> Tensor:
        drawn = np.random.default_rng((number, epoch))
        pixels: Pixels = np.frombuffer(zlib.decompress(item), dtype=np.uint8)
        picture = pixels.reshape(_COLOURS, self.side, self.side).astype(np.float32) / _STRENGTH
        moved = np.roll(picture, drawn.integers(-1, 2, 2), axis=(1, 2))
        return torch.from_numpy(moved - moved.mean() + drawn.normal(0.0, 0.1, (_COLOURS, 1, 1)).astype(np.float32))

    def _made(self, number: int) -> bytes:
        """The contents of a picture's file: the pattern of its class with added noise."""
        noise = np.random.default_rng(number).normal(size=self._patterns.shape[1:])
        bright = 127.5 + _STRENGTH * (self._patterns[number % self.classes] + 0.5 * noise)
        return zlib.compress(np.clip(bright, 0, 255).astype(np.uint8).tobytes())

    def build_model(self) -> nn.Module:
        return OnAccelerator(self.channels, (1, 1, 1), self.classes, self.accelerator_s)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target)

    def build_optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.learning_rate, momentum=0.9)
