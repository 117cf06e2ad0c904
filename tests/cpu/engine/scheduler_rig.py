"""A scheduler for tests, driven by a fake runner that has no model but keeps a KV cache of its own.

The runner's KV remembers in every (block, offset) the hash of the whole prefix written there. Whenever a request is
computed, its block table is walked and must yield exactly the request's true tokens: every way of sharing, freeing or
reusing a block wrongly shows. The next token is a function of all previous ones, so outputs show it too.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from perilune.core.messages import FIRST_COME, Delta, Submit
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
    """The answer of the fake model to this request without any other: (tokens, finish reason)."""
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
    """Executes plans in order; `errors` maps a request to the output index at which it fails. `chain` gives the drafts
    after a request's output tokens, for chained works."""

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
        self.spoilt: set[int] = set()  # requests that got no last token in the last step: a work chained to it is void
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
        for work in void:  # a void work may write anything to its own blocks
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
        # Works of a step run in any order: none may have a block that another one writes.
        for work, blocks in zip(plan.work, written):
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
        for draw, guess in enumerate((*work.draft_tokens, None), work.output_index):
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

    `drafter` gives drafts after a request's text, from its prompt and the number of its output tokens. With a drafter
    a step is committed before the next one is planned: always, or with `rng` in 7 of 10 cases at random and always if
    it had drafts. With `trails` the next step is chained to it instead in 8 of 10 cases, if that is possible.
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

    def submit(self, rid, prompt, seed=0, keys=(), order=FIRST_COME, now=0.0, params=None, **more) -> None:
        self.prompts[rid], self.params[rid] = tuple(prompt), params or SamplingParams(**more)
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
