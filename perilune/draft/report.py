"""A drafter's acceptance length on held-out problems, by family and position, at T = 0 and 1."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from perilune.core.sampling import SamplingParams
from perilune.draft.capture import Capture
from perilune.draft.corpus import Row
from perilune.draft.evaluate import Tally, summed, walk, walk_lookup
from perilune.engine.llm import LLM
from perilune.model.kimi_k2 import KimiK2
from perilune.model.load import load
from perilune.spec.eagle3 import load_drafter
from perilune.tasks.families import FAMILIES, problems
from perilune.text.chat import template_for

SPLIT = "heldout"
TEMPERATURES = (0.0, 1.0)
DRAFTERS = ("eagle3", "lookup")


def evaluated() -> tuple[str, ...]:
    return tuple(f.name for f in FAMILIES.values() if f.evaluated)


def answers(llm: LLM, count: int, *, seed: int, max_tokens: int) -> dict[float, list[Row]]:
    """The target's answers to `count` held-out problems of each family, half of them with thinking, by temperature."""
    assert llm.tokenizer is not None
    template = template_for(llm.path)
    prompts: list[tuple[tuple[int, ...], int]] = []
    for index, name in enumerate(evaluated()):
        for thinking, n in ((True, count - count // 2), (False, count // 2)):
            for p in problems(name, SPLIT, n, seed=seed, thinking=thinking) if n else ():
                ids = template.render_ids(llm.tokenizer, p.messages, tools=p.tools or None, thinking=thinking)
                prompts.append((tuple(ids), index))
    found: dict[float, list[Row]] = {}
    for temperature in TEMPERATURES:
        params = [
            SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i in range(len(prompts))
        ]
        drawn = llm.generate([ids for ids, _ in prompts], params)
        found[temperature] = [
            Row(ids + a.token_ids, len(ids), index, temperature == 0)
            for (ids, index), a in zip(prompts, drawn)
            if len(a.token_ids) > 1
        ]
    return found


def measure(
    target: Path,
    draft: Path,
    rows: dict[float, list[Row]],
    *,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """One record per drafter, chain length, temperature and family, and one for the mean over families."""
    config, weights = load(target, dtype=dtype, device=device)
    drafter = load_drafter(draft, config, weights, dtype=dtype, device=device)
    longest = max(len(row.ids) for some in rows.values() for row in some)
    model = KimiK2(config, weights, max_positions=longest)
    capture = Capture(model, drafter.aux_layers, tokens=max(16384, longest))
    records = []
    for temperature, some in rows.items():
        for name in DRAFTERS:
            for length in lengths:
                tallies = (
                    walk(drafter, capture, some, length, advance=advance)
                    if name == "eagle3"
                    else walk_lookup(some, length)
                )
                records += _records(some, tallies, {"drafter": name, "length": length, "temperature": temperature})
    return records


def _records(rows: Sequence[Row], tallies: Sequence[Tally], about: dict[str, Any]) -> list[dict[str, Any]]:
    records = []
    for index, name in enumerate(evaluated()):
        mine = [t for row, t in zip(rows, tallies) if row.family == index]
        if mine:
            records.append({**about, "family": name, "n": len(mine), **summed(mine).record()})
    lengths = [r["acceptance_length"] for r in records]
    mean = {"acceptance_length": round(sum(lengths) / len(lengths), 4), "worst": min(lengths)}
    return [*records, {**about, "family": "mean", "n": len(rows), **mean}]


def tables(records: Sequence[dict[str, Any]]) -> list[Table]:
    """A table per temperature, of tokens per cycle: a line per family, a column per drafter and chain length; beside
    them the shares by position in the longest chain."""
    return [
        _table([r for r in records if r["temperature"] == t], t)
        for t in dict.fromkeys(r["temperature"] for r in records)
    ]


def _table(records: Sequence[dict[str, Any]], temperature: float) -> Table:
    columns = list(dict.fromkeys((r["drafter"], r["length"]) for r in records))
    shown = Table(
        title=f"acceptance length at T = {temperature:g}: tokens per verify step, the last drawn one included"
    )
    shown.add_column("family")
    for name, length in columns:
        shown.add_column(f"{name}\nk={length}", justify="right")
    detail = max((c for c in columns if c[0] == DRAFTERS[0]), key=lambda c: c[1])
    shown.add_column("% right\nby position")
    for family in dict.fromkeys(r["family"] for r in records):
        mine = {(r["drafter"], r["length"]): r for r in records if r["family"] == family}
        cells = [f"{mine[c]['acceptance_length']:.2f}" if c in mine else "-" for c in columns]
        if family == "mean":
            shown.add_section()
        shares = mine.get(detail, {}).get("by_position", [])
        shown.add_row(family, *cells, " ".join(f"{100 * s:.0f}" for s in shares))
    return shown
