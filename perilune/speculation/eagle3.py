"""A drafter that is an EAGLE-3 model: follows every step with the target's features, then drafts greedily.

The pair of position p (the feature at p, the token at p + 1) lies in the slot of p. So the last entry of a block
depends on a token beyond it: where a cached prefix ends there, that one may belong to another request's continuation.
What a chain computes ahead of the last token goes to scratch blocks of its own, never into the pool: the pool holds
only what was computed from the target's features, and a chain needs no blocks that its request does not own.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perilune.loading.eagle3 import load_draft, to_fp8
from perilune.model.config import KimiConfig
from perilune.model.eagle3 import Eagle3, Eagle3Weights
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import Span, Step
from perilune.model.weights import Weights
from perilune.ops.drafts.argmax_probability import argmax_probability
from perilune.ops.drafts.draft_tables import draft_tables
from perilune.speculation.drafter import Drafts, Followed, Start

LONGEST = 8


def load_drafter(
    path: Path, target: KimiConfig, weights: Weights, *, dtype: torch.dtype, device: torch.device, fp8: bool = False
) -> "Eagle3Drafter":
    """The draft in `path` for a model that is loaded; CheckpointError if it cannot be, or is another model's."""
    config, own = load_draft(path, target, weights, dtype=dtype, device=device)
    if fp8:
        to_fp8(own, weights)
    return Eagle3Drafter(config, own, config.aux_layers(target.num_hidden_layers))


class Eagle3Drafter:
    """See spec.drafter.Drafter."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, aux_layers: tuple[int, ...]):
        self.config = config
        self.aux_layers = aux_layers
        self.longest = LONGEST
        self._weights = weights
        self._model: Eagle3 | None = None
        self._pages = torch.empty(0)
        self._blocks_ahead = self._scratch = 0

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_size * self.config.kv_width * dtype.itemsize

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        return _chains(max_num_seqs) * _ahead(block_size) * self.block_bytes(block_size, dtype)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._blocks_ahead = ahead = _ahead(block_size)
        chains = _chains(max_num_seqs)
        blocks = num_blocks + chains * ahead
        # Positions may be read that were never followed, so nothing there may be nan.
        self._pages = torch.zeros(blocks, block_size, self.config.kv_width, dtype=dtype, device=device)
        self._scratch = num_blocks
        self._starts = torch.arange(chains + 1, dtype=torch.int32, device=device)
        self._model = Eagle3(self.config, self._weights, max_positions=max_model_len + LONGEST)

    def follow(self, followed: Followed) -> Start | None:
        model = self._model
        assert model is not None, "allocate() comes first"
        step = dataclasses.replace(followed.step, tokens=followed.following, pending=None)
        features, at = model.features(followed.features), followed.last
        if step.plain is None:
            states, features = model.hidden(step, features, self._pages)
            return Start(states[at], features[at], step.positions[at], _owned(followed)) if followed.sampled else None
        # Of a prompt only the cache is wanted, and what its last token leads to.
        ends = features[at]
        model.store(step, features, self._pages)
        if not followed.sampled:
            return None
        positions, tables = step.positions[at], _owned(followed)
        span = Span(tables, self._starts[: len(at) + 1], (positions + 1).to(torch.int32), slice(0, len(at)))
        states, features = model.hidden(Step(step.tokens[at], positions, step.slots[at], span, None), ends, self._pages)
        return Start(states, features, positions, tables)

    def draft(self, start: Start, length: int, min_confidence: float = 0.0) -> Drafts:
        model = self._model
        assert model is not None and 1 <= length <= LONGEST, "allocate() comes first"
        drafts = [_best(model, start.states)]
        if length > 1:
            features, sure = start.features, drafts[0][1]
            stops = min_confidence > 0 and sure.device.type == "cpu"
            for ahead in self._steps(start.tables, start.positions, length - 1):
                if stops and float(sure.max()) < min_confidence:
                    break
                ahead = dataclasses.replace(ahead, tokens=drafts[-1][0])
                states, features = model.hidden(ahead, features, self._pages)
                drafts.append(_best(model, states))
                if stops:
                    sure = sure * drafts[-1][1]
        tokens, confidence = (torch.stack(column, 1) for column in zip(*drafts))
        return Drafts(tokens, confidence)

    def blank(self, requests: int, width: int) -> Start:
        device = self._pages.device
        rows = torch.zeros(2, requests, self.config.hidden_size, dtype=self._pages.dtype, device=device)
        positions = torch.zeros(requests, dtype=torch.int64, device=device)
        return Start(rows[0], rows[1], positions, torch.zeros(requests, width, dtype=torch.int32, device=device))

    def propose(self, followed: Followed, length: int, min_confidence: float = 0.0) -> Drafts | None:
        start = self.follow(followed)
        return None if start is None or not length else self.draft(start, length, min_confidence)

    def _steps(self, owned: Tensor, last: Tensor, count: int) -> list[Step]:
        """`count` steps of one token of each request, from the position after `last` [S] on; their tokens are to come.

        owned [S, M] int32: the requests' blocks. From the block on that the first of these positions lies in, scratch
        blocks, which lie one behind the other, take their place; what that block holds is copied to the first of them.
        """
        tables, *rows = draft_tables(owned, last, self._pages, self._scratch, self._blocks_ahead, count)
        S = len(last)
        return [Step(p, p, s, Span(tables, self._starts[: S + 1], c, slice(0, S)), None) for p, s, c in zip(*rows)]


def _chains(max_num_seqs: int) -> int:
    """Chains of a step at most: a CUDA graph may have rows for more requests than there can be."""
    return 2 * max_num_seqs


def _ahead(block_size: int) -> int:
    """Scratch blocks of a request: its chain's LONGEST - 1 positions may begin at a block's last one."""
    return -(-(block_size - 1 + LONGEST - 1) // block_size)


def _owned(followed: Followed) -> Tensor:
    """[S, M] int32 block tables of the requests that drew tokens."""
    span = followed.step.absorbed
    if span is not None and followed.step.plain is None and len(followed.sampled) == len(followed.work):
        return span.tables  # so a step that only decodes can be part of a CUDA graph
    owned = [followed.work[i].blocks for i in followed.sampled]
    tables = np.zeros((len(owned), max(map(len, owned))), np.int32)
    for row, blocks in zip(tables, owned):
        row[: len(blocks)] = blocks
    return torch.from_numpy(tables).to(followed.last.device)


def _best(model: Eagle3, states: Tensor) -> tuple[Tensor, Tensor]:
    """(the target's id [S] of the most likely token, its probability [S])."""
    token, probability = argmax_probability(model.logits(states))
    return model.target_ids(token), probability
