"""The seam for a model that drafts: what it is told of a step, and what it gives back.

The runner calls it once per step, on the compute thread, when the step's tokens have been drawn and accepted, in the
same queue of device work. Nothing in a call may wait for the device. What it drafts travels to the host with the
step's tokens; how much of it the next step carries is decided there (speculation/policy.py).

Drafts are the drafter's most likely tokens, not samples: see speculation/acceptance.py.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.core.step import Work
from perilune.model.kimi_k2 import Step


@dataclass(frozen=True, slots=True)
class Followed:
    """What a step computed: T rows, S requests that drew tokens.

    work       in the order of its rows; work[i] owns rows starts[i] .. starts[i] + work[i].count - 1
    step       its tokens [T] with PENDING resolved, positions, slots, and the spans that cover the rows
    features   [T, A D] the residual stream at the input of the drafter's aux layers, side by side
    following  [T] int64: the token after each row's position; of rows that draw, the one drawn there
    sampled    indices into `work` of the S requests
    last       [S] int64: the row of each one's last position that stands; rows of the same request behind it hold
               rejected drafts, whose slots will be written again
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
    """Where the chains of S requests begin, on the device: the last position of each that stands.

    states, features   [S, D] what the drafter's head and its next step take there; features are used up
    positions          [S] int64
    tables             [S, M] int32 the requests' blocks, padded with any
    """

    states: Tensor
    features: Tensor
    positions: Tensor
    tables: Tensor


class Drafter(Protocol):
    """One per engine. Its own cache lies in pages with the same block ids and slots as the target's.

    `aux_layers` are the layers, in ascending order, whose input it wants to see; it drafts at most `longest` tokens.
    It may be left out for any number of steps: its pages then hold zeros or old entries at those positions.
    """

    aux_layers: tuple[int, ...]
    longest: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of its own cache per block."""
        ...

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        """Bytes it needs besides, for the positions a chain is ahead."""
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

    def follow(self, followed: Followed) -> Start | None:
        """Takes in a step; None if nobody drew in it."""
        ...

    def draft(self, start: Start, length: int, min_confidence: float = 0.0) -> Drafts:
        """A chain of `length` tokens, at least one, after each request's last.

        Where looking costs nothing it is shorter: it ends when no request's has a probability of `min_confidence` left.
        """
        ...

    def blank(self, requests: int, width: int) -> Start:
        """Room for the starts of so many requests, with block tables so wide; chains drafted from it harm nobody."""
        ...

    def propose(self, followed: Followed, length: int, min_confidence: float = 0.0) -> Drafts | None:
        """`follow`, then `draft`; with length 0 it only follows the step, and gives None."""
        ...
