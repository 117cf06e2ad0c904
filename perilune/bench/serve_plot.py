"""The picture of `perilune bench serve`: tokens/s of one user against those of all, a point per concurrency."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 76, 28, 62, 56  # pixels
TICKS = 5
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .card { fill: #ffffff; stroke: #d0d7de; } .title { font-size: 15px; font-weight: 600; } .small { fill: #59636e; }
  .line { fill: none; stroke: #1f6feb; stroke-width: 2; } .good { fill: #1f6feb; stroke: #1f6feb; }
  .missed { fill: #ffffff; stroke: #1f6feb; stroke-width: 2; } .grid { stroke: #d0d7de; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .card { fill: #0d1117; stroke: #3d444d; } .small { fill: #9198a1; }
    .line, .good, .missed { stroke: #4493f8; } .good { fill: #4493f8; } .missed { fill: #0d1117; }
    .grid { stroke: #3d444d; }
  }
"""


def plot(rows: Sequence[Mapping[str, Any]]) -> str:
    """An SVG picture of rows of one sweep. A point is filled where 90 % of the requests kept both limits."""
    shown = [r for r in rows if r["tokens_per_s_user"] is not None]
    first = rows[0]
    title = f"{first['model']}: tokens/s of one user against all"
    limits = (
        f"filled: 90 % of requests with first text <= {first['max_ttft_ms']:g} ms, gaps <= {first['max_gap_ms']:g} ms"
    )
    across = _top(max((r["tokens_per_s"] for r in shown), default=1))
    up = _top(max((r["tokens_per_s_user"] for r in shown), default=1))
    span, rise = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'role="img" aria-labelledby="t">',
        f'<title id="t">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="small" x="16" y="46">{escape(limits)}</text>',
        f'<text class="small" x="{LEFT + span / 2:g}" y="{HEIGHT - 12}" text-anchor="middle">tokens/s of all</text>',
    ]
    for i in range(TICKS + 1):
        x, y = LEFT + span * i / TICKS, TOP + rise * (1 - i / TICKS)
        parts += [
            f'<line class="grid" x1="{x:g}" y1="{TOP}" x2="{x:g}" y2="{TOP + rise}"/>',
            f'<line class="grid" x1="{LEFT}" y1="{y:g}" x2="{LEFT + span}" y2="{y:g}"/>',
            f'<text class="small" x="{x:g}" y="{TOP + rise + 18}" text-anchor="middle">{across * i / TICKS:g}</text>',
            f'<text class="small" x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end">{up * i / TICKS:g}</text>',
        ]
    points = [(LEFT + span * r["tokens_per_s"] / across, TOP + rise * (1 - r["tokens_per_s_user"] / up)) for r in shown]
    parts.append(f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>')
    for (x, y), r in zip(points, shown):
        kind = "good" if r["good_share"] >= 0.9 else "missed"
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>')
        parts.append(f'<text class="small" x="{x + 8:.1f}" y="{y - 8:.1f}">{r["streams"]}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _top(value: float) -> float:
    """The end of an axis: 1, 2, 2.5 or 5 times a power of ten, not below the value."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= value)
