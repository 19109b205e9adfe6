"""Held-out loss against learning rate, a line for each rank, as SVG."""

from __future__ import annotations

import math

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, FLOOR = 60, 500, 40, 350
COLOURS = ("#2f6db5", "#2a9d5c", "#d98c1f", "#8a55b8", "#3aa6b9", "#b8577e", "#7a7a2a", "#555")
FULL_COLOUR = "#c0392b"


def chart(runs, title):
    """``runs`` as ``sweep.Run``; those that are worse than untrained are left out."""
    finite = [run for run in runs if math.isfinite(run.held_out)]
    low = min(run.held_out for run in finite)
    start = max(run.losses[0] for run in finite)
    shown = [run for run in finite if run.held_out <= start]
    x = _scale([math.log10(run.rate) for run in runs], LEFT, RIGHT)
    y = _scale([low, start], FLOOR, TOP)
    shapes = [*_axes(x, y, runs, low, start)]
    ranks = sorted({run.rank for run in runs})
    for index, rank in enumerate(ranks):
        colour = COLOURS[(index - 1) % len(COLOURS)] if rank else FULL_COLOUR
        points = [(x(math.log10(run.rate)), y(run.held_out)) for run in shown if run.rank == rank]
        shapes += _line(points, colour)
        told = f"rank {rank}" if rank else "all weights"
        at = TOP + 20 * index
        shapes.append(f'<rect x="{RIGHT + 20}" y="{at}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{RIGHT + 38}" y="{at + 10}">{told}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>{"".join(shapes)}</svg>\n'
    )


def _scale(values, start, end):
    low, high = min(values), max(values)
    size = (high - low) or 1.0
    return lambda value: start + (end - start) * (value - low) / size


def _axes(x, y, runs, low, high):
    for rate in sorted({run.rate for run in runs}):
        at = x(math.log10(rate))
        yield f'<path d="M{at:.1f} {TOP}V{FLOOR}" stroke="#eee"/>'
        yield f'<text x="{at:.1f}" y="{FLOOR + 16}" text-anchor="middle">{rate:.0e}</text>'
    for step in range(5):
        value = low + (high - low) * step / 4
        yield f'<path d="M{LEFT} {y(value):.1f}H{RIGHT}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
    middle = (LEFT + RIGHT) / 2
    yield f'<text x="{middle}" y="{FLOOR + 36}" text-anchor="middle">learning rate</text>'


def _line(points, colour):
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in points:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
