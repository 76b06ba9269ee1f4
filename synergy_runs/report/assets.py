"""What the report's page is made of beside its data: our scripts, and Bokeh's, of which Python is not asked."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from synergy_core.errors import InputError
from synergy_runs.report.packed import packed_text

_SCRIPTS = ("unpack", "words", "policies", "tables", "charts", "breakdown", "jobs", "gantt", "main")
_BOKEH = ("bokeh.min.js", "bokeh-api.min.js")


def scripts() -> str:
    """All of `page/*.js` as one function."""
    folder = files("synergy_runs.report").joinpath("page")
    parts = [folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS]
    return '(async () => {\n"use strict";\n' + "\n".join(parts) + "\n})();"


@cache
def bokeh_js() -> str:
    """Bokeh's script, packed. Read from where it is installed: importing it costs a second and brings nothing else."""
    spec = find_spec("bokeh")
    folder = Path((spec and spec.origin) or "").parent / "server" / "static" / "js"
    try:
        return packed_text(";\n".join((folder / name).read_text(encoding="utf-8") for name in _BOKEH))
    except OSError as error:
        raise InputError(
            "report.html needs the package bokeh, which is not installed: pip install bokeh, or figures=false for none."
        ) from error
