"""Speculation on a mixed trace: every fixed (source, length) of a small grid, the policy, and none at all, in turns.

The trace is the same for all, its seed fixed before there was a policy: problems whose answers are easy to foretell
(digits, forms), hard (stories at temperature 1), copied (values and calls taken over from the prompt) and long (far
behind in a long prompt), first by one user, then by several at once. All settings run in one process on the same
weights, round after round in changing order, with nothing cached, and what they learn in a round is forgotten after it.
Every answer is compared with the one without drafts.
"""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.bench import ledger
from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.messages import Submit
from perilune.core.plan import MAX_DRAFTS
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.spec.costs import Costs
from perilune.spec.policy import Acceptance, Chance, choose
from perilune.spec.speculator import cells
from perilune.spec.suffix import Store, Trail
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
USERS = (1, 4, 16)
MOST_TOKENS = 160
CONTEXT = 2048
OFF = ("off", None)
FIXED = {"suffix": (1, 2, 4, 8), "eagle3": (1, 2, 3, 5), "hybrid": (3, 5, 8)}
Setting = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class Asked:
    kind: str
    prompt: tuple[int, ...]
    params: SamplingParams


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
    """What a setting did with the trace once: seconds and tokens by users, drafts, answers."""

    seconds: dict[int, float]
    tokens: int
    drafted: int
    accepted: int
    verified: int
    answers: list[tuple[int, ...]]


def play(engine: Engine, asked: Sequence[Asked], users: Sequence[int]) -> Round:
    """The whole trace for each number of users at once."""
    result = Round({}, 0, 0, 0, 0, [])
    for most in users:
        waiting, answers = list(enumerate(asked))[::-1], [list[int]() for _ in asked]
        live = 0
        begin = time.perf_counter()
        while waiting or live:
            while waiting and live < most:
                rid, one = waiting.pop()
                engine.submit(Submit(rid, one.prompt, one.params))
                live += 1
            for delta in engine.step():
                answers[delta.rid] += delta.tokens
                result.drafted += delta.drafted
                result.accepted += delta.accepted
                result.verified += delta.drafted > 0
                live -= delta.finish_reason is not None
        result.seconds[most] = time.perf_counter() - begin
        while engine.busy:
            engine.step()  # what was planned ahead in vain
        result.tokens += sum(map(len, answers))
        result.answers += map(tuple, answers)
    return result


def measure(
    model: Path, config: dict[str, Any], count: int, users: Sequence[int], rounds: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """One row: the settings' times over those of no speculation, and what a policy that knew the future would gain.

    Where draft models go along, that last part is about suffix drafts all the same.
    """
    engine = Engine(
        model, EngineConfig(**{**config, "max_num_seqs": max(users), "prefix_cache": False, "draft_tokens": None})
    )
    try:
        asked = trace(model, count, engine.info.max_model_len - MOST_TOKENS - 1)
        sources = ["suffix"] if engine.config.draft == "suffix" else list(FIXED)
        if engine.config.draft == "off":
            raise ConfigError("draft is off: there is nothing to compare")
        adaptive: Setting = (engine.config.draft, None)
        settings: list[Setting] = [OFF, *((s, n) for s in sources for n in FIXED[s]), adaptive]
        for setting in settings:  # warm-up; on a GPU it captures the graphs
            engine.use_drafts(*setting, shared=True)
            play(engine, asked if engine.on_gpu else asked[: len(KINDS)], users)
        times: dict[Setting, list[Round]] = {s: [] for s in settings}
        for number in range(rounds):
            order = settings[:]
            random.Random(number).shuffle(order)
            for setting in order:
                engine.use_drafts(*setting, shared=True)
                times[setting].append(play(engine, asked, users))
                done = times[setting][-1]
                report(f"round {number}, {_name(setting)}: {sum(done.seconds.values()):.2f} s, {_length(done):.2f}")
        return _row(engine, asked, users, times, adaptive)
    finally:
        engine.close()


def _row(
    engine: Engine, asked: Sequence[Asked], users: Sequence[int], times: dict[Setting, list[Round]], adaptive: Setting
) -> dict[str, Any]:
    plain = times[OFF][0].answers
    different = {_name(s): sum(a != b for r in rs for a, b in zip(r.answers, plain)) for s, rs in times.items()}

    def seconds(setting: Setting, most: int | None = None) -> float:
        return statistics.median(sum(r.seconds.values()) if most is None else r.seconds[most] for r in times[setting])

    fixed = [s for s in times if s not in (OFF, adaptive)]
    best = min(fixed, key=seconds)
    costs = engine.costs
    texts = [(a.prompt, t) for a, t in zip(asked, plain)]
    foreseen, chosen = by_table(texts, costs, "oracle"), by_table(texts, costs, "policy")
    fixed_by_table = min(by_table(texts, costs, n) for n in range(1, MAX_DRAFTS + 1))
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
        "speed_over_off": {_name(s): round(seconds(OFF) / seconds(s), 3) for s in times if s != OFF},
        "adaptive_by_users": {str(n): round(seconds(OFF, n) / seconds(adaptive, n), 3) for n in users},
        "best_fixed": _name(best),
        "best_fixed_by_users": {str(n): _name(min(fixed, key=lambda s: seconds(s, n))) for n in users},
        "adaptive_over_best_fixed": round(seconds(best) / seconds(adaptive), 3),
        "acceptance_length": {_name(s): round(_length(rs[0]), 3) for s, rs in times.items() if s != OFF},
        "acceptance": "measured",
        "different_answers": different,
        "suffix_by_table": {
            "policy_over_off": round(by_table(texts, costs, 0) / chosen, 3),
            "policy_over_best_fixed": round(fixed_by_table / chosen, 3),
            "oracle_over_best_fixed": round(fixed_by_table / foreseen, 3),
        },
        "method": f"median of {len(times[OFF])} rounds, settings in random order; whole trace for each number of users",
        **ledger.circumstances(),
    }


def by_table(texts: Sequence[tuple[Sequence[int], Sequence[int]]], costs: Costs, how: int | str) -> float:
    """Seconds that one user's texts (prompt, answer) would take by the table of costs, free of a machine's noise.

    With so many suffix drafts; with as many as the policy chooses; or, "oracle", with as many as are going to be right
    where that pays.
    """
    store, acceptance, spent = Store(), Acceptance(), 0.0
    for rid, (prompt, answer) in enumerate(texts):
        trail = Trail(prompt, store)
        trail.catch_up(len(prompt))
        at = 0
        while at < len(answer):
            room = len(answer) - at - 1
            guesses = trail.guesses(min(how if isinstance(how, int) else MAX_DRAFTS, room)) if room else []
            right = 0
            while right < len(guesses) and guesses[right].token == answer[at + right]:
                right += 1
            count, context = len(guesses), len(prompt) + at
            if how == "oracle":
                count = max(range(right + 1), key=lambda n: (n + 1) / costs.step([n + 1], [context]))
            elif how == "policy":
                chance = Chance(1, context, True, acceptance.survival(rid, cells(guesses), [g.token for g in guesses]))
                choose([chance], costs, MAX_DRAFTS)
                count = chance.taken
            spent += costs.step([count + 1], [context])
            for token in answer[at : at + min(count, right) + 1]:
                if (guess := trail.foretold()) is not None:
                    acceptance.learn(rid, cells([guess])[0], guess.token, guess.token == token)
                trail.append(token)
            at += min(count, right) + 1
        store.add(trail.answer())
    return spent


def _length(one: Round) -> float:
    return 1 + one.accepted / one.verified if one.verified else 1.0


def _name(setting: Setting) -> str:
    draft, tokens = setting
    return draft if setting == OFF else f"{draft} {'adaptive' if tokens is None else tokens}"
