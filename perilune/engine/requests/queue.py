"""The requests that wait to run, and which of them the next step admits. Pure policy: no tensors.

The first request is admitted when the pool has blocks for all of its known tokens, besides those that running requests
will need soon. Until then no younger request of its priority is admitted.

With KV tiers (engine/kv_tiers/offload.py) a waiting request that has KV in a tier leaves the queue until its KV is back
in the pages, and younger requests are admitted meanwhile: a running request may then be younger than a restoring one.
The queue stays in order: no request is admitted before an older one of its priority that is in it.
"""

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from operator import attrgetter

from perilune.core.errors import RequestError
from perilune.core.request import Request
from perilune.core.sampling import SamplingParams
from perilune.engine.requests.blocks import RequestBlocks

_TOKEN_IDS = 2**31  # the device holds ids as int32
by_rank = attrgetter("rank")


class RequestQueue:
    """The waiting requests of one scheduler, by rank: priority, deadline, arrival.

    blocks         KV blocks, in which the prefix of a request is looked up
    max_model_len  prompt and output tokens of a request, at most
    """

    def __init__(self, blocks: RequestBlocks, max_model_len: int) -> None:
        self._blocks = blocks
        self._max_model_len = max_model_len
        self.requests: list[Request] = []  # by rank; changed by this class only

    def token_limit(self, prompt: Sequence[int], params: SamplingParams) -> int:
        """Tokens that a new request can have in all. RequestError if it could never run."""
        room = self._blocks.capacity_tokens
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if not (min(prompt) >= 0 and max(prompt) < _TOKEN_IDS):
            raise RequestError(f"prompt token ids must be between 0 and {_TOKEN_IDS - 1}", param="prompt")
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
        # The last token of a request needs no KV, so a request may have one token more than the cache holds.
        limit = min(self._max_model_len, room + 1)
        return limit if params.max_tokens is None else min(limit, len(prompt) + params.max_tokens)

    def add(self, request: Request) -> None:
        """Queues a new request, a preempted one, or one with KV restored from a tier."""
        insort(self.requests, request, key=by_rank)

    def remove(self, request: Request) -> None:
        self.requests.remove(request)

    def take(
        self, shares: Mapping[int, int], tokens: int, reserve: int, planned_steps: int
    ) -> tuple[Request, list[int], int] | None:
        """Takes out the first request if it can run in the step being planned: the request, the KV blocks that it found
        cached (no reference is taken), and how many of its tokens the step may compute. Requests before it that have KV
        in a tier leave the queue, too, and restores of their KV begin.

        shares         max tokens of a request in the step, by rid; a request that is not in it may have all `tokens`
        tokens         left in the step for prompts; with 0 only restores begin, and no request is admitted
        reserve        blocks that running requests will need soon
        planned_steps  steps planned so far; they may still use the blocks that KV from a tier will be written to
        """
        while self.requests:
            request = self.requests[0]
            room = min(tokens, shares.get(request.rid, tokens))
            hits = self._blocks.match(request)
            if lacking := self._blocks.lacking(request, hits, reserve):
                if self._blocks.take_kept(request.rank, lacking):
                    continue
                return None
            if stored := self._blocks.find_stored(request, hits):
                if not self._blocks.restore(request, hits, stored, planned_steps):
                    return None
                self.requests.pop(0)
                continue
            if not room or not self._blocks.has_room(request, hits, room):
                return None
            return self.requests.pop(0), hits, room
        return None

    def waits_for_tier(self) -> bool:
        """Whether KV of the first request could be restored from a tier now. The queue must not be empty."""
        first = self.requests[0]
        return self._blocks.offload is not None and bool(self._blocks.find_stored(first, self._blocks.match(first)))

    def check(self, running: Sequence[Request]) -> None:
        """Asserts the order of the queue, also against the `running` requests. Slow: for tests."""
        ranks = [r.rank for r in self.requests]
        assert ranks == sorted(set(ranks)), "waiting requests are not in their order"
        latest = {r.rank[0]: r.arrival for r in running if r.rank[1] == math.inf}  # by priority
        overtaking = self._blocks.offload is not None  # younger requests may overtake one that waits for a tier
        for request in self.requests:
            request.check()
            assert request.slot is None and request.planned == 0, request
            if request.rank[1] == math.inf and request.rank[0] in latest and not overtaking:
                assert request.arrival > latest[request.rank[0]], "a request overtook an older one"
