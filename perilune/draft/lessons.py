"""Batches of corpora's rows with the target's hidden states; states that fit `keep_bytes` are kept for later epochs."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError
from perilune.draft.batch import Batch
from perilune.draft.capture import Captured
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Row


class HiddenStates(Protocol):
    """The target's hidden states for rows: by running it (draft.capture), or from disk (draft.states)."""

    def taught(self, rows: Sequence[Row]) -> Captured:
        """As Capture.taught."""
        ...


class Lessons:
    """Batches of about `chains` chains; of each batch, part `part` of `parts`.

    If there are mined `windows`, they make up `window_share` of a batch's chains, and are repeated as often as needed.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        states: HiddenStates,
        device: torch.device,
        *,
        chains: int,
        seed: int,
        keep_bytes: float,
        windows: Sequence[Row] = (),
        window_share: float = 0.0,
        part: int = 0,
        parts: int = 1,
    ) -> None:
        usable = [row for row in rows if _usable(row)]
        again = [row for row in windows if _usable(row)]
        if not usable:
            raise CheckpointError("the corpus has no answer long enough to learn from: collect more")
        Random(f"{seed}:batches").shuffle(usable)
        own = round(chains * (1 - window_share)) if again else chains
        self._members = _parts(usable, max(own, 1))
        if again:
            more = _cycled(again, seed)
            for members in self._members:
                count = 0
                while count < chains - own:
                    members.append(next(more))
                    count += _chains(members[-1])
        for members in self._members:
            members.sort(key=lambda row: len(row.ids))  # less padding
            # Every part needs a row: add copies of weight 0.
            members += [replace(members[-1], weight=0.0)] * (parts - len(members))
        self._states, self._device = states, device
        self._part, self._parts = part, parts
        self._kept: dict[int, tuple[Batch, Tensor, Tensor]] = {}
        self._room = keep_bytes
        self.chains = sum(_chains(row) for members in self._members for row in members if row.weight)

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, i: int) -> tuple[Batch, Tensor, Tensor]:
        """(batch, aux [N, A D], hidden [taught tokens, D])."""
        if i in self._kept:
            return self._kept[i]
        whole = self._members[i]
        rows = whole[self._part :: self._parts]
        batch = Batch.of(rows, self._device, whole=whole, shares=self._parts)
        found = self._states.taught(rows)
        lesson = (batch, found.aux, found.hidden)
        self._room -= batch.nbytes + sum(t.nbytes for t in lesson[1:])
        if self._room > 0:
            self._kept[i] = lesson
        return lesson


def _usable(row: Row) -> bool:
    return row.given > 0 and len(row.ids) - row.given >= LEAST_ANSWER


def _chains(row: Row) -> int:
    return len(row.ids) - row.given - 1


def _parts(rows: Sequence[Row], chains: int) -> list[list[Row]]:
    """The rows in order, in batches that end when they have `chains` chains."""
    parts: list[list[Row]] = []
    count = chains
    for row in rows:
        if count >= chains:
            parts.append([])
            count = 0
        parts[-1].append(row)
        count += _chains(row)
    return parts


def _cycled(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    """The rows endlessly, in a new order in each pass."""
    for turn in itertools.count():
        order = list(rows)
        Random(f"{seed}:windows:{turn}").shuffle(order)
        yield from order
