"""The --help text: what to type, and every name that can be typed."""

from __future__ import annotations

from synergy_core.mechanisms import mechanism_names
from synergy_core.policies import Policy, get_policy, policy_names
from synergy_runs.overrides import options
from synergy_runs.settings import meanings
from synergy_sim.settings import Settings

TEXT = """\
Replays a job log on a simulated GPU cluster under several scheduling policies, and compares them.

  python -m synergy_sim +trace=philly                                  compare the default policies
  python -m synergy_sim +trace=philly 'policy=[fifo,srtf]' cluster.nodes=80
  python -m synergy_sim +trace=file trace.path=FILE cluster.nodes=16   your own log; sacct --parsable2 works
  python -m synergy_sim -m +trace=philly policy=fifo,srtf cluster.load=0.8,1.0,1.2     a sweep
  python -m synergy_sim.traces list                                    log formats, and traces to download
  python -m synergy_sim experiment=sia_sosp23                          jobs whose speed depends on what they are given
  python -m synergy_sim.results DIR                                    what is below DIR, in one table (--csv, --latex)
  python -m synergy_sim.explain DIR/philly/latest/synergy-0 JOB        why a job got what it got
  eval "$(python -m synergy_sim --completion=bash)"                    keys and values complete as you type; or zsh

Traces     {traces}
Clusters   {clusters}
Testbeds   {testbeds}
Experiments {experiments}

Policies (* reads true run times; ° reads users' estimates, which are drawn from true run times where a log has none)
{policies}

Other parameters for one row: 'policy=[sia,sia(growth=4)]'; what another policy knows and may: 'sia(like=synergy)'

Mechanisms: an order with one, such as fifo+tune or las+greedy, shares out CPUs and memory beside GPUs, on nodes that
name theirs: cluster.cpus_per_node=24 cluster.memory_gb_per_node=500 'policy=[fifo,fifo+tune]'
{mechanisms}

Keys
{keys}
"""


def _star(policy: Policy) -> str:
    return "*" if policy.oracle else "°" * policy.reads_estimates


def usage() -> str:
    """The whole text."""
    starred = {name: name + _star(get_policy(name)) for name in policy_names()}
    policies = "\n".join(f"  {starred[name]:12} {summary}" for name, summary in policy_names().items())
    mechanisms = "\n".join(f"  {name:12} {summary}" for name, summary in mechanism_names().items())
    keys = "\n".join(f"  {name:32} {meaning}" for name, meaning in meanings(Settings))
    groups = {
        group + "s": "  ".join(options(group)) or "none yet" for group in ("cluster", "testbed", "truth", "experiment")
    }
    return TEXT.format(
        traces="  ".join(options("trace")),
        policies=policies,
        mechanisms=mechanisms,
        keys=keys,
        **groups,
    )
