"""Each key of the executor is declared once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from synergy_core.errors import InputError
from synergy_exec.settings import Settings
from synergy_exec.usage import usage
from synergy_runs.settings import build, defaults, meanings

ROOT = Path(__file__).resolve().parents[2]
KEYS = [name for name, _ in meanings(Settings) if not name.startswith("trace.")]


@pytest.mark.parametrize("name", KEYS)
def test_every_key_has_a_meaning_and_a_default_and_is_in_help(name: str) -> None:
    assert len(dict(meanings(Settings))[name]) > len("where")
    section, _, last = name.rpartition(".")
    assert last in (defaults(Settings)[section] if section else defaults(Settings))
    assert f"  {name} " in usage()


def test_defaults_are_what_the_class_has_by_itself() -> None:
    assert build(Settings, defaults(Settings)) == Settings()


@pytest.mark.parametrize("name", [name for name in KEYS if name.endswith("_s") and not name.endswith("_per_s")])
@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_seconds_are_above_0(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"^{name}={value}: expected seconds above 0\.$"):
        build(Settings, {**defaults(Settings), name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("retries", -1), ("seed", -1), ("port", -1), ("port", 65_536), ("storage_mb_per_s", 0.0)]
)
def test_what_is_out_of_bounds_is_said(name: str, value: float) -> None:
    with pytest.raises(InputError, match=rf"^{name}={value}: expected "):
        build(Settings, {**defaults(Settings), name: value})


def test_nothing_below_has_a_default_of_its_own_for_a_key() -> None:
    """training/ apart: a `Trainer` is used by itself, too, and its device decides whether it computes in bfloat16.

    A plan's compressor is no key: the key says from which jobs choose theirs.
    """
    keys = {name for name in KEYS if "." not in name} - {"compressor"}
    found = [
        f"{path.relative_to(ROOT)}: {where}.{name}"
        for path in sorted((ROOT / "synergy_exec").rglob("*.py"))
        if path.name != "settings.py" and path.parent.name != "training"
        for where, name in _with_defaults(ast.parse(path.read_text(encoding="utf-8")))
        if name in keys
    ]
    assert found == []


def _with_defaults(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(function or class, parameter or field) of all that have one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            ordered = [*node.args.posonlyargs, *node.args.args]
            last = ordered[len(ordered) - len(node.args.defaults) :]
            named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from ((node.name, each.arg) for each in last)
            yield from ((node.name, each.arg) for each, default in named if default is not None)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and each.value is not None and isinstance(each.target, ast.Name):
                    yield node.name, each.target.id


def test_conf_repeats_no_key() -> None:
    """But for the simulator's picture of the executor, which can import nothing of it, and says the same."""
    assert set(yaml.safe_load((ROOT / "conf" / "executor.yaml").read_text(encoding="utf-8"))) == {"defaults", "hydra"}
    pictured = yaml.safe_load((ROOT / "conf" / "testbed" / "executor.yaml").read_text(encoding="utf-8"))
    assert pictured["round_s"] == Settings().round_s
