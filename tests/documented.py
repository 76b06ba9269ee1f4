"""The commands that README.md, docs/ and traces/README.md tell people to type, and what each says it needs.

A command is a line of a code block, or a span of code in a sentence, that starts with python, pip or .ci/run. What it
needs stands beside it: in a comment at the end of its line, or in parentheses behind the span:

    python bench/reproduce.py        # needs: data; minutes: 40

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
    "network": "hundreds of megabytes from elsewhere",
    "ray": "a Ray cluster",
    "slurm": "an allocation of Slurm",
    "namespaces": "network namespaces joined by a slowed link: root, iproute2",
}
MARK = re.compile(r"\b(needs|minutes):\s*([^;()]*)")
WHOLE_PAGE = "as all commands here"
_VARIABLES = r"(?:[A-Z_]+=\S* )*"
_OURS = r"(?:python3? (?:-m \S+|bench/\S+)|pip|\.ci/run)(?=\s|$)"
_OF_PROSE = re.compile(_VARIABLES + _OURS)
_OF_BLOCK = re.compile(_VARIABLES + r"(?:" + _OURS + r"|(?:ray|sacct|salloc|sbatch|srun)\b)")
_NAME_ALONE = re.compile(r"python3? -m \S+")
_SPAN = re.compile(r"`([^`]+)`(?:\s+\(([^()]*)\))?")
_COMMENT = re.compile(r"\s+# ")
_LAST_PARENTHESES = re.compile(r"\(([^()]*)\)[^()]*$")
_OTHER_LANGUAGES = ("python", "yaml")


@dataclass(frozen=True)
class Command:
    """One command as documented. said: the comment or parentheses beside it."""

    page: str
    line: int
    typed: str
    said: str = ""

    @property
    def needs(self) -> frozenset[str]:
        """What of NEEDS it says that it needs. Raises ValueError for a word that is not among them."""
        words = [word.strip() for what, text in self.marks if what == "needs" for word in text.split(",")]
        words = [word for word in words if word != WHOLE_PAGE]
        if strange := set(words) - set(NEEDS):
            raise ValueError(f"{self.page}:{self.line}: needs: {', '.join(strange)}; known: {', '.join(NEEDS)}")
        return frozenset(words)

    @property
    def minutes(self) -> float | None:
        """How long it says that it takes."""
        return next((float(text.split(",")[0]) for what, text in self.marks if what == "minutes"), None)

    @property
    def marks(self) -> list[tuple[str, str]]:
        return [(what, text.strip()) for what, text in MARK.findall(self.said)]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.typed}"


def pages(root: Path) -> list[Path]:
    """Where commands are documented, the README first."""
    top, docs = (root / "README.md", root / "CONTRIBUTING.md"), sorted((root / "docs").glob("*.md"))
    return [*top, *docs, root / "traces" / "README.md"]


def documented(root: Path) -> list[Command]:
    """Every command of every page, in order."""
    return [
        each for page in pages(root) for each in commands(str(page.relative_to(root)), page.read_text(encoding="utf-8"))
    ]


def commands(page: str, text: str) -> list[Command]:
    """The commands of one page, what is said of them elsewhere on it included."""
    found: list[Command] = []
    for line, kind, content in _parts(text):
        if kind == "code":
            found += _of_block(page, line, content, _introduction(text, line))
        else:
            found += _of_prose(page, line, content)
    return [_with_what_the_page_says(each, found) for each in found]


def _parts(text: str) -> list[tuple[int, str, str]]:
    """The page cut into (line, code or prose, text); code of other languages is left out."""
    parts: list[tuple[int, str, list[str]]] = []
    fence, before = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fence, before = ("" if fence else line.strip("` \n") or "code"), "fence"
            continue
        indented = line.startswith("    ") and before in ("blank", "indented", "fence")
        kind = "code" if fence or indented else "prose"
        now = fence or ("blank" if not line.strip() else "indented" if indented else "prose")
        if fence not in _OTHER_LANGUAGES:
            if now != before or now == "blank" or not parts:
                parts.append((number, kind, []))
            parts[-1][2].append(line.strip() if kind == "code" else line)
        before = now
    return [(number, kind, "\n".join(lines)) for number, kind, lines in parts if any(lines)]


def _introduction(text: str, line: int) -> str:
    """What stands in parentheses last in the sentence before the block at that line."""
    before = [each for each in text.splitlines()[: line - 1] if each.strip() and not each.startswith("```")]
    if not before or not before[-1].rstrip().endswith(":"):
        return ""
    found = _LAST_PARENTHESES.search(before[-1])
    return found[1] if found else ""


def _of_block(page: str, line: int, text: str, introduction: str) -> list[Command]:
    found = []
    joined = re.sub(r"\\\n", lambda _: "\\\x00", text)  # a continued line is one command
    for offset, each in enumerate(joined.split("\n")):
        typed, _, comment = _split(each.replace("\\\x00", ""))
        if _OF_BLOCK.match(typed):
            before = joined.split("\n")[:offset]
            continued = sum(earlier.count("\x00") for earlier in before)
            found.append(Command(page, line + offset + continued, typed, comment or introduction))
    return found


def _split(line: str) -> tuple[str, str, str]:
    cut = _COMMENT.search(line)
    return (line[: cut.start()], "#", line[cut.end() :]) if cut else (line.rstrip(), "", "")


def _of_prose(page: str, line: int, text: str) -> list[Command]:
    found = []
    for span in _SPAN.finditer(text):
        typed = " ".join(span[1].split())
        if _OF_PROSE.match(typed) and not _NAME_ALONE.fullmatch(typed):
            found.append(Command(page, line + text[: span.start()].count("\n"), typed, span[2] or ""))
    return found


def _with_what_the_page_says(command: Command, found: list[Command]) -> Command:
    if command.marks:
        return command
    for other in found:
        shorter = command.typed == other.typed or command.typed.startswith(other.typed + " ")
        if other.marks and (shorter or WHOLE_PAGE in other.said):
            return replace(command, said=other.said)
    return command
