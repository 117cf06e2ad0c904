"""Acceptance of a drafter on texts that the target has written: runs serving's drafter against the known tokens.

Serving samples the same text whatever is drafted, at any temperature (speculation/acceptance.py). So comparing drafts
with a text that the target has sampled gives the acceptance of serving. Each cycle drafts after the last accepted
token, and advances by the accepted drafts and one token.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.core.sampling import SamplingParams
from perilune.core.step import StepPlan, Work
from perilune.draft.capture import Capture
from perilune.draft.corpus import Row
from perilune.engine.batch import build
from perilune.speculation.drafter import Drafter, Followed

ABSORB_LIMIT = 16  # rows of a request up to which attention is absorbed, as in serving
SHORTEST_MATCH, LONGEST_MATCH = 2, 8  # tokens that `lookup` compares
GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class Tally:
    """Numbers of cycles and of their tokens. By position in the chain: drafts that were compared with the text
    (`asked`; drafts after a wrong one are not compared), and accepted ones (`stood`)."""

    cycles: int = 0
    tokens: int = 0
    stood: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def add(self, drafts: Sequence[int], truth: Sequence[int]) -> int:
        """Counts a cycle: drafts against `truth`, the rest of the text; returns how many are accepted."""
        right = 0
        while right < min(len(drafts), len(truth)) and drafts[right] == truth[right]:
            right += 1
        self.cycles += 1
        self.tokens += min(right + 1, len(truth))
        for i in range(min(len(drafts), len(truth), right + 1)):
            if i == len(self.asked):
                self.asked.append(0)
                self.stood.append(0)
            self.asked[i] += 1
            self.stood[i] += i < right
        return right

    @property
    def length(self) -> float:
        """Tokens per cycle."""
        return self.tokens / self.cycles if self.cycles else float("nan")

    def record(self) -> dict[str, Any]:
        shares = [round(s / a, 4) for s, a in zip(self.stood, self.asked)]
        return {"acceptance_length": round(self.length, 4), "by_position": shares, "cycles": self.cycles}


def walk(
    drafter: Drafter,
    capture: Capture,
    rows: Sequence[Row],
    length: int,
    *,
    at_once: int = 128,
    block_size: int = 64,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[Tally]:
    """Each row's tally with chains of `length`. Rows with fewer than two tokens of answer have no cycle."""
    dtype, device = capture.model.weights.norm.dtype, capture.model.weights.norm.device
    longest = max(len(row.ids) for row in rows)
    drafter.allocate(
        at_once * -(-longest // block_size), block_size, dtype, device, max_num_seqs=at_once, max_model_len=longest
    )
    tallies = []
    for start in range(0, len(rows), at_once):
        some = rows[start : start + at_once]
        tallies += _Walk(drafter, capture, some, length, block_size).run()
        advance(len(some))
    return tallies


class _Walk:
    """Cycles of several rows at once, each row at its own position."""

    def __init__(self, drafter: Drafter, capture: Capture, rows: Sequence[Row], length: int, block_size: int) -> None:
        self._drafter, self._rows, self._length, self._block_size = drafter, rows, length, block_size
        self._aux = capture([row.ids for row in rows]).aux
        self._device = self._aux.device
        counts = np.array([len(row.ids) for row in rows])
        self._first = np.cumsum(counts) - counts
        blocks = -(-counts // block_size)
        begin = np.cumsum(blocks) - blocks
        self._blocks = [tuple(range(b, b + n)) for b, n in zip(begin.tolist(), blocks.tolist())]
        self._none = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
        self._tallies = [Tally() for _ in rows]

    @torch.inference_mode()
    def run(self) -> list[Tally]:
        # In a cycle the drafter reads row i at spans[i]; the token at spans[i].stop is the one sampled in that step.
        spans = {i: range(row.given) for i, row in enumerate(self._rows) if row.given + 1 < len(row.ids)}
        while spans:
            following = {}
            for i, drafts in self._propose(spans):
                ids, end = self._rows[i].ids, spans[i].stop
                right = self._tallies[i].add(drafts, ids[end + 1 :])
                if end + right + 2 < len(ids):  # else no token is left to draft
                    following[i] = range(end, end + right + 1)
            spans = following
        return self._tallies

    def _propose(self, spans: dict[int, range]) -> Iterator[tuple[int, list[int]]]:
        work = tuple(
            Work(
                rid=i,
                slot=i,
                start=span.start,
                tokens=self._rows[i].ids[span.start : span.stop],
                blocks=self._blocks[i],
                sample=True,
                output_index=0,
                params=GREEDY,
                seed=0,
            )
            for i, span in spans.items()
        )
        batch = build(StepPlan(0, work), self._none, self._block_size, ABSORB_LIMIT)
        at: NDArray[np.int64] = np.concatenate([np.arange(w.start, w.end) + self._first[w.rid] for w in batch.work])
        after = np.concatenate([np.array(self._rows[w.rid].ids[w.start + 1 : w.end + 1]) for w in batch.work])
        drafts = self._drafter.propose(
            Followed(
                work=batch.work,
                starts=batch.starts,
                step=batch.step,
                features=self._aux[torch.from_numpy(at).to(self._device)],
                following=torch.from_numpy(after).to(self._device),
                sampled=tuple(range(len(batch.work))),
                last=batch.rows,
            ),
            self._length,
        )
        assert drafts is not None
        yield from zip([w.rid for w in batch.work], drafts.tokens.tolist())


def walk_lookup(rows: Sequence[Row], length: int) -> list[Tally]:
    """As `walk`, for drafts of `lookup`, which needs no model."""
    tallies = []
    for row in rows:
        tally, end = Tally(), row.given
        while end + 1 < len(row.ids):
            end += tally.add(lookup(row.ids[: end + 1], length), row.ids[end + 1 :]) + 1
        tallies.append(tally)
    return tallies


def lookup(ids: Sequence[int], length: int) -> tuple[int, ...]:
    """Up to `length` tokens that follow an earlier occurrence of the end of `ids`: after the longest match, and of
    equally long ones after the latest."""
    last, best, found, at = len(ids) - 1, SHORTEST_MATCH, -1, -1
    with contextlib.suppress(ValueError):  # `index` raises ValueError after the last occurrence
        while True:
            at = ids.index(ids[last], at + 1, last)
            size = 1
            while size < min(LONGEST_MATCH, at + 1) and ids[at - size] == ids[last - size]:
                size += 1
            if size >= best:
                best, found = size, at
    return tuple(ids[found + 1 : found + 1 + length]) if found >= 0 else ()


def summed(tallies: Sequence[Tally]) -> Tally:
    """The sum of tallies: every cycle counts alike, so that long texts count more."""
    total = Tally()
    for tally in tallies:
        total.cycles += tally.cycles
        total.tokens += tally.tokens
        for own, more in ((total.stood, tally.stood), (total.asked, tally.asked)):
            own += [0] * (len(more) - len(own))
            for i, n in enumerate(more):
                own[i] += n
    return total
