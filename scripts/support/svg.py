"""Bar charts as SVG text, so that no plotting library is needed."""

from xml.sax.saxutils import escape

COLOURS = ["#1b6ca8", "#e07a1f", "#4d9a4d", "#b23a48", "#7a5ea8", "#8c6d3f", "#5f6b73"]
BAR, GAP, HEIGHT, TOP, LEFT, LEGEND_ROW = 18, 28, 200, 44, 40, 18


def bars(title: str, groups: list[tuple[str, dict[str, float]]], unit: str = "") -> str:
    """A chart with one group of bars for each `(label, {series: value})`."""
    series = list(dict.fromkeys(name for _, values in groups for name in values))
    highest = max((value for _, values in groups for value in values.values()), default=1.0) or 1.0
    width_group = BAR * len(series) + GAP
    width = max(LEFT + width_group * len(groups) + GAP, 9 * len(title))
    height = TOP + HEIGHT + 34 + LEGEND_ROW * len(series)
    parts = [text(LEFT, 22, title, 14)]
    for g, (label, values) in enumerate(groups):
        left = LEFT + g * width_group
        for s, name in enumerate(series):
            if name in values:
                parts.append(bar(left + s * BAR, values[name], highest, s, name, unit))
        parts.append(text(left, TOP + HEIGHT + 16, label, 11))
    parts.append(f'<path d="M{LEFT} {TOP + HEIGHT}H{width - 8}" stroke="#333"/>')
    parts += [legend(s, name) for s, name in enumerate(series)]
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{ground}\n{body}\n</svg>\n'


def bar(left: int, value: float, highest: float, number: int, name: str, unit: str) -> str:
    tall = max(1.0, HEIGHT * value / highest)
    place = f'x="{left}" y="{TOP + HEIGHT - tall:.1f}" width="{BAR - 3}" height="{tall:.1f}"'
    hint = escape(f"{name}: {value:.3g} {unit}".strip())
    return f'<rect {place} fill="{colour(number)}"><title>{hint}</title></rect>'


def legend(number: int, name: str) -> str:
    top = TOP + HEIGHT + 30 + number * LEGEND_ROW
    box = f'<rect x="{LEFT}" y="{top}" width="12" height="12" fill="{colour(number)}"/>'
    return box + text(LEFT + 18, top + 10, name, 11)


def text(left: int, base: int, words: str, size: int) -> str:
    font = f'font-family="sans-serif" font-size="{size}"'
    return f'<text x="{left}" y="{base}" {font} fill="#222">{escape(words)}</text>'


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
