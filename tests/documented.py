"""The commands that README.md, docs/ and traces/README.md tell people to type, and what each says it needs.

A command is a line of a code block, or a span of code in a sentence, that starts with python, pip or .ci/run. What it
needs stands beside it: in a comment at the end of its line, or in parentheses behind the span:

    python bench/pages.py accuracy   # needs: data; minutes: 40

Code blocks with a title, ```python title="figure.py"```, are files that readers save (`files`).

The same in parentheses in the sentence before a code block is said of the whole block. What is said of a command holds
for the same command with more arguments on the same page, and where it ends in `as all commands here`, for the page.
`python -m synergy_sim` alone is a name, no command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

NEEDS = {
    "data": "the folder that SYNERGY_DATA names",
    "gpu": "a GPU of NVIDIA's, and a torch build for it",
    "network": "hundreds of megabytes from elsewhere",
    "ray": "a Ray cluster",
    "slurm": "an allocation of Slurm",
    "namespaces": "a network namespace with a slowed link: root, iproute2",
}
MARK = re.compile(r"\b(needs|minutes):\s*([^;()]*)")
WHOLE_PAGE = "as all commands here"
_VARIABLES = r"(?:[A-Z_]+=\S* )*"
_OURS = r"(?:python3? (?:-m \S+|bench/\S+|\w+\.py)|pip|\.ci/run)(?=\s|$)"
_OF_PROSE = re.compile(_VARIABLES + _OURS)
_OF_BLOCK = re.compile(_VARIABLES + r"(?:" + _OURS + r"|(?:ray|sacct|salloc|sbatch|srun)\b)")
_FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NAME_ALONE = re.compile(r"python3? -m \S+")
_SPAN = re.compile(r"`([^`]+)`(?:\s+\(([^()]*)\))?")
_LAST_PARENTHESES = re.compile(r"\(([^()]*)\)[^()]*$")


@dataclass(frozen=True)
class Command:
    """One command as documented. said: the comment or parentheses beside it."""

    page: str
    line: int
    typed: str
    said: str = ""

    @property
    def marks(self) -> dict[str, str]:
        return {what: text.strip() for what, text in MARK.findall(self.said)}

    @property
    def needs(self) -> frozenset[str]:
        """Those of NEEDS that the command's line says it needs."""
        words = [word.strip() for word in self.marks.get("needs", "").split(",")]
        return frozenset(word for word in words if word and word != WHOLE_PAGE)

    @property
    def minutes(self) -> float | None:
        """How long it says that it takes."""
        return float(self.marks["minutes"].split(",")[0]) if "minutes" in self.marks else None


def pages(root: Path) -> list[Path]:
    """Every page, the README first."""
    top, docs = (root / "README.md", root / "CONTRIBUTING.md"), sorted((root / "docs").glob("*.md"))
    return [*top, *docs, root / "traces" / "README.md"]


def documented(root: Path) -> list[Command]:
    """Every command of every page, in order."""
    return [
        each for page in pages(root) for each in commands(str(page.relative_to(root)), page.read_text(encoding="utf-8"))
    ]


def files(root: Path) -> dict[str, str]:
    """The files that pages tell readers to save, by name."""
    return {name: text for page in pages(root) for name, text in _FILE.findall(page.read_text(encoding="utf-8"))}


def commands(page: str, text: str) -> list[Command]:
    """The commands of one page, what is said of them elsewhere on it included."""
    found: list[Command] = []
    prose: list[tuple[int, str]] = []
    fence, of_block, continued, after_blank = "", "", None, True

    def end_of_prose() -> None:
        paragraph = "\n".join(line for _, line in prose)
        for span in _SPAN.finditer(paragraph):
            typed = " ".join(span[1].split())
            if _OF_PROSE.match(typed) and not _NAME_ALONE.fullmatch(typed):
                line = prose[0][0] + paragraph[: span.start()].count("\n")
                found.append(Command(page, line, typed, span[2] or ""))
        prose.clear()

    for number, line in enumerate(text.splitlines(), start=1):
        fenced = line.lstrip().startswith("```")
        in_block = bool(fence) or (line.startswith("    ") and after_blank and not fenced)
        if fenced:
            fence = "" if fence else (line.strip("` \n") or "code").split()[0]
        if (fenced and fence) or (in_block and not fence and prose):  # what stands before a block is said of all of it
            before = next((each for _, each in reversed(prose) if each.strip()), "")
            match = _LAST_PARENTHESES.search(before) if before.rstrip().endswith(":") else None
            of_block = match[1] if match else ""
        if fenced or (in_block and prose):
            end_of_prose()
        elif not in_block:
            prose.append((number, line))
        if in_block and not fenced and fence not in ("python", "yaml"):
            first, typed = continued or (number, "")
            typed, _, comment = (typed + line.strip()).partition("  #" if "  #" in line else " # ")
            continued = (first, typed[:-1]) if typed.endswith("\\") else None
            if continued is None and _OF_BLOCK.match(typed):
                found.append(Command(page, first, typed.rstrip(), comment or of_block))
        after_blank = not line.strip() or in_block or fenced
    end_of_prose()
    return [_with_what_the_page_says(each, found) for each in found]


def _with_what_the_page_says(command: Command, found: list[Command]) -> Command:
    if not command.marks:
        for other in found:
            shorter = command.typed == other.typed or command.typed.startswith(other.typed + " ")
            if other.marks and (shorter or WHOLE_PAGE in other.said):
                return replace(command, said=other.said)
    return command
