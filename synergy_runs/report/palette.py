"""How policies look in every figure of every report: a colour by the policy's name, and a mark beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from synergy_runs.as_logged import AS_LOGGED

LIGHT_PAGE, DARK_PAGE = "#ffffff", "#15181d"
"""The two backgrounds that colours are chosen for."""


@dataclass(frozen=True)
class Tone:
    """One colour, as it is on a light page and on a dark one, and the marker that goes with it.

    marker: Bokeh's name of it; printed: matplotlib's.
    """

    light: str
    dark: str
    marker: str
    printed: str | tuple[int, int, int]


TONES = (
    Tone("#782d3b", "#cf2456", "circle", "o"),
    Tone("#ba2d15", "#fea897", "square", "s"),
    Tone("#b08d1b", "#b18f21", "triangle", "^"),
    Tone("#292a00", "#e8ef65", "diamond", "D"),
    Tone("#098e8b", "#7afdf8", "inverted_triangle", "v"),
    Tone("#113575", "#5f98fc", "plus", "P"),
    Tone("#55557b", "#6e51fe", "star", "*"),
    Tone("#8b49fe", "#c4b5f9", "hex", "h"),
    Tone("#a926b9", "#aa3ab7", "x", "X"),
    Tone("#fc35aa", "#f262ae", "asterisk", (6, 2, 0)),
)
"""Found by simulated annealing: the least distance of two of them in OKLab, seen by anybody, as large as it gets at a
contrast of 3:1 with the page. tests/results/test_palette.py computes both, for colour-blind eyes as well."""

LOGGED = Tone("#000000", "#b4f0b4", "square_pin", (4, 1, 45))
"""What the log itself shows, which is no policy: black on a white page, a pale green on a dark one."""

# Chosen so that no two policies of the shipped comparisons share a tone.
_SALT = "567213"

SIZE_TONES = (
    Tone("#b08d1b", "#ffe27a", "", ""),
    Tone("#c04a1c", "#f29a6b", "", ""),
    Tone("#4a3fae", "#8f8cf0", "", ""),
    Tone("#1b1b33", "#b5407a", "", ""),
)
"""Of jobs on a Gantt chart, by `metrics.SIZE_CLASSES`: larger is darker, so that they differ in grey."""


@dataclass(frozen=True)
class Look:
    """A policy's tone, which hangs on its name alone, and its mark, which no other policy beside it has."""

    tone: Tone
    mark: Tone
    hollow: bool

    @property
    def light(self) -> str:
        """Its colour on a light page."""
        return self.tone.light

    @property
    def dark(self) -> str:
        """Its colour on a dark page."""
        return self.tone.dark


def tone_of(policy: str) -> int:
    """The index in `TONES` of a policy by its name, whatever stands beside it; known to nobody before or not."""
    digest = hashlib.sha256((_SALT + policy).encode("utf-8")).digest()
    return int.from_bytes(digest[:4], "big") % len(TONES)


def looks(policies: Iterable[str]) -> dict[str, Look]:
    """A look per policy, in their order. Policies of the same tone have other markers, or the same one hollow."""
    free = [(number, hollow) for hollow in (False, True) for number in range(len(TONES))]
    names = dict.fromkeys(policies)
    found: dict[str, Look] = {}
    later = []
    for policy in names:
        own = tone_of(policy)
        if policy == AS_LOGGED:
            found[policy] = Look(LOGGED, LOGGED, hollow=False)
        elif (own, False) in free:
            free.remove((own, False))
            found[policy] = Look(TONES[own], TONES[own], hollow=False)
        else:
            later.append(policy)
    for policy in later:
        own = tone_of(policy)
        mark, hollow = min(free, key=lambda each: (each != (own, True), each[1], each[0]), default=(own, True))
        if (mark, hollow) in free:
            free.remove((mark, hollow))
        found[policy] = Look(TONES[own], TONES[mark], hollow=hollow)
    return {policy: found[policy] for policy in names}
