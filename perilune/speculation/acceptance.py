"""Decides which drafts are accepted, so that speculation never changes an answer.

Output token number d of a request is a function of the target's logits at its position (after penalties, bias, grammar
mask, temperature and filters) and of one random number, uniform(seed, d) (engine/sampler.py). A step with drafts
evaluates the same function at every drafted position, each row given the drafts before it. The rows' tokens are read in
order: while a row's token equals the next draft, the next row computed what plain decoding would have computed. The
first token that differs is what plain decoding would have sampled; everything after it is dropped. If all drafts are
accepted, the last row gives one token more. So answers equal those of plain decoding token for token, with any seed and
at any temperature, as long as the target computes the same logits for a row in any batch (in bfloat16, almost equal
logits may swap). This is stronger than an equal distribution, and a test can compare tokens. `accept` is for steps
queued op by op; CUDA graphs use ops/drafts/accept_drafts.py.

Drafting the most likely token loses no acceptance against standard rejection sampling, which accepts a draft x with
probability min(1, p(x) / q(x)) for target p and proposal q. If q has all its mass on x, this probability is p(x): the
probability that a token sampled from p equals x. Drafts sampled from a draft model's q would be accepted with
probability sum(min(p, q)). It exceeds p(argmax q) only if p and q are flat and alike, at high temperature; and the
tokens of an answer would then depend on the drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NONE = -2  # padding: equals no token id, and not the sampler's FAILED (-1)


@dataclass(frozen=True, slots=True)
class Accepted:
    """S requests, R rows.

    lengths  [S] int64: tokens that the request gets: the accepted drafts, and one sampled token more unless `spoilt`
    spoilt   [S] bool: the logits after the accepted drafts are not finite, so there is no sampled token
    """

    lengths: Tensor
    spoilt: Tensor


def accept(
    sampled: Tensor,
    drafts: Sequence[int],
    allowed: Sequence[Sequence[int]],
    on_device: Callable[[NDArray[Any], torch.device], Tensor],
) -> Accepted:
    """How many tokens each request gets. The host does not wait for the device.

    sampled    [R] int64: the rows of each request in order, one more than it has `drafts`; negative where the logits
               are not finite
    drafts     number of drafts of each request
    allowed    the drafts that may be accepted: all of a request's, or the first of them
    on_device  copies an array to a device without waiting
    """
    counts = np.array(drafts, np.int64)
    first = np.cumsum(counts + 1) - counts - 1
    width = int(counts.max(initial=0)) + 1
    # [0]: each request's allowed drafts, then _NONE (at least in the last column). [1]: their rows in `sampled`.
    staged = np.full((2, len(drafts), width), _NONE, np.int64)
    for row, tokens in zip(staged[0], allowed):
        row[: len(tokens)] = tokens
    staged[1] = np.minimum(first[:, None] + np.arange(width), (first + counts)[:, None])
    expected, places = on_device(staged, sampled.device).unbind()
    table = sampled[places]
    hits = (table == expected).cumprod(1).sum(1)
    spoilt = table.gather(1, hits[:, None]).squeeze(1) < 0
    return Accepted(hits + ~spoilt, spoilt)


def rows_kept(
    lengths: Tensor, drafts: Sequence[int], on_device: Callable[[NDArray[Any], torch.device], Tensor]
) -> Tensor:
    """[R] bool: whether a row's token is kept: true for the first lengths[s] rows of request s; `lengths` [S]."""
    counts = np.array(drafts, np.int64) + 1
    owners = np.repeat(np.arange(len(drafts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    owner, offset = on_device(np.stack([owners, offsets]), lengths.device).unbind()
    return offset < lengths[owner]
