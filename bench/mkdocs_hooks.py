"""Hooks of mkdocs.yml: adds two pages from outside docs/; of links to other files outside, only the text is left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"traces/README.md": "traces.md", "CONTRIBUTING.md": "contributing.md"}
"""Pages outside docs/ by their path, with their names on the site."""
LINK = re.compile(r"\[([^\]]+)\]\(([^():#]+\.\w+)(#[\w-]+)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages outside docs/."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites relative links, which hold in the repository, to pages of the site."""
    sources = {name: ROOT / source for source, name in OUTSIDE.items()}
    folder = sources.get(page.file.src_uri, ROOT / "docs" / page.file.src_uri).parent

    def on_the_site(found: re.Match[str]) -> str:
        path = str((folder / found[2]).resolve().relative_to(ROOT))
        name = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"[{found[1]}]({name}{found[3] or ''})" if name != path or path in OUTSIDE else found[1]

    return LINK.sub(on_the_site, markdown)
