"""docs/images/speed.svg: for README's rows, the share of the floor's speed that Perilune and the peer reach.

The picture has a background of its own, dark if the reader's system is in dark mode: so it stays legible on a page
that is not in the system's mode.
"""

from html import escape

from runs.docs.ledger import PEER
from runs.docs.tables import first_screen

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 760, 148, 100, 66, 34
BAR, GAP, BETWEEN = 15, 3, 15  # heights in pixels: a bar, the gap to the next, the gap between groups

STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328; }
  .card { fill: #ffffff; stroke: #d0d7de; } .title { font-size: 15px; font-weight: 600; } .small { fill: #59636e; }
  .ours { fill: #1f6feb; } .peer { fill: #8c959f; } .floor { fill: none; stroke: #59636e; stroke-dasharray: 3 3; }
  .grid { stroke: #d0d7de; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .card { fill: #0d1117; stroke: #3d444d; } .small { fill: #9198a1; }
    .ours { fill: #4493f8; } .peer { fill: #656c76; } .floor { stroke: #9198a1; } .grid { stroke: #3d444d; }
  }
"""


def speed() -> str:
    shown = first_screen()
    group = 3 * BAR + 2 * GAP + BETWEEN
    height = TOP + len(shown) * group - BETWEEN + BOTTOM
    span = WIDTH - LEFT - RIGHT
    (gpu,) = {m.row["gpu"] for m in shown}
    (reads,) = {m.row["ceiling_tb_s"] for m in shown if "ceiling_tb_s" in m.row}
    (products,) = {m.row["ceiling_tflops"] for m in shown if "ceiling_tflops" in m.row}
    title = f"One MoE layer of Kimi K2.5 on one {gpu}: share of the possible speed"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'role="img" aria-labelledby="t">',
        f'<title id="t">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
    ]
    legend = (("ours", "Perilune"), ("peer", PEER), ("floor", f"floor: {reads:g} TB/s (prefill: {products:g} TFLOP/s)"))
    for x, (kind, name) in zip((16, 104, 216), legend):
        parts.append(f'<rect class="{kind}" x="{x + 0.5}" y="38.5" width="12" height="12"/>')
        parts.append(f'<text class="small" x="{x + 19}" y="49">{escape(name)}</text>')
    bottom = height - BOTTOM + 6
    for percent in range(0, 101, 25):
        x = LEFT + span * percent / 100
        parts.append(f'<line class="grid" x1="{x:g}" y1="{TOP - 4}" x2="{x:g}" y2="{bottom}"/>')
        parts.append(f'<text class="small" x="{x:g}" y="{bottom + 16}" text-anchor="middle">{percent} %</text>')
    for i, m in enumerate(shown):
        y = TOP + i * group
        for line, words in enumerate(m.what.rsplit(", ", 1)):
            above = f'x="{LEFT - 12}" y="{y + 23 + 17 * line}" text-anchor="end"'
            parts.append(f'<text class="{("", "small")[line]}" {above}>{escape(words)}</text>')
        for line, (kind, time) in enumerate((("ours", m.ours), ("peer", m.peer), ("floor", m.floor))):
            length, top = span * m.floor / time, y + line * (BAR + GAP)
            parts.append(f'<rect class="{kind}" x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}"/>')
            parts.append(f'<text x="{LEFT + length + 6:.1f}" y="{top + 12}">{time:g} {m.unit}</text>')
    return "\n".join([*parts, "</svg>", ""])
