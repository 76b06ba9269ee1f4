"""The pages build as a site without warnings, and what is said of the project agrees with pyproject.toml."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]


def test_the_pages_build_as_a_site_without_warnings(tmp_path):
    """Every page is in the navigation, and every link and anchor leads somewhere, or this is a warning."""
    pytest.importorskip("material")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not done.stdout + done.stderr
    built = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= built
    assert {"traces", "contributing"} <= built


def test_the_citation_is_of_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert {"cff-version", "message", "title", "authors"} <= set(cited)
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
