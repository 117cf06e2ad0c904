"""Changes logits before sampling, by a request's parameters: penalties, logit_bias, no end token before min_tokens.

Step N+1 may be queued before the host knows the token of step N, so the device counts what a request has generated:
each request with penalties has a row of counts, found by its slot, to which every sampled token is added at once. The
host writes a row when the request starts or resumes: its work then has all its tokens (Work.history).

A token sampled after drafts counts these as generated: its penalties come from a copy of the counts with the drafts
added. Only accepted tokens are added to the counts themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.sampling import SamplingParams
from perilune.core.step import Sample
from perilune.engine.sampler import on_device
from perilune.ops.sampling.penalize import PROMPT, penalize

MIN_ROWS = 4  # rows of counts allocated first; doubled when slots beyond them need counts


@dataclass(frozen=True, slots=True)
class _Terms:
    """One request's token ids and the numbers added to their logits; -inf: the token is forbidden."""

    params: SamplingParams
    ids: NDArray[np.float64]
    values: NDArray[np.float64]


class Adjuster:
    """Adjusts logits; holds the token counts, 4 bytes per id of the vocabulary for each slot that ever needed them.

    No method waits for the device, and a step in which no request wants an adjustment copies nothing.
    """

    def __init__(self, max_num_seqs: int):
        self._max_rows = max_num_seqs
        self._rows: dict[int, int] = {}  # by slot
        self._counts: Tensor | None = None  # [rows, V] int32, as ops/sampling/penalize reads them
        self._terms: dict[tuple[int, bool], _Terms] = {}  # by slot, and whether ends are masked
        # From `adjust` until `count`: indices into the step's tokens, and rows of counts.
        self._open: tuple[Tensor, Tensor] | None = None

    @property
    def counting(self) -> bool:
        """Whether `count` has to be called with the tokens sampled from the logits that `adjust` returned last."""
        return self._open is not None

    @staticmethod
    def wanted(sample: Sample) -> bool:
        """Whether `adjust` changes the logits of this token."""
        p = sample.params
        return p.penalized or bool(p.logit_bias) or (sample.output_index < p.min_tokens and bool(p.stop_token_ids))

    def adjust(self, logits: Tensor, samples: Sequence[Sample]) -> Tensor:
        """The logits [S, V] float32 to choose from, row i for samples[i]; `logits` itself if none is changed."""
        V = logits.shape[1]
        counted = [(i, s) for i, s in enumerate(samples) if s.params.penalized]
        terms = [(i, t) for i, s in enumerate(samples) if (t := self._terms_of(s, V)) is not None]
        self._open = None
        if not counted and not terms:
            return logits
        per_sample = [
            (
                i,
                self._row(s, logits),
                s.params.presence_penalty,
                s.params.frequency_penalty,
                s.params.repetition_penalty,
            )
            for i, s in counted
        ]
        size = 5 * len(counted)
        staged = on_device(
            np.concatenate(
                [
                    np.array(per_sample, np.float64).T.reshape(size),
                    *(np.full(len(t.ids), i, np.float64) for i, t in terms),
                    *(t.ids for _, t in terms),
                    *(t.values for _, t in terms),
                ]
            ),
            logits.device,
        )
        adjusted = logits.clone()
        if counted:
            assert self._counts is not None
            indices, rows = staged[: 2 * len(counted)].long().view(2, -1)
            amounts = staged[2 * len(counted) : size].float().view(3, -1)
            counts = (self._counts, rows)
            if any(s.before for _, s in counted):
                counts = self._counts_after([s.before for _, s in counted], rows)
            penalized = penalize(logits.index_select(0, indices), *counts, *amounts)
            adjusted.index_copy_(0, indices, penalized)
            self._open = indices, rows
        if terms:
            owners, ids, values = staged[size:].view(3, -1)
            where = (owners.long(), ids.long())
            adjusted.index_put_(where, adjusted[where] + values.float())  # no index occurs twice
        return adjusted

    def count(self, tokens: Tensor, kept: Tensor | None = None) -> None:
        """Counts tokens [S] int64, sampled from the logits that `adjust` returned last. kept [S] bool: which of them
        the requests get; None: all, if each request sampled one."""
        if self._open is None:
            return
        assert self._counts is not None
        indices, rows = self._open
        where = (rows, tokens.index_select(0, indices))
        if kept is None:
            self._counts.index_put_(where, self._counts[where] + 1)
        else:
            self._counts.index_put_(where, kept.index_select(0, indices).int(), accumulate=True)

    def _counts_after(self, before: Sequence[Sequence[int]], rows: Tensor) -> tuple[Tensor, Tensor]:
        """(counts, rows): copies of the `rows` of the counts, each with the tokens `before` added."""
        assert self._counts is not None
        owners = np.repeat(np.arange(len(before)), [len(b) for b in before])
        tokens = np.fromiter((t for b in before for t in b), np.int64, len(owners))
        where = on_device(np.stack([owners, tokens]), rows.device)
        counts = self._counts.index_select(0, rows)
        counts.index_put_((where[0], where[1]), torch.ones_like(where[0], dtype=torch.int32), accumulate=True)
        return counts, torch.arange(len(before), device=rows.device)

    def _row(self, sample: Sample, logits: Tensor) -> int:
        """The request's row of counts, which holds all tokens sampled so far."""
        row = self._rows.setdefault(sample.slot, len(self._rows))
        if self._counts is None or row >= len(self._counts):
            self._grow(row + 1, logits)
        assert self._counts is not None
        if history := sample.history:
            prompt = len(history) - sample.output_index
            counts = np.bincount(np.array(history[prompt:], np.int64), minlength=logits.shape[1]).astype(np.int32)
            counts[np.array(history[:prompt], np.int64)] |= PROMPT
            self._counts[row].copy_(on_device(counts, logits.device))
        return row

    def _grow(self, least: int, logits: Tensor) -> None:
        rows = min(max(2 * least, MIN_ROWS), self._max_rows)
        counts = torch.zeros(rows, logits.shape[1], dtype=torch.int32, device=logits.device)
        if self._counts is not None:
            counts[: len(self._counts)] = self._counts
        self._counts = counts

    def _terms_of(self, sample: Sample, V: int) -> _Terms | None:
        params = sample.params
        masked = sample.output_index < params.min_tokens and bool(params.stop_token_ids)
        if not masked and not params.logit_bias:
            return None
        found = self._terms.get((sample.slot, masked))
        if found is None or found.params is not params:
            values = dict(params.logit_bias)
            if masked:
                values.update((t, -np.inf) for t in params.stop_token_ids if t < V)
            found = _Terms(params, np.array([*values], np.float64), np.array([*values.values()], np.float64))
            self._terms[sample.slot, masked] = found
        return found
