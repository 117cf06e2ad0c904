"""Speculation on a mixed trace: every fixed (source, length) of a small grid, the policy, and no drafts, interleaved.

The trace is the same for all, its seed fixed before there was a policy: problems with answers that are easy to predict
(digits, forms), hard (stories at temperature 1), copied (values and calls from the prompt) and long (about a long
prompt), first by one user, then by several at once. All settings run in one process on the same weights, round after
round in changing order, without a prefix cache. Drafters' state is reset before each play: n-gram lookup would find the
answers in stored texts. Every answer is compared with the one without drafts. drafts_replay.py
computes the same from a table of costs, and what knowing the answers (hindsight) would gain.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bench import drafts_replay, ledger
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import MAX_DRAFTS
from perilune.engine.engine import Engine
from perilune.speculation.drafting import Speculator
from perilune.tasks.documents import BUILT_IN
from perilune.tasks.families import problems
from perilune.tasks.problem import Problem
from perilune.text.chat import template_for
from perilune.text.tokenizer import Tokenizer

SEED = 20261121
KINDS = {  # families, temperature, paragraphs before the question
    "easy": (("add_sub", "arithmetic"), 0.0, 0),
    "hard": (("word_problems", "chat"), 1.0, 0),
    "edit": (("json_extract", "tool_call"), 0.0, 0),
    "long": (("doc_questions",), 0.0, 12),
}
MOST_TOKENS = 160
WARM_UPS = 4
CONTEXT = 2048
OFF = ("off", None)
FIXED = {"suffix": (1, 2, 4, 8), "eagle3": (2, 3, 5, 8), "hybrid": (3, 5, 8)}
Setting = tuple[str, int | None]  # source, and drafts per step; None: as many as pay


@dataclass(frozen=True, slots=True)
class Asked:
    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams


def settings_of(text: str) -> list[Setting]:
    """Settings from text such as "hybrid,eagle3:3": as many hybrid drafts as pay, then 3 drafts of the draft model."""
    found: list[Setting] = []
    for part in text.split(","):
        source, _, count = part.strip().partition(":")
        if source not in FIXED or not (count == "" or (count.isdecimal() and 1 <= int(count) <= MAX_DRAFTS)):
            raise ConfigError(
                f"setting {part!r} is none: {', '.join(FIXED)}, alone or with :1 to :{MAX_DRAFTS} drafts, by commas"
            )
        found.append((source, int(count) if count else None))
    return found


def trace(model: Path, count: int, longest: int) -> list[Asked]:
    """`count` requests, kinds in turn."""
    tokenizer, template = Tokenizer.from_directory(model), template_for(model)
    rng = random.Random(SEED)
    drawn: dict[str, list[Problem]] = {}
    for kind, (families, _, _) in KINDS.items():
        each = -(-count // (len(KINDS) * len(families)))
        found = [problems(f, "heldout" if f != "chat" else "train", each, seed=SEED, thinking=True) for f in families]
        drawn[kind] = [problem for row in zip(*found) for problem in row]
    asked = []
    for number in range(count):
        kind = tuple(KINDS)[number % len(KINDS)]
        _, temperature, paragraphs = KINDS[kind]
        problem = drawn[kind][number // len(KINDS)]
        messages = [dict(m) for m in problem.messages]
        if paragraphs:
            background = "\n\n".join(rng.sample(BUILT_IN, min(paragraphs, len(BUILT_IN))))
            messages[0]["content"] = f"{background}\n\n{messages[0]['content']}"
        ids = template.render_ids(tokenizer, messages, tools=problem.tools or None, thinking=problem.thinking)
        params = SamplingParams(temperature=temperature, seed=number, max_tokens=MOST_TOKENS)
        asked.append(Asked(kind, tuple(ids[-longest:]), params.ending_with(tokenizer.stop_ids)))
    return asked


@dataclass(slots=True)
class Round:
    """One play of the trace with a setting: seconds by users, tokens, drafts, answers. `rates`, by users: tokens per
    second of decoding, while no request waited for its first token. `captured`: CUDA graphs captured meanwhile."""

    seconds: dict[int, float]
    rates: dict[int, float]
    tokens: int
    drafted: int
    accepted: int
    verified: int
    answers: list[tuple[int, ...]]
    captured: int = 0


def play(engine: Engine, asked: Sequence[Asked], users: Sequence[int], setting: Setting | None = None) -> Round:
    """Plays the whole trace once for each number of simultaneous `users`. `setting`: how to draft, with statistics
    reset before each play; None: as the engine is set."""
    result = Round({}, {}, 0, 0, 0, 0, [])
    graphs = engine.runner.graphs
    captured = graphs.recorder.captured if graphs is not None else 0
    for most in users:
        if setting is not None:
            engine.use_drafts(*setting, shared=True)
        waiting, answers = list(enumerate(asked))[::-1], [list[int]() for _ in asked]
        live, fresh = 0, set[int]()
        tokens, seconds = 0, 0.0  # of decoding alone
        now = begin = time.perf_counter()
        while waiting or live:
            while waiting and live < most:
                rid, one = waiting.pop()
                engine.submit(Submit(rid, one.prompt, one.params))
                fresh.add(rid)
                live += 1
            deltas, decoding = engine.step(), not fresh
            before, now = now, time.perf_counter()
            if decoding:
                tokens += sum(len(delta.tokens) for delta in deltas)
                seconds += now - before
            for delta in deltas:
                answers[delta.rid] += delta.tokens
                fresh.discard(delta.rid)
                result.drafted += delta.drafted
                result.accepted += delta.accepted
                result.verified += delta.drafted > 0
                live -= delta.finish_reason is not None
        result.seconds[most], result.rates[most] = now - begin, tokens / seconds if seconds else math.nan
        while engine.busy:
            engine.step()  # run steps that were planned ahead for ended requests
        result.tokens += sum(map(len, answers))
        result.answers += map(tuple, answers)
    result.captured = graphs.recorder.captured - captured if graphs is not None else 0
    return result


def measure(
    model: Path,
    config: dict[str, Any],
    count: int,
    users: Sequence[int],
    rounds: int,
    report: Callable[[str], None],
    wanted: Sequence[Setting] = (),
) -> dict[str, Any]:
    """One row: speed-ups of the settings `wanted` (default: a small grid and the policy) over no speculation, and those
    of the policy and of hindsight by the table of costs."""
    engine = Engine(
        model, EngineConfig(**{**config, "max_num_seqs": max(users), "prefix_cache": False, "draft_tokens": None})
    )
    try:
        asked = trace(model, count, engine.info.max_model_len - MOST_TOKENS - 1)
        sources = ["suffix"] if engine.config.draft == "suffix" else list(FIXED)
        if engine.config.draft == "off":
            raise ConfigError("draft is off: there is nothing to compare")
        if bad := {s for s, _ in wanted} - set(sources):
            raise ConfigError(f"no draft model is loaded: {', '.join(sorted(bad))} cannot be run")
        adaptive: Setting = (engine.config.draft, None)
        settings = [OFF, *(wanted or [*((s, n) for s in sources for n in FIXED[s]), adaptive])]
        times: dict[Setting, list[Round]] = {s: [] for s in settings}
        for number in range(rounds):
            order = settings[:]
            random.Random(number).shuffle(order)
            for setting in order:
                _warm_up(engine, setting, asked, users)
                times[setting].append(play(engine, asked, users, setting))
                done = times[setting][-1]
                report(f"round {number}, {_name(setting)}: {sum(done.seconds.values()):.2f} s, {_length(done):.2f}")
        return _row(engine, asked, users, times)
    finally:
        engine.close()


def _warm_up(engine: Engine, setting: Setting, asked: Sequence[Asked], users: Sequence[int]) -> None:
    """Plays the trace; on a GPU again until no CUDA graph is captured, at most WARM_UPS times. On a CPU a short one."""
    if engine.runner.graphs is None:
        asked, users = asked[: len(KINDS)], users[:1]
    for _ in range(WARM_UPS):
        if not play(engine, asked, users, setting).captured:
            break


def _row(
    engine: Engine, asked: Sequence[Asked], users: Sequence[int], times: dict[Setting, list[Round]]
) -> dict[str, Any]:
    plain = times[OFF][0].answers
    different = {_name(s): sum(a != b for r in rs for a, b in zip(r.answers, plain)) for s, rs in times.items()}

    def seconds(setting: Setting, most: int | None = None) -> float:
        return statistics.median(sum(r.seconds.values()) if most is None else r.seconds[most] for r in times[setting])

    def over_off(most: int | None = None) -> dict[str, float]:
        return {_name(s): round(seconds(OFF, most) / seconds(s, most), 3) for s in times if s != OFF}

    def rate(setting: Setting, most: int) -> float:
        return statistics.median(r.rates[most] for r in times[setting])

    adaptive: Setting = (engine.config.draft, None)
    fixed = [s for s in times if s[1] is not None]
    compared = {}
    if fixed and adaptive in times:
        best = min(fixed, key=seconds)
        compared = {
            "best_fixed": _name(best),
            "adaptive_over_best_fixed": round(seconds(best) / seconds(adaptive), 3),
            "adaptive_over_best_fixed_by_users": {
                str(n): round(min(seconds(s, n) for s in fixed) / seconds(adaptive, n), 3) for n in users
            },
            "by_table": _by_table(engine, asked, users, adaptive),
        }
    return {
        "bench": "drafts",
        "model": engine.info.model,
        "draft": adaptive[0],
        "requests": len(asked),
        "users": list(users),
        "rounds": len(times[OFF]),
        "seed": SEED,
        "tokens": times[OFF][0].tokens,
        "off_s": round(seconds(OFF), 3),
        "speed_over_off": over_off(),
        "speed_over_off_by_users": {str(n): over_off(n) for n in users},
        "decoding_over_off_by_users": {
            str(n): {_name(s): round(rate(s, n) / rate(OFF, n), 3) for s in times if s != OFF} for n in users
        },
        **compared,
        "acceptance_length": {_name(s): round(_length(rs[0]), 3) for s, rs in times.items() if s != OFF},
        "acceptance": "measured",
        "different_answers": different,
        "graphs_captured": {_name(s): sum(r.captured for r in rs) for s, rs in times.items()},
        "method": f"median of {len(times[OFF])} rounds, settings in random order; whole trace with prompts, anew "
        "for each number of users; decoding: while no request waited for its first token",
        **ledger.circumstances(),
    }


def _by_table(engine: Engine, asked: Sequence[Asked], users: Sequence[int], adaptive: Setting) -> dict[str, Any]:
    """Speed-ups by the table of costs; for one user also that of hindsight over the best fixed setting."""
    engine.use_drafts(*adaptive, shared=True)
    costs = engine.costs
    recorded = drafts_replay.listen(engine, [(a.kind, a.prompt, a.params) for a in asked])
    modelled = adaptive[0] != "suffix"
    clock = drafts_replay.Clock(costs)  # floor 0: chains are as long as asked for, as the oracle assumes

    def seconds(most: int, source: str, count: int | None) -> float:
        speculator = Speculator(
            suffix=source != "eagle3",
            longest=MAX_DRAFTS if source != "suffix" else 0,
            fixed=count,
            costs=None if count else costs,
            shared=True,
        )
        floor = 0.0 if engine.runner.graphs is not None else speculator.min_confidence
        clock = drafts_replay.Clock(costs if speculator.longest else costs.without_drafter(), floor=floor)
        return drafts_replay.play(recorded, most, clock, speculator).seconds

    best = {n: min(seconds(n, s, k) for s in FIXED if s == "suffix" or modelled for k in FIXED[s]) for n in users}
    chosen = {n: seconds(n, *adaptive) for n in users}
    found = {
        "policy_over_off": {
            str(n): round(drafts_replay.play(recorded, n, clock, None).seconds / chosen[n], 3) for n in users
        },
        "policy_over_best_fixed": {str(n): round(best[n] / chosen[n], 3) for n in users},
    }
    if 1 in users:
        found["oracle_over_best_fixed"] = {"1": round(best[1] / drafts_replay.oracle(recorded, clock), 3)}
    return found


def _length(one: Round) -> float:
    return 1 + one.accepted / one.verified if one.verified else 1.0


def _name(setting: Setting) -> str:
    draft, tokens = setting
    return draft if setting == OFF else f"{draft} {'adaptive' if tokens is None else tokens}"
