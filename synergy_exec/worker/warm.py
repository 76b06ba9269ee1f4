"""The module that the forkserver preloads before it forks workers (`agent.forkserver`).

It runs no operator, starts no thread and touches no GPU, so that its forks may do all three.
"""

import gc
import importlib
import os
import signal
import sys
import warnings

from synergy_exec.worker.processes import adopt_orphans, die_with, end_all
from synergy_exec.worker.start import WARM

_FORKSERVER, _AGENT = os.getpid(), os.getppid()


def _end_with_agent(*_: object) -> None:
    """Kills all workers and their leftover processes after the agent has died."""
    if os.getpid() == _FORKSERVER and os.getppid() != _AGENT:
        end_all()
        os._exit(1)


adopt_orphans()
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")  # for orphans
# The kernel sends SIGCONT when the agent dies, because that also reaches a stopped process.
signal.signal(signal.SIGCONT, _end_with_agent)
die_with(_AGENT, signal.SIGCONT)
# Slurm sends SIGTERM to all processes of a step, but the agent ends this one. Workers install a handler of their own.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _module in WARM:
    importlib.import_module(_module)
if (_threads := len(os.listdir("/proc/self/task"))) > 1:
    sys.exit(f"forkserver: {_threads} threads after the imports, so it must not fork; set OPENBLAS_NUM_THREADS=1")
# A garbage collection in a fork would write to all these objects and so copy their pages.
gc.freeze()
