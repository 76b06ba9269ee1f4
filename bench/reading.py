"""The reading test: names and comments of the product drawn at random, to be understood without their context.

python bench/reading.py [--seed N] [--count N] [FOLDER …]
"""

from __future__ import annotations

import argparse
import ast
import random
import tokenize
from pathlib import Path

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ROOT = Path(__file__).resolve().parents[1]


def names_of(tree: ast.Module) -> set[str]:
    """Functions, classes, methods, module constants, parameters and fields."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        if isinstance(node, ast.arg):
            found.add(node.arg)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    return {name for name in found if len(name) > 1 and not name.startswith("__")}


def comments_of(path: Path, tree: ast.Module) -> list[str]:
    """The first lines of docstrings, and comments behind `#`: blocks whole, those behind code with their line."""
    found = [
        text.splitlines()[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        and (text := ast.get_docstring(node))
    ]
    lines = path.read_text(encoding="utf-8").splitlines()
    with path.open("rb") as stream:
        tokens = [each for each in tokenize.tokenize(stream.readline) if each.type == tokenize.COMMENT]
    block_ends = 0
    for each in tokens:
        text, (row, column) = each.string.lstrip("# "), each.start
        if "noqa" in text or "type: ignore" in text:
            continue
        is_alone = not lines[row - 1][:column].strip()
        if is_alone and row == block_ends + 1:
            found[-1] += f" {text}"
        else:
            found.append(text if is_alone else lines[row - 1].strip())
        block_ends = row if is_alone else 0
    return [each for each in found if each]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", default=["synergy_core", "synergy_runs", "synergy_sim"], metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--count", type=int, default=20)
    chosen = parser.parse_args()
    paths = [path for folder in chosen.folders for path in sorted((ROOT / folder).rglob("*.py"))]
    names, comments = [], []
    for path in paths:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        where = path.relative_to(ROOT)
        names += [f"{name}  ({where})" for name in sorted(names_of(tree))]
        comments += [f"{text}  ({where})" for text in comments_of(path, tree)]
    draw = random.Random(chosen.seed)
    print(f"{chosen.count} of {len(names):,} names:", *draw.sample(names, chosen.count), sep="\n  ")
    print(f"\n{chosen.count} of {len(comments):,} comments:", *draw.sample(comments, chosen.count), sep="\n  ")


if __name__ == "__main__":
    main()
