"""Bar charts as SVG text without a plotting library.

What enters: groups of bars, one bar for each series that has a value in the group, and values to be
marked. What leaves: a picture with a linear axis from zero. A series without a value in a group has
no bar there.
"""

import math
from xml.sax.saxutils import escape

COLOURS = ["#1b6ca8", "#e07a1f", "#4d9a4d", "#b23a48", "#7a5ea8", "#8c6d3f", "#5f6b73"]
BAR, GAP, HEIGHT, TOP, LEFT, LEGEND_ROW = 18, 28, 200, 44, 48, 18
# Largest number of axis lines, and the width of a letter at the size of labels.
TICKS, LETTER = 5, 6.5

Groups = list[tuple[str, dict[str, float]]]


def bars(title: str, groups: Groups, unit: str = "", marks: list[tuple[float, str]] | None = None) -> str:
    """A chart with one group of bars for each `(label, {series: value})`, and a dashed line for
    each mark."""
    marks = marks or []
    series = list(dict.fromkeys(name for _, values in groups for name in values))
    values = [value for _, found in groups for value in found.values()] + [value for value, _ in marks]
    highest = max(values, default=1.0) or 1.0
    width_group = max(BAR * len(series), LETTER * max((len(label) for label, _ in groups), default=0)) + GAP
    right = LEFT + width_group * len(groups) + GAP
    labelled = right + LETTER * max((len(label) for _, label in marks), default=0)
    width = math.ceil(max(labelled, 9 * len(title)))
    height = TOP + HEIGHT + 34 + LEGEND_ROW * len(series)
    parts = [text(LEFT, 22, title, 14), *scale(highest, right, unit)]
    for g, (label, found) in enumerate(groups):
        left = LEFT + 8 + g * width_group
        for s, name in enumerate(series):
            if name in found:
                parts.append(bar(left + s * BAR, found[name], highest, s, name, unit))
        parts.append(text(left, TOP + HEIGHT + 16, label, 11))
    parts.append(f'<path d="M{LEFT} {TOP + HEIGHT}H{right}" stroke="#333"/>')
    for value, label in marks:
        parts += mark(value, label, highest, right)
    parts += [legend(s, name) for s, name in enumerate(series)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{ground}\n{body}\n</svg>\n'


def height_of(value: float, highest: float) -> float:
    """Vertical position of a value, in units from the top of the picture."""
    return TOP + HEIGHT - HEIGHT * value / highest


def scale(highest: float, right: float, unit: str) -> list[str]:
    """Thin lines at round values, with their numbers on the left; the unit above."""
    rough = highest / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
    parts = [text(LEFT - 6, TOP - 10, unit, 10, "end")] if unit else []
    for number in range(int(highest / step + 1e-9) + 1):
        y = height_of(number * step, highest)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{right:.1f}" stroke="#e3e7eb"/>')
        parts.append(text(LEFT - 6, y + 4, f"{number * step:g}", 10, "end"))
    return parts


def mark(value: float, label: str, highest: float, right: float) -> list[str]:
    y = height_of(value, highest)
    line = f'<path d="M{LEFT} {y:.1f}H{right:.1f}" stroke="#b23a48" stroke-dasharray="5 3"/>'
    return [line, text(right + 4, y + 4, label, 11)]


def bar(left: float, value: float, highest: float, number: int, name: str, unit: str) -> str:
    tall = max(1.0, HEIGHT * value / highest)
    place = f'x="{left:.1f}" y="{TOP + HEIGHT - tall:.1f}" width="{BAR - 3}" height="{tall:.1f}"'
    hint = escape(f"{name}: {value:.3g} {unit}".strip())
    return f'<rect {place} fill="{colour(number)}"><title>{hint}</title></rect>'


def legend(number: int, name: str) -> str:
    top = TOP + HEIGHT + 30 + number * LEGEND_ROW
    box = f'<rect x="{LEFT}" y="{top}" width="12" height="12" fill="{colour(number)}"/>'
    return box + text(LEFT + 18, top + 10, name, 11)


def text(left: float, base: float, words: str, size: int, anchor: str = "start") -> str:
    font = f'font-family="sans-serif" font-size="{size}" text-anchor="{anchor}"'
    return f'<text x="{left:.1f}" y="{base:.1f}" {font} fill="#222">{escape(words)}</text>'


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
