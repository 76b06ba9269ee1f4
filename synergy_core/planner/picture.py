"""Plans as an SVG: step time against GPU count, and the fastest plan's pipeline as stages over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from synergy_core.planner.plan import Plan
from synergy_core.planner.plan_table import PlanTable

WIDTH, HEIGHT, LEFT, RIGHT, TOP = 900, 320, 80, 190, 50
COLOURS = ("#4063d8", "#389826", "#cb3c33", "#9558b2", "#b07d00", "#00838f")
FORWARD, BACKWARD = "#7aa6e0", "#e0a07a"
MOST_STAGES, MOST_MICRO_BATCHES = 16, 24
"""How much of a pipeline is drawn; more would be too small to see."""

Point = tuple[float, float]


def picture(title: str, tables: Sequence[PlanTable]) -> str:
    """One SVG document. Tables without plans appear in the legend only."""
    body = [_text(LEFT, 26, title, size=18), *_curves(tables)]
    height = TOP + HEIGHT + 60
    best = [(table.best(), table) for table in tables if len(table)]
    if best:
        rows, table = min(best, key=lambda each: float(each[0].step_time_s.min()))
        plan = rows.plans.plan(int(np.argmin(rows.step_time_s)))
        drawn, taken = _pipeline(plan, table.machine.gpu.title, height)
        body += drawn
        height += taken
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def schedule(stages: int, micro_batches: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """When each stage begins each forward and backward under 1F1B, (stages, micro-batches) each; a backward takes 2.

    Each stage runs min(stages − stage, micro-batches) forwards before its first backward, then one of each.
    """
    orders = []
    for stage in range(stages):
        first = min(stages - stage, micro_batches)
        order = [(True, each) for each in range(first)]
        for each in range(micro_batches):
            order.append((False, each))
            order += [(True, first + each)] if first + each < micro_batches else []
        orders.append(order)
    starts = np.full((2, stages, micro_batches), np.nan)
    free, at = np.zeros(stages), [0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                forward, each = orders[stage][at[stage]]
                ready = _ready(starts, stage, each, stages, forward)
                if np.isnan(ready):
                    break
                begin = max(float(free[stage]), ready)
                starts[0 if forward else 1, stage, each] = begin
                free[stage] = begin + (1.0 if forward else 2.0)
                at[stage] += 1
    return starts[0], starts[1]


def _ready(starts: NDArray[np.float64], stage: int, each: int, stages: int, forward: bool) -> float:
    """When what it takes from its neighbour is there; NaN: not known yet."""
    if forward:
        return 0.0 if stage == 0 else float(starts[0, stage - 1, each]) + 1.0
    if stage == stages - 1:
        return float(starts[0, stage, each]) + 1.0
    return float(starts[1, stage + 1, each]) + 2.0


def _curves(tables: Sequence[PlanTable]) -> list[str]:
    """Step time of the best plan against GPUs, both logarithmic; the line joins counts that fewer do not equal."""
    result = [_text(LEFT, TOP - 6, "step time of the best plan, s"), _text(LEFT, TOP + HEIGHT + 36, "GPUs")]
    best = [table.best() for table in tables]
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
    """The fastest plan's first stages and micro-batches, and the height that takes."""
    stages, batches = min(plan.pipeline, MOST_STAGES), min(plan.accumulation, MOST_MICRO_BATCHES)
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
    """A logarithmic axis: from the least and greatest value to two ends in pixels."""
    low, high = float(np.log(values.min())), float(np.log(values.max()))
    span = max(high - low, 1e-9)
    return lambda value: first + (float(np.log(value)) - low) / span * (last - first)


def _counts(values: NDArray[np.float64]) -> list[float]:
    """Labels of the axis of GPU counts: up to eight of the counts, none nearer to the next than a twelfth of it."""
    every = np.unique(values)
    least = (every[-1] / every[0]) ** (1.0 / 12.0)
    kept = [float(every[-1])]
    for value in every[-2::-1].tolist():
        if kept[-1] / value >= least and (value == every[0] or value / every[0] >= least):
            kept.append(value)
    step = -(-len(kept) // 8)
    return kept[::step][::-1]


def _ticks(values: NDArray[np.float64]) -> list[float]:
    """Labels of the axis of seconds: 1, 2 and 5 times powers of ten, at most eight; its ends where few lie within."""
    low, high = float(values.min()), float(values.max())
    if high <= low * 1.000001:
        return [low]
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    for digits in ((1, 2, 5), (1,)):
        round_ones = [float(f"{digit}e{power}") for power in powers for digit in digits]
        inside = [each for each in round_ones if low <= each <= high]
        if len(inside) <= 8:
            break
    return inside if len(inside) > 1 else [low, high]


def _text(x: float, y: float, words: str, *, size: int = 12, colour: str = "#222", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'


def _line(one: Point, other: Point) -> str:
    return f'<line x1="{one[0]:.1f}" y1="{one[1]:.1f}" x2="{other[0]:.1f}" y2="{other[1]:.1f}" stroke="#ddd"/>'
