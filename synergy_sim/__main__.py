"""`python -m synergy_sim +trace=philly` simulates policies and compares them. `--help` lists the keys."""

from __future__ import annotations

import os
import resource
import sys

from synergy_core import cli
from synergy_core.errors import InputError, out_of_memory
from synergy_core.scheduling.policies import get_policy, policy_names
from synergy_core.scheduling.policies.mechanisms import mechanism_names
from synergy_runs.inputs.command_line import composed_of, is_sweep, key_table, options, prepared, text_asked_for
from synergy_runs.inputs.keys import keys
from synergy_sim.settings import SIMULATOR, SimulatorSettings

TEXT = """\
Replays a job log on a simulated GPU cluster under several scheduling policies and compares them.

  python -m synergy_sim +trace=philly                                  compare the default policies
  python -m synergy_sim +trace=philly 'policy=[fifo,srtf]' cluster.nodes=80
  python -m synergy_sim +trace=file trace.path=FILE cluster.nodes=16   your own log; sacct --parsable2 works
  python -m synergy_sim -m +trace=philly policy=fifo,srtf cluster.load=0.8,1.0,1.2     a sweep
  python -m synergy_sim.traces list                                    log formats, and traces to download
  python -m synergy_sim experiment=sia_sosp23                          jobs whose speed depends on their GPUs
  python -m synergy_sim.results DIR                                    all runs below DIR in one table (--csv, --latex)
  python -m synergy_sim.explain DIR/philly/latest/synergy-0 JOB        why a job ran or waited
  python -m synergy_sim --help=markdown                                every key with its default and possible values
  eval "$(python -m synergy_sim --completion=bash)"                    completes keys and values as you type (or zsh)

Traces     {traces}
Clusters   {clusters}
Testbeds   {testbeds}
Experiments {experiments}

Policies (* reads true run times; ° reads users' estimates, drawn from true run times if a log has none)
{policies}

Other parameters for one row: 'policy=[sia,sia(growth=4)]'; on the terms of another policy: 'sia(like=synergy)'

Mechanisms: an order with a mechanism, such as fifo+tune or las+greedy, also shares out CPUs and memory. The nodes must
declare theirs: cluster.cpus_per_node=24 cluster.memory_gb_per_node=500 'policy=[fifo,fifo+tune]'
{mechanisms}

Keys
{keys}
"""

PAGE = """\
# Configuration

The table lists every key of `python -m synergy_sim` with its default and possible values, as
`python -m synergy_sim --help=markdown` prints it. Defaults are those of `+trace=philly`; other traces, clusters,
testbeds and experiments set their own in `conf/`. Names end in units: `_s` is seconds, `_gb` GB, `_mb` MB, `_gbps`
Gb/s. Type text and paths as they are, with any characters, and lists and mappings as in YAML, in the shell's quotes.
Both programs complete keys and values in bash and zsh: `eval "$(python -m synergy_sim --completion=bash)"`.

"""


def usage() -> str:
    """Returns the text of `--help`."""
    policies = []
    for name, summary in policy_names().items():
        policy = get_policy(name)
        star = "*" if policy.oracle else "°" * policy.reads_estimates
        policies.append(f"  {name + star:12} {summary}")
    mechanisms = "\n".join(f"  {name:12} {summary}" for name, summary in mechanism_names().items())
    groups = {
        group + "s": "  ".join(options(group)) or "none yet" for group in ("cluster", "testbed", "truth", "experiment")
    }
    return TEXT.format(
        traces="  ".join(options("trace")),
        policies="\n".join(policies),
        mechanisms=mechanisms,
        keys="\n".join(f"  {each.name:32} {each.meaning}" for each in keys(SimulatorSettings)),
        **groups,
    )


def page() -> str:
    """Returns the text of `--help=markdown`, the first part of docs/configuration.md."""
    return PAGE + key_table(SIMULATOR)


def _main() -> None:
    arguments = sys.argv[1:]
    if (text := text_asked_for(SIMULATOR, arguments, usage, page)) is not None:
        print(text, end="")
        return
    overrides = prepared(arguments, SIMULATOR)
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < MIN_MEMORY_BYTES:
        raise _too_little_memory()
    try:
        from synergy_sim.run import run, sweep  # slow to import, and not needed to refuse a command

        if is_sweep(arguments):
            sweep(arguments, overrides)
        else:
            run(composed_of(SIMULATOR, overrides), arguments)
    except Exception as error:
        if isinstance(error, InputError) or not out_of_memory(error):
            raise
        raise _too_little_memory() from None


MIN_MEMORY_BYTES = 0.6e9
"""Address space below which no simulation ends: six hours without figures ended with 0.61 GB, not with 0.51."""
USUAL_MEMORY_GB = 1.0
"""Memory with which the first command of the README ends: with 1.02 GB per process (ulimit -v), not with 0.92."""


def _too_little_memory() -> InputError:
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    has = f"{limit_bytes / 1e9:.1f} GB (ulimit -v) are" if limit_bytes > 0 else "the machine or its container has"
    return InputError(
        f"{has} too little memory: a week under the default policies needs about {USUAL_MEMORY_GB:g} GB in all, and as "
        "much address space in each process. Type ulimit -v unlimited or enlarge the container, or type figures=false, "
        "a shorter trace.window or fewer policies."
    )


def main() -> None:
    """Runs the command line."""
    # Policies run in parallel, one per core, so threads of the linear algebra library would slow all of them down.
    # This must be set before numpy is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    cli.run("synergy_sim", _main, interrupted="finished runs are kept; the run in progress is discarded.")


if __name__ == "__main__":
    main()
