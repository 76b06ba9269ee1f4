"""Describes a profile's machine in words and by node type; reads and writes the profile's file."""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from synergy_core.scheduling.jobs.cluster import Cluster
from synergy_core.scheduling.jobs.record import Placed
from synergy_core.scheduling.jobs.testbed_profiles import NoiseFrom, ProfiledModel, TestbedProfile
from synergy_exec.plans import sizes_of
from synergy_runs.inputs.from_settings import read_profile, write_profile


def machine(backend: str, options: Mapping[str, Any], *, precision: str) -> str:
    """The machine of a profile in words, with the run's precision if it is not the default."""
    given = ", ".join(f"{name}={value}" for name, value in sorted(options.items()))
    cores = len(os.sched_getaffinity(0))
    options_given = f" ({given})" if given else ""
    computing = "" if precision == "auto" else f", {precision}"
    return f"{socket.gethostname()}, {platform.machine()}, {cores} cores, {backend}{options_given}{computing}"


def profile_in(results_dir: Path) -> Path:
    """The path of the profile that profile=auto keeps in this folder."""
    return results_dir / "profile.json"


def known_profile(path: Path, where: str) -> TestbedProfile:
    """The profile of machine `where` in the file, or in one that `keep_profile` renamed; empty if there is none."""
    there = [read_profile(each) for each in (path, _renamed(path, where)) if each.is_file()]
    return next((each for each in there if each.machine == where), TestbedProfile({}, where))


def keep_profile(models: Mapping[str, ProfiledModel], where: str, path: Path) -> None:
    """Writes the profile with the current date. First renames a profile of another machine or of other slots."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    if path.is_file() and (there := read_profile(path)).machine != where:
        path.replace(_renamed(path, there.machine))
    write_profile(TestbedProfile(models, where, now), path)


def _renamed(path: Path, where: str) -> Path:
    return path.with_suffix(f".{zlib.crc32(where.encode()):08x}.json")


NOISE_FROM_WORK, NOISE_STRETCH = 10.0, 1.5
"""A profile records a job's gradient noise first at this work, then each time the work has grown by this factor."""


def noted(model: ProfiledModel, work: float, ratio: float) -> ProfiledModel:
    """Adds the gradient noise at that work to the model, if the work is much more than at the last entry."""
    if work < max(NOISE_FROM_WORK, NOISE_STRETCH * model.noise[-1].work):
        return model
    return dataclasses.replace(model, noise=(*model.noise, NoiseFrom(work, ratio)))


@dataclass(frozen=True, slots=True)
class Part:
    """All nodes of one type. per_node: slots of each node."""

    gpu_type: str
    first_node: int
    nodes: int
    per_node: int

    @property
    def sizes(self) -> list[int]:
        """Numbers of slots on which plans are measured."""
        return sizes_of(self.nodes * self.per_node)

    def places(self, size: int) -> list[Placed]:
        """Disjoint placements of that size: as many as fit within nodes, or one over several nodes."""
        first, per_node = self.first_node, self.per_node
        if size <= per_node:
            mask = (1 << size) - 1
            return [
                ((first + node, mask << (place * size)),)
                for node in range(self.nodes)
                for place in range(per_node // size)
            ]
        whole, rest = divmod(size, per_node)
        parts = [(first + node, (1 << per_node) - 1) for node in range(whole)]
        return [tuple(parts + ([(first + whole, (1 << rest) - 1)] if rest else []))]

    def nodes_of(self, size: int) -> int:
        """Number of nodes for that many slots."""
        return -(-size // self.per_node)


def parts_of(cluster: Cluster) -> list[Part]:
    """One part per node type."""
    firsts = cluster.first_nodes()
    return [
        Part(each.gpu_type, first, each.nodes, each.gpus_per_node)
        for each, first in zip(cluster.node_types, firsts, strict=True)
    ]
