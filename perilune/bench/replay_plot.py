"""The picture of a replay: TTFT by prompt length."""

import statistics
from collections.abc import Sequence
from html import escape

from perilune.bench.replay import Call


def picture(calls: Sequence[Call], title: str) -> str:
    """TTFT by prompt length, hits in blue and misses in grey, as the text of an SVG file."""
    good = [c for c in calls if c.error is None and c.arrivals]
    width, height, left, bottom = 900, 420, 70, 50
    most_tokens = max((c.prompt_tokens for c in good), default=1) or 1
    most_seconds = max((c.ttft for c in good), default=1.0) or 1.0
    x = [left + (width - left - 20) * c.prompt_tokens / most_tokens for c in good]
    y = [height - bottom - (height - bottom - 50) * c.ttft / most_seconds for c in good]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" '
        f'font-size="12" fill="#222"><rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="24" font-size="15">{escape(title)}</text>',
        f'<path d="M{left} 40V{height - bottom}H{width - 20}" fill="none" stroke="#999"/>',
        f'<text x="{width - 20}" y="{height - 18}" text-anchor="end">prompt tokens, up to {most_tokens:,}</text>',
        f'<text x="8" y="52">{most_seconds:.2f} s</text><text x="8" y="{height - bottom}">TTFT</text>',
    ]
    for at, up, call in zip(x, y, good):
        share = call.cached / max(call.prompt_tokens, 1)
        colour = "#1f5f8b" if share >= 0.5 else "#b0a798"
        parts.append(f'<circle cx="{at:.1f}" cy="{up:.1f}" r="3" fill="{colour}" fill-opacity="0.7"/>')
    median = statistics.median(c.ttft for c in good) if good else 0.0
    parts.append(f'<text x="{left}" y="{height - 18}">blue: half or more of it cached; median {median:.2f} s</text>')
    return "\n".join([*parts, "</svg>", ""])
