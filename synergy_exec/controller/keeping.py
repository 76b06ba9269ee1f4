"""What is kept of a job that a user has: pruned, and its weights handed out."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from aiohttp import web

from synergy_core.errors import InputError
from synergy_exec.controller.execution import Execution
from synergy_exec.controller.jobs import ExecutedJob
from synergy_exec.plain import plain_lines
from synergy_exec.retention import Retention, removals, remove

KINDS = ("safetensors", "pt")
_CHUNK = 1 << 20


async def pruned(execution: Execution, job: ExecutedJob, asked: Any) -> dict[str, Any]:
    """What of a job that has ended need not be kept, removed where `yes` is asked.

    asked: last_checkpoint, or days, or neither for the run's own retention. Raises InputError for anything else, and
    for a job that may still write.
    """
    keep, days, yes = _asked(execution, asked)
    if not job.ended or execution.runs.of_job(job.job_id) is not None:
        raise InputError(f"job {job.name} is {job.state}; only what is left of jobs that have ended can be pruned.")
    what = await asyncio.to_thread(removals, execution.folder, [job.job_id], keep, days)
    if yes:
        await asyncio.to_thread(remove, what)
    return {"removed": yes, "what": [str(each) for each in what], "bytes": sum(each.size_bytes for each in what)}


def _asked(execution: Execution, asked: Any) -> tuple[Retention, float, bool]:
    if isinstance(asked, dict) and asked.keys() <= {"last_checkpoint", "days", "yes"}:
        days, yes, last = asked.get("days"), asked.get("yes", False), asked.get("last_checkpoint", False)
        number = isinstance(days, int | float) and not isinstance(days, bool) and days >= 0
        if isinstance(yes, bool) and isinstance(last, bool) and (days is None or (number and not last)):
            if last:
                return "last_checkpoint", 0.0, yes
            if days is not None:
                return "remove", float(days), yes
            return execution.settings.retention, execution.settings.retention_days, yes
    raise InputError('expected {"last_checkpoint": true}, {"days": a number from 0} or {}; with "yes": true to remove.')


class Exports:
    """Weights as files of a kind, made one at a time by a process that knows torch, and sent."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def send(
        self, request: web.Request, execution: Execution, job: ExecutedJob, kind: str, step: str
    ) -> web.StreamResponse:
        """The answer with a job's weights, of its newest checkpoint or that of a step. Raises InputError."""
        if kind not in KINDS or not (step == "" or (step.isdecimal() and step.isascii() and len(step) < 19)):
            raise InputError(f"expected format={' or format='.join(KINDS)}, and step=N or none.")
        folder = Path(tempfile.mkdtemp(prefix=".export-", dir=execution.folder))
        try:
            out = folder / f"weights.{kind}"
            async with self._one:
                await _export(execution.folder_of(job).resolve(), out, step)
            answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            with out.open("rb") as stream:
                answer.content_length = os.fstat(stream.fileno()).st_size
                await answer.prepare(request)
                while chunk := await asyncio.to_thread(stream.read, _CHUNK):
                    await answer.write(chunk)
            await answer.write_eof()
            return answer
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def _export(folder: Path, out: Path, step: str) -> None:
    command = [sys.executable, "-m", "synergy_exec", "export", str(folder), "--out", str(out)]
    process = await asyncio.create_subprocess_exec(
        *command,
        *(["--step", step] if step else []),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise InputError(plain_lines(said.decode(errors="replace").strip()) or "the export was killed.")
