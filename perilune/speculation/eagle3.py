"""An EAGLE-3 model as a drafter: it reads every step with the target's hidden states ("features"), then drafts
greedily.

The KV entry of position p (from the feature at p and the token at p + 1) is in the slot of p. So the last entry of a
block depends on a token of the next block. If a cached prefix ends with that block, the token may be another request's:
this makes one draft worse and changes no answer. The entries of a chain, after the last token, go to scratch blocks and
never into the pool: the pool holds only entries computed from the target's features, and a chain needs no blocks of its
own.
"""

import dataclasses
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perilune.dist.group import ALONE, Group
from perilune.loading.eagle3 import load_draft, to_fp8
from perilune.model.config import KimiConfig
from perilune.model.eagle3 import Eagle3, Eagle3Weights, kv_width
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import Span, Step
from perilune.model.weights import Weights
from perilune.ops.drafts.draft_tables import draft_tables
from perilune.speculation.drafter import Drafts, Followed, Start

MAX_CHAIN_TOKENS = 8  # Larger: longer chains in texts where drafts are nearly always right, more scratch blocks.


def load_drafter(
    path: Path,
    target: KimiConfig,
    weights: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device,
    fp8: bool = False,
    group: Group = ALONE,
) -> "Eagle3Drafter":
    """Loads the draft model in `path` for `target`, split over ranks like the target. CheckpointError if the files are
    damaged or belong to another target."""
    config, own = load_draft(path, target, weights, dtype=dtype, device=device, slicing=group.slicing)
    if fp8:
        to_fp8(own, weights)
    return Eagle3Drafter(config, own, config.aux_layers(target.num_hidden_layers), group)


class Eagle3Drafter:
    """See drafter.Drafter."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, aux_layers: tuple[int, ...], group: Group = ALONE):
        self.config = config
        self._group = group
        self.aux_layers = aux_layers
        self.longest = MAX_CHAIN_TOKENS
        self._weights = weights
        self._model: Eagle3 | None = None
        self._pages = torch.empty(0)
        self._scratch_blocks = self._first_scratch = 0

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return block_size * kv_width(self.config, self._group) * dtype.itemsize

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        return scratch_tokens(block_size, max_num_seqs) * self.block_bytes(1, dtype)

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
        self._scratch_blocks = _blocks_per_chain(block_size)
        chains = _chains(max_num_seqs)
        blocks = num_blocks + chains * self._scratch_blocks
        # Attention also reads positions of steps that the model skipped, so no entry may be NaN: begin with zeros.
        width = kv_width(self.config, self._group)
        self._pages = torch.zeros(blocks, block_size, width, dtype=dtype, device=device)
        self._first_scratch = num_blocks
        self._starts = torch.arange(chains + 1, dtype=torch.int32, device=device)
        positions = max_model_len + MAX_CHAIN_TOKENS
        self._model = Eagle3(self.config, self._weights, max_positions=positions, group=self._group)

    def cache(self) -> Tensor:
        return self._pages

    def follow(self, followed: Followed) -> Start | None:
        model = self._model
        assert model is not None, "allocate() comes first"
        step = dataclasses.replace(followed.step, tokens=followed.following, pending=None)
        features, at = model.features(followed.features), followed.last
        if step.plain is None:
            states, features = model.hidden(step, features, self._pages)
            return Start(states[at], features[at], step.positions[at], _owned(followed)) if followed.sampled else None
        # A prompt needs only the cache and the state after its last token.
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
        assert model is not None and 1 <= length <= MAX_CHAIN_TOKENS, "allocate() comes first"
        drafts = [_best(model, start.states)]
        if length > 1:
            features, confidence_left = start.features, drafts[0][1]
            stops = min_confidence > 0 and confidence_left.device.type == "cpu"
            for step in self._steps(start.tables, start.positions, length - 1):
                if stops and float(confidence_left.max()) < min_confidence:
                    break
                step = dataclasses.replace(step, tokens=drafts[-1][0])
                states, features = model.hidden(step, features, self._pages)
                drafts.append(_best(model, states))
                if stops:
                    confidence_left = confidence_left * drafts[-1][1]
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
        """`count` steps of one token per request, from the position after `last` [S] on, without their tokens.

        owned [S, M] int32: the requests' blocks. From the block of position last + 1 on, consecutive scratch blocks
        replace them; the entries of that block are copied to the first scratch block.
        """
        tables, *rows = draft_tables(owned, last, self._pages, self._first_scratch, self._scratch_blocks, count)
        S = len(last)
        return [Step(p, p, s, Span(tables, self._starts[: S + 1], c, slice(0, S)), None) for p, s, c in zip(*rows)]


def scratch_tokens(block_size: int, max_num_seqs: int) -> int:
    return _chains(max_num_seqs) * _blocks_per_chain(block_size) * block_size


def _chains(max_num_seqs: int) -> int:
    """The largest number of chains in a step: a CUDA graph may have padding rows beyond the largest batch."""
    return 2 * max_num_seqs


def _blocks_per_chain(block_size: int) -> int:
    """Scratch blocks of a chain: its MAX_CHAIN_TOKENS - 1 positions may begin at the last position of a block."""
    return -(-(block_size - 1 + MAX_CHAIN_TOKENS - 1) // block_size)


def _owned(followed: Followed) -> Tensor:
    """[S, M] int32 block tables of the requests that sampled tokens."""
    span = followed.step.absorbed
    if span is not None and followed.step.plain is None and len(followed.sampled) == len(followed.work):
        return span.tables  # on the device already: a step that only decodes can be captured as a CUDA graph
    owned = [followed.work[i].blocks for i in followed.sampled]
    tables = np.zeros((len(owned), max(map(len, owned))), np.int32)
    for row, blocks in zip(tables, owned):
        row[: len(blocks)] = blocks
    return torch.from_numpy(tables).to(followed.last.device)


def _best(model: Eagle3, states: Tensor) -> tuple[Tensor, Tensor]:
    """(the target's id [S] of the most likely token, its probability [S])."""
    token, probability = model.vocabulary.argmax_probability(model.logits(states))
    return model.target_ids(token), probability
