"""The scheduler, driven by a fake runner that knows no model but keeps a KV cache of its own.

The runner's KV remembers in every (block, offset) the hash of the whole prefix written there. Whenever a request is
computed, its block table is walked and must yield exactly the request's true tokens: every way of sharing, freeing or
reusing a block wrongly shows. The next token is a function of all previous ones, so outputs show it too.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.core.errors import RequestError
from perilune.core.messages import FIRST_COME, Delta, Order, Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import MAX_DRAFTS, PENDING, Output, StepPlan, StepResult, TokenLogprob, Work
from perilune.engine.plan_wire import Reader, Writer
from perilune.engine.scheduler import Scheduler

VOCAB = 29


def extend(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % 2_147_483_647


def next_token(state: int) -> int:
    return state // 7 % VOCAB


def alone(prompt, params, limit):
    """What the fake model answers when nobody else is there: (tokens, finish reason)."""
    state, out = 1, []
    for token in prompt:
        state = extend(state, token)
    limit = min(limit, len(prompt) + params.max_tokens) if params.max_tokens is not None else limit
    while True:
        out.append(next_token(state))
        state = extend(state, out[-1])
        if out[-1] in params.stop_token_ids:
            return tuple(out), "stop"
        if len(prompt) + len(out) == limit:
            return tuple(out), "length"


class FakeRunner:
    """Executes plans in order; `errors` maps a request to the output index at which it fails. `chain` drafts behind
    the output tokens that a request has, for works planned behind others."""

    def __init__(
        self,
        block_size: int,
        slots: int,
        errors: dict[int, int] | None = None,
        chain: Callable[[int, int], list[int]] = lambda rid, draw: [],
    ) -> None:
        self.block_size = block_size
        self.errors = errors or {}
        self.chain = chain
        self.given: dict[int, int] = {}  # prompt tokens
        self.drafted: dict[int, int] = {}  # drafts of each in the last step that it was in
        self.spoilt: set[int] = set()  # whose last step drew nothing to go on from
        self.kv: dict[tuple[int, int], int] = {}
        self.last: list[tuple[int, int, int] | None] = [None] * slots  # (rid, step, token)
        self.truth: dict[int, list[int]] = {}
        self.step = -1
        self.wire = Writer(), Reader()

    def submit(self, rid: int, prompt: tuple[int, ...]) -> None:
        self.truth[rid] = list(prompt)
        self.given[rid] = len(prompt)

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.step + 1
        self.step = plan.step
        writer, reader = self.wire
        assert reader.plan(reader.order(writer.plan(plan))) == plan, "another rank gets another plan"
        void = [w for w in plan.work if w.chained and w.rid in self.spoilt]
        for work in void:  # it may write whatever it likes to what it was given
            self.kv.update(
                ((work.blocks[p // self.block_size], p % self.block_size), -1)
                for p in range(len(self.truth[work.rid]) - 1, work.end)
            )
        self.spoilt.clear()
        plan = replace(plan, work=tuple(self._resolved(w) for w in plan.work if w not in void))
        result = self._run(plan) if plan.work else StepResult(plan.step, ())
        self.drafted = {w.rid: w.drafts for w in plan.work}
        return StepResult(plan.step, (*result.outputs, *(Output(w.rid, (0,)) for w in void)))

    def _resolved(self, work: Work) -> Work:
        if not work.chained:
            return work
        assert set(work.tokens) == {PENDING} and work.count == work.drafts + 1
        row = self.last[work.slot]
        assert row is not None and row[:2] == (work.rid, self.step - 1), "the row holds somebody else's token"
        start = len(self.truth[work.rid]) - 1
        shift = start - work.start
        assert 0 <= shift <= self.drafted[work.rid], "the step before brought more than was reserved for"
        drafts = (self.chain(work.rid, work.output_index + shift) + [0] * MAX_DRAFTS)[: work.drafts]
        return replace(
            work,
            start=start,
            output_index=work.output_index + shift,
            left=work.left - shift,
            tokens=(row[2], *drafts),
            chained=False,
        )

    def _run(self, plan: StepPlan) -> StepResult:
        assert len({w.slot for w in plan.work}) == len({w.rid for w in plan.work}) == len(plan.work) > 0
        written = [self._write(work) for work in plan.work]
        for work, blocks in zip(plan.work, written):  # no ordering within a step: nobody reads what another writes
            assert all(w is work or not blocks & set(w.blocks) for w in plan.work)
        return StepResult(plan.step, tuple(o for w in plan.work if (o := self._sample(w)) is not None))

    def _tokens(self, work: Work) -> list[int]:
        tokens = list(work.tokens)
        assert PENDING not in tokens[:-1]
        if tokens[-1] == PENDING:
            row = self.last[work.slot]
            assert row is not None and row[:2] == (work.rid, self.step - 1), "the row holds somebody else's token"
            tokens[-1] = row[2]
        return tokens

    def _write(self, work: Work) -> set[int]:
        truth, tokens = self.truth[work.rid], self._tokens(work)
        assert tokens[: work.count - work.drafts] == truth[work.start : work.end - work.drafts]
        assert 0 <= work.drafts < work.count and (work.sample or not work.drafts)
        assert len(work.blocks) >= -(-work.end // self.block_size)
        assert len(set(work.blocks)) == len(work.blocks)
        state = self._state(work, work.start)
        for position, token in enumerate(tokens, work.start):
            state = extend(state, token)
            self.kv[work.blocks[position // self.block_size], position % self.block_size] = state
        return {work.blocks[p // self.block_size] for p in range(work.start, work.end)}

    def _state(self, work: Work, end: int) -> int:
        """Walks the block table up to `end`, checking it against the true tokens."""
        state = 1
        for position in range(end):
            state = extend(state, self.truth[work.rid][position])
            cell = (work.blocks[position // self.block_size], position % self.block_size)
            assert self.kv.get(cell) == state, f"request {work.rid}: wrong KV at position {position}, block {cell[0]}"
        return state

    def _sample(self, work: Work) -> Output | None:
        end = work.end - work.drafts
        state = self._state(work, end)
        scores = tuple(TokenLogprob(t, -float(p)) for p, t in enumerate(work.prompt_targets, work.start + 1))
        assert [s.token for s in scores] == self.truth[work.rid][work.start + 1 :][: len(scores)]
        if not work.sample:
            return Output(work.rid, prompt_logprobs=scores) if scores else None
        truth = self.truth[work.rid]
        assert end == len(truth), "sampled before the end of what is known"
        drawn = []
        for draw, guess in enumerate((*work.guesses, None), work.output_index):
            if self.errors.get(work.rid) == draw:
                if work.drafts:
                    truth += drawn
                    self.spoilt.add(work.rid)
                    return Output(work.rid, tuple(drawn), self._logprobs(work, drawn), scores, again=True)
                truth.append(0)
                self.last[work.slot] = (work.rid, self.step, 0)
                return Output(work.rid, error="logits are not finite")
            drawn.append(next_token(state))
            state = extend(state, drawn[-1])
            if drawn[-1] != guess:
                break
        truth += drawn
        self.last[work.slot] = (work.rid, self.step, drawn[-1])
        return Output(work.rid, tuple(drawn), self._logprobs(work, drawn), scores)

    @staticmethod
    def _logprobs(work: Work, drawn: list[int]) -> tuple[TokenLogprob, ...]:
        return tuple(TokenLogprob(t, -1.0) for t in drawn) if work.params.logprobs is not None else ()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenLogprob] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    cached: int = 0


class Rig:
    """A scheduler, a runner, and the loop between them; `check_integrity` after every call.

    `drafter` guesses what follows a request's text, given its prompt and how many output tokens it has. Where it may,
    a step lands before the next one is planned: always, or as chance (`rng`) has it; with drafts it must, unless the
    next one can be planned behind it: tried as chance (`trails`) has it.
    """

    def __init__(
        self,
        *,
        overlapped=True,
        errors=None,
        drafter: Callable[[tuple[int, ...], int], list[int]] | None = None,
        rng: random.Random | None = None,
        trails: random.Random | None = None,
        **limits,
    ) -> None:
        self.limits = {
            "num_blocks": 16,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_step_tokens": 64,
            "max_model_len": 64,
        } | limits
        self.scheduler = Scheduler(**self.limits)
        chain = lambda rid, draw: drafter(self.prompts[rid], draw) if drafter else []  # noqa: E731
        self.runner = FakeRunner(self.limits["block_size"], self.limits["max_num_seqs"], errors, chain)
        self.trails = trails
        self.overlapped = overlapped
        self.drafter, self.rng = drafter, rng
        self.flying: StepResult | None = None
        self.answers: dict[int, Answer] = {}
        self.plans: list[StepPlan] = []
        self.params: dict[int, SamplingParams] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.order: list[int] = []  # live requests, oldest first
        self.ranked = False  # requests have priorities or deadlines
        self.ended: list[int] = []

    def submit(self, rid, prompt, seed=0, keys=(), order=FIRST_COME, now=0.0, **params) -> None:
        self.prompts[rid], self.params[rid] = tuple(prompt), SamplingParams(**params)
        self.ranked = self.ranked or order != FIRST_COME
        self.scheduler.submit(Submit(rid, tuple(prompt), self.params[rid], cache_keys=keys, order=order), seed, now)
        self.runner.submit(rid, tuple(prompt))
        self.answers[rid] = Answer()
        self.order.append(rid)
        self.scheduler.check_integrity()

    def cancel(self, rid) -> None:
        self.scheduler.cancel(rid)
        if rid in self.order:
            self.order.remove(rid)
        self.scheduler.check_integrity()

    def expire(self, now) -> list[int]:
        rids = []
        for delta in self.scheduler.expire(now):
            assert delta == Delta(delta.rid, finish_reason="deadline")
            self.answers[delta.rid].finish = "deadline"
            self.order.remove(delta.rid)
            rids.append(delta.rid)
        self.scheduler.check_integrity()
        return rids

    def tick(self, between=lambda: None) -> StepPlan | None:
        """Plans and runs one step; commits its predecessor (overlapped) or itself."""
        plan = None
        if self.flying is not None and self.trails is not None and self.trails.random() < 0.8:
            plan = self.scheduler.plan_chained(self.trails.choice([0, 1, 3, 8]))
        behind = plan is not None
        if self.flying is not None and self.drafter is not None and not behind:
            drafted = any(w.drafts for w in self.plans[-1].work)
            if drafted or self.rng is None or self.rng.random() < 0.7:
                self._commit(self.flying)
                self.flying = None
        plan = plan or self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is not None and self.drafter is not None and not behind:
            guesses = {w.rid: self.drafter(self.prompts[w.rid], w.output_index) for w in plan.work}
            plan = self.scheduler.add_drafts(plan, guesses)
            self.scheduler.check_integrity()
        result = None
        if plan is not None:
            self._check(plan)
            self.plans.append(plan)
            result = self.runner.run(plan)
        elif self.scheduler.has_work:
            assert self.flying is not None or self.may_wait(), "live requests, nothing in flight, nothing to do"
        between()
        due, self.flying = (self.flying, result) if self.overlapped else (result, None)
        if due is not None:
            self._commit(due)
        return plan

    def oldest(self) -> int:
        """The request that must not be held up."""
        return self.order[0]

    def may_wait(self) -> bool:
        """Whether requests may wait for something else than a step."""
        return False

    def set_overlapped(self, overlapped) -> None:
        if self.flying is not None and not overlapped:
            self._commit(self.flying)
            self.flying = None
        self.overlapped = overlapped

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.scheduler.has_work and self.flying is None:
                break
            self.tick()
        assert not self.scheduler.has_work and not self.order
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.blocks_owned) == (0, 0, 0)
        assert stats.steps == len(self.plans)
        self.scheduler.check_integrity()

    def expect(self, rid, cached=None) -> None:
        limit = min(self.limits["max_model_len"], self.limits["num_blocks"] * self.limits["block_size"] + 1)
        tokens, finish = alone(self.prompts[rid], self.params[rid], limit)
        answer = self.answers[rid]
        assert (tuple(answer.tokens), answer.finish, answer.error) == (tokens, finish, None)
        if cached is not None:
            assert answer.cached == cached

    def works(self, rid) -> list[Work]:
        return [w for plan in self.plans for w in plan.work if w.rid == rid]

    def _check(self, plan: StepPlan) -> None:
        assert plan.tokens <= self.limits["max_step_tokens"]
        assert len(plan.work) <= self.limits["max_num_seqs"]
        for work in plan.work:
            assert work.end < self.limits["max_model_len"]
            if (most := work.params.max_tokens) is not None:
                assert work.end < len(self.prompts[work.rid]) + most
            assert work.output_index >= 0 and (
                not work.sample or work.output_index == work.end - work.drafts - len(self.prompts[work.rid])
            )
            assert work.drafts <= MAX_DRAFTS and (not work.drafts or work.drafts < work.left)
        if self.ranked:
            return
        # The oldest is never held up, but for a result it is waiting for.
        oldest = self.oldest()
        waits = self.flying is not None and any(w.rid == oldest and w.sample for w in self.plans[-1].work)
        assert waits or self.may_wait() or any(w.rid == oldest for w in plan.work), (
            f"the oldest request {oldest} is held up"
        )

    def _commit(self, result: StepResult) -> None:
        deltas = self.scheduler.commit(result)
        self.scheduler.check_integrity()
        assert len({d.rid for d in deltas}) == len(deltas)
        for delta in deltas:
            answer = self.answers[delta.rid]
            assert delta.rid in self.order, "a delta after the end"
            assert answer.deltas == [] or delta.cached_tokens == 0, "only the first delta reports hits"
            answer.deltas.append(delta)
            answer.tokens += delta.tokens
            answer.scores += delta.prompt_logprobs
            answer.cached += delta.cached_tokens
            assert delta.accepted <= min(delta.drafted, len(delta.tokens))
            assert len(delta.logprobs) == (len(delta.tokens) if self.params[delta.rid].logprobs is not None else 0)
            if delta.finish_reason is not None:
                answer.finish, answer.error = delta.finish_reason, delta.error
                self.order.remove(delta.rid)
                self.ended.append(delta.rid)


modes = pytest.mark.parametrize("overlapped", [False, True], ids=["sequential", "overlapped"])


def prompt_of(length, seed=1):
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB) for _ in range(length))


def first_answer_token(prompt):
    return alone(prompt, SamplingParams(max_tokens=1), 10_000)[0][0]


@modes
def test_one_request(overlapped):
    rig = Rig(overlapped=overlapped)
    rig.submit(7, prompt_of(5), seed=99, max_tokens=6, logprobs=0)
    rig.finish()
    rig.expect(7, cached=0)
    works = rig.works(7)
    assert [w.count for w in works] == [5, 1, 1, 1, 1, 1]
    assert [w.output_index for w in works] == [0, 1, 2, 3, 4, 5]
    assert all(w.sample and w.seed == 99 and w.slot == works[0].slot for w in works)
    assert [w.tokens == (PENDING,) for w in works] == [False] + [overlapped] * 5
    stats = rig.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens, stats.preemptions) == (5, 0, 6, 0)


@modes
def test_max_tokens_1(overlapped):
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt_of(9), max_tokens=1)
    rig.finish()
    rig.expect(1)
    assert len(rig.works(1)) == 1  # never planned beyond what is known in advance


@modes
def test_max_model_len_ends_a_request(overlapped):
    rig = Rig(overlapped=overlapped, max_model_len=12)
    rig.submit(1, prompt_of(11))
    rig.submit(2, prompt_of(3, seed=2))
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert (len(rig.answers[1].tokens), len(rig.answers[2].tokens)) == (1, 9)


@modes
def test_stop_token_on_the_very_first_token(overlapped):
    prompt = prompt_of(8)
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt, max_tokens=9, stop_token_ids=(first_answer_token(prompt),))
    rig.finish()
    rig.expect(1)
    assert rig.answers[1].finish == "stop" and len(rig.answers[1].tokens) == 1
    assert len(rig.works(1)) == 1 + overlapped  # the optimistic step is computed in vain and ignored


@modes
def test_chunked_prompt_lets_the_next_use_the_rest_of_the_budget(overlapped):
    rig = Rig(overlapped=overlapped, max_step_tokens=8)
    rig.submit(1, prompt_of(19), max_tokens=4)
    rig.submit(2, prompt_of(10, seed=2), max_tokens=4)
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert [(w.start, w.count, w.sample) for w in rig.works(1)[:3]] == [(0, 8, False), (8, 8, False), (16, 3, True)]
    assert [(w.rid, w.count) for w in rig.plans[2].work] == [(1, 3), (2, 5)]
    assert [(w.rid, w.count) for w in rig.plans[3].work] == [(1, 1), (2, 5)]


@modes
@pytest.mark.parametrize("length", [4, 8, 16])
def test_prompt_is_a_multiple_of_block_size(overlapped, length):
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt_of(length), max_tokens=5)
    rig.finish()
    rig.expect(1)
    assert [len(w.blocks) for w in rig.works(1)[:2]] == [length // 4, length // 4 + 1]


@modes
def test_prompt_fully_cached_recomputes_its_last_block(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(12)
    for rid in (1, 2):
        rig.submit(rid, prompt, max_tokens=3)
        rig.finish()
    rig.expect(1, cached=0)
    rig.expect(2, cached=8)  # at least one token must be computed, or there are no logits
    first = rig.works(2)[0]
    assert (first.start, first.count) == (8, 4)
    assert first.blocks[:2] == rig.works(1)[0].blocks[:2]
    assert rig.scheduler.stats().blocks_cached == 3  # the recomputed block was not kept twice
    assert rig.scheduler.stats().cached_tokens == 8


@modes
def test_two_identical_prompts_at_once(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(13)
    rig.submit(1, prompt, max_tokens=8)
    rig.submit(2, prompt, max_tokens=8)
    rig.finish()
    rig.expect(1, cached=0), rig.expect(2, cached=0)
    one, two = rig.works(1), rig.works(2)
    assert not set(one[0].blocks) & set(two[0].blocks)
    assert one[-1].blocks[:3] == two[-1].blocks[:3]  # the second adopted the blocks of the first


@modes
def test_conversation_finds_its_own_answer_cached(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(6)
    rig.submit(1, prompt, max_tokens=7)
    rig.finish()
    rig.submit(2, (*prompt, *rig.answers[1].tokens, *prompt_of(3, seed=9)), max_tokens=2)
    rig.finish()
    rig.expect(2, cached=12)


@modes
def test_prefix_cache_off(overlapped):
    rig = Rig(overlapped=overlapped, prefix_cache=False)
    for rid in (1, 2):
        rig.submit(rid, prompt_of(12), max_tokens=3)
        rig.finish()
        rig.expect(rid, cached=0)
    assert rig.scheduler.stats().blocks_cached == 0


@modes
def test_pool_of_the_minimal_size(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=1, max_num_seqs=2)
    rig.submit(1, prompt_of(4), max_tokens=9)  # the last token needs no room
    rig.submit(2, prompt_of(2, seed=2), max_tokens=3)
    rig.submit(3, prompt_of(1, seed=3))  # no limit: ends when the cache is full
    with pytest.raises(RequestError, match="KV cache holds 4: shorten it, or start the engine with more kv_blocks"):
        rig.submit(4, prompt_of(5))
    rig.finish()
    for rid, count in ((1, 1), (2, 3), (3, 4)):
        rig.expect(rid)
        assert len(rig.answers[rid].tokens) == count


@modes
def test_preemption_takes_the_youngest_and_loses_nothing(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24)
    for rid in (1, 2, 3):
        rig.submit(rid, prompt_of(5, seed=rid), max_tokens=14)
    rig.finish()
    for rid in (1, 2, 3):
        rig.expect(rid)
    assert rig.scheduler.stats().preemptions > 0
    assert [w.start for w in rig.works(1)] == [0, *range(5, 18)]  # the oldest was never preempted
    assert sum(w.count > 1 for w in rig.works(2)) > 1  # the second was, and recomputed what it had


def test_request_preempted_with_a_pending_sample_keeps_its_token():
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12)
    # Both fill a block with their third token; the third block can then be had by one of them only.
    rig.submit(1, prompt_of(3, seed=1), max_tokens=8)
    rig.submit(2, prompt_of(3, seed=2), max_tokens=8)
    while not rig.scheduler.stats().preemptions:
        plan = rig.tick()
    assert [w.rid for w in plan.work] == [1]
    assert [w.rid for w in rig.plans[-2].work if w.sample] == [1, 2]  # the victim's sample was in flight
    delivered = len(rig.answers[2].tokens)
    assert delivered == 2  # and was delivered when it arrived
    rig.finish()
    rig.expect(1), rig.expect(2)
    resumed = next(w for w in rig.works(2)[2:] if w.count > 1)
    assert PENDING not in resumed.tokens
    assert resumed.end == 3 + delivered and resumed.output_index == delivered


def rig_that_preempts_2_while_its_second_token_is_on_the_way(**kwargs):
    """Step 1 gives request 2 the last block; step 2 takes it away, because request 1 wants one."""
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12, **kwargs)
    rig.submit(1, prompt_of(3, seed=1), max_tokens=8)
    rig.submit(2, prompt_of(4, seed=2), max_tokens=2)
    for _ in range(3):
        assert rig.scheduler.stats().preemptions == 0
        assert rig.answers[2].finish is None
        rig.tick()
    assert rig.scheduler.stats().preemptions == 1
    return rig


def test_preempted_request_finishes_with_its_pending_sample():
    rig = rig_that_preempts_2_while_its_second_token_is_on_the_way()
    assert rig.answers[2].finish == "length"
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert len(rig.works(2)) == 2


def test_request_that_preempts_itself_does_not_resume_before_its_sample_arrives():
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12)
    rig.submit(1, prompt_of(6, seed=1), max_tokens=3)  # never wants a third block: nothing is reserved for it
    rig.submit(2, prompt_of(3, seed=2), max_tokens=6)
    rig.tick(), rig.tick()
    plan = rig.tick()
    assert rig.scheduler.stats().preemptions == 1
    assert [w.rid for w in plan.work] == [1]  # what 2 gave back would do for its known tokens
    rig.finish()
    rig.expect(1), rig.expect(2)


def test_error_of_a_preempted_request():
    rig = rig_that_preempts_2_while_its_second_token_is_on_the_way(errors={2: 1})
    assert (rig.answers[2].finish, len(rig.answers[2].tokens)) == ("error", 1)
    rig.finish()
    rig.expect(1)
    rig.submit(3, rig.prompts[2], max_tokens=2)
    rig.finish()
    rig.expect(3, cached=0)


@modes
def test_cancel_while_in_flight(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    rig.submit(1, prompt_of(6), max_tokens=20)
    rig.submit(2, prompt_of(6, seed=2), max_tokens=4)
    rig.tick()
    rig.tick()
    before = len(rig.answers[1].tokens)
    rig.tick(between=lambda: rig.cancel(1))
    assert rig.scheduler.stats().waiting == 1
    rig.submit(1, prompt_of(7, seed=3), max_tokens=3)  # the id may be used again at once
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert before < 4
    assert rig.works(2)[0].slot == rig.works(1)[0].slot


def test_cancel_unknown_waiting_and_finished():
    rig = Rig(max_num_seqs=1)
    rig.scheduler.cancel(5)
    rig.submit(1, prompt_of(3), max_tokens=2)
    rig.submit(2, prompt_of(3), max_tokens=2)
    rig.tick()
    rig.cancel(2)
    rig.finish()
    rig.cancel(1)
    rig.expect(1)
    assert rig.answers[2].deltas == []


@modes
def test_error_ends_one_request_and_its_blocks_are_not_found_again(overlapped):
    rig = Rig(overlapped=overlapped, errors={2: 6})
    rig.submit(1, prompt_of(6, seed=1), max_tokens=12)
    rig.submit(2, prompt_of(9, seed=2), max_tokens=12)
    rig.finish()
    rig.expect(1)
    answer = rig.answers[2]
    assert (answer.finish, answer.error) == ("error", "logits are not finite")
    assert tuple(answer.tokens) == alone(rig.prompts[2], rig.params[2], 64)[0][:6]
    rig.submit(3, prompt_of(9, seed=2), max_tokens=12)
    rig.submit(4, prompt_of(6, seed=1), max_tokens=12)
    rig.finish()
    rig.expect(3, cached=0), rig.expect(4, cached=4)


@modes
def test_error_leaves_those_who_share_the_blocks_alone(overlapped):
    prompt = prompt_of(16)
    rig = Rig(overlapped=overlapped, errors={1: 4})
    rig.submit(1, prompt, max_tokens=12)
    rig.tick(), rig.tick()
    rig.submit(2, (*prompt, 3), max_tokens=20)
    rig.finish()
    rig.expect(2, cached=16)
    assert rig.answers[1].finish == "error"
    assert rig.scheduler.stats().blocks_cached == 0  # nor is anything found that was computed on top of them
    rig.submit(3, prompt, max_tokens=2)
    rig.finish()
    rig.expect(3, cached=0)


@modes
def test_eviction_lets_cached_blocks_make_room(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=25)
    for rid in range(5):
        rig.submit(rid, prompt_of(13, seed=rid), max_tokens=8)
        rig.finish()
        rig.expect(rid, cached=0)
    assert rig.scheduler.stats().preemptions == 0
    rig.submit(9, prompt_of(13, seed=4), max_tokens=8)
    rig.finish()
    rig.expect(9, cached=12)


@modes
def test_admission_keeps_a_reserve_for_those_running(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24)
    rig.submit(1, prompt_of(11, seed=1), max_tokens=5)
    rig.submit(2, prompt_of(12, seed=2), max_tokens=2)  # three blocks are free, but 1 will soon want one of them
    rig.tick()
    assert (rig.scheduler.stats().running, rig.scheduler.stats().waiting) == (1, 1)
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0


@modes
def test_prompt_logprobs_come_complete_and_in_order(overlapped):
    rig = Rig(overlapped=overlapped, max_step_tokens=8)
    prompt = prompt_of(21)
    rig.submit(1, prompt, max_tokens=3)
    rig.finish()
    rig.submit(2, prompt, max_tokens=1, prompt_logprobs=0)
    rig.submit(3, prompt[:1], max_tokens=2, prompt_logprobs=0)
    rig.finish()
    rig.expect(2, cached=0), rig.expect(3, cached=0)  # every position had to be computed
    assert [(s.token, s.logprob) for s in rig.answers[2].scores] == [(t, -float(p)) for p, t in enumerate(prompt)][1:]
    # Request 3's single token is part of the first step.
    assert [w.prompt_targets for w in rig.works(2)] == [prompt[1:8], prompt[8:15], prompt[15:21]]
    assert rig.answers[3].scores == []
    assert all(w.prompt_targets == () for w in rig.works(1))


@modes
def test_prompt_logprobs_survive_preemption(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24, max_step_tokens=5)
    for rid in (1, 2, 3):
        rig.submit(rid, prompt_of(7, seed=rid), max_tokens=12, prompt_logprobs=0)
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    for rid in (1, 2, 3):
        rig.expect(rid)
        assert [s.token for s in rig.answers[rid].scores] == list(rig.prompts[rid][1:])


@modes
def test_more_requests_than_budget_all_finish(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=4, max_step_tokens=2, num_blocks=40)
    for rid in range(8):
        rig.submit(rid, prompt_of(3 + rid, seed=rid), max_tokens=5)
    rig.finish()
    for rid in range(8):
        rig.expect(rid)
    ends = [max(p.step for p in rig.plans if any(w.rid == rid for w in p.work)) for rid in range(8)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("chain", [0, 2])
def test_works_that_only_decode_are_of_few_series(chain):
    scheduler = Scheduler(num_blocks=40, block_size=16, max_num_seqs=4, max_step_tokens=64, max_model_len=256)
    for rid in (1, 2):
        scheduler.submit(Submit(rid, prompt_of(10, rid), SamplingParams(temperature=0.0, max_tokens=60)), rid)
    runner, found = FakeRunner(16, 4, chain=lambda rid, draw: [0, 0]), {}
    for rid in (1, 2):
        runner.submit(rid, prompt_of(10, rid))
    plan = scheduler.plan()
    while plan is not None and len(found.get(1, ())) < 30:
        for w in plan.work:
            found.setdefault(w.rid, []).append(w)
        after = scheduler.plan_chained(chain) if chain else scheduler.plan()
        scheduler.commit(runner.run(plan))
        plan = after or scheduler.plan()
    assert {w.series for w in found[1]}.isdisjoint(w.series for w in found[2])
    for works in found.values():
        assert len({w.series for w in works}) < len(works) / 3


def test_block_table_is_copied_only_when_it_grows():
    rig = Rig(num_blocks=600, max_model_len=2_400, max_step_tokens=4_096)
    rig.submit(1, prompt_of(2_001), max_tokens=12)
    rig.finish()
    rig.expect(1)
    tables = [w.blocks for w in rig.works(1)]
    assert len({id(t) for t in tables}) == len({len(t) for t in tables}) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "the prompt is empty"),
        (prompt_of(64), "the prompt has 64 tokens; this model's context of 64 leaves room for at most 63"),
        ((3, -1, 4), "token ids must be between 0 and"),
        ((3, 2**31), "token ids must be between 0 and"),
    ],
)
def test_unservable_prompts_are_refused(prompt, message):
    scheduler = Scheduler(num_blocks=99, block_size=4, max_num_seqs=2, max_step_tokens=8, max_model_len=64)
    with pytest.raises(RequestError, match=message) as error:
        scheduler.submit(Submit(1, prompt, SamplingParams()), 0)
    assert error.value.param == "prompt"
    assert not scheduler.has_work and scheduler.plan() is None


def test_contract_with_the_loop():
    rig = Rig()
    rig.submit(1, prompt_of(6), max_tokens=9)
    with pytest.raises(AssertionError, match="live already"):
        rig.scheduler.submit(Submit(1, (1,), SamplingParams()), 0)
    first = rig.scheduler.plan()
    assert first is not None
    with pytest.raises(AssertionError, match="not the oldest"):
        rig.scheduler.commit(StepResult(first.step + 1, ()))
    rig.scheduler.plan()
    with pytest.raises(AssertionError, match="before planning a third"):
        rig.scheduler.plan()
    with pytest.raises(AssertionError, match="brought no token"):
        rig.scheduler.commit(StepResult(first.step, ()))


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
            rig.params[rid], rig.prompts[rid] = params, prompt
            rig.scheduler.submit(Submit(rid, prompt, params), seed=rid)
            rig.runner.submit(rid, prompt)
            rig.answers[rid] = Answer()
            rig.order.append(rid)
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


@modes
def test_waiting_requests_are_admitted_by_priority_then_deadline_then_arrival(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    orders = [FIRST_COME, Order(5), Order(1), Order(1, 60.0), Order(1, 30.0), FIRST_COME]
    for rid, order in enumerate(orders):
        rig.submit(rid, prompt_of(5, seed=rid), max_tokens=3, order=order)
        if rid == 0:
            rig.tick()  # runs: no later request stops it
    rig.finish()
    assert rig.ended == [0, 5, 4, 3, 2, 1]
    for rid in range(len(orders)):
        rig.expect(rid)


def test_the_last_priority_gives_its_blocks_back_first():
    rig = Rig(num_blocks=6, max_model_len=24)
    rig.submit(1, prompt_of(5, seed=1), max_tokens=14, order=Order(9))
    rig.tick()
    rig.submit(2, prompt_of(5, seed=2), max_tokens=14)
    rig.submit(3, prompt_of(5, seed=3), max_tokens=14)
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    assert [w.start for w in rig.works(2)] == [0, *range(5, 18)] and sum(w.count > 1 for w in rig.works(1)) > 1
    for rid in (1, 2, 3):
        rig.expect(rid)


@modes
def test_a_deadline_ends_waiting_and_running_requests(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    rig.submit(0, prompt_of(5, seed=0), max_tokens=30, order=Order(0, 10.0), now=100.0)
    rig.submit(1, prompt_of(5, seed=1), max_tokens=3, order=Order(0, 5.0), now=101.0)  # admitted first
    rig.submit(2, prompt_of(5, seed=2), max_tokens=3)
    rig.submit(3, prompt_of(5, seed=3), max_tokens=30, order=Order(0, 8.0), now=101.0)
    for _ in range(6):
        rig.tick()
    assert rig.expire(105.9) == [] and rig.expire(109.5) == [3]
    rig.tick()
    assert rig.expire(111.0) == [0]
    rig.finish()
    rig.expect(1)
    rig.expect(2)
    assert rig.expire(1e9) == []


def test_deadlines_of_ended_requests_take_bounded_room():
    rig = Rig()
    for rid in range(1000):
        rig.submit(rid, (1, 2), max_tokens=1, order=Order(0, 1e6))
        rig.finish()
    assert len(rig.scheduler._deadlines) < 200


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
            rig.params[rid], rig.prompts[rid], rig.ranked = params, prompt, True
            rig.scheduler.submit(Submit(rid, prompt, params, order=order), seed=rid, now=tick)
            rig.runner.submit(rid, prompt)
            rig.answers[rid] = Answer()
            rig.order.append(rid)
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


class Always(random.Random):
    """Whatever is left to chance is done, with as many drafts as there may be."""

    def random(self):
        return 0.0

    def choice(self, options):
        return options[-1]


def perfect(prompt, draw):
    return list(alone(prompt, SamplingParams(max_tokens=draw + 20), 10_000)[0][draw:])


@modes
def test_perfect_drafts_bring_their_number_and_one_more(overlapped):
    rig = Rig(overlapped=overlapped, drafter=perfect, num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(5), max_tokens=31, logprobs=0)
    rig.finish()
    rig.expect(1)
    assert [d.accepted for d in rig.answers[1].deltas] == [0] + [MAX_DRAFTS] * 3 + [2]
    assert [len(d.tokens) for d in rig.answers[1].deltas] == [1] + [MAX_DRAFTS + 1] * 3 + [3]  # up to max_tokens
    assert rig.scheduler.stats().generated_tokens == 31
    # What was accepted is in the cache as if it had been computed one by one: 36 tokens, the last of them not computed.
    rig.drafter = None
    rig.submit(2, (*prompt_of(5), *rig.answers[1].tokens, 1), max_tokens=2)
    rig.finish()
    rig.expect(2, cached=32)


@modes
def test_rejected_drafts_leave_no_trace(overlapped):
    wrong = lambda prompt, draw: [(t + 1) % VOCAB for t in perfect(prompt, draw)]  # noqa: E731
    rig = Rig(overlapped=overlapped, drafter=wrong, num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(7), max_tokens=20)
    rig.finish()
    rig.expect(1)
    assert all((d.accepted, len(d.tokens)) == (0, 1) for d in rig.answers[1].deltas)
    assert {d.drafted for d in rig.answers[1].deltas[1:-8]} == {MAX_DRAFTS}
    assert rig.scheduler.stats().blocks_cached == (7 + 20 - 1) // 4


def test_drafts_take_only_what_is_left_over():
    """Of the step's budget and of the pool: nobody is preempted or waits for the sake of a guess."""
    rig = Rig(overlapped=False, drafter=perfect, num_blocks=7, max_step_tokens=6, max_model_len=20)
    rig.submit(1, prompt_of(4), max_tokens=12)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].drafts == 5  # 1 + 5 = 6 tokens
    rig.submit(2, prompt_of(8, seed=2), max_tokens=2)
    rig.tick()
    assert [(w.rid, w.count, w.drafts) for w in rig.plans[-1].work] == [(1, 1, 0), (2, 5, 0)]
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0

    rig = Rig(overlapped=False, drafter=perfect, num_blocks=3, max_model_len=12)
    rig.submit(1, prompt_of(3), max_tokens=4)
    rig.submit(2, prompt_of(2, seed=2), max_tokens=6)
    rig.tick(), rig.tick()
    assert [w.drafts for w in rig.plans[-1].work] == [2, 1]  # the first one's take the last block
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0


def test_a_request_with_drafts_in_flight_waits_for_them():
    rig = Rig(overlapped=True, drafter=perfect)
    rig.submit(1, prompt_of(5), max_tokens=40)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].drafts == MAX_DRAFTS
    assert rig.scheduler.plan() is None


def test_steps_behind_drafts_bring_their_number_and_one_more():
    rig = Rig(drafter=perfect, trails=Always(), num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(5), max_tokens=50, logprobs=0)
    rig.finish()
    rig.expect(1)
    # Planned behind each other as long as the answer may go on after all of them; then it sits out until they landed.
    assert [len(d.tokens) for d in rig.answers[1].deltas] == [1] + [MAX_DRAFTS + 1] * 5 + [4]
    assert [w.chained for w in rig.works(1)] == [False] + [True] * 6
    assert rig.scheduler.stats().blocks_cached == (5 + 50 - 1) // 4


def test_nothing_is_planned_behind_where_somebody_waits():
    rig = Rig(drafter=perfect, trails=Always(), max_num_seqs=2, num_blocks=40, max_model_len=100)
    rig.submit(1, prompt_of(5), max_tokens=60)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].chained
    rig.submit(2, prompt_of(6, seed=2), max_tokens=60)
    rig.tick()  # which lands what is in flight, and admits the newcomer
    assert [(w.rid, w.chained) for w in rig.plans[-1].work] == [(1, False), (2, False)]
    rig.submit(3, prompt_of(4, seed=3), max_tokens=4)  # for whom there is no place
    rig.tick()
    assert [(w.rid, w.chained) for w in rig.plans[-1].work] == [(1, True), (2, True)]
    rig.finish()
    for rid in (1, 2, 3):
        rig.expect(rid)


def test_drafts_behind_others_take_only_what_is_left_over():
    rig = Rig(drafter=perfect, trails=Always(), num_blocks=5, max_model_len=20)
    for rid in (1, 2):
        rig.submit(rid, prompt_of(4, seed=rid), max_tokens=12)
    rig.tick(), rig.tick()
    assert [(w.chained, w.drafts) for w in rig.plans[-1].work] == [(True, 0)] * 2  # with 8 each it would take 8 blocks
    assert rig.scheduler.stats().preemptions == 0
    rig.finish()
    rig.expect(1), rig.expect(2)


def test_who_may_have_ended_sits_out_and_comes_back():
    wrong = lambda prompt, draw: [(t + 1) % VOCAB for t in perfect(prompt, draw)]  # noqa: E731
    rig = Rig(drafter=wrong, trails=Always(), num_blocks=40, max_model_len=100)
    rig.submit(1, prompt_of(5), max_tokens=60)
    rig.submit(2, prompt_of(6, seed=2), max_tokens=8)
    rig.finish()
    rig.expect(1), rig.expect(2)
    kinds = [[w.chained for w in p.work if w.rid == 2] for p in rig.plans]
    assert [False] in kinds[2:] and [] in kinds[: kinds.index([False], 2)], kinds
    assert all(w.chained for w in rig.works(1)[1:])
