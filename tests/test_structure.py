"""One concept, one name: no two classes, and no two test files, are called alike."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("synergy_core", "synergy_runs", "synergy_sim", "synergy_exec", "tests", "bench")

ROLES = {"Architecture", "Settings", "Attention", "Block", "Run", "Scheme", "Half", "PowerSgd", "Quantised", "TopK"}
"""Names that several classes may have, each in the same role: a family's architecture, a program's
settings, layers of an example's model beside those that the planner knows, a run of either program, a way to compress
gradients as it is reckoned with and as it is carried out."""


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for folder in FOLDERS[:4]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert len(found) > 300
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and name not in ROLES} == {}


def test_no_two_test_files_have_one_name() -> None:
    """pytest would import only the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert [name for name in sorted(set(names)) if names.count(name) > 1] == []
