"""`sbatch`: prints a script for Slurm's sbatch that requests nodes and runs Synergy on them with this Python.

python -m synergy_exec sbatch --nodes=2 --cpus-per-task=32 --gpus-per-node=4 --time=12:00:00 -- serve=true > run.sh

Before -- are options of Slurm's sbatch, a word each. Slots are the nodes' GPUs, or their CPUs if no GPUs are asked for.
"""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Sequence

from synergy_core.cli import Parser
from synergy_core.errors import InputError

_OPTION = re.compile(r"--[a-z][a-z-]*(=\S+)?")
_BODY = """
{command} backend.name=slurm "host=$(hostname -f)" &
controller=$!
# Slurm tells this shell before the time is up; the controller saves, and the same script goes on from there.
trap 'kill -TERM "$controller"' TERM
wait "$controller"
status=$?
# A trapped signal ends `wait` before the controller has ended.
while kill -0 "$controller" 2>/dev/null; do
    wait "$controller"
    status=$?
done
exit "$status"
"""


def main(arguments: Sequence[str]) -> None:
    """Prints the script. Raises InputError."""
    parser = Parser(
        prog="python -m synergy_exec sbatch",
        usage="python -m synergy_exec sbatch --OPTION=VALUE… -- KEY=VALUE…",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("keys", nargs="+", metavar="KEY=VALUE", help="what Synergy is to run, such as +trace=demo")
    words = list(arguments)
    options = words[: words.index("--")] if "--" in words else words
    given = parser.parse_args(["--help"] if {"-h", "--help"} & {*options} else words[len(options) + 1 :])
    for option in options:
        if not _OPTION.fullmatch(option):
            raise InputError(f"no option of sbatch: {option}; write its long name, = and a value without spaces.")
    asked = [*options, "--ntasks-per-node=1", "--signal=B:TERM@120"]  # of two equal options Slurm obeys the last
    command = shlex.join([sys.executable, "-m", "synergy_exec", *given.keys])
    print("\n".join(["#!/bin/bash", *(f"#SBATCH {each}" for each in asked), _BODY.format(command=command)]), end="")
