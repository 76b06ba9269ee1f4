"""`python -m synergy_exec +trace=demo` schedules and trains real jobs; `submit`, `list`, … talk to a running one."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from synergy_core import cli as exits
from synergy_core.errors import InputError
from synergy_core.scheduling.policies import policy_names
from synergy_exec.backends import backend_names
from synergy_exec.settings import EXECUTOR, Settings
from synergy_runs.inputs.command_line import composed, key_table, options, text_asked_for
from synergy_runs.inputs.keys import keys


def main() -> None:
    """Runs the command line."""
    exits.run("synergy_exec", _main, interrupted="the same command resumes from what was saved.")


def _main() -> None:
    needed = ("aiohttp", "prometheus_client", "safetensors", "torch")
    if missing := [each for each in needed if importlib.util.find_spec(each) is None]:
        raise InputError(f"not installed here: {', '.join(missing)}. Type: pip install -e '.[exec]'")
    from synergy_core import module_names
    from synergy_exec import commands
    from synergy_exec.commands import _asking

    arguments = sys.argv[1:]
    if arguments and arguments[0] in _asking.COMMANDS:
        sys.exit(_asking.main(arguments[0], arguments[1:]))
    if arguments and arguments[0] in module_names(commands.__name__):
        command = importlib.import_module(f"{commands.__name__}.{arguments[0]}")
        sys.exit(command.main(arguments[1:]))
    if (text := text_asked_for(EXECUTOR, arguments, usage, page)) is not None:
        print(text, end="")
        return
    values = composed(EXECUTOR, arguments)
    from synergy_exec.run import run  # slow to import, and not needed to refuse a command line

    run(values)


# The --help text: what to type, and every name that can be typed.


TEXT = """\
Trains the jobs of a trace for real, placed, sized and tuned by a scheduling policy.

  python -m synergy_exec +trace=demo                         on this machine's slots; results in results/demo/latest
  python -m synergy_exec +trace=demo 'policy=[synergy,las]'  one after another, and compared
  python -m synergy_exec serve=true                          no trace: jobs are submitted
  python -m synergy_exec submit JOB.yaml… [KEY=VALUE…]       to the controller that runs (--dir or --url says which)
  python -m synergy_exec list | cancel JOB | explain JOB [--json]
  python -m synergy_exec logs JOB [--tail N] [--follow]      what its workers printed, while it runs and afterwards
  python -m synergy_exec retry JOB [--from-start]            one that failed or was cancelled waits again
  python -m synergy_exec resume [RUN.work] [KEY=VALUE…]      goes on with a run, with the settings it was started with
  python -m synergy_exec sbatch --nodes=N … -- KEY=VALUE…    prints a script for Slurm's sbatch
  python -m synergy_exec export JOB [--step N] [--out FILE]  its weights, to load without Synergy
  python -m synergy_exec verify RUN.work [--jobs NAME…]      compares losses and weights with uninterrupted training
  python -m synergy_exec profile [MODEL…]                    measures every plan here, to schedule and simulate by
  python -m synergy_exec --help=markdown                     every key with its default and possible values
  eval "$(python -m synergy_exec --completion=bash)"         keys and values complete as you type; or zsh

Ctrl-C has every job save and leave; the same command, or resume, goes on from there.

Traces     {traces}
Models     {models}
Backends   {backends}

Policies
{policies}

Keys
{keys}
"""

PAGE = """
## The executor

These are the keys of `python -m synergy_exec`, as `python -m synergy_exec --help=markdown` prints them. The keys of a
trace are those of the simulator.

"""


def usage() -> str:
    """The whole --help text."""
    from synergy_exec.workload import models  # imports packages that `_main` checks

    return TEXT.format(
        traces="  ".join(options("trace")),
        models="  ".join(models()) + "  (files in conf/jobs)",
        backends="  ".join(backend_names()),
        policies="\n".join(f"  {name:12} {summary}" for name, summary in policy_names().items()),
        keys="\n".join(f"  {each.name:32} {each.meaning}" for each in keys(Settings)),
    )


def page() -> str:
    """Returns the text of `--help=markdown`, the second part of docs/configuration.md."""
    return PAGE + key_table(EXECUTOR, without="trace.")


if __name__ == "__main__":
    main()
