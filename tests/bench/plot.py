"""Lines over steps, on a logarithmic scale, as SVG."""

from __future__ import annotations

import math

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, FLOOR = 60, 520, 40, 350
COLOURS = ("#2f6db5", "#9cc3ea", "#c0392b", "#e8a79f", "#2a9d5c", "#d98c1f")


def plot(lines, title, of_x):
    """``lines``: name -> positive values, one for each step."""
    values = [value for line in lines.values() for value in line]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    count = max(map(len, lines.values()))

    def at(step, value):
        x = LEFT + (RIGHT - LEFT) * step / max(count - 1, 1)
        y = FLOOR - (FLOOR - TOP) * (math.log10(value) - low) / max(high - low, 1)
        return f"{x:.1f},{y:.1f}"

    shapes = []
    for power in range(low, high + 1):
        y = at(0, 10**power).partition(",")[2]
        shapes.append(f'<path d="M{LEFT},{y}H{RIGHT}" stroke="#ddd"/>')
        shapes.append(f'<text x="{LEFT - 6}" y="{y}" text-anchor="end">{10**power:g}</text>')
    for index, (name, line) in enumerate(lines.items()):
        colour, y = COLOURS[index % len(COLOURS)], TOP + 20 * index
        points = " ".join(at(step, value) for step, value in enumerate(line))
        shapes.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        shapes.append(f'<rect x="{RIGHT + 20}" y="{y}" width="12" height="12" fill="{colour}"/>')
        shapes.append(f'<text x="{RIGHT + 38}" y="{y + 10}">{name}</text>')
    shapes.append(f'<text x="{LEFT}" y="{FLOOR + 20}">0</text>')
    shapes.append(f'<text x="{RIGHT}" y="{FLOOR + 20}" text-anchor="end">{of_x} {count}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>{"".join(shapes)}</svg>\n'
    )
