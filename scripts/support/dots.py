"""Measurements as dots on logarithmic axes, as SVG text without a plotting library.

What enters: panels (one quantity each, side by side), and groups of rows with one value for each
panel. What leaves: a picture that also shows each value as a number at the end of its row, in a
column of its own, so that no text lies over other text or dots. The picture follows the reader's
colour scheme, light or dark; the default is light.
"""

import math
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

NAMES, PLOT, NUMBERS, EDGE = 250, 270, 128, 24  # widths: row names, axis, numbers, margin
NOTE, GROUP, ROW, GAP = 19, 26, 24, 14  # heights: a note, a group's name, a row, between groups
STYLE = """
text { font-family: system-ui, "DejaVu Sans", "Liberation Sans", sans-serif; fill: #1c2126 }
.quiet { fill: #5a646e }
.ground { fill: #ffffff }
.grid { stroke: #e3e7eb } .axis { stroke: #77818b }
.mark { stroke: #b23a48; stroke-width: 1.5; stroke-dasharray: 5 3 } .marked { fill: #b23a48 }
.ours { fill: #1b6ca8; stroke: #1b6ca8 } .peer { fill: #ffffff; stroke: #b8601a }
.stem.ours { stroke: #a9cbe4 } .stem.peer { stroke: #ecd2bb }
@media (prefers-color-scheme: dark) {
text { fill: #e8ebee } .quiet { fill: #a3adb7 } .ground { fill: #14181c }
.grid { stroke: #2b3238 } .axis { stroke: #7f8993 }
.mark { stroke: #f0808d } .marked { fill: #f0808d }
.ours { fill: #5fb2ee; stroke: #5fb2ee } .peer { fill: #14181c; stroke: #f0a35e }
.stem.ours { stroke: #294f6b } .stem.peer { stroke: #5c4431 }
}
"""


@dataclass(frozen=True)
class Panel:
    title: str
    unit: str


@dataclass(frozen=True)
class Row:
    name: str
    values: list[float | None]  # one for each panel, above zero; None: a dash and no dot
    ours: bool = False  # a filled dot and a bold number


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other, and for each panel a mark line if there is one."""

    name: str
    rows: list[Row]
    marks: list[tuple[float, str] | None] = field(default_factory=list)


@dataclass(frozen=True)
class Axis:
    """Logarithmic axis: powers of ten from `low` to `high`, over `PLOT` units from `left`."""

    left: float
    low: int
    high: int

    def at(self, value: float) -> float:
        return self.left + PLOT * (math.log10(value) - self.low) / (self.high - self.low)


def chart(title: str, notes: list[str], panels: list[Panel], groups: list[Group]) -> str:
    """The picture as SVG text; `notes` stand under the title, one for each line."""
    axes = [axis(number, groups) for number in range(len(panels))]
    width = NAMES + len(panels) * (PLOT + NUMBERS) + EDGE
    top = 52 + NOTE * len(notes) + 36
    foot = top + sum(GROUP + ROW * len(group.rows) + GAP for group in groups)
    parts = [f'<rect class="ground" width="{width}" height="{foot + 40}"/>']
    parts.append(text(EDGE, 36, title, 19, "bold"))
    parts += [text(EDGE, 58 + NOTE * i, note, 12.5, kind="quiet") for i, note in enumerate(notes)]
    for panel, scale in zip(panels, axes):
        parts += frame(panel, scale, top, foot)
    for group in groups:
        parts += drawn_group(group, panels, axes, top)
        top += GROUP + ROW * len(group.rows) + GAP
    size = f'width="{width}" height="{foot + 40}" viewBox="0 0 {width} {foot + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>'
    body = "\n".join(parts)
    return f"{head}\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"


def axis(number: int, groups: list[Group]) -> Axis:
    values = [value for group in groups for row in group.rows if (value := row.values[number]) is not None]
    values += [group.marks[number][0] for group in groups if any(group.marks[number:number + 1])]
    # Without a value there is nothing to draw, but an empty picture is still a picture.
    low, high = min(values, default=1.0), max(values, default=10.0)
    first = math.floor(math.log10(low))
    left = NAMES + number * (PLOT + NUMBERS)
    return Axis(left, first, max(math.ceil(math.log10(high)), first + 1))


def frame(panel: Panel, scale: Axis, top: float, foot: float) -> list[str]:
    """Frame of a panel: title, a line and a number for each power of ten, short ticks between
    them."""
    parts = [text(scale.left, top - 14, panel.title, 13.5, "bold")]
    for power in range(scale.low, scale.high + 1):
        x = scale.at(10.0**power)
        parts.append(line("grid", x, top, x, foot))
        parts.append(text(x, foot + 20, f"{10.0**power:g}", 12, anchor="middle", kind="quiet"))
        parts.append(line("axis", x, foot, x, foot + 6))
        between = range(2, 10) if power < scale.high else ()
        ticks = [scale.at(digit * 10.0**power) for digit in between]
        parts += [line("axis", tick, foot, tick, foot + 3) for tick in ticks]
    parts.append(text(scale.left + PLOT + 28, foot + 20, panel.unit, 12, kind="quiet"))
    return [*parts, line("axis", scale.left, foot, scale.left + PLOT, foot)]


def drawn_group(group: Group, panels: list[Panel], axes: list[Axis], top: float) -> list[str]:
    parts = [text(EDGE, top + 17, group.name, 13.5, "bold")]
    foot = top + GROUP + ROW * len(group.rows)
    for scale, mark in zip(axes, group.marks):
        if mark:
            parts += drawn_mark(scale, *mark, top, foot)
    for place, row in enumerate(group.rows):
        middle = top + GROUP + ROW * (place + 0.5)
        parts.append(text(EDGE + 14, middle + 4, row.name, 12.5))
        for panel, scale, value in zip(panels, axes, row.values):
            weight = "bold" if row.ours else ""
            if value is None:
                parts.append(text(numbers_end(scale), middle + 4, "–", 12.5, weight, "end"))
                continue
            hint = f"{group.name}, {row.name}: {figure(value)} {panel.unit}"
            parts += dot(scale, value, middle, row.ours, hint)
            number = f"{figure(value)} {panel.unit}"
            parts.append(text(numbers_end(scale), middle + 4, number, 12.5, weight, "end"))
    return parts


def numbers_end(scale: Axis) -> float:
    return scale.left + PLOT + NUMBERS - 30


def drawn_mark(scale: Axis, value: float, label: str, top: float, foot: float) -> list[str]:
    """A dashed line through the group's rows, with a label at its top, on the side with more
    space."""
    x = scale.at(value)
    anchor, gap = ("end", -6) if x > scale.left + PLOT / 2 else ("start", 6)
    words = text(x + gap, top + 16, label, 12, anchor=anchor, kind="marked")
    return [line("mark", x, top + 4, x, foot), words]


def dot(scale: Axis, value: float, y: float, ours: bool, hint: str) -> list[str]:
    kind, x = "ours" if ours else "peer", scale.at(value)
    stem = f'<path class="stem {kind}" d="M{scale.left} {y}H{x:.1f}" stroke-width="3"/>'
    place = f'cx="{x:.1f}" cy="{y}" r="5.5" stroke-width="2.5"'
    return [stem, f'<circle class="{kind}" {place}><title>{escape(hint)}</title></circle>']


def line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path class="{kind}" fill="none" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"/>'


def text(x, base, words: str, size, weight="", anchor="start", kind="") -> str:
    style = f'font-size="{size}" text-anchor="{anchor}"'
    style += ' font-weight="bold"' if weight else ""
    style += f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{base:.1f}" {style}>{escape(words)}</text>'


def figure(value: float) -> str:
    return f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
