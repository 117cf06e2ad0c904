"""Which request advances by how many tokens in the next step, on which KV blocks. Pure policy: no tensors.

Requests have a rank: priority, then deadline, then arrival. Running requests go first, by rank; then waiting requests
are admitted by rank. When a running request cannot get a block, the running request of the last rank is preempted: it
gives back its slot and all blocks, and is computed again later. No request is preempted only because another one waits.
So among requests of one priority none overtakes an older one, and the first always advances: in the worst case it gets
the whole pool, and `submit` has refused requests that do not fit the whole pool. Requests of a later priority may wait
without bound while earlier ones keep coming; only a deadline ends such a wait.

Steps overlap: step N+1 is planned while step N runs, assuming that no request ends in N. A token that N samples is
planned as PENDING at its position. If the request ends in N, its part of N+1 is computed and ignored.

Drafts use only free capacity: `add_drafts` gives them blocks and step tokens that no request needs in this step.
`plan` leaves out a request with drafts in flight, because the number of tokens it will get is unknown. `plan_chained`
includes it: it plans as if the step in flight yielded one token and reserves blocks for the case that all drafts are
accepted; the device computes the real positions (ops/drafts/advance_inputs.py).

The prompt tokens of a step are split among several prompts, so that a short prompt need not wait for a long one before
it (engine/step_times/prompt_turns.py). While requests decode, the pacer (engine/step_times/pacing.py) limits the number
of prompt tokens per step; the limit may be 0.

A request that next needs a picture that is not encoded yet (engine/vision/encoder.py) keeps its slot, its
blocks and its place before younger requests, but gets no work.

Steps execute one at a time, in the order in which they were planned. So blocks and slots are given back at once, even
while a step in flight still uses them: the next owner is planned in a later step, which overwrites them only after the
step in flight has run.
"""

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perilune.core.messages import Delta, EngineStats, Submit
from perilune.core.request import ONE_PENDING, Request
from perilune.core.step import MAX_DRAFTS, PENDING, Output, Slice, StepPlan, StepResult, TokenLogprob, Work
from perilune.engine.requests.blocks import RequestBlocks
from perilune.engine.requests.queue import RequestQueue, by_rank
from perilune.engine.step_times.pacing import Pacer
from perilune.engine.step_times.prompt_turns import PromptTurns, choose
from perilune.engine.vision.encoder import Encoder
from perilune.kv.prefix import root_of
from perilune.kv.tiers import Tiers

SPARE_REQUESTS = 64  # The heap of deadlines is rebuilt when it has 2 entries per live request and this many more.


@dataclass(slots=True)
class _Flight:
    """One request's work in a step that is not committed yet. `life`: Request.life when the work was planned; a
    higher one now means that the request was preempted since. `void`: the result is ignored, because the token that
    the work continues from could not be sampled."""

    request: Request
    life: int
    work: Work
    void: bool = False


class Scheduler:
    """The requests of one engine and their KV blocks.

    num_blocks       KV blocks of block_size tokens each
    max_num_seqs     requests running at a time, and rows of the device's last-token buffer
    max_step_tokens  tokens computed in a step; longer prompts are split into chunks
    max_model_len    prompt and output tokens of a request
    prefix_cache     whether blocks of equal prefixes are kept and shared
    tiers            store cached blocks that the pool evicts; None: evicted blocks are lost
    pacer            limits prompt tokens of steps in which requests decode; None: only max_step_tokens does
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        prefix_cache: bool = True,
        tiers: Tiers | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        assert min(num_blocks, block_size, max_num_seqs, max_step_tokens) >= 1 and max_model_len >= 2
        # Blocks to keep free: for two steps full of prompt tokens, and one for each request that decodes.
        spare = 2 * -(-max_step_tokens // block_size) + max_num_seqs
        self.blocks = RequestBlocks(num_blocks, block_size, prefix_cache=prefix_cache, tiers=tiers, spare_blocks=spare)
        self.offload = self.blocks.offload
        self.pacer = pacer
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self.encoder: Encoder | None = None  # None: the model takes no pictures
        self._live: dict[int, Request] = {}
        self._running: list[Request] = []  # by rank
        self._queue = RequestQueue(self.blocks, max_model_len)  # waiting requests
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, rid); entries of ended requests are stale
        self._flying: deque[tuple[int, list[_Flight]]] = deque()  # steps planned and not committed: at most two
        self._slots = list(range(max_num_seqs))  # a heap: low rows first
        self._arrivals = 0
        self._planned_steps = 0  # planned so far: the next StepPlan.step
        self._series = 0  # the last number given to Work.series
        self._steps = 0  # committed
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. A step may still be in flight when none is."""
        return bool(self._live)

    def submit(self, message: Submit, seed: int, now: float = 0.0) -> None:
        """Queues a request; `seed` gives its random numbers. RequestError if the request can never run.

        `now`: seconds, by the same clock as in `expire`.
        """
        assert message.rid not in self._live, f"request {message.rid} is live already"
        prompt, params = message.prompt, message.params
        limit = self._queue.token_limit(prompt, params)
        pictures = () if self.encoder is None else self.encoder.place(prompt, message.pictures)
        root = root_of(message.cache_keys)
        order = message.order
        deadline = math.inf if order.deadline_seconds is None else now + order.deadline_seconds
        rank = (order.priority, deadline, self._arrivals)
        request = Request(message.rid, self._arrivals, list(prompt), len(prompt), params, seed, limit, rank, root)
        request.submitted = request.ready = now
        if pictures and self.encoder is not None:
            request.pictures = pictures
            self.encoder.open(request)
        self._arrivals += 1
        self._live[request.rid] = request
        self._queue.add(request)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, request.rid))
            if len(self._deadlines) > 2 * len(self._live) + SPARE_REQUESTS:
                self._deadlines = [(r.rank[1], r.rid) for r in self._live.values() if r.rank[1] < math.inf]
                heapq.heapify(self._deadlines)

    def expire(self, now: float) -> list[Delta]:
        """Ends the requests with a deadline up to `now`; returns their last deltas."""
        deltas = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, rid = heapq.heappop(self._deadlines)
            request = self._live.get(rid)
            if request is not None and request.rank[1] == deadline:
                self._end(request)
                deltas.append(Delta(rid, finish_reason="deadline"))
        return deltas

    def adopt(self, tokens: Sequence[int]) -> list[int]:
        """Registers a block for each full block of `tokens` and returns them; the caller writes the KV. A prompt that
        begins with `tokens` then finds them cached. Fewer blocks are returned when none is free; with tiers the caller
        may then ask again after a step, which copies other cached blocks to a tier."""
        return self.blocks.adopt(tokens)

    def cancel(self, rid: int) -> None:
        """Ends a request without a Delta; unknown ids are ignored."""
        request = self._live.get(rid)
        if request is not None:
            self._end(request)

    def take_transfers(self) -> None:
        """Handles ended copies to and from the KV tiers; requests with an ended restore are queued again. Called before
        a step is planned."""
        for request in self.blocks.take_restored(self._steps, self._running):
            if not request.finished:
                self._queue.add(request)

    def plan(self, chain: int = 0) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a result arrives (or at all).

        At most one step may be in flight. `chain` as in StepPlan.
        """
        assert len(self._flying) <= 1, "commit a step before planning a third"
        budget = self._max_step_tokens
        if self.encoder is not None:
            self.encoder.look(self._running)
        turns: PromptTurns | None = None  # computed at the first prompt: most steps have none
        prompts = 0  # tokens of `budget` that are left for prompts
        flights: list[_Flight] = []
        preempted = False
        turn = 0
        while turn < len(self._running) and budget:
            request = self._running[turn]
            # A long prompt leaves one token of the step for each running request of a later rank: these keep decoding.
            count = min(request.todo, max(budget - (len(self._running) - turn - 1), 1))
            if count > 1:
                if turns is None:
                    turns = self._prompt_turns()
                    prompts = turns.tokens
                count = self._aligned(request, min(count, turns.shares[request.rid]))
                prompts -= count
            # The victim is the last of the list: never a request that this step has planned already.
            while count and not self.blocks.at_hand(missing := self.blocks.missing(request, request.planned + count)):
                if self.blocks.waits(missing, alone=turn == len(self._running) - 1 == 0):
                    count = 0
                    break
                if self.blocks.take_kept():
                    continue
                victim = self._running.pop()
                assert victim is not request or turn > 0, f"request {request.rid} does not fit the empty pool"
                self._preempt(victim)
                preempted = True
                if victim is request:
                    count = 0
            if count:
                flights.append(self._launch(request, count))
                budget -= count
            turn += 1

        # A step that preempted a request admits none: a running request needs the blocks given back, and none may
        # overtake the victim. The victim cannot resume before its pending token, if any, is committed: the device
        # holds that token in the row of the victim's old slot.
        if self._queue.requests and not preempted:
            if turns is None:
                turns = self._prompt_turns()
                prompts = turns.tokens
            reserve = sum(self.blocks.lookahead(r) for r in self._running)
            while self._slots and (min(budget, prompts) > 0 or self.offload is not None):
                taken = self._queue.take(turns.shares, min(budget, prompts), reserve, self._planned_steps)
                if taken is None:
                    break
                request, hits, room = taken
                self._start(request, hits)
                if self.encoder is not None:
                    self.encoder.look((request,))
                insort(self._running, request, key=by_rank)
                if count := self._aligned(request, min(request.todo, room)):
                    flights.append(self._launch(request, count))
                    budget, prompts = budget - count, prompts - count
                reserve += self.blocks.lookahead(request)
        if self.pacer is not None and (tokens := sum(f.work.count for f in flights)) > len(flights):
            self.pacer.planned(tokens, sum(f.work.count == 1 for f in flights))
        return self._planned(flights, chain)

    def _prompt_turns(self) -> PromptTurns:
        waiting = self._queue.requests if self._slots else ()
        return choose(self.pacer, self._max_step_tokens, self._running, waiting, self.blocks.cached_tokens)

    def add_drafts(self, plan: StepPlan, drafts: Mapping[int, Sequence[int]]) -> StepPlan:
        """Adds drafts, by rid, to the works of the plan made last, which is not launched yet; returns the plan.

        A work gets as many drafts as the step, the pool and the request's remaining tokens have room for. Only works
        that compute one known token get any: drafts after the last chunk of a prompt would gain little.
        """
        step, flights = self._flying[-1]
        assert step == plan.step, f"step {plan.step} was not planned last"
        budget = self._max_step_tokens - plan.tokens
        for flight in flights:
            request, work = flight.request, flight.work
            given = drafts.get(work.rid, ())
            if not given or not work.sample or work.count > 1 or work.tokens[0] == PENDING or request.doubted:
                continue
            # The last token of a request is never computed, so a draft of it could not be verified.
            count = min(len(given), MAX_DRAFTS, budget, work.left - 1)
            while count > 0 and not self.blocks.at_hand(self.blocks.missing(request, work.end + count)):
                count -= 1
            if count <= 0:
                continue
            self.blocks.extend(request, work.end + count)
            request.drafted += count
            budget -= count
            # In place: the step was not launched yet, and dataclasses.replace takes 4 us for each request.
            work.tokens, work.blocks, work.drafts = (*work.tokens, *given[:count]), request.table, count
        return plan

    def plan_chained(self, drafts: int) -> StepPlan | None:
        """The next step, planned before the result of the step in flight is known, even if that step has drafts. Every
        request continues after the tokens that the step in flight will bring, with up to `drafts` drafts of the
        chain that the draft model drafts at the end of that step. A request that may end in that step is left out.

        None if the step in flight must be committed first: a prompt could be computed or its KV restored from a tier, a
        request wants prompt log-probabilities, or blocks are short. Prompts that wait for the pacer are left out.
        """
        assert len(self._flying) == 1, "there is no step in flight to chain to"
        if self.encoder is not None:
            self.encoder.look(self._running)
        turns: PromptTurns | None = None
        if self._queue.requests and self._slots:
            turns = self._prompt_turns()
            if turns.tokens or self._queue.waits_for_tier():
                return None
        flying = {f.request.rid: f.work for f in self._flying[0][1] if f.life == f.request.life and not f.void}
        going: list[tuple[Request, int]] = []
        share = self._max_step_tokens // max(len(self._running), 1) - 1
        for request in self._running:
            work = flying.get(request.rid)
            if request.barrier <= request.planned:
                continue
            if work is None and request.horizon - request.planned == 1:
                going.append((request, 0))
            elif work is None or not work.sample:
                if request.todo <= 1:
                    return None
                turns = turns or self._prompt_turns()
                if turns.tokens:
                    return None
            elif request.params.prompt_logprobs is not None:
                return None
            elif (left := request.limit - request.horizon - request.drafted) > 0:
                going.append((request, min(drafts, MAX_DRAFTS, left - 1, share)))
        if not going or share < 0:
            return None
        for fewer in (0, MAX_DRAFTS):  # if blocks are short for all drafts, plan without drafts
            ends = [r.planned + r.drafted + 1 + max(count - fewer, 0) for r, count in going]
            if self.blocks.at_hand(sum(self.blocks.missing(request, end) for end, (request, _) in zip(ends, going))):
                break
        else:
            return None
        flights = []
        for (request, count), end in zip(going, ends):
            self.blocks.extend(request, end)
            flights.append(self._launch(request, 1, max(count - fewer, 0) if request.rid in flying else None))
        return self._planned(flights)

    def commit(self, result: StepResult) -> list[Delta]:
        """Applies the result of the oldest step in flight; returns the deltas for the front end."""
        assert self._flying and self._flying[0][0] == result.step, f"step {result.step} is not the oldest in flight"
        _, flights = self._flying.popleft()
        outputs = {output.rid: output for output in result.outputs}
        deltas = [self._land(flight, outputs.pop(flight.work.rid, None)) for flight in flights]
        assert not outputs, f"step {result.step} has outputs of requests it did not compute: {sorted(outputs)}"
        self._steps += 1
        return [delta for delta in deltas if delta is not None]

    def stats(self) -> EngineStats:
        """Counters since the start; the runner and the speculator add theirs (step_seconds, graphs, drafts)."""
        stats = EngineStats(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            blocks_total=self.blocks.total,
            blocks_cached=self.blocks.tree.num_cached,
            blocks_owned=self.blocks.num_owned,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
        )
        return stats if self.offload is None else self.offload.report(stats)

    def check_integrity(self) -> None:
        """Asserts that every block, slot and request is accounted for exactly once. Slow: for tests."""
        self.blocks.check(self._running, self._queue.requests)
        if self.encoder is not None:
            self.encoder.check()
        self._queue.check(self._running)
        ranks = [r.rank for r in self._running]
        assert ranks == sorted(set(ranks)), "running requests are not in their order"
        restoring = {r.rid: r for r in self._live.values() if r.restoring}
        assert {r.rid: r for r in (*self._running, *self._queue.requests)} | restoring == self._live
        assert not any(r.finished for r in self._live.values())
        slots = [r.slot for r in self._running if r.slot is not None]
        assert sorted(slots + self._slots) == list(range(self._max_num_seqs)), "lost slots"
        for request in self._running:
            request.check()

    # ---- planning

    def _planned(self, flights: list[_Flight], chain: int = 0) -> StepPlan | None:
        """The plan of `flights` and of the slices of pictures to encode; None if it would be empty."""
        slices: tuple[Slice, ...] = ()
        dropped: tuple[bytes, ...] = ()
        if self.encoder is not None and self.encoder.busy:
            prompts = any(f.work.count - f.work.drafts > 1 for f in flights)
            slices, dropped = self.encoder.plan(self._running, prompts)
        if not flights and not slices and not dropped:
            return None
        step = self._planned_steps
        self._planned_steps += 1
        self._flying.append((step, flights))
        return StepPlan(step, tuple(f.work for f in flights), chain, slices=slices, dropped=dropped)

    def _aligned(self, request: Request, count: int) -> int:
        """`count`, or fewer so that the step's positions do not end inside a picture."""
        return self.encoder.align(request, count) if request.pictures and self.encoder is not None else count

    def _start(self, request: Request, hits: list[int]) -> None:
        """Gives a request that was taken out of the queue a slot, and the cached blocks `hits`."""
        self.blocks.start(request, heapq.heappop(self._slots), hits)
        if request.life == 0:  # blocks that a preempted request finds again are its own, not prefix cache hits
            request.cached_tokens = request.computed
            request.queue_seconds = time.monotonic() - request.submitted
            self._prompt_tokens += request.prompt_len
            self._cached_tokens += request.computed

    def _launch(self, request: Request, count: int, chained: int | None = None) -> _Flight:
        """The request's next `count` positions as work of the step. `chained`, unless None: the work is chained to the
        step in flight, and computes one token and this many drafts."""
        self.blocks.extend(request, request.planned + count)
        slot, start, horizon = request.slot, request.planned, len(request.tokens) + request.pending
        assert slot is not None
        tokens = request.next_tokens(count) if chained is None else (PENDING,) * (1 + chained)
        targets = request.targets(count) if request.params.prompt_logprobs is not None else ()
        history = () if request.counted else request.history(count)
        next_token = request.next_token(count)
        media = request.media(count) if request.pictures else ()
        sample, drafts, table = request.launch(count), chained or 0, request.table
        request.drafted += drafts
        decodes = sample and (tokens is ONE_PENDING or chained is not None) and not (targets or history or media)
        if not (decodes and request.steady_table is table and request.steady_chain == chained):
            self._series += 1
            request.series, request.steady_chain = self._series, chained
            request.steady_table = table if decodes else None
        # By position: 1.7 us less than by keyword, for each request and step.
        work = Work(
            request.rid, slot, start, tokens, table, sample, horizon - request.prompt_len, request.params,
            request.seed, targets, history, request.limit - horizon, drafts, next_token, chained is not None, media,
            request.series,
        )  # fmt: skip
        return _Flight(request, request.life, work)

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        self._queue.add(request)
        self._preemptions += 1

    def _give_back(self, request: Request) -> None:
        """Frees the slot and the blocks, even while a step in flight uses them: see the module's docstring."""
        slot, blocks = request.stop()
        heapq.heappush(self._slots, slot)
        self.blocks.tree.release(blocks)

    def _end(self, request: Request) -> None:
        request.finished = True
        del self._live[request.rid]
        if request.pictures and self.encoder is not None:
            self.encoder.close(request)
        if request.restoring:
            return  # it is in no queue; blocks being restored for it enter the prefix cache when they arrive
        if request.slot is None:
            self._queue.remove(request)
            self.blocks.drop_kept(request)
        else:
            self._running.remove(request)
            self._give_back(request)

    # ---- results

    def _land(self, flight: _Flight, output: Output | None) -> Delta | None:
        """Applies one work's output to its request. Returns the Delta; None if there is nothing to report."""
        request, work = flight.request, flight.work
        if request.finished or flight.void:
            return None  # since this step was planned, the request ended or the token before could not be sampled
        request.pending -= work.sample
        brought, again, error = ((), False, None) if output is None else (output.tokens, output.again, output.error)
        accepted = len(brought) if again else max(len(brought) - 1, 0)
        assert accepted <= work.drafts and not (error and brought), (work.rid, brought, error, work.drafts)
        finish_reason = "error" if error is not None else None
        for count, token in enumerate(brought, 1):
            request.append(token)
            if token in request.params.stop_token_ids:  # tokens after one that ends the request are dropped
                finish_reason, brought = "stop", brought[:count]
                break
        accepted = min(accepted, len(brought))
        self._generated_tokens += len(brought)
        request.doubted = again
        if finish_reason is None and len(request.tokens) == request.limit:
            finish_reason = "length"
        scores: tuple[TokenLogprob, ...] = ()
        if error is None:
            assert brought or again or not work.sample, f"request {work.rid}: step brought no token"
            if request.life == flight.life:  # else it was preempted since: it has its tokens, but no blocks any more
                if again:
                    self._void(request)
                request.land(work.count - work.drafts, work.drafts, accepted, again)
                self.blocks.settle(request)
            if request.params.prompt_logprobs is not None:
                scores = self._new_scores(request, work, output)
        if finish_reason is not None:
            self._end(request)
        if error is not None:
            self.blocks.forget(request)
        if not brought and not scores and finish_reason is None:
            return None
        assert output is not None
        cached, request.cached_tokens = request.cached_tokens, 0
        logprobs = output.logprobs[: len(brought)]
        delta = Delta(request.rid, brought, logprobs, scores, finish_reason, error, cached, work.drafts, accepted)
        if request.queue_seconds:
            delta.queue_seconds, request.queue_seconds = request.queue_seconds, 0.0
        return delta

    def _void(self, request: Request) -> None:
        """Voids the request's later work in flight, which continues from a token that could not be sampled."""
        for _, flights in self._flying:
            for flight in flights:
                if flight.request is request:
                    flight.void = True
                    request.withdraw(flight.work.drafts)

    @staticmethod
    def _new_scores(request: Request, work: Work, output: Output | None) -> tuple[TokenLogprob, ...]:
        """The step's prompt log-probabilities, without those delivered before a preemption."""
        scores = () if output is None else output.prompt_logprobs
        assert len(scores) == len(work.prompt_targets), (work.rid, len(scores), len(work.prompt_targets))
        fresh = scores[max(request.scored - work.start, 0) :]
        request.scored += len(fresh)
        return fresh
