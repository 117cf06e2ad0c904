"""One picture of an evaluation, as SVG: tokens per verify step by family, drafter against n-gram, T = 0 and 1."""

from collections.abc import Sequence
from html import escape
from typing import Any

LEFT, RIGHT, TOP, ROW, BAR, WIDTH = 150, 60, 64, 46, 11, 900
BARS = (  # drafter, temperature, colour, label
    ("eagle3", 0.0, "#1f5f8b", "drafter, T = 0"),
    ("eagle3", 1.0, "#7fb2d6", "drafter, T = 1"),
    ("lookup", 0.0, "#c9c2b4", "n-gram, T = 0"),
)


def picture(records: Sequence[dict[str, Any]], length: int, title: str) -> str:
    """The text of an SVG file, from the records with chains of `length`."""
    own = [r for r in records if r["length"] == length]
    lines = list(dict.fromkeys((r["split"], r["family"]) for r in own))
    height = TOP + ROW * len(lines) + 40
    scale = (WIDTH - LEFT - RIGHT) / (length + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#222">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        _text(LEFT, 22, title, size=15),
    ]
    for i, (_, _, colour, name) in enumerate(BARS):
        parts += [_bar(LEFT + 150 * i, 36, 12, colour, 12), _text(LEFT + 150 * i + 18, 46, name)]
    for tick in range(length + 2):
        x = LEFT + scale * tick
        parts.append(f'<path d="M{x:.1f} {TOP - 6}V{height - 34}" stroke="#ddd"/>')
        parts.append(_text(x, height - 18, str(tick), anchor="middle"))
    for place, (split, family) in enumerate(lines):
        y = TOP + ROW * place
        parts.append(_text(LEFT - 10, y + 16, family, anchor="end", bold=family == "mean"))
        parts.append(_text(LEFT - 10, y + 30, split, anchor="end", colour="#777", size=10))
        for i, (drafter, temperature, colour, _) in enumerate(BARS):
            found = [
                r["acceptance_length"]
                for r in own
                if (r["split"], r["family"], r["drafter"], r["temperature"]) == (split, family, drafter, temperature)
            ]
            if found:
                width, at = scale * found[0], y + (BAR + 1) * i
                parts.append(_bar(LEFT, at, width, colour, BAR))
                parts.append(_text(LEFT + width + 5, at + BAR - 1, f"{found[0]:.2f}", size=10))
    return "\n".join([*parts, "</svg>", ""])


def _bar(x: float, y: float, width: float, colour: str, height: int) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" fill="{colour}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, bold: bool = False, colour: str = "#222"
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>'
        f"{escape(text)}</text>"
    )
