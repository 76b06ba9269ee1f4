"""Explains in a phrase why a plan is slower than another, counts a sample's FLOPs, and draws plans as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from synergy_core.performance.planner.machine import Machine, Software
from synergy_core.performance.planner.plan import Plan, Recompute, plans_of
from synergy_core.performance.planner.search import PlanTable
from synergy_core.performance.planner.work import Architecture, Family

PARTS = {
    "compute_s": "compute",
    "recompute_s": "recompute",
    "bubble_s": "bubble",
    "tensor_s": "TP",
    "context_s": "CP",
    "expert_s": "EP",
    "pipeline_s": "PP",
    "data_s": "DP",
    "optimizer_s": "optimizer",
    "other_s": "other",
}
"""Parts of a step time, and the names under which they are printed."""


def why(table: PlanTable, row: int, best: int) -> str:
    """Names the largest extra cost of plan `row` over plan `best`: `TP 16 leaves the node: all-reduces +4.1 s`."""
    extra = {name: float(getattr(table.parts, name)[row] - getattr(table.parts, name)[best]) for name in PARTS}
    worst = max(extra, key=lambda name: extra[name])
    reason = _reason(worst, table.plans.plan(row), table.plans.plan(best), table.machine)
    return f"{reason} +{seconds(extra[worst])}"


def seconds(value: float) -> str:
    """Formats a time with three digits: `4.10 s`, `85.0 ms`."""
    size, unit = (value, "s") if value >= 1.0 else (value * 1e3, "ms")
    return f"{size:.{max(0, 2 - int(np.log10(max(size, 1.0))))}f} {unit}"


def model_flops(family: Family, architecture: Architecture, software: Software, *, causal_share: float = 0.5) -> float:
    """FLOPs of one sample: 3 × forward, without recomputation; 1 × in layers that are frozen.

    causal_share: the part of causal attention that counts. PaLM (arXiv 2204.02311, appendix B) and Megatron-LM (arXiv
    2104.04473, section 5.1) count it whole, 1.
    """
    work = family.work(architecture, plans_of([Plan()]), software)
    flops = work.before.flops(causal_share) + work.after.flops(causal_share)
    for run in work.layers:
        flops = flops + run.block.flops(causal_share) * run.count * ((1.0 + 2.0 * software.run.trained_fraction) / 3.0)
    return 3.0 * float(np.max(flops))


def _reason(part: str, loser: Plan, winner: Plan, machine: Machine) -> str:
    if part == "tensor_s":
        if loser.tensor > machine.gpus_per_node >= winner.tensor:
            return f"TP {loser.tensor} leaves the node: all-reduces"
        return f"TP {loser.tensor}, micro-batch {loser.micro_batch}: all-reduces"
    if part == "bubble_s":
        return f"{loser.pipeline} stages, {loser.accumulation} micro-batches: bubble"
    if part == "recompute_s":
        return f"recomputes {Recompute(loser.recompute).again}:"
    if part == "data_s":
        if loser.zero == 3:
            return "ZeRO 3 gathers weights for every micro-batch:"
        return f"{loser.data * loser.context} replicas: gradients"
    if part == "pipeline_s":
        return f"{loser.pipeline * loser.interleave} pieces of the pipeline: transfers"
    if part == "optimizer_s":
        return "optimizer state is not sharded:" if loser.zero < winner.zero else "more state per GPU: optimizer"
    if part == "compute_s":
        # The same products take longer: work is repeated, or the products are smaller.
        if winner.sequence and not loser.sequence and loser.tensor > 1:
            return "without sequence parallelism, every rank repeats the norms:"
        if loser.micro_batch < winner.micro_batch:
            return f"micro-batch {loser.micro_batch} makes smaller products: compute"
        if loser.tensor > winner.tensor:
            return f"TP {loser.tensor} makes smaller products: compute"
        if loser.pipeline > winner.pipeline:
            return f"{loser.pipeline} stages are less even, because the last computes the logits: compute"
        return "compute"
    return {
        "context_s": f"CP {loser.context}: keys and values",
        "expert_s": f"EP {loser.expert}: all-to-alls",
        "other_s": "fixed costs",
    }[part]


WIDTH, HEIGHT, LEFT, RIGHT, TOP = 900, 320, 80, 190, 50
COLOURS = ("#4063d8", "#389826", "#cb3c33", "#9558b2", "#b07d00", "#00838f")
FORWARD, BACKWARD = "#7aa6e0", "#e0a07a"
MAX_STAGES_DRAWN, MAX_MICRO_BATCHES_DRAWN = 16, 24
"""Only this much of a pipeline is drawn, because the parts of larger pictures would be too small to see."""

Point = tuple[float, float]


def picture(title: str, tables: Sequence[PlanTable]) -> str:
    """Draws step time against GPUs, and the fastest plan's pipeline, as SVG. The legend names tables without plans."""
    body = [_text(LEFT, 26, title, size=18), *_curves(tables)]
    height = TOP + HEIGHT + 60
    best = [(table.best(), table) for table in tables if len(table)]
    if best:
        rows, table = min(best, key=lambda each: float(each[0].step_time_s.min()))
        plan = rows.plans.plan(int(np.argmin(rows.step_time_s)))
        drawn, taken = _pipeline(plan, table.machine.gpu.title, height)
        body += drawn
        height += taken
    return svg(height, body)


def svg(height: int, body: Sequence[str]) -> str:
    """An SVG document of width `WIDTH`."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def schedule(stages: int, micro_batches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start times of forward and backward passes, which take 1 and 2, under 1F1B; each (stages, micro-batches).

    Each stage first runs min(stages − stage, micro-batches) forward passes, then backward and forward passes in turn.
    """
    forward, backward = np.full((2, stages, micro_batches), np.nan)
    waiting = []
    for stage in range(stages):
        first = min(stages - stage, micro_batches)
        order = [(forward, each) for each in range(first)]
        for each in range(micro_batches):
            order += [(backward, each), (forward, first + each)]
        waiting.append([step for step in order if step[1] < micro_batches])
    free = np.zeros(stages)
    while any(waiting):
        for stage, order in enumerate(waiting):
            while order:
                starts, each = order[0]
                # Time when the neighbour's result arrives; NaN: not known yet.
                if starts is forward:
                    ready = forward[stage - 1, each] + 1.0 if stage else 0.0
                else:
                    ready = forward[stage, each] + 1.0 if stage == stages - 1 else backward[stage + 1, each] + 2.0
                if np.isnan(ready):
                    break
                starts[stage, each] = max(free[stage], ready)
                free[stage] = starts[stage, each] + (1.0 if starts is forward else 2.0)
                del order[0]
    return forward, backward


def _curves(tables: Sequence[PlanTable]) -> list[str]:
    """Draws the best plan's step time against GPUs, both logarithmic. The line skips counts that save no time."""
    best = [table.best() for table in tables]
    result = [_text(LEFT, TOP - 6, "step time of the best plan, s"), _text(LEFT, TOP + HEIGHT + 36, "GPUs")]
    gpus = np.concatenate([each.gpus for each in best]).astype(float)
    times = np.concatenate([each.step_time_s for each in best])
    if len(gpus):
        x, y = _scale(gpus, LEFT, WIDTH - RIGHT), _scale(times, TOP + HEIGHT, TOP)
        for value in _counts(gpus):
            result += [
                _line((x(value), TOP), (x(value), TOP + HEIGHT)),
                _text(x(value), TOP + HEIGHT + 16, f"{value:g}", anchor="middle"),
            ]
        for value in _ticks(times):
            result += [
                _line((LEFT, y(value)), (WIDTH - RIGHT, y(value))),
                _text(LEFT - 8, y(value) + 4, f"{value:.3g}", anchor="end"),
            ]
        for at, rows in enumerate(best):
            points, line = (
                [(x(float(g)), y(float(t))) for g, t in zip(each.gpus, each.step_time_s, strict=True)]
                for each in (rows, rows.efficient())
            )
            path = " ".join(f"{each[0]:.1f},{each[1]:.1f}" for each in line)
            colour = COLOURS[at % len(COLOURS)]
            result.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            result += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points[:200]]
    for at, table in enumerate(tables):
        name = table.machine.gpu.title + ("" if len(table) else ": no plan")
        result.append(_text(WIDTH - RIGHT + 12, TOP + 16 + 18 * at, name, colour=COLOURS[at % len(COLOURS)]))
    return result


def _pipeline(plan: Plan, gpu: str, top: int) -> tuple[list[str], int]:
    """Draws the plan's first stages and micro-batches. Returns SVG elements and their height in pixels."""
    stages, batches = min(plan.pipeline, MAX_STAGES_DRAWN), min(plan.accumulation, MAX_MICRO_BATCHES_DRAWN)
    part = "; drawn without interleaving" if plan.interleave > 1 else ""
    if (stages, batches) != (plan.pipeline, plan.accumulation):
        part += f"; drawn as {stages} of {plan.pipeline} stages, {batches} of {plan.accumulation} micro-batches"
    result = [_text(LEFT, top, f"{plan.describe()} on {plan.gpus} × {gpu}{part}")]
    forward, backward = schedule(stages, batches)
    unit = (WIDTH - LEFT - 20) / float(backward.max() + 2.0)
    row = 18
    for stage in range(stages):
        y = top + 12 + stage * row
        result.append(_text(LEFT - 8, y + 12, f"stage {stage + 1}", anchor="end"))
        for each in range(batches):
            for start, length, colour in ((forward, 1.0, FORWARD), (backward, 2.0, BACKWARD)):
                x = LEFT + unit * float(start[stage, each])
                result.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{unit * length:.1f}" height="{row - 3}" fill="{colour}" '
                    f'stroke="white" stroke-width="0.5"><title>micro-batch {each + 1}</title></rect>'
                )
    y = top + 12 + stages * row
    for at, (name, colour) in enumerate((("forward", FORWARD), ("backward, twice as long", BACKWARD))):
        x = LEFT + 100 * at
        result.append(f'<rect x="{x}" y="{y + 4}" width="10" height="10" fill="{colour}"/>')
        result.append(_text(x + 16, y + 13, name))
    return result, 56 + stages * row


def _scale(values: NDArray[np.float64], first: float, last: float) -> Callable[[float], float]:
    """A logarithmic axis: maps the smallest value to pixel `first` and the largest to pixel `last`."""
    low, high = float(np.log(values.min())), float(np.log(values.max()))
    span = max(high - low, 1e-9)
    return lambda value: first + (float(np.log(value)) - low) / span * (last - first)


def _counts(values: NDArray[np.float64]) -> list[float]:
    """Labels of the axis of GPU counts: at most eight, at least a twelfth of the axis apart."""
    every = np.unique(values)
    least = (every[-1] / every[0]) ** (1.0 / 12.0)
    kept = [float(every[-1])]
    for value in every[-2::-1].tolist():
        if kept[-1] / value >= least and (value == every[0] or value / every[0] >= least):
            kept.append(value)
    step = -(-len(kept) // 8)
    return kept[::step][::-1]


def _ticks(values: NDArray[np.float64]) -> list[float]:
    """Labels of the axis of seconds: at most eight of 1, 2 and 5 × powers of ten, or both ends if fewer than 2 fit."""
    low, high = float(values.min()), float(values.max())
    if high <= low * 1.000001:
        return [low]
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for digits in ((1, 2, 5), (1,)):
        inside = [tick for power in powers for digit in digits if low <= (tick := float(f"{digit}e{power}")) <= high]
        if len(inside) <= 8:
            break
    return inside if len(inside) > 1 else [low, high]


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#222", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _line(one: Point, other: Point) -> str:
    return f'<line x1="{one[0]:.1f}" y1="{one[1]:.1f}" x2="{other[0]:.1f}" y2="{other[1]:.1f}" stroke="#ddd"/>'
