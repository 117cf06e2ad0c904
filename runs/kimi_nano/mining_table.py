"""Acceptance lengths of several ways to train, by family: means over seeds, and confidence intervals of gains.

Per seed, a way's length is tokens by cycles over all held-out texts of a family. Gains are ratios to BASE of the same
seed. Two 95 % intervals: Student's over seeds (how training varies), and a bootstrap over prompts of the mean over
seeds (how the sample of problems varies; the same prompts for both ways).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from runs.kimi_nano.mining_setting import BASE

RESAMPLED = 2000
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # by deg. of freedom
Lengths = NDArray[np.float64]  # [seeds, samples, families]
Measured = Mapping[str, Sequence[tuple[int, int]]]  # way: (tokens, cycles) of each text


def compare(by_seed: Sequence[Measured], families: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """The lengths of every way, and the gains on BASE of the others.

    by_seed   what each seed measured
    families  the family of each text, a number of `names`
    """
    family = np.asarray(families)
    ways = list(by_seed[0])
    counts = {way: np.array([seed[way] for seed in by_seed], np.float64) for way in ways}  # [seeds, texts, 2]
    rng = np.random.default_rng(0)
    lengths = {way: _lengths(c, family, len(names), np.ones((1, len(family)))) for way, c in counts.items()}
    # The same texts are drawn for all ways, within each family.
    weights = np.zeros((RESAMPLED, len(family)))
    for f in range(len(names)):
        (own,) = np.nonzero(family == f)
        weights[:, own] = rng.multinomial(len(own), np.full(len(own), 1 / len(own)), RESAMPLED)
    drawn = {way: _lengths(c, family, len(names), weights) for way, c in counts.items()}
    found: dict[str, Any] = {"ways": {}, "gains": {}}
    for way in ways:
        of_seeds = lengths[way][:, 0]  # [seeds, families]
        found["ways"][way] = {
            "families": _named(names, of_seeds.mean(0)),
            "mean": round(float(of_seeds.mean()), 4),
            "worst": round(float(of_seeds.min(1).mean()), 4),
        }
        if way != BASE and BASE in ways:
            found["gains"][way] = _gains(lengths[way], lengths[BASE], drawn[way], drawn[BASE], names)
    return found


def _lengths(counts: NDArray[np.float64], family: NDArray[np.int64], n: int, weights: NDArray[np.float64]) -> Lengths:
    """[seeds, samples, families] tokens per cycle, each text taken `weights` [samples, texts] times."""
    member = (family[:, None] == np.arange(n)).astype(np.float64)
    sums = np.einsum("bt,tf,stk->sbfk", weights, member, counts, optimize=True)
    lengths: Lengths = sums[..., 0] / sums[..., 1]
    return lengths


def _gains(
    own: Lengths, base: Lengths, own_drawn: Lengths, base_drawn: Lengths, names: Sequence[str]
) -> dict[str, Any]:
    """Ratios minus 1: of each family, of the mean over families, and of the worst family."""
    found = {}
    for name in (*names, "mean", "worst"):
        gain = _part(own, name, names) / _part(base, name, names) - 1
        gains = gain[:, 0]  # [seeds]
        resampled = (_part(own_drawn, name, names) / _part(base_drawn, name, names) - 1).mean(0)
        low, high = np.quantile(resampled, (0.025, 0.975))
        half = T95.get(len(gains) - 1, math.nan) * gains.std(ddof=1) / math.sqrt(len(gains)) if len(gains) > 1 else None
        found[name] = {
            "gain": round(float(gains.mean()), 4),
            "by_seed": [round(float(g), 4) for g in gains],
            "seeds_95": None
            if half is None
            else [round(float(gains.mean() - half), 4), round(float(gains.mean() + half), 4)],
            "prompts_95": [round(float(low), 4), round(float(high), 4)],
        }
    return found


def _part(lengths: Lengths, name: str, names: Sequence[str]) -> NDArray[np.float64]:
    """[seeds, samples] of a family, of the mean over families, or of the worst family."""
    if name == "mean":
        mean: NDArray[np.float64] = lengths.mean(-1)
        return mean
    if name == "worst":
        found: NDArray[np.float64] = lengths.min(-1)
        return found
    return lengths[..., list(names).index(name)]


def _named(names: Sequence[str], values: NDArray[np.float64]) -> dict[str, float]:
    return {name: round(float(v), 4) for name, v in zip(names, values)}


def table(row: Mapping[str, Any]) -> Table:
    result = row["results"]
    ways = list(result["ways"])
    begin = f"{row['begin_steps']} steps" if row["begin_steps"] else "the bundled draft"
    shown = Table(
        title=f"{row['setting']}: tokens per verify step, greedy chains of {row['length']}: {begin} and {row['steps']} "
        f"more of {row['chains']} chains, {row['share']:g} mined (guard {row['guard']:g}); {len(row['seeds'])} seeds, "
        f"{row['held_out']} prompts"
    )
    shown.add_column("family")
    for way in ways:
        shown.add_column(way, justify="right")
    for way in result["gains"]:
        shown.add_column(f"{way}\ngain, % [seeds] (prompts)", justify="right")
    for name in [*result["ways"][BASE]["families"], "mean", "worst"]:
        cells = [result["ways"][way]["families"].get(name, result["ways"][way].get(name)) for way in ways]
        gains = [_spell(gain[name]) for gain in result["gains"].values()]
        if name == "mean":
            shown.add_section()
        shown.add_row(name, *(f"{c:.3f}" for c in cells), *gains)
    return shown


def _spell(gain: Mapping[str, Any]) -> str:
    def span(pair: Sequence[float] | None) -> str:
        return "-" if pair is None else f"{100 * pair[0]:.1f} .. {100 * pair[1]:.1f}"

    return f"{100 * gain['gain']:+.1f} [{span(gain['seeds_95'])}] ({span(gain['prompts_95'])})"
