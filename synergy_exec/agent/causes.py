"""Why a run ended, from all that was seen of its workers on this node."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from ..messages import PAUSED, Failure, Outcome
from ..worker.exits import PEER_LOST


def outcome(
    codes: Mapping[int, int], failures: Mapping[int, Failure], killed: Collection[int], verdict: str
) -> tuple[Outcome, str]:
    """The outcome, and for failed and lost one sentence.

    codes: by rank, exit codes, or minus a signal's number, in the order in which the ranks left. failures: what ranks
    said of their own errors. killed: ranks that the agent killed itself, which says nothing of them. verdict: why it
    did; "" when another rank had failed.
    What a rank did by itself comes before what it suffered from others.
    """
    own = {rank: code for rank, code in codes.items() if rank not in killed and code not in (0, PAUSED)}
    erred = [rank for rank, code in own.items() if code > 0 and code != PEER_LOST]
    # Said before it was killed: it counts as its own too.
    erred += [rank for rank in failures if rank not in erred and rank in killed]
    for rank in sorted(erred, key=lambda rank: not _out_of_memory(failures.get(rank))):
        failure = failures.get(rank)
        return "failed", failure.reason if failure else f"rank {rank} left with exit code {own[rank]}"
    for rank, code in own.items():
        if code < 0:
            return "lost", f"rank {rank} was killed by {_name(-code)}"
    if verdict:
        return "lost", verdict
    for rank in own:
        return "lost", f"rank {rank} lost its peers, which another node's ranks may explain"
    if set(codes.values()) <= {0}:
        return "done", ""
    return "paused", ""


def _out_of_memory(failure: Failure | None) -> bool:
    return failure is not None and failure.out_of_memory


def _name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"
