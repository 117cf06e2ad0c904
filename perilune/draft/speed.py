"""Measures a drafter's speed-up in the engine: the same prompts with and without it, by turns, one user and several."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.core.config import EngineConfig, build
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine

OFF = "off"
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Way:
    """A drafting mode: `tokens` drafts of `source` in every step; None: the engine's policy decides how many."""

    name: str
    source: str
    tokens: int | None


def ways(length: int) -> tuple[Way, ...]:
    """The compared ways: no drafts; n-grams; the drafter's chains of `length`; both, with as many drafts as pay."""
    return (
        Way(OFF, "off", None),
        Way("n-gram", "suffix", None),
        Way(f"drafter, {length} tokens", "eagle3", length),
        Way("both, as pays", "hybrid", None),
    )


@dataclass(frozen=True, slots=True)
class Question:
    prompt: tuple[int, ...]
    family: int
    params: SamplingParams


def measure(
    model: Path,
    draft: Path,
    questions: Sequence[Question],
    families: Sequence[str],
    *,
    length: int,
    users: Sequence[int] = (1, 8),
    rounds: int = ROUNDS,
    engine: dict[str, Any] | None = None,
    advance: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """A record per number of users and way, of all prompts and by family: seconds, tokens per second, and the speed-up
    over no drafts, medians over the rounds. `different`: number of answers that differ from those without drafts."""
    asked = sorted({q.family for q in questions})  # a family may have none: every answer of it was too short
    config = {**(engine or {}), "drafter": str(draft), "draft": "hybrid", "draft_tokens": None, "prefix_cache": False}
    config["max_num_seqs"] = max(users)
    own = Engine(model, build(EngineConfig, config))
    try:
        chosen = ways(length)
        for way in chosen:  # warms up; on a GPU, captures the graphs
            own.use_drafts(way.source, way.tokens, shared=True)
            for most in users:
                _play(own, questions[:: max(len(questions) // 16, 1)], most)
        taken: dict[tuple[str, int, int], list[float]] = {}
        said: dict[tuple[int, int], list[tuple[int, ...]]] = {}
        tokens: dict[tuple[str, int], int] = {(way.name, most): 0 for way in chosen for most in users}
        different = dict(tokens)
        for number in range(rounds):
            for most in users:
                # Rotate the order, so that no mode always follows the same one. Statistics are kept across families.
                for i in range(len(chosen)):
                    way = chosen[(i + number) % len(chosen)]
                    own.use_drafts(way.source, way.tokens, shared=True)
                    for family in asked:
                        mine = [q for q in questions if q.family == family]
                        seconds, answers = _play(own, mine, most)
                        taken.setdefault((way.name, most, family), []).append(seconds)
                        plain = said.setdefault((most, family), answers)
                        tokens[way.name, most] += sum(map(len, answers))
                        different[way.name, most] += sum(a != b for a, b in zip(answers, plain))
                    advance()
    finally:
        own.close()
    records = []
    for most in users:
        plain_seconds = [statistics.median(taken[OFF, most, f]) for f in asked]
        for way in chosen:
            each = [statistics.median(taken[way.name, most, f]) for f in asked]
            by_family = {families[f]: round(p / s, 3) for f, p, s in zip(asked, plain_seconds, each)}
            records.append(
                {
                    "way": way.name,
                    "users": most,
                    "rounds": rounds,
                    "seconds": round(sum(each), 4),
                    "tokens_per_second": round(tokens[way.name, most] / rounds / sum(each), 1),
                    "speed_up": round(sum(plain_seconds) / sum(each), 3),
                    "speed_up_by_family": by_family,
                    "different": different[way.name, most],
                }
            )
    return records


def _play(engine: Engine, questions: Sequence[Question], most: int) -> tuple[float, list[tuple[int, ...]]]:
    """(seconds, answers) of all, `most` at a time."""
    waiting, answers = list(enumerate(questions))[::-1], [list[int]() for _ in questions]
    live = 0
    begin = time.perf_counter()
    while waiting or live:
        while waiting and live < most:
            rid, one = waiting.pop()
            engine.submit(Submit(rid, one.prompt, one.params))
            live += 1
        for delta in engine.step():
            answers[delta.rid] += delta.tokens
            live -= delta.finish_reason is not None
    seconds = time.perf_counter() - begin
    while engine.busy:
        engine.step()  # run steps that were planned ahead for ended requests
    return seconds, [tuple(a) for a in answers]
