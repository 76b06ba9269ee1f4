"""Published traces: where they are, under which licence, and what an archive must be to be believed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Source:
    """One published trace.

    url: the archive, "" where we can name only the page. sha256, size_bytes: of the archive, "" and 0 where unknown.
    wanted: the files to take out of it, by name; the rest of the archive is not unpacked.
    """

    name: str
    what: str
    page: str
    licence: str
    url: str = ""
    archive: str = ""
    size_bytes: int = 0
    sha256: str = ""
    wanted: tuple[str, ...] = ()

    @property
    def downloadable(self) -> bool:
        """Whether we know what to fetch and can tell whether it arrived whole."""
        return bool(self.url and self.sha256)


# Size and checksum of the Philly archive are those of its git-LFS pointer in the repository.
SOURCES = (
    Source(
        name="philly",
        what="Microsoft Philly, 117,325 jobs, August to December 2017 (ATC '19)",
        page="https://github.com/msr-fiddle/philly-traces",
        licence="CC BY 4.0",
        url="https://github.com/msr-fiddle/philly-traces/raw/master/trace-data.tar.gz",
        archive="philly-trace-data.tar.gz",
        size_bytes=1_055_988_361,
        sha256="2037ccf63a725a02be718b0e1aeee6142c90b7f62d0d849295120e9f6ba13d2c",
        wanted=("cluster_job_log", "cluster_machine_list"),
    ),
    Source(
        name="helios",
        what="SenseTime Helios, 4 clusters, 3.4 million jobs, April to September 2020 (SC '21)",
        page="https://github.com/S-Lab-System-Group/HeliosData",
        licence="CC BY 4.0",
    ),
    Source(
        name="acme",
        what="Shanghai AI Laboratory Acme, Seren and Kalos, March to August 2023 (NSDI '24)",
        page="https://github.com/InternLM/AcmeTrace",
        licence="CC BY 4.0",
    ),
    Source(
        name="openb",
        what="Alibaba OpenB, 8,152 pods of a cluster with 6,212 GPUs, 2023 (ATC '23)",
        page="https://github.com/alibaba/clusterdata/tree/master/cluster-trace-gpu-v2023",
        licence="for research and study; cite",
    ),
    Source(
        name="spot2026",
        what="Alibaba spot GPUs, 466,867 jobs on 4,278 nodes, 2026 (ASPLOS '26)",
        page="https://github.com/alibaba/clusterdata/tree/master/cluster-trace-v2026-spot-gpu",
        licence="for research and study; cite",
    ),
)


def by_name() -> dict[str, Source]:
    """Every source, by name."""
    return {each.name: each for each in SOURCES}
