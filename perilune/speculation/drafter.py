"""The protocol of a draft model: the inputs that it gets from a step, and the drafts that it returns.

The runner calls it once per step, on the compute thread and the step's CUDA stream, after the step's tokens have been
sampled and accepted. No call may wait for the device. Its drafts reach the host with the step's tokens; the host
decides how many of them the next step verifies (adaptive.py).

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
    following  [T] int64: the token at the position after each row's; where the row samples, the sampled token
    sampled    indices into `work` of the S requests
    last       [S] int64: the row of each request's last accepted position; its rows after that are rejected drafts,
               and later steps overwrite their cache slots
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
    """The state from which the chains of S requests begin, on the device: after the last accepted position of each.

    states, features   [S, D] inputs of the drafter's head and of its next step; `features` is overwritten
    positions          [S] int64
    tables             [S, M] int32 block tables; the padding may be any block
    """

    states: Tensor
    features: Tensor
    positions: Tensor
    tables: Tensor


class Drafter(Protocol):
    """A draft model; one per engine. Its own KV cache has the same block ids and slots as the target's.

    aux_layers  numbers of the target's layers that it reads the inputs of, ascending
    longest     length of its longest chain, in tokens

    Any number of steps may run without it: its pages then hold zeros or old entries at those positions.
    """

    aux_layers: tuple[int, ...]
    longest: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of its own cache per block."""
        ...

    def scratch_bytes(self, block_size: int, dtype: torch.dtype, max_num_seqs: int) -> int:
        """Bytes of its scratch blocks, which hold the KV of chains, at positions after the last known token."""
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
        """Its KV cache [blocks, block_size, width]; blocks after the last one of the target are scratch blocks."""
        ...

    def follow(self, followed: Followed) -> Start | None:
        """Reads a step into its cache and returns where chains begin; None if no request sampled a token."""
        ...

    def draft(self, start: Start, length: int, min_confidence: float = 0.0) -> Drafts:
        """A chain of `length` >= 1 tokens after each request's last token.

        On a CPU all chains end early once the product of probabilities is below `min_confidence` in every one.
        """
        ...

    def blank(self, requests: int, width: int) -> Start:
        """Buffers for `requests` requests and tables of `width` blocks; drafting from them writes no block in use."""
        ...

    def propose(self, followed: Followed, length: int, min_confidence: float = 0.0) -> Drafts | None:
        """`follow`, then `draft`; with length 0 only `follow`, and None."""
        ...
