"""Makes the generated pages, the notebooks' outputs and the table of durations again, one after another.

    SYNERGY_DATA=… OPENBLAS_NUM_THREADS=1 python bench/pages.py [NAME …]

Every page says which commands made it; they are read from the page and run again. `notebooks` executes all notebooks in
place, on a fresh run of the main command; `durations` prints how long the README's commands take. A command that failed
is named at the end, the others still run, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

from documented import commands  # noqa: E402

PAGES = {
    "configuration": ("configuration_page",),
    "policies": ("policies",),
    "compression": ("compression_findings",),
    "planner": ("fit_planner", "planner_page"),
    "language_models": ("llm", "llm_page"),
    "accuracy": ("reproduce",),
    "fidelity": ("fidelity",),
}
"""The programs in bench/ that make a page, in the order in which they run."""
FILES = {"compression": "compression_findings.md", "planner": "accuracy_planner.md"}
"""Pages whose file is not called as they are."""
MAIN_COMMAND = "python -m synergy_sim +trace=philly"
NOTEBOOKS = [MAIN_COMMAND, *(f"notebook {path.name}" for path in sorted((ROOT / "notebooks").glob("*.ipynb")))]
TIMEOUT_S = 3600


def commands_of(name: str) -> list[str]:
    """The commands that make a page, read from it. Where one stands there twice, that with more arguments counts."""
    path = ROOT / "docs" / FILES.get(name, f"{name}.md")
    typed = list(dict.fromkeys(each.typed for each in commands(path.name, path.read_text(encoding="utf-8"))))
    whole = [each for each in typed if not any(other.startswith(f"{each} ") for other in typed)]
    found = [each for program in PAGES[name] for each in whole if each.split()[1] == f"bench/{program}.py"]
    if {each.split()[1] for each in found} != {f"bench/{program}.py" for program in PAGES[name]}:
        raise SystemExit(f"{path}: expected the commands of {', '.join(PAGES[name])}; the page says: {found}.")
    return found


def execute(notebook: Path) -> None:
    """Runs all cells and keeps their outputs. Raises CellExecutionError where a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    cells = nbformat.read(notebook, as_version=4)
    client = NotebookClient(cells, timeout=TIMEOUT_S, kernel_name="python3", record_timing=False)
    client.execute(cwd=str(notebook.parent))
    nbformat.write(cells, notebook)


def run(typed: str) -> bool:
    """Whether the command went well."""
    program, *arguments = shlex.split(typed)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SYNERGY_RESULTS": str(ROOT / "results/philly/latest")}
    if typed == MAIN_COMMAND:  # on generated jobs, as in the README
        environment.pop("SYNERGY_DATA", None)
    if program == "notebook":
        program, arguments = "python", ["bench/pages.py", "--execute", arguments[0]]
    assert program == "python", typed
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment).returncode == 0


def main() -> int:
    every = [*PAGES, "notebooks", "durations"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(every)}")
    parser.add_argument("--execute", metavar="NOTEBOOK", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.execute:
        execute(ROOT / "notebooks" / given.execute)
        return 0
    if unknown := set(given.names) - set(every):
        parser.error(f"{', '.join(sorted(unknown))}: no such page; known: {', '.join(every)}")
    others = {"notebooks": NOTEBOOKS, "durations": ["python bench/durations.py"]}
    asked = [typed for name in given.names or every for typed in others.get(name) or commands_of(name)]
    failed = []
    for typed in asked:
        print(f"$ {typed}", flush=True)
        began_s = time.monotonic()
        if not run(typed):
            failed.append(typed)
        print(f"# {time.monotonic() - began_s:,.0f} s{', failed' if typed in failed else ''}", flush=True)
    print(*(f"failed: {typed}" for typed in failed), f"{len(asked) - len(failed)} of {len(asked)} went well", sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
