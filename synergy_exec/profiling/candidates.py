"""What may be measured of a model: its size and its admitted plans, found out in a process of its own.

To know them the model is built and run, seconds of Python in which an event loop of the same process would answer
nobody, so that agents would take it for dead.

    python -m synergy_exec.profiling.candidates

reads questions from standard input, a JSON object a line, and answers each with one on standard output; what the
user's code prints goes to standard error. It leaves at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from synergy_core.errors import InputError
from synergy_exec.backends._agents import package_environment
from synergy_exec.job_file import JobFile
from synergy_exec.messages import PlanMessage
from synergy_exec.profiling.grid import batches_of, plans

MOST_ANSWER_BYTES = 1 << 28


class Data(NamedTuple):
    """The data of a job that loads its samples: how many, and the most that storage holds of one, in bytes."""

    samples: int
    item_bytes: int


class CandidatePlans(NamedTuple):
    """What may be measured. parameters: of the model. plans: admitted ones by number of slots, one list per degrees.

    data: None of a job that makes its batches itself.
    """

    parameters: float
    plans: dict[int, list[list[PlanMessage]]]
    data: Data | None = None


class Finder:
    """Asks the other process, which it starts when there is none."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def candidates(self, file: JobFile, sizes: list[int]) -> CandidatePlans:
        """What may be measured of a job's model on so many slots. Raises InputError where it cannot be built."""
        process = await self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        batches = batches_of(file.initial_batch, file.max_batch)
        asked = {"job_class": file.job_class, "arguments": file.arguments, "batches": batches, "sizes": sizes}
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise InputError(
                f"{file.name}: the process that builds its model left with exit code {await process.wait()}; "
                "what it said stands above."
            )
        answer = json.loads(line)
        if "error" in answer:
            raise InputError(answer["error"])
        found = {
            int(size): [[PlanMessage(**each) for each in same_degrees] for same_degrees in lists]
            for size, lists in answer["plans"].items()
        }
        data = answer["data"]
        return CandidatePlans(answer["parameters"], found, None if data is None else Data(*data))

    async def _started(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "synergy_exec.profiling.candidates"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=package_environment(),
                limit=MOST_ANSWER_BYTES,
                # The terminal's Ctrl-C is for the controller, which ends this.
                start_new_session=True,
            )
        return self._process

    async def close(self) -> None:
        """Ends the other process."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()


@contextlib.asynccontextmanager
async def finder() -> AsyncIterator[Finder]:
    """A `Finder`, which is closed when the block ends."""
    made = Finder()
    try:
        yield made
    finally:
        await made.close()


def main() -> None:
    """Answers questions from standard input until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), file=answers, flush=True)


def _answer(job_class: str, arguments: dict[str, Any], batches: list[int], sizes: list[int]) -> dict[str, Any]:
    from synergy_exec.training.admitted import Admission
    from synergy_exec.training.job import LoadedJob
    from synergy_exec.training.loading import load_job

    try:
        job = load_job(job_class, arguments)
        admission = Admission(job)
        found = {size: plans(size, batches, admission.refusal) for size in sizes}
        as_json = {
            size: [[dataclasses.asdict(plan) for plan in same_degrees] for same_degrees in lists]
            for size, lists in found.items()
        }
        data = (job.samples, job.item_bytes) if isinstance(job, LoadedJob) else None
        return {"parameters": float(admission.parameters), "plans": as_json, "data": data}
    except InputError as error:
        return {"error": str(error)}
    except Exception as error:
        # The user's own code, whose error ends this model and not the others.
        return {"error": f"{job_class}: its model cannot be built: {type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
