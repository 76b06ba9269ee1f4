"""Blocks of a page that an experiment fills; all other text of the page is written by hand, there.

    <!-- made sensitivity digest=3f2a9c81d07b cpu_s=2017 -->
    Made by <!-- begin sensitivity.made -->`python bench/pages.py sensitivity` …<!-- end -->

    <!-- begin sensitivity.ratios -->

    | … |

    <!-- end -->

`made` records what the blocks of an experiment were made from. A block that starts and ends within a line stays there.
Every experiment has a block `made`: its command, date, machine and version, and a warning if it is out of date.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from runner.experiment import ROOT

BLOCK = re.compile(r"(<!-- begin (\w+)\.([\w-]+) -->)(.*?)(<!-- end -->)", re.DOTALL)
MADE = re.compile(r"<!-- made (\w+) digest=(\w+) cpu_s=([\d.]+) -->")
OUT_OF_DATE = "**Out of date**: made before a change that these figures depend on."


@dataclass(frozen=True)
class Made:
    """The inputs from which an experiment's blocks on a page were made."""

    page: Path
    digest: str
    cpu_s: float


def pages() -> list[Path]:
    """Pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def made() -> dict[str, Made]:
    """What the blocks on the pages were made from, by experiment."""
    return {
        name: Made(path, digest, float(cpu_s))
        for path in pages()
        for name, digest, cpu_s in MADE.findall(path.read_text(encoding="utf-8"))
    }


def names(text: str) -> list[tuple[str, str]]:
    """Experiment and block name of every block, in order."""
    return [(match[2], match[3]) for match in BLOCK.finditer(text)]


def replaced(text: str, experiment: str, tables: dict[str, str], *, digest: str = "", cpu_s: float = 0.0) -> str:
    """The page with the blocks of one experiment replaced. Raises KeyError for a block that `tables` lacks."""

    def block(match: re.Match[str]) -> str:
        if match[2] != experiment or (not digest and match[3] not in tables):
            return match[0]
        body = tables[match[3]].strip("\n")
        space = "\n\n" if "\n" in match[4] else ""
        return f"{match[1]}{space}{body}{space}{match[5]}"

    text = BLOCK.sub(block, text)
    if digest:
        mark = f"<!-- made {experiment} digest={digest} cpu_s={cpu_s:.0f} -->"
        text = re.sub(rf"<!-- made {experiment} .*?-->", mark, text)
    return text


def marked(text: str, experiment: str, *, is_stale: bool) -> str:
    """The page with the warning added to the experiment's blocks `made`, or removed from them."""

    def block(match: re.Match[str]) -> str:
        if (match[2], match[3]) != (experiment, "made"):
            return match[0]
        said = match[4].removesuffix(OUT_OF_DATE).strip()
        return f"{match[1]}{said}{f' {OUT_OF_DATE}' if is_stale else ''}{match[5]}"

    return BLOCK.sub(block, text)
