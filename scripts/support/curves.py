"""Line charts with logarithmic axes as SVG text: quantities by message size.

What enters: panels of curves, a value for each size in bytes. What leaves: a picture with a panel
beside the other, `COLUMNS` in a row, and one legend for all. A curve has a gap nowhere: sizes without
a value are left out of it.
"""

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

from .svg import colour, text

COLUMNS = 2
WIDTH, HEIGHT, LEFT, TOP, BELOW, BETWEEN, LEGEND_ROW = 380, 220, 62, 40, 44, 28, 18
# Powers of two from one label of the horizontal axis to the next.
LABEL_EACH = 5

# Value by size in bytes.
Curve = dict[int, float]


@dataclass
class Panel:
    """Curves by name, with what they show and in which unit."""

    title: str
    unit: str
    curves: dict[str, Curve]


@dataclass
class Frame:
    """Where the drawing of a panel lies, and what its edges stand for: exponents of 2 and 10."""

    left: float
    top: float
    sizes: tuple[int, int]
    values: tuple[int, int]

    def across(self, size: float) -> float:
        first, last = self.sizes
        return self.left + WIDTH * (math.log2(size) - first) / (last - first)

    def down(self, value: float) -> float:
        first, last = self.values
        return self.top + HEIGHT * (1 - (math.log10(value) - first) / (last - first))


def chart(title: str, panels: list[Panel]) -> str:
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    rows = math.ceil(len(panels) / COLUMNS)
    high, wide = TOP + HEIGHT + BELOW, LEFT + WIDTH + BETWEEN
    bottom = TOP + rows * high
    parts = [text(12, 22, title, 14)]
    for number, panel in enumerate(panels):
        left, top = (number % COLUMNS) * wide + LEFT, TOP + (number // COLUMNS) * high + TOP
        parts += drawn(panel, frame_of(panel, left, top), names)
    for number, name in enumerate(names):
        y = bottom + number * LEGEND_ROW
        parts.append(f'<path d="M{LEFT} {y + 6}h18" stroke="{colour(number)}" stroke-width="2"/>')
        parts.append(text(LEFT + 26, y + 10, name, 11))
    size = (math.ceil(wide * min(COLUMNS, max(1, len(panels)))), math.ceil(bottom + len(names) * LEGEND_ROW + 12))
    body, ground = "\n".join(parts), '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">\n{ground}\n{body}\n</svg>\n'


def frame_of(panel: Panel, left: float, top: float) -> Frame:
    sizes = [size for curve in panel.curves.values() for size in curve] or [1]
    values = [value for curve in panel.curves.values() for value in curve.values()] or [1.0]
    first, last = math.floor(math.log2(min(sizes))), math.ceil(math.log2(max(sizes)))
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return Frame(left, top, (first, max(last, first + 1)), (low, max(high, low + 1)))


def drawn(panel: Panel, frame: Frame, names: list[str]) -> list[str]:
    parts = [text(frame.left, frame.top - 10, f"{panel.title}, {panel.unit}", 12)]
    for power in range(frame.values[0], frame.values[1] + 1):
        y = frame.down(10.0**power)
        parts.append(f'<path d="M{frame.left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(text(frame.left - 6, y + 4, f"{10.0**power:g}", 10, "end"))
    for power in range(frame.sizes[0], frame.sizes[1] + 1, LABEL_EACH):
        x = frame.across(2.0**power)
        parts.append(f'<path d="M{x:.1f} {frame.top}v{HEIGHT}" stroke="#eee"/>')
        parts.append(text(x, frame.top + HEIGHT + 16, size_name(1 << power), 10, "middle"))
    for name, curve in panel.curves.items():
        points = " ".join(f"{frame.across(size):.1f},{frame.down(value):.1f}" for size, value in sorted(curve.items()))
        line = f'fill="none" stroke="{colour(names.index(name))}" stroke-width="1.6"'
        parts.append(f'<polyline points="{points}" {line}><title>{escape(name)}</title></polyline>')
    return parts


def size_name(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
