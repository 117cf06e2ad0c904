"""What a request's parameters do to its logits before anything is drawn: penalties, bias, and no end before min_tokens.

Step N+1 is planned, and may be queued, before the host knows the token of step N. So what a request has generated is
counted on the device: each request that looks back has a row of counts, found by its slot, to which every token drawn
is added at once. A row is written anew whenever a work brings the request's whole history: when it starts or resumes,
and whenever else the host happens to know all its tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.plan import Work
from perilune.core.sampling import SamplingParams
from perilune.engine.sampler import on_device
from perilune.ops.penalize import PROMPT, penalize

FEWEST = 4  # rows of counts to begin with


@dataclass(frozen=True, slots=True)
class _Terms:
    """What is added to single logits of a request; -inf for a token it may not choose."""

    params: SamplingParams
    masked: bool
    ids: NDArray[np.float64]
    values: NDArray[np.float64]


class Adjuster:
    """Adjusts logits; holds the token counts, 4 bytes per id of the vocabulary for each slot that ever needed them.

    Nothing here waits for the device, and a step in which no request asks for anything costs nothing.
    """

    def __init__(self, max_num_seqs: int):
        self._max_rows = max_num_seqs
        self._rows: dict[int, int] = {}  # by slot
        self._counts: Tensor | None = None  # [rows, V] int32, as ops/penalize reads them
        self._terms: dict[int, _Terms] = {}  # by slot
        self._open: tuple[Tensor, Tensor] | None = None  # indices into the step's tokens, and their rows of counts

    def adjust(self, logits: Tensor, work: tuple[Work, ...]) -> Tensor:
        """The logits [S, V] float32 to choose from, row i for work[i]; the very same tensor if nobody asks for more."""
        V = logits.shape[1]
        looking = [(i, w) for i, w in enumerate(work) if w.params.penalized]
        terms = [(i, t) for i, w in enumerate(work) if (t := self._terms_of(w, V)) is not None]
        self._open = None
        if not looking and not terms:
            return logits
        per_work = [
            (
                i,
                self._row(w, logits),
                w.params.presence_penalty,
                w.params.frequency_penalty,
                w.params.repetition_penalty,
            )
            for i, w in looking
        ]
        size = 5 * len(looking)
        staged = on_device(
            np.concatenate(
                [
                    np.array(per_work, np.float64).T.reshape(size),
                    *(np.full(len(t.ids), i, np.float64) for i, t in terms),
                    *(t.ids for _, t in terms),
                    *(t.values for _, t in terms),
                ]
            ),
            logits.device,
        )
        adjusted = logits.clone()
        if looking:
            assert self._counts is not None
            indices, rows = staged[: 2 * len(looking)].long().view(2, -1)
            amounts = staged[2 * len(looking) : size].float().view(3, -1)
            penalized = penalize(logits.index_select(0, indices), self._counts, rows, *amounts)
            adjusted.index_copy_(0, indices, penalized)
            self._open = indices, rows
        if terms:
            owners, ids, values = staged[size:].view(3, -1)
            where = (owners.long(), ids.long())
            adjusted.index_put_(where, adjusted[where] + values.float())  # no place occurs twice
        return adjusted

    def count(self, tokens: Tensor) -> None:
        """Counts the tokens [S] int64 that were drawn from what `adjust` returned last."""
        if self._open is None:
            return
        assert self._counts is not None
        indices, rows = self._open
        where = (rows, tokens.index_select(0, indices))
        self._counts.index_put_(where, self._counts[where] + 1)

    def _row(self, work: Work, logits: Tensor) -> int:
        """The work's row of counts, up to date but for tokens not drawn yet."""
        row = self._rows.setdefault(work.slot, len(self._rows))
        if self._counts is None or row >= len(self._counts):
            self._grow(row + 1, logits)
        assert self._counts is not None
        if work.history:
            prompt = len(work.history) - work.draw
            counts = np.bincount(np.array(work.history[prompt:], np.int64), minlength=logits.shape[1]).astype(np.int32)
            counts[np.array(work.history[:prompt], np.int64)] |= PROMPT
            self._counts[row].copy_(on_device(counts, logits.device))
        return row

    def _grow(self, least: int, logits: Tensor) -> None:
        rows = min(max(2 * least, FEWEST), self._max_rows)
        counts = torch.zeros(rows, logits.shape[1], dtype=torch.int32, device=logits.device)
        if self._counts is not None:
            counts[: len(self._counts)] = self._counts
        self._counts = counts

    def _terms_of(self, work: Work, V: int) -> _Terms | None:
        params = work.params
        masked = work.draw < params.min_tokens and bool(params.stop_token_ids)
        if not masked and not params.logit_bias:
            return None
        found = self._terms.get(work.slot)
        if found is None or found.params is not params or found.masked != masked:
            values = dict(params.logit_bias)
            if masked:
                values.update((t, -np.inf) for t in params.stop_token_ids if t < V)
            found = _Terms(params, masked, np.array([*values], np.float64), np.array([*values.values()], np.float64))
            self._terms[work.slot] = found
        return found
