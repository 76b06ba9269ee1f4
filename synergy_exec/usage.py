"""The --help text: what to type, and every name that can be typed."""

from __future__ import annotations

from synergy_core.policies import policy_names
from synergy_exec.backends import backend_names
from synergy_exec.settings import Settings
from synergy_exec.workload import models
from synergy_runs.overrides import options
from synergy_runs.settings import meanings

TEXT = """\
Trains the jobs of a trace for real, placed, sized and tuned by a scheduling policy.

  python -m synergy_exec +trace=demo                         on this machine's slots; results in results/demo/latest
  python -m synergy_exec +trace=demo 'policy=[synergy,las]'  one after another, and compared
  python -m synergy_exec serve=true                          no trace: jobs are submitted
  python -m synergy_exec submit JOB.yaml                     to the controller that runs (--dir or --url says which)
  python -m synergy_exec alerts                              what somebody should look at; exit code 1 if there is any
  python -m synergy_exec reload                              users and changed settings are read again, as at SIGHUP
  python -m synergy_exec list | cancel JOB | explain JOB [--json]
  python -m synergy_exec logs JOB [--follow] [--run N]       what its workers printed, while it runs and afterwards
  python -m synergy_exec retry JOB [--from-start]            one that failed or was cancelled waits again
  python -m synergy_exec resume [RUN.work] [KEY=VALUE…]      goes on with a run, with the settings it was started with
  python -m synergy_exec export JOB [--step N] [--out FILE]  its weights, to load without Synergy
  python -m synergy_exec prune DIR [--yes]                   says, then removes what need not be kept
  python -m synergy_exec profile [MODEL…]                    measures every plan here, to schedule and simulate by
  python -m synergy_exec verify RUN.work                     do losses go on as if nothing had been interrupted?
  python -m synergy_exec tensorboard RUN.work                a run's steps as TensorBoard's event files
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


def usage() -> str:
    """The whole text."""
    return TEXT.format(
        traces="  ".join(options("trace")),
        models="  ".join(models()) + "  (files in conf/jobs)",
        backends="  ".join(backend_names()),
        policies="\n".join(f"  {name:12} {summary}" for name, summary in policy_names().items()),
        keys="\n".join(f"  {name:32} {meaning}" for name, meaning in meanings(Settings)),
    )
