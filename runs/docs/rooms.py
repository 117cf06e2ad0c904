"""The import table of tests/cpu/house/test_imports.py, as docs/images/rooms.svg and as text for docs/architecture.md.

The picture has a box for each room of the package and an arrow for each import that no chain of other arrows implies,
all of them downwards. The layout is Sugiyama's: a box's row is given by the longest path, an arrow that passes rows
gets a point in each of them, and rows are sorted by the mean position of their neighbours until nothing changes.
"""

from html import escape
from itertools import pairwise

from runs.docs.tables import ROOT
from tests.cpu.house.test_imports import MAY, NO_TORCH

# What a room holds, in a few words; a new row of the import table needs a line here.
HOLDS = {
    "cli": "one verb per file",
    "bench": "speed and its ceiling",
    "server": "OpenAI, Anthropic APIs",
    "engine": "step loop, scheduler",
    "draft": "training of drafters",
    "convert": "formats to formats",
    "speculation": "drafting policy",
    "model": "Kimi K2, EAGLE-3",
    "loading": "checkpoints to memory",
    "doctor": "checks of checkpoints",
    "client": "an OpenAI client",
    "evals": "scores",
    "kv": "cache blocks, prefixes",
    "dist": "ranks, links",
    "formats": "checkpoint formats",
    "ops": "kernels, references",
    "text": "prompts, streams",
    "media": "images to patches",
    "grammar": "enforced answers",
    "plan": "what fits",
    "tasks": "checked problems",
    "core": "requests, plans, errors",
}

BOX, HEIGHT, STEP, MARGIN = 144, 46, 84, 16  # pixels; STEP from row to row
STYLE = """
  text { font: 600 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328;
         text-anchor: middle; }
  .small { font-size: 11px; font-weight: 400; fill: #59636e; } .card { fill: #ffffff; stroke: #d0d7de; }
  .box { fill: #ddf4ff; stroke: #1f6feb; } .torch { fill: #fff8c5; stroke: #bf8700; }
  path { fill: none; stroke: #8c959f; stroke-width: 1.3; } .part { stroke-dasharray: 4 3; }
  .head { fill: #8c959f; stroke: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; } .small { fill: #9198a1; } .card { fill: #0d1117; stroke: #3d444d; }
    .box { fill: #0c2d4d; stroke: #4493f8; } .torch { fill: #372a08; stroke: #d29922; }
    path { stroke: #7d8590; } .head { fill: #7d8590; }
  }
"""


def text() -> str:
    """The table, a line for each row, from the top down."""
    height = rows()
    depth = {rule: height[rule.split(".")[0]] for rule in MAY if rule.split(".")[0] in height}
    lines = []
    for rule in sorted(depth, key=lambda r: (-depth[r], r)):
        may = MAY[rule]
        what = "everything" if may is None else ", ".join(sorted(may)) or "the standard library"
        lines.append(f"{rule:18s} -> {what}")
    never = ", ".join(m for m in NO_TORCH if [*(ROOT / "perilune").glob(m.replace(".", "/") + "*")])
    return "\n".join(["```", *lines, "```", "", f"Never import torch, not even indirectly: {never}."])


def rooms() -> dict[str, set[str]]:
    """Room -> the rooms that it may import. Rooms without a file yet, and single modules' own rules, are left out."""
    there = [r for r in MAY if "." not in r and any((ROOT / "perilune" / r).glob("**/*.py"))]
    missing = [r for r in there if r not in HOLDS]
    assert not missing, f"say in runs/docs/rooms.py, HOLDS, what {', '.join(missing)} holds"
    tops = {r for r in there if MAY[r] is None}
    allowed = {r: set(there) - tops if MAY[r] is None else MAY[r] for r in there}
    may = {r: {t.split(".")[0] for t in allowed[r] if "." not in t or t not in MAY} for r in there}
    return {r: (may[r] & set(there)) - {r} for r in there}


def rows() -> dict[str, int]:
    """Room -> its row, 0 at the bottom: one above the highest room that it may import."""
    may, height = rooms(), dict[str, int]()

    def above(room: str) -> int:
        if room not in height:
            height[room] = 1 + max(map(above, may[room]), default=-1)
        return height[room]

    for room in may:
        above(room)
    return height


def arrows() -> list[tuple[str, str]]:
    """The imports that no chain of other imports implies."""
    may = rooms()

    def reaches(room: str) -> set[str]:
        return may[room] | {far for near in may[room] for far in reaches(near)}

    return [(a, b) for a in may for b in sorted(may[a]) if not any(b in reaches(c) for c in may[a] - {b})]


def picture() -> str:
    height = rows()
    chains = []  # of points: a room, one in every row passed, a room
    for a, b in arrows():
        chains.append([a, *(f"{a}>{b}@{row}" for row in range(height[a] - 1, height[b], -1)), b])
    layers: dict[int, list[str]] = {}
    for point, row in {**height, **{p: int(p.split("@")[1]) for c in chains for p in c[1:-1]}}.items():
        layers.setdefault(row, []).append(point)
    near: dict[str, list[str]] = {}
    for chain in chains:
        for a, b in pairwise(chain):
            near.setdefault(a, []).append(b)
            near.setdefault(b, []).append(a)
    width = max(sum(map(_width, layer)) + MARGIN * (len(layer) + 1) for layer in layers.values())
    place = _places(layers, near, width)
    top = max(layers)

    def y(row: int) -> int:
        return 24 + (top - row) * STEP

    def at(point: str) -> tuple[float, int]:
        return place[point], y(height[point] if point in height else int(point.split("@")[1]))

    bottom = y(0) + HEIGHT + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{bottom}" viewBox="0 0 {width:g} {bottom}" '
        'role="img" aria-labelledby="t">',
        '<title id="t">Rooms of the package perilune and what they import</title>',
        f"<style>{STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path class="head" d="M0 0 L8 4 L0 8 z"/></marker>',
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1:g}" height="{bottom - 1}" rx="8"/>',
        '<g marker-end="url(#head)">',
    ]
    for chain in chains:
        x, row = at(chain[0])
        path = f"M{x:.0f} {row + HEIGHT}"
        for a, b in pairwise(chain):
            (x, row), (to, below) = at(a), at(b)
            start, bend = row + HEIGHT, (below - row - HEIGHT) / 2
            path += f" C{x:.0f} {start + bend:.0f} {to:.0f} {below - bend:.0f} {to:.0f} {below}"
            path += f" V{below + HEIGHT}" if b != chain[-1] else ""
        part = _part(chain[0], chain[-1])
        kind = ' class="part"' if part else ""
        parts.append(f'<path{kind} d="{path}"/>')
        if part:
            (x, row), (to, _) = at(chain[0]), at(chain[1])
            parts.append(f'<text class="small" x="{min(x, to) - 36:.0f}" y="{row + HEIGHT + 22}">{part} only</text>')
    parts.append("</g>")
    for room in height:
        x, row = at(room)
        kind = "box" if room in NO_TORCH else "torch"
        parts.append(f'<rect class="{kind}" x="{x - BOX / 2:.0f}" y="{row}" width="{BOX}" height="{HEIGHT}" rx="6"/>')
        parts.append(f'<text x="{x:.0f}" y="{row + 20}">{escape(room)}</text>')
        parts.append(f'<text class="small" x="{x:.0f}" y="{row + 37}">{escape(HOLDS[room])}</text>')
    parts.append(
        f'<text class="small" x="{width / 2:.0f}" y="{bottom - 16}">Arrows: may import. cli and bench may import '
        "everything. Blue rooms never import torch.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def _part(room: str, other: str) -> str:
    """The modules of another room that this one may import, if not all of it."""
    may = MAY[room]
    if may is None or other in may:
        return ""
    return ", ".join(sorted(rule.removeprefix(f"{other}.") for rule in may if rule.startswith(f"{other}.")))


def _width(point: str) -> float:
    return BOX / 4 if ">" in point else BOX  # where an arrow passes a row, or a room


def _places(layers: dict[int, list[str]], near: dict[str, list[str]], width: float) -> dict[str, float]:
    """Point -> x of its middle."""

    def spread(layer: list[str]) -> dict[str, float]:
        gap = (width - sum(map(_width, layer))) / (len(layer) + 1)
        x, made = gap, {}
        for point in layer:
            made[point], x = x + _width(point) / 2, x + _width(point) + gap
        return made

    best, fewest = dict[str, float](), float("inf")
    place = {p: x for layer in layers.values() for p, x in spread(layer).items()}
    for turn in range(40):
        for row in sorted(layers, reverse=turn % 2 == 1):
            middle = {p: sum(place[q] for q in near[p]) / len(near[p]) for p in layers[row] if near.get(p)}
            place.update(spread(sorted(layers[row], key=lambda p: middle.get(p, place[p]))))
        length = sum(abs(place[a] - place[b]) for a in near for b in near[a])
        if length < fewest:
            best, fewest = dict(place), length
    return best
