"""Measures a drafter on problems that were kept out of training: acceptance by family and position at T = 0 and 1, and
the engine's speed-up; as records, and as one table."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from perilune.core.sampling import SamplingParams
from perilune.draft import speed
from perilune.draft.capture import Capture
from perilune.draft.corpus import Row
from perilune.draft.evaluate import Tally, summed, walk, walk_lookup
from perilune.engine.llm import LLM
from perilune.loading.load import load
from perilune.model.kimi_k2 import KimiK2
from perilune.speculation.eagle3 import load_drafter
from perilune.tasks.families import FAMILIES, problems
from perilune.text.chat import template_for

SPLITS = ("heldout", "structural")  # sampled as in training; words, stories and layouts that training never had
TEMPERATURES = (0.0, 1.0)
DRAFTERS = ("eagle3", "lookup")
AT_ONCE = 256  # texts evaluated together


def evaluated() -> tuple[str, ...]:
    return tuple(f.name for f in FAMILIES.values() if f.evaluated)


def prompts(llm: LLM, count: int, *, seed: int, split: str = SPLITS[0]) -> list[tuple[tuple[int, ...], int]]:
    """(ids, family) of `count` problems of each family, half of them with thinking, tools declared."""
    assert llm.tokenizer is not None
    template = template_for(llm.path)
    found: list[tuple[tuple[int, ...], int]] = []
    for index, name in enumerate(evaluated()):
        for thinking, n in ((True, count - count // 2), (False, count // 2)):
            for p in problems(name, split, n, seed=seed, thinking=thinking) if n else ():
                ids = template.render_ids(llm.tokenizer, p.messages, tools=p.tools or None, thinking=thinking)
                found.append((tuple(ids), index))
    return found


def answers(llm: LLM, count: int, *, seed: int, max_tokens: int, split: str = SPLITS[0]) -> dict[float, list[Row]]:
    """The target's answers to `prompts`, by temperature."""
    asked = prompts(llm, count, seed=seed, split=split)
    found: dict[float, list[Row]] = {}
    for temperature in TEMPERATURES:
        params = [
            SamplingParams(temperature=temperature, seed=seed + i, max_tokens=max_tokens) for i in range(len(asked))
        ]
        drawn = llm.generate([ids for ids, _ in asked], params)
        found[temperature] = [
            Row(ids + a.token_ids, len(ids), index, temperature == 0)
            for (ids, index), a in zip(asked, drawn)
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
                    walk(drafter, capture, some, length, at_once=AT_ONCE, advance=advance)
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


def questions(rows: Sequence[Row], count: int, *, max_tokens: int, ends: Iterable[int]) -> list[speed.Question]:
    """`count` prompts of each family of `rows`, half of them from the end of its rows (without thinking)."""
    chosen: list[speed.Question] = []
    for family in sorted({row.family for row in rows}):
        own = [row for row in rows if row.family == family]
        for row in [*own[: count - count // 2], *own[len(own) - count // 2 :]]:
            params = SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens).ending_with(ends)
            chosen.append(speed.Question(row.ids[: row.given], family, params))
    return chosen


def table(records: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]] = ()) -> Table:
    """A line per split and family; columns: tokens per verify step by temperature, drafter and chain length, the shares
    accepted by position in the longest chain, and the speed-up over no drafts by drafting mode and number of users."""
    kinds = [
        (t, name, length)
        for t in dict.fromkeys(r["temperature"] for r in records)
        for name, length in dict.fromkeys((r["drafter"], r["length"]) for r in records)
    ]
    ways = [r for r in speeds if r["way"] != speed.OFF]
    shown = Table(
        title="tokens per verify step, the last drawn one included; right by position, %; times as fast as without"
    )
    shown.add_column("family")
    for t, name, length in kinds:
        shown.add_column(f"T={t:g}\n{name}\nk={length}", justify="right")
    longest = max(length for _, _, length in kinds)
    shown.add_column(f"T=0\nright by\nposition, k={longest}")
    for r in ways:
        shown.add_column(f"speed\n{r['way']}\n{r['users']} at once", justify="right")
    for split in dict.fromkeys(r["split"] for r in records):
        own = [r for r in records if r["split"] == split]
        shown.add_section()
        shown.add_row(f"[bold]{split}[/bold]")
        for family in dict.fromkeys(r["family"] for r in own):
            mine = {(r["temperature"], r["drafter"], r["length"]): r for r in own if r["family"] == family}
            cells = [f"{mine[k]['acceptance_length']:.2f}" if k in mine else "-" for k in kinds]
            shares = mine.get((0.0, DRAFTERS[0], longest), {}).get("by_position", [])
            fast = []
            for r in ways if split == SPLITS[0] else ():
                value = r["speed_up"] if family == "mean" else r["speed_up_by_family"].get(family)
                fast.append("-" if value is None else f"{value:.2f}")
            shown.add_row(family, *cells, " ".join(f"{100 * s:.0f}" for s in shares), *fast)
    return shown
