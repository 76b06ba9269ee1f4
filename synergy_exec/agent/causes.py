"""Why a run ended, from all that was seen of its workers on this node."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping

from synergy_exec.messages import LOST_PEERS, PAUSED, Failure, Outcome
from synergy_exec.worker.exits import PEER_LOST

_NOBODY_SENDS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
"""What broken code gets, and code on a broken device."""


def outcome(
    codes: Mapping[int, int],
    meant: Mapping[int, int | None],
    failures: Mapping[int, Failure],
    killed: Collection[int],
    verdict: str,
) -> tuple[Outcome, str]:
    """The outcome, and for failed and lost one sentence.

    codes: by rank, exit codes, or minus a signal's number, in the order in which the ranks left. meant: by rank, the
    code it said that it would leave with, if it did. failures: what ranks said of their own errors. killed: ranks that
    the agent killed itself, which says nothing of them. verdict: why it did; "" when another rank had failed.
    What a rank did by itself comes before what it suffered from others.
    """
    own = {rank: code for rank, code in codes.items() if rank not in killed and code not in (0, PAUSED)}
    failed = {rank: failure for rank, failure in failures.items() if not failure.from_peers}
    erred = [rank for rank, code in own.items() if code > 0 and code != PEER_LOST]
    # Said before it was killed: it counts as its own too.
    erred += [rank for rank in failed if rank not in erred and rank in killed]
    for rank in sorted(erred, key=lambda rank: not _out_of_memory(failed.get(rank))):
        failure = failed.get(rank)
        if failure is not None and (failure.unsaved or failure.broken_device):
            return "lost", failure.reason
        return "failed", failure.reason if failure else f"rank {rank} left with exit code {own[rank]}"
    # Of code 0 and PAUSED too, which a job's own code may leave with at any time.
    for rank, code in codes.items():
        if code in (0, PAUSED) and rank not in killed and meant.get(rank) != code:
            return "failed", f"the job's code ended rank {rank} with exit code {code} in the middle of its work"
    for rank, code in own.items():
        if code < 0:
            return "lost", f"rank {rank} was killed by {_name(-code)}"
    if verdict:
        return "lost", verdict
    for rank in own:
        said = failures.get(rank)
        return "lost", f"{said.reason}: {LOST_PEERS}" if said else f"rank {rank} {LOST_PEERS}"
    if set(codes.values()) <= {0}:
        return "done", ""
    return "paused", ""


def died_there(codes: Mapping[int, int], failures: Mapping[int, Failure], killed: Collection[int]) -> int | None:
    """The first rank that the place where it was may have ended; arguments as of `outcome`."""
    broken = [rank for rank, failure in failures.items() if failure.broken_device]
    signalled = [rank for rank, code in codes.items() if -code in _NOBODY_SENDS and rank not in killed]
    return next(iter([*broken, *signalled]), None)


def _out_of_memory(failure: Failure | None) -> bool:
    return failure is not None and failure.out_of_memory


def _name(number: int) -> str:
    hint = " (out of memory?)" if number == signal.SIGKILL else ""
    return f"{signal.Signals(number).name}{hint}"
