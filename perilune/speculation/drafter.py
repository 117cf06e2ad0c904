"""The protocol of a draft model: what it gets of a step, and what it returns.

The runner calls it once per step, on the compute thread, after the step's tokens have been sampled and accepted, in the
same queue of device work. No call may wait for the device. Its drafts come to the host with the step's tokens; how many
of them the next step verifies is decided there (adaptive.py).

Drafts are the model's most likely tokens, not samples: see acceptance.py.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.core.step import Work
from perilune.model.kimi_k2 import Step


@dataclass(frozen=True, slots=True)
class Followed:
    """What a step computed: T rows, S requests that sampled tokens.

    work       in the order of its rows; work[i] owns rows starts[i] .. starts[i] + work[i].count - 1
    step       its tokens [T] with PENDING resolved, positions, slots, and the spans that cover the rows
    features   [T, A D] the residual stream at the inputs of the drafter's A aux layers, concatenated
    following  [T] int64: the token after each row's position; the sampled one where the row samples
    sampled    indices into `work` of the S requests
    last       [S] int64: the row of each request's last accepted position; its rows after that hold rejected drafts;
               their slots are written again later
    """

    work: tuple[Work, ...]
    starts: tuple[int, ...]
    step: Step
    features: Tensor
    following: Tensor
    sampled: tuple[int, ...]
    last: Tensor


@dataclass(frozen=True, slots=True)
class Drafts:
    """tokens [S, k] int64 of the target's vocabulary; confidence [S, k] float32, the drafter's probability of each."""

    tokens: Tensor
    confidence: Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """Where the chains of S requests begin, on the device: the last accepted position of each.

    states, features   [S, D] inputs of the drafter's head and of its next step; `features` is overwritten
    positions          [S] int64
    tables             [S, M] int32 the requests' blocks, padded with any block
    """

    states: Tensor
    features: Tensor
    positions: Tensor
    tables: Tensor


class Drafter(Protocol):
    """One per engine. Its own cache has the same block ids and slots as the target's.

    `aux_layers` are the layers, in ascending order, that it gets the inputs of; it drafts at most `longest` tokens. It
    may be left out of any number of steps: its pages then hold zeros or old entries at those positions.
    """

    aux_layers: tuple[int, ...]
    longest: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of its own cache per block."""
        ...

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        """Bytes of its scratch blocks, for the positions of chains after the last token."""
        ...

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None: ...

    def cache(self) -> Tensor:
        """[blocks, block_size, width] its own cache, once allocated; blocks beyond the target's are scratch."""
        ...

    def follow(self, followed: Followed) -> Start | None:
        """Writes the step to its cache; None if no request sampled a token."""
        ...

    def draft(self, start: Start, length: int, min_confidence: float = 0.0) -> Drafts:
        """A chain of `length` tokens, at least one, after each request's last.

        On a CPU chains end early: when the confidence in every request's chain is below `min_confidence`.
        """
        ...

    def blank(self, requests: int, width: int) -> Start:
        """Buffers for so many requests and a block table `width`; drafting from them writes no live block."""
        ...

    def propose(self, followed: Followed, length: int, min_confidence: float = 0.0) -> Drafts | None:
        """`follow`, then `draft`; with length 0 only `follow`, and None."""
        ...
