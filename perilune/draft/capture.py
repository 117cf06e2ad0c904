"""The target's hidden states for given texts: those that a drafter reads, and those that the target's head reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.draft.corpus import Row
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2, Step
from perilune.model.varlen import WholeTexts, grids


@dataclass(frozen=True, slots=True)
class Captured:
    """The target's hidden states of concatenated rows, N tokens: aux [N, A D] at the drafter's A layers, hidden [N, D]
    after the final norm."""

    aux: Tensor
    hidden: Tensor


class Capture:
    """Runs the target over whole texts, with pages for `tokens` tokens at a time; keeps nothing between calls."""

    def __init__(
        self, model: KimiK2, aux_layers: Sequence[int], *, tokens: int, block_size: int = 64, layers: int | None = None
    ) -> None:
        """`layers` of the cache; default: all of the model's."""
        self.model = model
        self._whole = WholeTexts(model)
        self.aux_layers = tuple(aux_layers)
        c, w = model.config, model.weights
        self._pages = Pages.allocate(
            layers or c.num_hidden_layers,
            -(-tokens // block_size),
            block_size,
            c.kv_lora_rank + c.qk_rope_head_dim,
            w.norm.dtype,
            w.norm.device,
        )

    def rows_that_fit(self, lengths: Sequence[int]) -> int:
        """How many of these texts, from the first on, one call takes."""
        blocks = np.cumsum([-(-n // self._pages.block_size) for n in lengths])
        return int(np.searchsorted(blocks, self._pages.num_blocks, side="right"))

    @torch.no_grad()  # not inference_mode: what it returns enters the drafter's graph
    def __call__(self, texts: Sequence[Sequence[int]]) -> Captured:
        """Runs the target over all texts, in as many steps as the pages require. Each text must fit the pages."""
        parts: list[tuple[Tensor, Tensor]] = []
        left = list(texts)
        while left:
            some = self.fitting(left)
            parts.append(self._whole.hidden_with_aux(self.step(some), self._pages.data, self.aux_layers))
            left = left[len(some) :]
        hidden, aux = (torch.cat(part) for part in zip(*parts))
        return Captured(aux, hidden)

    def taught(self, rows: Sequence[Row]) -> Captured:
        """aux of all tokens, hidden [L, D] of the tokens of answers."""
        found = self([row.ids for row in rows])
        answers = torch.tensor([i >= row.given for row in rows for i in range(len(row.ids))])
        return Captured(found.aux, found.hidden[answers.to(found.hidden.device)])

    def each(self, shards: Sequence[Sequence[Row]]) -> Iterator[Captured]:
        """`taught` of each shard, in order."""
        for rows in shards:
            yield self.taught(rows)

    def fitting(self, texts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """The first texts, as many as one step takes."""
        count = self.rows_that_fit([len(t) for t in texts])
        assert count, f"a text of {len(texts[0])} tokens is longer than the pages"
        return texts[:count]

    def step(self, texts: Sequence[Sequence[int]]) -> Step:
        """The step of these texts, which must fit; also sets the model's grids for it."""
        device, size = self._pages.data.device, self._pages.block_size
        counts = np.array([len(t) for t in texts])
        needed = -(-counts // size)
        first = np.cumsum(needed) - needed
        start = np.zeros(len(texts) + 1, np.int32)
        np.cumsum(counts, out=start[1:])
        positions = np.arange(start[-1]) - np.repeat(start[:-1], counts)
        # The tokens of a text lie in adjacent blocks.
        slots = positions + np.repeat(first * size, counts)
        self._whole.grids = grids(counts.tolist(), start[:-1].tolist(), device)
        return Step(
            tokens=torch.from_numpy(np.concatenate([np.asarray(t, np.int64) for t in texts])).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            absorbed=None,
            plain=None,
        )
