"""The draft model's CUDA graphs: "follow" graphs read a step's rows, "draft" graphs draft a chain.

A follow graph belongs to one step graph and reads its tensors. It writes the state from which chains begin to a
`Start`; there is one for each number of requests and table width. A draft graph reads only a Start, so it serves all
step graphs of that size: the number of graphs is the sum of step sizes and chain lengths, not their product. Both are
launched while the step itself still runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.dist.group import Group
from perilune.engine.graphs.recorder import Recorder, Replay
from perilune.engine.graphs.self_test import check_chains
from perilune.speculation.drafter import Drafter, Drafts, Followed, Start


@dataclass(slots=True)
class _Chains:
    """The state from which the chains of B requests begin, and the graphs that draft them.

    slots    [B] int64: the requests' rows of the draft buffer
    replays  by chain length
    """

    start: Start
    slots: Tensor
    replays: dict[int, Replay] = field(default_factory=dict)

    def begin(self, start: Start) -> None:
        """Copies `start`, of at most B requests with block tables at most as wide, to the tensors that the graphs
        read."""
        own, (count, used) = self.start, start.tables.shape
        for to, of in ((own.states, start.states), (own.features, start.features), (own.positions, start.positions)):
            to[:count] = of
        own.tables[:count, :used] = start.tables


class DraftGraphs:
    """The graphs of one draft model.

    out           [max requests, 2 K] float64: chains of length <= K, ids in the first K columns, then probabilities
    draft_buffer  [N, K] int64: ids of the chains, by the requests' slots; the last row is padding
    tested_by     the ranks that compare each draft graph with drafting without one (self_test.py); None: no test
    """

    def __init__(
        self, drafter: Drafter, recorder: Recorder, out: Tensor, draft_buffer: Tensor, tested_by: Group | None
    ) -> None:
        self.drafter, self._tested_by = drafter, tested_by
        self._recorder, self._out, self._buffer = recorder, out, draft_buffer
        self._chains: dict[tuple[int, int], _Chains] = {}  # by number of requests and table width

    def clear(self) -> None:
        self._chains.clear()

    def record_follow(self, followed: Callable[[], Followed], slots: Tensor, width: int, name: str) -> Replay:
        """Captures the follow graph of a step; `slots` [B] int64 are the requests' rows of the draft buffer. Then
        `draft` may be called for B requests with tables of this width."""
        chains = self._chains_for(len(slots), width)

        def follow() -> None:
            start = self.drafter.follow(followed())
            assert start is not None
            chains.begin(start)
            chains.slots.copy_(slots)

        return self._recorder.record_or_run(follow, name)

    def draft(self, requests: int, width: int, length: int) -> None:
        """Drafts chains after the step that was followed last, into `out` and the draft buffer. Once per step: drafting
        overwrites the Start."""
        chains = self._chains_for(requests, width)
        replay = chains.replays.get(length)
        if replay is None:
            ids, probabilities = self._out[:requests].chunk(2, 1)

            def draft() -> None:
                drafts = self.drafter.draft(chains.start, length)
                ids[:, :length], probabilities[:, :length] = drafts.tokens, drafts.confidence
                self._buffer[:, :length].index_copy_(0, chains.slots, drafts.tokens)

            kept = chains.start.features.clone()  # `record_or_run` drafts once, which overwrites them
            name = f"chains of {length} for {requests} requests, tables {width} wide"
            replay = self._recorder.record_or_run(draft, name)
            chains.start.features.copy_(kept)
            if (group := self._tested_by) is not None:
                eager = torch.cat([ids[:, :length], probabilities[:, :length]], 1)

                def test() -> None:
                    replay()
                    check_chains(eager, torch.cat([ids[:, :length], probabilities[:, :length]], 1), group, name)

                self._recorder.test(test)
                chains.start.features.copy_(kept)
            chains.replays[length] = replay
        replay()

    def draft_from(self, start: Start, length: int, requests: int, width: int) -> Drafts:
        """As Drafter.draft from `start`, which has at most `requests` rows and tables up to `width`; valid until the
        next step. The draft buffer stays as it is."""
        chains = self._chains_for(requests, width)
        chains.slots.fill_(len(self._buffer) - 1)
        chains.begin(start)
        self.draft(requests, width, length)
        ids, probabilities = self._out[: len(start.tables)].chunk(2, 1)
        return Drafts(ids[:, :length], probabilities[:, :length])

    def _chains_for(self, requests: int, width: int) -> _Chains:
        found = self._chains.get((requests, width))
        if found is None:
            slots = torch.full((requests,), len(self._buffer) - 1, device=self._buffer.device)
            found = self._chains[requests, width] = _Chains(self.drafter.blank(requests, width), slots)
        return found
