"""No module and no function is longer than one can take in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("synergy_core", "synergy_runs", "synergy_sim", "synergy_exec", "tests", "bench")
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 80


def too_long(path: Path) -> Iterator[str]:
    """The module, if it has too many lines, and its functions that have."""
    text = path.read_text(encoding="utf-8")
    if (lines := len(text.splitlines())) > MOST_LINES:
        yield f"{path}: {lines} lines, at most {MOST_LINES}"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {lines} lines, at most {MOST_LINES_OF_A_FUNCTION}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_and_no_function_is_too_long(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    assert [said for path in paths for said in too_long(path)] == []


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def short():\n" + "    pass\n" * 79 + "async def long():\n" + "    pass\n" * 80)
    assert list(too_long(path)) == [f"{path}:81: long has 81 lines, at most 80"]
    path.write_text("\n" * 401)
    assert list(too_long(path)) == [f"{path}: 401 lines, at most 400"]


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
