"""What a worker is started with: a request from its agent, and file descriptors in a fixed order."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from synergy_exec.messages import Launch
from synergy_exec.wire import decode, encode


@dataclass(frozen=True, slots=True)
class Start:
    """One rank of a run.

    cores: of the CPU, that it may use. cpus: how many of them are its own, for others may have a part of one. gpu:
    index of its CUDA device, None without. launched_s: time.time() at which the agent was told to launch the run.
    copy: index of the copy of the job that this rank trains.
    """

    launch: Launch
    rank: int
    cores: tuple[int, ...]
    cpus: float
    gpu: int | None
    launched_s: float
    copy: int = 0

    def text(self) -> str:
        """This start as JSON, for `parse`."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return json.dumps(values | {"launch": encode(self.launch)})

    @staticmethod
    def parse(text: str) -> Start:
        """The start that `text` wrote."""
        values = json.loads(text)
        launch = decode(values.pop("launch"))
        assert isinstance(launch, Launch)
        return Start(launch=launch, cores=tuple(values.pop("cores")), **values)


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Sent along, in this order. cache: of the memory for data that the run has on this node. store: where ranks meet,
    a file in memory without a name where all are on this node; else on rank 0 the listening socket.
    """

    agent: int
    pulse: int
    log: int
    cache: int
    store: int | None = None

    def all(self) -> list[int]:
        """The descriptors that are not None, in order."""
        return [each for each in (self.agent, self.pulse, self.log, self.cache, self.store) if each is not None]
