"""The scheduler on random histories of requests: every request gets the tokens that it gets alone."""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.messages import Order
from perilune.core.sampling import SamplingParams
from perilune.core.step import PENDING
from tests.cpu.engine.scheduler_rig import VOCAB, Rig, alone, modes, prompt_of


@dataclass(frozen=True)
class Trace:
    """A random history: engine limits, requests with arrival ticks, cancels, errors."""

    limits: dict
    requests: tuple  # (tick, prompt, params)
    cancels: dict  # rid -> (tick, between plan and commit)
    errors: dict


def make_trace(rng):
    cramped = rng.random() < 0.5  # many short prompts with long answers: the pool gets full while they run
    block_size = rng.choice([1, 2]) if cramped else rng.choice([1, 2, 3, 4])
    num_blocks = rng.randint(2, 14)
    max_model_len = rng.randint(20, 50) if cramped else rng.randint(4, 50)
    limits = {
        "num_blocks": num_blocks,
        "block_size": block_size,
        "max_num_seqs": rng.randint(1, 5),
        "max_step_tokens": rng.choice([1, 2, 5, 8, 64]),
        "max_model_len": max_model_len,
        "prefix_cache": rng.random() < 0.75,
    }
    longest = min(max_model_len - 1, num_blocks * block_size)
    stems = [tuple(rng.randrange(3) for _ in range(longest)) for _ in range(2)]
    requests, cancels, errors = [], {}, {}
    for rid in range(rng.randint(1, 10)):
        shared = rng.randint(0, longest // 5 if cramped else longest)
        own = rng.randint(0, longest - shared) // (6 if cramped else 2)
        prompt = rng.choice(stems)[:shared] + tuple(rng.randrange(VOCAB) for _ in range(own))
        params = SamplingParams(
            max_tokens=rng.choice([None, 12, 30] if cramped else [None, 1, 2, 5, 12]),
            stop_token_ids=tuple(rng.sample(range(VOCAB), rng.choice([0, 0, 1] if cramped else [0, 1, 4]))),
            prompt_logprobs=rng.choice([None, None, None, 0]),
        )
        tick = rng.choice([0, rng.randint(0, 12), rng.randint(0, 40)])
        requests.append((tick, prompt or (0,), params))
        if rng.random() < 0.2:
            cancels[rid] = (tick + rng.randint(0, 8), rng.random() < 0.5)
        elif rng.random() < 0.15:
            errors[rid] = rng.randint(0, 6)
    return Trace(limits, tuple(requests), cancels, errors)


def hostile(rng):
    """Guesses of any length that are right as far as chance has it."""

    def drafter(prompt, draw):
        true = alone(prompt, SamplingParams(max_tokens=draw + 10), 10_000)[0][draw:]
        right = rng.choice([0, 0, 1, 2, 9])
        return [*true[:right], *(rng.randrange(VOCAB) for _ in range(rng.randrange(4)))]

    return drafter


def play(trace, overlapped, drafts=None, trails=None):
    """Plays a trace to the end; `overlapped` is a bool, or a random generator that switches now and then; `drafts` a
    random generator for hostile ones, `trails` one that has steps planned behind them."""
    drafter = None if drafts is None else hostile(drafts)
    rig = Rig(
        overlapped=overlapped is not False,
        errors=trace.errors,
        drafter=drafter,
        rng=drafts,
        trails=trails,
        **trace.limits,
    )
    tick, left = 0, dict(enumerate(trace.requests))

    def cancel(between):
        for rid, (when, midway) in trace.cancels.items():
            if when == tick and midway == between:
                rig.cancel(rid)

    while left or rig.scheduler.has_work or rig.flying is not None:
        assert tick < 5_000, "no end"
        for rid in [rid for rid, (when, _, _) in left.items() if when == tick]:
            _, prompt, params = left.pop(rid)
            rig.submit(rid, prompt, rid, params=params)
        cancel(False)
        if isinstance(overlapped, random.Random):
            rig.set_overlapped(overlapped.random() < 0.6)
        rig.tick(between=lambda: cancel(True))
        tick += 1
    rig.finish()
    return rig


def judge(trace, rig):
    room = trace.limits["num_blocks"] * trace.limits["block_size"] + 1
    for rid, (_, prompt, params) in enumerate(trace.requests):
        answer = rig.answers[rid]
        tokens, finish = alone(prompt, params, min(trace.limits["max_model_len"], room))
        if answer.finish is None:
            assert rid in trace.cancels
            assert tuple(answer.tokens) == tokens[: len(answer.tokens)]
        elif trace.errors.get(rid, len(tokens)) < len(tokens):
            assert answer.finish == "error" and tuple(answer.tokens) == tokens[: trace.errors[rid]]
        else:
            assert (tuple(answer.tokens), answer.finish) == (tokens, finish)
        if answer.tokens and params.prompt_logprobs is not None:
            assert [s.token for s in answer.scores] == list(prompt[1:]) and answer.cached == 0
        assert answer.cached < len(prompt) and answer.cached % trace.limits["block_size"] == 0
    stats = rig.scheduler.stats()
    assert stats.blocks_owned == 0 and 0 <= stats.blocks_cached <= stats.blocks_total


@settings(max_examples=120, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32))
def test_any_trace_gives_everybody_the_tokens_it_gets_alone(rng, seed):
    trace = make_trace(rng)
    for overlapped in (False, True, random.Random(seed)):
        for drafts in (None, random.Random(seed)):
            judge(trace, play(trace, overlapped, drafts))
        judge(trace, play(trace, overlapped, random.Random(seed), random.Random(seed)))


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_any_trace_with_priorities_and_deadlines_gives_the_same_tokens(rng):
    trace = make_trace(rng)
    rig = Rig(overlapped=rng.random() < 0.5, errors=trace.errors, **trace.limits)
    left, tick = dict(enumerate(trace.requests)), 0
    while left or rig.scheduler.has_work or rig.flying is not None:
        assert tick < 5_000, "no end"
        for rid in [rid for rid, (when, _, _) in left.items() if when == tick]:
            _, prompt, params = left.pop(rid)
            order = Order(rng.randrange(3), rng.choice([None, None, rng.randint(1, 40)]))
            rig.submit(rid, prompt, rid, params=params, order=order, now=tick)
        rig.expire(tick)
        rig.tick()
        tick += 1
    rig.finish()
    room = trace.limits["num_blocks"] * trace.limits["block_size"] + 1
    for rid, (_, prompt, params) in enumerate(trace.requests):
        tokens, finish = alone(prompt, params, min(trace.limits["max_model_len"], room))
        answer = rig.answers[rid]
        if answer.finish in ("deadline", "error"):
            assert tuple(answer.tokens) == tokens[: len(answer.tokens)]
        else:
            assert (tuple(answer.tokens), answer.finish) == (tokens, finish)


KEYS = ((), ("salt:a",), ("salt:b",), ("adapter:a",), ("salt:a", "image:1"), ("image:1", "salt:a"), ("salt:aimage:1",))


@modes
def test_equal_keys_share_and_different_ones_do_not(overlapped):
    prompt = prompt_of(17)
    rig = Rig(num_blocks=64, overlapped=overlapped)
    for rid, keys in enumerate(KEYS * 2):
        rig.submit(rid, prompt, keys=keys, max_tokens=3)
        rig.finish()
        rig.expect(rid, cached=0 if rid < len(KEYS) else 16)


def keyed(rng, overlapped):
    """A random history of requests with keys; asserts that a block's content is read under the keys it was written
    under. Returns how many tokens came from the cache."""
    limits = {"num_blocks": rng.randint(6, 20), "block_size": rng.choice([1, 2, 4]), "max_model_len": 24}
    rig = Rig(overlapped=overlapped, max_step_tokens=rng.choice([3, 8, 64]), **limits)
    longest = min(limits["num_blocks"] * limits["block_size"], 20)
    stem = tuple(rng.randrange(3) for _ in range(longest))
    keys, writers = {}, {}
    for rid in range(rng.randint(6, 14)):
        keys[rid] = rng.choice(KEYS)
        prompt = stem[: rng.randint(1, longest)] + tuple(rng.randrange(2) for _ in range(rng.randint(0, 1)))
        rig.submit(rid, prompt[:longest], keys=keys[rid], max_tokens=rng.randint(1, 4))
        for _ in range(rng.choice([0, 1, 4, 30])):
            if not rig.scheduler.has_work:
                break
            rig.tick()
    rig.finish()
    for plan in rig.plans:
        for work in plan.work:
            size = limits["block_size"]
            first = work.start // size
            for index, block in enumerate(work.blocks[: -(-work.end // size)]):
                if index < first:
                    assert writers[block] == keys[work.rid], f"block {block} was written under other keys"
                elif index > first or work.start % size == 0:
                    writers[block] = keys[work.rid]
                else:
                    assert writers[block] == keys[work.rid]
    for rid in keys:
        rig.expect(rid)
    return rig.scheduler.stats().cached_tokens


@pytest.mark.slow
def test_no_block_is_shared_across_keys():
    """Random histories, also of cramped pools with preemption and eviction; many of them do share within their keys."""
    hits = [keyed(random.Random(seed), overlapped) for seed in range(150) for overlapped in (False, True)]
    assert sum(n > 0 for n in hits) > 100


@pytest.mark.slow
def test_seeded_traces_reach_what_they_are_for():
    """The same with well-mixed numbers, and proof that the rare events do occur in such traces."""
    seen = {"preempted": 0, "preempted again": 0, "hit": 0, "pending": 0, "in vain": 0}
    drafts = {"accepted": 0, "rejected": 0, "preempted in flight": 0, "cut short": 0, "stopped among": 0, "spoilt": 0}
    behind = Counter(dict.fromkeys(["accepted", "long", "two in a row", "preempted", "stopped", "spoilt"], 0))
    for seed in range(150):
        trace = make_trace(random.Random(seed))
        judge(trace, play(trace, random.Random(-seed)))
        rig = play(trace, True)
        judge(trace, rig)
        stats = rig.scheduler.stats()
        works = [w for p in rig.plans for w in p.work]
        seen["preempted"] += stats.preemptions > 0
        seen["preempted again"] += stats.preemptions > 2
        seen["hit"] += stats.cached_tokens > 0
        seen["pending"] += any(w.tokens[-1] == PENDING for w in works)
        seen["in vain"] += sum(w.sample for w in works) > stats.generated_tokens

        rig = play(trace, random.Random(seed), random.Random(seed + 1000))
        judge(trace, rig)
        deltas = [d for a in rig.answers.values() for d in a.deltas]
        drafts["accepted"] += any(d.accepted for d in deltas)
        drafts["rejected"] += any(d.drafted > d.accepted for d in deltas)
        drafts["cut short"] += any(w.drafts == w.left - 1 > 0 for p in rig.plans for w in p.work)
        drafts["stopped among"] += any(d.finish_reason == "stop" and d.accepted == len(d.tokens) for d in deltas)
        drafts["spoilt"] += any(d.drafted and d.accepted == len(d.tokens) and not d.finish_reason for d in deltas)
        drafts["preempted in flight"] += rig.scheduler.stats().preemptions > 0 and any(d.drafted for d in deltas)

        rig = play(trace, True, random.Random(seed), random.Random(seed + 2000))
        judge(trace, rig)
        works = [(p, w) for p in rig.plans for w in p.work]
        deltas = [d for a in rig.answers.values() for d in a.deltas]
        behind["accepted"] += any(d.accepted for d in deltas)
        behind["long"] += sum(w.chained for _, w in works) > 10
        behind["two in a row"] += any(
            v.chained and w.chained and v.drafts and w.drafts and v.rid == w.rid and p.step + 1 == q.step
            for (p, v), (q, w) in itertools.product(works, works)
            if len(works) < 200
        )
        behind["preempted"] += rig.scheduler.stats().preemptions > 0 and any(w.chained for _, w in works)
        behind["stopped"] += any(d.finish_reason == "stop" and d.drafted for d in deltas)
        behind["spoilt"] += any(d.drafted and d.accepted == len(d.tokens) and not d.finish_reason for d in deltas)
    assert all(n >= 10 for n in seen.values()), seen
    assert all(n >= 5 for n in drafts.values()), drafts
    assert all(n >= 5 for n in behind.values()), behind
