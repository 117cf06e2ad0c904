"""Which request advances by how many tokens in the next step, on which KV blocks. Pure policy: no tensors.

Running requests go first, oldest first; then waiting ones are admitted in order of arrival. When a running request
cannot get a block, the youngest running one is preempted: it gives everything back and later recomputes. So those
running are always older than those waiting, nobody overtakes, and the oldest request of all is never held up:
in the worst case it has the whole pool to itself, which `submit` made sure is enough.

Steps overlap: step N+1 is planned while step N runs. The plan assumes that N goes well: a token that N samples is
planned as PENDING at its position. If N then ends the request, its part of N+1 is computed in vain and ignored.

Drafts are guests: `add_drafts` gives them the blocks and the part of the step that the plan has left over, never what
somebody else could have had. `plan` leaves out a request with drafts in flight; `plan_behind` does not: it takes for
granted that they bring one token, reserves the blocks for the case that all of them are right, and leaves it to the
device to find out where the request goes on.

Steps execute in the order they were planned, each after the whole of its predecessor. Hence blocks and slots can be
given back at once, even while a step in flight still uses them: whoever gets them is planned in a later step, which
overwrites them only after the step in flight has run.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from perilune.core.errors import RequestError
from perilune.core.messages import Delta, EngineStats, Submit
from perilune.core.request import Request
from perilune.core.step import MAX_DRAFTS, PENDING, Output, StepPlan, StepResult, TokenLogprob, Work
from perilune.kv.blocks import BlockPool
from perilune.kv.prefix import PrefixTree, extend_digests, root_of

_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Flight:
    """One request's work in a step that is not committed yet. `void`: it goes on from what never was."""

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
    ) -> None:
        assert min(num_blocks, block_size, max_num_seqs, max_step_tokens) >= 1 and max_model_len >= 2
        self._pool = BlockPool(num_blocks)
        self._tree = PrefixTree(self._pool)
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._max_model_len = max_model_len
        self._prefix_cache = prefix_cache
        self._live: dict[int, Request] = {}
        self._running: list[Request] = []  # by arrival; all older than those waiting
        self._waiting: deque[Request] = deque()  # by arrival
        self._flying: deque[tuple[int, list[_Flight]]] = deque()  # steps planned and not committed: at most two
        self._slots = list(range(max_num_seqs))  # a heap: low rows first
        self._arrivals = 0
        self._planned_steps = 0
        self._steps = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished. A step may still be in flight when none is."""
        return bool(self._live)

    def submit(self, message: Submit, seed: int) -> None:
        """Queues a request; `seed` is the one its random numbers are drawn with. Raises RequestError if unservable."""
        assert message.rid not in self._live, f"request {message.rid} is live already"
        prompt, params = message.prompt, message.params
        room = self._pool.total * self._block_size
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if not (min(prompt) >= 0 and max(prompt) <= _MAX_TOKEN_ID):
            raise RequestError(f"prompt token ids must be between 0 and {_MAX_TOKEN_ID}", param="prompt")
        if len(prompt) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens; this model's context of {self._max_model_len} leaves room for"
                f" at most {self._max_model_len - 1}",
                param="prompt",
                code="context_length_exceeded",
            )
        if len(prompt) > room:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens but the KV cache holds {room}:"
                " shorten it, or start the engine with more kv_blocks or a higher memory_fraction",
                param="prompt",
                code="context_length_exceeded",
            )
        # The last token of a request needs no KV, hence the one more than the cache has room for.
        limit = min(self._max_model_len, room + 1)
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        root = root_of(message.cache_keys)
        request = Request(message.rid, self._arrivals, list(prompt), len(prompt), params, seed, limit, root)
        self._arrivals += 1
        self._live[request.rid] = request
        self._waiting.append(request)

    def adopt(self, tokens: Sequence[int]) -> list[int]:
        """Registers blocks for the full blocks of `tokens`, whose KV the caller puts (or has put) there, and returns
        them: a prompt that begins with `tokens` finds them cached. Stops early where no block is free."""
        digests: list[bytes] = []
        extend_digests(digests, tokens, self._block_size, len(tokens) // self._block_size)
        held = self._tree.match(digests)
        self._tree.acquire(held)
        for digest in digests[len(held) :]:
            if not self._tree.available:
                break
            block = self._tree.allocate()
            kept = self._tree.insert(held[-1] if held else None, digest, block)
            assert kept == block, "a digest beyond the longest match is known"
            held.append(block)
        self._tree.release(held)
        return held

    def cancel(self, rid: int) -> None:
        """Ends a request without a Delta; unknown ids are ignored."""
        request = self._live.get(rid)
        if request is not None:
            self._end(request)

    def abort_all(self, reason: str) -> list[Delta]:
        """Ends every request as "cancelled" with `reason` as its error. Steps in flight may still be committed."""
        deltas = [self._delta(r, finish_reason="cancelled", error=reason) for r in self._live.values()]
        for request in list(self._live.values()):
            self._end(request)
        return deltas

    def plan(self, chain: int = 0) -> StepPlan | None:
        """The next step, or None when nothing can be computed before a result arrives (or at all).

        At most one step may be in flight. `chain` is passed on.
        """
        assert len(self._flying) <= 1, "commit a step before planning a third"
        budget = self._max_step_tokens
        flights: list[_Flight] = []
        preempted = False
        turn = 0
        while turn < len(self._running) and budget:
            request = self._running[turn]
            # A long prompt leaves one token of the step to each running request after it: they keep decoding.
            count = min(request.todo, max(budget - (len(self._running) - turn - 1), 1))
            # Victims come from the end of the list: never one that this step has planned already.
            while count and self._blocks_for(request.planned + count) - len(request.blocks) > self._tree.available:
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

        # Nobody is admitted right after a preemption: what the victim gave back was needed, nobody may overtake it, and
        # it cannot resume before a token it still has on the way is committed: that sits in the row of its old slot.
        if self._waiting and not preempted:
            reserve = sum(self._lookahead(r) for r in self._running)
            while self._waiting and self._slots and budget:
                request = self._waiting[0]
                if not self._admit(request, reserve):
                    break
                self._running.append(self._waiting.popleft())
                count = min(request.todo, budget)
                flights.append(self._launch(request, count))
                budget -= count
                reserve += self._lookahead(request)
        if not flights:
            return None
        step = self._planned_steps
        self._planned_steps += 1
        self._flying.append((step, flights))
        return StepPlan(step, tuple(f.work for f in flights), chain)

    def add_drafts(self, plan: StepPlan, drafts: Mapping[int, Sequence[int]]) -> StepPlan:
        """The plan just made, which must not run before this, with guesses of what its works sample, by rid.

        A work gets as many as fit: what the step and the pool have left, and what the request may still come to have.
        Only works that compute one known token get any: the end of a prompt would gain little by them.
        """
        step, flights = self._flying[-1]
        assert step == plan.step, f"step {plan.step} was not planned last"
        budget = self._max_step_tokens - plan.tokens
        for index, flight in enumerate(flights):
            request, work = flight.request, flight.work
            guesses = drafts.get(work.rid, ())
            if not guesses or not work.sample or work.count > 1 or work.tokens[0] == PENDING or request.doubted:
                continue
            # The last token of all is never computed, so there is no guessing it.
            count = min(len(guesses), MAX_DRAFTS, budget, work.left - 1)
            while count > 0 and self._blocks_for(work.end + count) - len(request.blocks) > self._tree.available:
                count -= 1
            if count <= 0:
                continue
            for _ in range(self._blocks_for(work.end + count) - len(request.blocks)):
                request.add_block(self._tree.allocate())
            request.drafted += count
            budget -= count
            tokens = (*work.tokens, *guesses[:count])
            flight = replace(flight, work=replace(work, tokens=tokens, blocks=request.table, drafts=count))
            flights[index] = flight
        return replace(plan, work=tuple(f.work for f in flights))

    def plan_behind(self, drafts: int) -> StepPlan | None:
        """The next step, behind the one in flight, drafts or not: every work that it does for a request goes on there
        with as many as `drafts` of the chain behind. None if that would hold up anybody, or somebody has more to
        compute than a token: then the step in flight must be committed first.

        A request that may have ended by then sits out.
        """
        assert len(self._flying) == 1, "there is no step to plan behind"
        if self._waiting and self._slots:
            return None
        flying = {f.request.rid: f.work for f in self._flying[0][1] if f.life == f.request.life and not f.void}
        going: list[tuple[Request, int]] = []
        most = self._max_step_tokens // max(len(self._running), 1) - 1
        for request in self._running:
            work = flying.get(request.rid)
            if work is None and request.horizon - request.planned == 1:
                going.append((request, 0))
            elif work is None or not work.sample or request.params.prompt_logprobs is not None:
                return None
            elif (left := request.limit - request.horizon - request.drafted) > 0:
                going.append((request, min(drafts, MAX_DRAFTS, left - 1, most)))
        if not going or most < 0:
            return None
        for least in (0, MAX_DRAFTS):  # drafts are what can be done without
            ends = [r.planned + r.drafted + 1 + max(count - least, 0) for r, count in going]
            if sum(self._blocks_for(end) - len(r.blocks) for end, (r, _) in zip(ends, going)) <= self._tree.available:
                break
        else:
            return None
        flights = []
        for (request, count), end in zip(going, ends):
            count, behind = max(count - least, 0), request.rid in flying
            for _ in range(self._blocks_for(end) - len(request.blocks)):
                request.add_block(self._tree.allocate())
            flights.append(self._launch(request, 1, count if behind else None))
        step = self._planned_steps
        self._planned_steps += 1
        self._flying.append((step, flights))
        return StepPlan(step, tuple(f.work for f in flights))

    def commit(self, result: StepResult) -> list[Delta]:
        """Takes in what the oldest step in flight brought; returns what the front end has to hear."""
        assert self._flying and self._flying[0][0] == result.step, f"step {result.step} is not the oldest in flight"
        _, flights = self._flying.popleft()
        outputs = {output.rid: output for output in result.outputs}
        deltas = [self._land(flight, outputs.pop(flight.work.rid, None)) for flight in flights]
        assert not outputs, f"step {result.step} has outputs of requests it did not compute: {sorted(outputs)}"
        self._steps += 1
        return [delta for delta in deltas if delta is not None]

    def stats(self) -> EngineStats:
        """Counters since the start; `step_seconds` is left to whoever runs the steps."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_total=self._pool.total,
            blocks_cached=self._tree.num_cached,
            blocks_owned=self._pool.num_referenced,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            preemptions=self._preemptions,
            steps=self._steps,
        )

    def check_integrity(self) -> None:
        """Asserts that every block, slot and request is accounted for exactly once. Slow: for tests."""
        self._tree.check([r.blocks for r in self._running])
        arrivals = [r.arrival for r in (*self._running, *self._waiting)]
        assert arrivals == sorted(set(arrivals)), "somebody overtook"
        assert {r.rid: r for r in (*self._running, *self._waiting)} == self._live
        assert not any(r.finished for r in self._live.values())
        slots = [r.slot for r in self._running if r.slot is not None]
        assert sorted(slots + self._slots) == list(range(self._max_num_seqs)), "lost slots"
        for request in self._running:
            request.check()
            assert len(request.blocks) == self._blocks_for(request.planned + request.drafted), request
        for request in self._waiting:
            request.check()
            assert request.slot is None and request.planned == 0, request
        assert self._prefix_cache or self._tree.num_cached == 0

    # ---- planning

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _lookahead(self, request: Request) -> int:
        """Blocks a running request will want soon: for the rest of its known tokens and one block more."""
        soon = min(request.horizon + self._block_size, request.limit - 1)
        return max(self._blocks_for(soon) - len(request.blocks), 0)

    def _admit(self, request: Request, reserve: int) -> bool:
        """Starts a waiting request if the blocks for all its known tokens are there besides the reserve.

        Its first chunk alone would need less; but a prompt that cannot be finished would only be preempted.
        """
        hits = self._tree.match(self._readable(request))
        missing = self._blocks_for(request.known) - len(hits)
        if self._tree.available - self._tree.idle_among(hits) - missing < reserve:
            return False
        self._tree.acquire(hits)
        request.start(heapq.heappop(self._slots), hits, self._block_size)
        if request.life == 0:  # finding one's own blocks again after a preemption is no hit
            request.cached_tokens = request.computed
            self._prompt_tokens += request.prompt_len
            self._cached_tokens += request.computed
        return True

    def _readable(self, request: Request) -> list[bytes]:
        """Digests of the blocks a request may take from the cache.

        One token at least is left to compute, because its logits are wanted; all of them if every prompt token's are.
        """
        if not self._prefix_cache or request.params.prompt_logprobs is not None:
            return []
        blocks = (request.known - 1) // self._block_size
        extend_digests(request.digests, request.tokens, self._block_size, blocks, request.root)
        return request.digests[:blocks]

    def _launch(self, request: Request, count: int, behind: int | None = None) -> _Flight:
        """`behind`: with so many drafts, behind a step in flight."""
        for _ in range(self._blocks_for(request.planned + count) - len(request.blocks)):
            request.add_block(self._tree.allocate())
        assert request.slot is not None
        start, draw = request.planned, request.horizon - request.prompt_len
        tokens = request.next_tokens(count) if behind is None else (PENDING,) * (1 + behind)
        targets = request.targets(count) if request.params.prompt_logprobs is not None else ()
        history, left, ahead = request.history(count), request.limit - request.horizon, request.ahead(count)
        work = Work(
            rid=request.rid,
            slot=request.slot,
            start=start,
            tokens=tokens,
            blocks=request.table,
            sample=request.launch(count),
            draw=draw,
            params=request.params,
            seed=request.seed,
            prompt_targets=targets,
            history=history,
            left=left,
            drafts=behind or 0,
            ahead=ahead,
            behind=behind is not None,
        )
        request.drafted += behind or 0
        return _Flight(request, request.life, work)

    def _preempt(self, request: Request) -> None:
        self._give_back(request)
        self._waiting.appendleft(request)
        self._preemptions += 1

    def _give_back(self, request: Request) -> None:
        """Frees the slot and the blocks, even under a step in flight: see the module's docstring."""
        slot, blocks = request.stop()
        heapq.heappush(self._slots, slot)
        self._tree.release(blocks)

    def _end(self, request: Request) -> None:
        request.finished = True
        del self._live[request.rid]
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._give_back(request)

    # ---- results

    def _land(self, flight: _Flight, output: Output | None) -> Delta | None:
        request, work = flight.request, flight.work
        if request.finished or flight.void:
            return None  # ended after this step was planned, or it went on from nothing
        if work.sample:
            request.pending -= 1
        error = None if output is None else output.error
        brought = () if output is None else output.tokens
        again = output is not None and output.again
        accepted = len(brought) if again else max(len(brought) - 1, 0)
        assert accepted <= work.drafts and not (error and brought), (work.rid, brought, error, work.drafts)
        kept = brought[: self._until_stop(request, brought)]
        for token in kept:
            request.append(token)
        self._generated_tokens += len(kept)
        request.doubted = again
        finish_reason = None
        if error is not None:
            finish_reason = "error"
        elif kept and kept[-1] in request.params.stop_token_ids:
            finish_reason = "stop"
        elif request.known == request.limit:
            finish_reason = "length"
        scores: tuple[TokenLogprob, ...] = ()
        if finish_reason != "error":
            assert kept or again or not work.sample, f"request {work.rid}: step brought no token"
            if request.life == flight.life:  # otherwise preempted since: the tokens are good, the blocks are gone
                if again:
                    self._void(request)
                request.land(work.count - work.drafts, work.drafts, min(accepted, len(kept)), again)
                self._tree.release(request.trim(self._blocks_for(request.planned + request.drafted)))
                self._register(request)
            scores = self._new_scores(request, work, output)
        if finish_reason is not None:
            self._end(request)
        if finish_reason == "error" and request.digests:
            # Bad values may have come from any block of its context, so none of them may be found again, read or
            # written, and nothing that was computed on top of them.
            self._tree.forget(request.digests[0])
        if not kept and not scores and finish_reason is None:
            return None
        assert output is not None
        return self._delta(
            request,
            tokens=kept,
            logprobs=output.logprobs[: len(kept)],
            prompt_logprobs=scores,
            finish_reason=finish_reason,
            error=error if finish_reason == "error" else None,
            drafted=work.drafts,
            accepted=min(accepted, len(kept)),
        )

    def _void(self, request: Request) -> None:
        """What is in flight for the request goes on from a token that has not come."""
        for _, flights in self._flying:
            for index, flight in enumerate(flights):
                if flight.request is request:
                    flights[index] = replace(flight, void=True)
                    request.withdraw(flight.work.drafts)

    @staticmethod
    def _until_stop(request: Request, tokens: tuple[int, ...]) -> int:
        """How many of these tokens the request takes: none after one that ends it."""
        stops = request.params.stop_token_ids
        return next((i for i, token in enumerate(tokens, 1) if token in stops), len(tokens))

    def _register(self, request: Request) -> None:
        """Offers the blocks that this commit completed to the prefix tree."""
        full = request.computed // self._block_size
        if not self._prefix_cache or full == request.registered:
            return
        extend_digests(request.digests, request.tokens, self._block_size, full, request.root)
        for index in range(request.registered, full):
            parent = request.blocks[index - 1] if index else None
            own = request.blocks[index]
            block = self._tree.insert(parent, request.digests[index], own)
            if block is None:
                return
            if block != own:
                request.swap_block(index, block)
            request.registered = index + 1

    @staticmethod
    def _new_scores(request: Request, work: Work, output: Output | None) -> tuple[TokenLogprob, ...]:
        """The step's prompt log-probabilities, without those delivered before a preemption."""
        scores = () if output is None else output.prompt_logprobs
        assert len(scores) == len(work.prompt_targets), (work.rid, len(scores), len(work.prompt_targets))
        fresh = scores[max(request.scored - work.start, 0) :]
        request.scored += len(fresh)
        return fresh

    @staticmethod
    def _delta(
        request: Request,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        prompt_logprobs: tuple[TokenLogprob, ...] = (),
        finish_reason: str | None = None,
        error: str | None = None,
        drafted: int = 0,
        accepted: int = 0,
    ) -> Delta:
        cached, request.cached_tokens = request.cached_tokens, 0
        return Delta(
            request.rid, tokens, logprobs, prompt_logprobs, finish_reason, error, cached, drafted, accepted
        )  # fmt: skip
