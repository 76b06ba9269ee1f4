"""`sbatch`: prints a script for Slurm's sbatch that requests nodes and runs Synergy on them with this Python.

python -m synergy_exec sbatch --nodes=2 --cpus-per-node=32 --gpus-per-node=4 --time=12:00:00 -- serve=true > run.sh
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from synergy_core.commands import Parser
from synergy_exec.backends.slurm import script


def main(arguments: Sequence[str]) -> None:
    """Prints the script. Raises InputError."""
    parser = Parser(
        prog="python -m synergy_exec sbatch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--cpus-per-node", type=int, required=True)
    parser.add_argument("--gpus-per-node", type=int, default=0, help="0: slots are CPU cores")
    for name, meaning in (
        ("time", "such as 12:00:00; two minutes before, all jobs are saved"),
        ("partition", "of the cluster"),
        ("account", "that pays"),
        ("output", "the file that the script's output goes to"),
    ):
        parser.add_argument(f"--{name}", default="", help=meaning)
    parser.add_argument("words", nargs="+", metavar="KEY=VALUE", help="what Synergy is to run, such as +trace=demo")
    given = parser.parse_args(arguments)
    options = {name: value for name in ("partition", "account", "output") if (value := getattr(given, name))}
    print(
        script(
            [sys.executable, "-m", "synergy_exec", *given.words],
            nodes=given.nodes,
            cpus_per_node=given.cpus_per_node,
            gpus_per_node=given.gpus_per_node,
            time=given.time,
            options=options,
        ),
        end="",
    )
