"""`profile`: measures promising plans of models on a testbed, for scheduling and for simulation."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from synergy_core.cli import Parser
from synergy_core.errors import InputError
from synergy_core.scheduling.jobs.testbed_profiles import ProfiledInput, ProfiledModel
from synergy_core.units import MB
from synergy_exec.backends import get_backend
from synergy_exec.job_file import JobFile, job_of, read_job_file
from synergy_exec.profiling.machine import machine
from synergy_exec.profiling.profile import Effort, add_to_profile, progress
from synergy_exec.settings import EXECUTOR, Settings
from synergy_exec.workload import models, template
from synergy_runs.inputs.command_line import composed
from synergy_runs.inputs.keys import build

LEISURE_S = 600.0
"""Default of `profile_s` for this command, whose user does not wait for a run."""


def main(arguments: Sequence[str]) -> None:
    """Measures models on this testbed and writes a profile. Raises InputError."""
    parser = Parser(prog="python -m synergy_exec profile", description=__doc__)
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL | KEY=VALUE",
        help="names in conf/jobs, or job files; all that ship. Keys are a run's (python -m synergy_exec --help), such "
        "as profile_s=300 host=10.0.0.1 precision=fp32 backend.name=slurm backend.options.slots=2",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("profile.json"), help="models of this machine already in it stay there"
    )
    parser.add_argument(
        "--seconds", type=float, default=Effort().seconds, help="of training at each batch of each plan"
    )
    given = parser.parse_intermixed_args(arguments)
    if not 0 < given.seconds < 3600:
        raise InputError(f"--seconds {given.seconds:g}: expected a number above 0, such as 3.")
    keys = [f"profile_s={LEISURE_S}", *(each for each in given.models if "=" in each)]  # the last value of a key counts
    settings = build(Settings, composed(EXECUTOR, [*keys, EXECUTOR.without_trace]))
    files = [_file(each) for each in given.models if "=" not in each] or [_file(each) for each in models()]
    where = machine(settings.backend.name, settings.backend.options, precision=settings.run.precision)
    backend = get_backend(settings.backend.name, settings.backend.options)
    with progress() as say:
        limit_s = settings.profiling.profile_s
        say(f"measuring {', '.join(each.name for each in files)} for at most {limit_s:g} s (profile_s)")
        made = add_to_profile(given.out, files, backend, where, Effort(seconds=given.seconds), say, settings)
    for model in made.models:
        print("\n".join(table(model)))
    for remark in made.remarks:
        print(remark, file=sys.stderr)
    if not made.models:
        raise InputError(f"none of {', '.join(each.name for each in files)} could be profiled.")
    print(f"wrote {given.out}")


def _file(text: str) -> JobFile:
    """Reads the job file at a path, or of a model that ships with Synergy. The job's work does not matter here."""
    if text.endswith((".yaml", ".yml")):
        return read_job_file(Path(text))
    return job_of({**template(text, "Give one, or a job file such as job.yaml."), "work": 1.0}, text)


def _scale(model: ProfiledModel, at: int) -> str:
    known = model.noise[at] if len(model.noise) > 1 else model.noise[0]
    return f"{known.ratio * model.initial_batch:,.0f} at {known.work:,.0f}"


def table(model: ProfiledModel) -> list[str]:
    """The model's measured configurations; the best for each number of slots and batch is marked."""
    costs = {} if model.costs is None else dataclasses.asdict(model.costs)
    lines = [
        f"{model.name}: {model.parameters:,.0f} parameters, "
        f"noise scale {_scale(model, 1)} → {_scale(model, -1)} samples, "
        + ", ".join(f"{name[:-2]} {seconds:.2f} s" for name, seconds in costs.items())
    ]
    rows = sorted(model.rows, key=lambda row: (row.gpu_type, row.plan.gpus, row.plan.global_batch, row.step_s))
    for row in rows:
        best = model.best(row.gpu_type, row.nodes, row.plan.gpus, row.plan.global_batch) is row
        rate = row.plan.global_batch / row.step_s
        lines.append(
            f"  {'*' if best else ' '} {row.plan.gpus} × {row.gpu_type:6} batch {row.plan.global_batch:5} "
            f"{row.step_s * 1e3:8.1f} ms ±{row.spread:4.0%} {rate:9,.0f} samples/s {row.memory_bytes / 1e6:7,.0f} MB  "
            f"{row.plan.describe()}{', predicted' if row.predicted else ''}"
        )
    return lines if model.input is None else lines + _input_table(model.input)


def _input_table(given: ProfiledInput) -> list[str]:
    """CPU-seconds per sample, and measured step times beside those of the formula."""
    lines = [
        f"  input on 1 × {given.gpu_type}, batch {given.batch}: {given.cpu_s * 1e3:.2f} ms of CPU per sample, "
        f"{given.gpu_s * 1e3:.1f} ms a step without waiting, {given.data_bytes / MB:,.1f} MB of data"
    ]
    for each in given.steps:
        rate, waited = given.batch / each.step_s, each.waited_s / each.step_s
        lines.append(
            f"    {each.cpus:2g} CPUs, {each.cpu_s / each.step_s:5.2f} used {each.step_s * 1e3:8.1f} ms "
            f"(formula {given.step_s(each.cpus) * 1e3:8.1f}) {rate:9,.0f} samples/s  {waited:4.0%} of it waiting"
        )
    return lines
