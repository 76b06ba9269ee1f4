"""What to compress with, drawn as an SVG by the network between nodes and the noise scale of gradients."""

from __future__ import annotations

import re
from html import escape
from itertools import cycle

import numpy as np

from synergy_core.commands._sweep import Best, Sweep
from synergy_core.planner.picture import COLOURS
from synergy_core.planner.plan import NO_COMPRESSOR

WIDTH, LEFT, TOP, ROW = 900, 110, 70, 24
NOISES = 16
"""Noise scales drawn, from a hundredth of what was asked to a hundred times as much."""
GREY = "#e4e4e4"
GBPS_BYTES = 1e9 / 8.0


def compression_map(title: str, found: Sweep) -> str:
    """One SVG document: a cell for every rate that was tried and every noise scale; colour by kind of compressor,
    darker where more is gained.
    """
    noises = found.noise_scale * np.geomspace(0.01, 100.0, NOISES)
    cells = [[found.best(rate, float(noise)) for rate in found.rates] for noise in noises]
    kinds = sorted({_kind(each) for row in cells for each in row} - {NO_COMPRESSOR})
    colours = {NO_COMPRESSOR: GREY, **dict(zip(kinds, cycle(COLOURS), strict=False))}
    width = (WIDTH - LEFT - 30) / len(found.rates)
    bottom = TOP + ROW * NOISES
    body = [
        _text(LEFT, 26, title, size=18),
        _text(LEFT, 50, "best compressor, each cell with its own best batch and plan; number: % gained over none"),
    ]
    for at, (row, noise) in enumerate(zip(cells, noises, strict=True)):
        top = bottom - ROW * (at + 1)
        if at % 3 == 0 or at == NOISES - 1:
            body.append(_text(LEFT - 8, top + ROW / 2 + 4, _short(float(noise)), anchor="end"))
        for column, each in enumerate(row):
            body.append(_cell(LEFT + column * width, top, width, colours[_kind(each)], each))
    for column, rate in enumerate(found.rates):
        # As many marks as have room.
        if column % max(1, round(50.0 / width)) == 0:
            body.append(_text(LEFT + (column + 0.5) * width, bottom + 18, _short(rate / GBPS_BYTES), anchor="middle"))
    body.append(_text(LEFT + (WIDTH - LEFT) / 2, bottom + 40, "network of a node, Gb/s", anchor="middle"))
    middle = TOP + ROW * NOISES / 2
    body.append(
        f'<text transform="translate(28,{middle:.0f}) rotate(-90)" text-anchor="middle">'
        "gradient noise scale, samples</text>"
    )
    across = float(LEFT)
    for name, colour in colours.items():
        body.append(f'<rect x="{across:.0f}" y="{bottom + 54}" width="14" height="14" fill="{colour}"/>')
        body.append(_text(across + 20, bottom + 66, name))
        across += 50 + 8 * len(name)
    height = bottom + 84
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="{WIDTH}" height="{height}" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _kind(best: Best) -> str:
    """A compressor's name with an N for its number."""
    return re.sub(r"[\d.]+$", "N", best.plan.compressor)


def _short(value: float) -> str:
    """In few letters: 4.9, 31, 12k."""
    return f"{value / 1000:.2g}k" if value >= 1000 else f"{value:.3g}" if value >= 100 else f"{value:.2g}"


def _cell(x: float, y: float, width: float, colour: str, best: Best) -> str:
    opacity = 1.0 if not best.gain else min(1.0, 0.35 + best.gain)
    tip = escape(f"{best.plan.describe()}: batch {best.plan.global_batch}, {best.gain:+.1%}")
    drawn = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{ROW}" fill="{colour}" '
        f'fill-opacity="{opacity:.2f}" stroke="white"><title>{tip}</title></rect>'
    )
    if not best.gain or width < 22:
        return drawn
    label = _text(x + width / 2, y + ROW / 2 + 4, f"{100 * best.gain:.0f}", anchor="middle", size=10)
    return drawn + "\n" + label


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'
