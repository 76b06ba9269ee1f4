"""`profile`: measures every admitted plan of a testbed's models, to schedule by and to simulate with."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import datetime
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from synergy_core.errors import InputError, unknown
from synergy_core.profiles import Profile, ProfiledModel
from synergy_exec.backends import backend_names, get_backend
from synergy_exec.controller.runs import Run
from synergy_exec.job_file import JobFile, job_of, read_job_file
from synergy_exec.messages import Launch, PlanMessage
from synergy_runs.profiles import read_profile, write_profile

ENDLESS = 1e15
REPORT_S = 0.5


def main(arguments: Sequence[str]) -> None:
    """Measures models on this testbed and writes a profile. Raises InputError."""
    parser = argparse.ArgumentParser(prog="python -m synergy_exec profile", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="names in conf/jobs, or job files; all that ship")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="models already in it stay there")
    parser.add_argument("--seconds", type=float, default=3.0, help="of training at each batch of each plan")
    parser.add_argument("--backend", default="local", choices=backend_names())
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the backend: slots=2")
    parser.add_argument("--quiet", action="store_true", help="say nothing on the way")
    given = parser.parse_args(arguments)
    if not 0 < given.seconds < 3600:
        raise InputError(f"--seconds {given.seconds:g}: expected a number above 0, such as 3.")
    files = [_file(each) for each in given.models or _shipped()]
    made = asyncio.run(_profile(files, given))
    older = read_profile(given.out).models if given.out.is_file() else {}
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    write_profile(Profile({**older, **{each.name: each for each in made}}, machine(), now), given.out)
    for model in made:
        print("\n".join(table(model)))
    print(f"wrote {given.out}")


def _shipped() -> list[str]:
    from synergy_exec.workload import models

    return list(models())


def _file(text: str) -> JobFile:
    """A model that ships, or a job file; how much work it is does not matter here."""
    import yaml  # type: ignore[import-untyped]

    from synergy_exec.workload import models

    if text.endswith((".yaml", ".yml")):
        return read_job_file(Path(text))
    known = models()
    if text not in known:
        raise unknown("model", text, known, hint="Or a job file, such as job.yaml.")
    return job_of({**yaml.safe_load(known[text].read_text(encoding="utf-8")), "work": 1.0}, str(known[text]))


async def _profile(files: list[JobFile], given: argparse.Namespace) -> list[ProfiledModel]:
    from synergy_exec.profiling.measure import measured
    from synergy_exec.profiling.testbed import testbed
    from synergy_exec.training.admitted import refusal
    from synergy_exec.training.loading import load_job

    options: dict[str, Any] = dict(_option(each) for each in given.option)
    backend = get_backend(given.backend, options)
    made = []
    with tempfile.TemporaryDirectory(prefix="synergy-profile-", dir=given.out.parent) as text:
        folder = Path(text)
        owner: dict[int, JobFile] = {}

        def launch_of(run: Run) -> Launch:
            file = owner[run.job]
            return Launch(
                run=run.number,
                job=run.job,
                job_class=file.job_class,
                arguments=file.arguments,
                plan=run.plan,
                initial_batch=file.initial_batch,
                work=ENDLESS,
                slots=[],
                first_rank=0,
                world=run.plan.world,
                store_host="",
                store_port=0,
                folder=str(folder / "jobs" / str(run.job)),
                checkpoint_interval_s=ENDLESS,
                report_s=REPORT_S,
            )

        async with testbed(backend, folder, launch_of) as bench:
            for file in files:
                job = load_job(file.job_class, file.arguments)
                parameters = float(sum(each.numel() for each in job.build_model().parameters()))
                first = len(owner)
                mine = list(range(first, first + bench.cluster.gpus))
                owner.update(dict.fromkeys(mine, file))

                def admitted(plan: PlanMessage, job: Any = job) -> str | None:
                    return refusal(job, plan)

                model, failed = await measured(
                    bench, mine, file, parameters, admitted, seconds=given.seconds, say=_quiet if given.quiet else _say
                )
                for each in failed:
                    print(f"{file.name}: left out, {each}", file=sys.stderr)
                made.append(model)
    return made


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _quiet(words: str) -> None:
    """Nothing."""


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--option {text}: expected KEY=VALUE, such as slots=2.")
    return name, int(value) if value.isdigit() else value


def machine() -> str:
    """What this was measured on."""
    return f"{socket.gethostname()}, {platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def table(model: ProfiledModel) -> list[str]:
    """The model's measured configurations, the best of each number of slots and batch marked."""
    costs = dataclasses.asdict(model.costs)
    lines = [
        f"{model.name}: {model.parameters:,.0f} parameters, "
        f"noise scale {model.noise * model.initial_batch:,.0f} samples, "
        + ", ".join(f"{name[:-2]} {seconds:.2f} s" for name, seconds in costs.items())
    ]
    rows = sorted(model.rows, key=lambda row: (row.gpu_type, row.plan.gpus, row.plan.global_batch, row.step_s))
    for row in rows:
        best = model.best(row.gpu_type, row.nodes, row.plan.gpus, row.plan.global_batch) is row
        rate = row.plan.global_batch / row.step_s
        lines.append(
            f"  {'*' if best else ' '} {row.plan.gpus} × {row.gpu_type:6} batch {row.plan.global_batch:5} "
            f"{row.step_s * 1e3:8.1f} ms ±{row.spread:4.0%} {rate:9,.0f} samples/s {row.memory_bytes / 1e6:7,.0f} MB  "
            f"{row.plan.describe()}"
        )
    return lines
