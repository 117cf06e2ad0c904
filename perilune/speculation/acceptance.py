"""Which drafts are accepted: the rule by which speculation never changes an answer.

Output token number d of a request is a function of the target's logits at its position (after penalties, bias, grammar
mask, temperature and filters) and of one random number, uniform(seed, d) (engine/sampler.py). A step with drafts
evaluates the same function at every drafted position, each row given the drafts before it. The rows' tokens are read in
order: while a row's token equals the next draft, the next row computed what plain decoding would have computed. The
first token that differs is what plain decoding would have sampled; everything after it is dropped. If all drafts are
right, the last row gives one token more. So answers are those of plain decoding token for token, with any seed and at
any temperature, as far as the target's arithmetic gives a row the same logits beside other rows. That is stronger than
an equal distribution, and can be tested by comparing. `accept` is for steps queued call by call; in a CUDA graph it is
ops/drafts/accept_drafts.py.

No acceptance is lost by drafting one token per position. Rejection sampling accepts a draft x with probability
min(1, p(x) / q(x)) for target p and proposal q; for a proposal with all its mass on x that is p(x), which is how often
a token sampled from p equals x. Sampling drafts from a model's distribution q and rejecting against it would accept
with probability sum(min(p, q)), more than the p(argmax q) here if both are flat and alike: a gain at high temperature
only, and the tokens of an answer would then depend on what was drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NONE = -2  # equals no token, nor the sampler's mark for logits that are not finite


@dataclass(frozen=True, slots=True)
class Accepted:
    """S requests, R rows.

    lengths  [S] int64: the accepted drafts and one token more, unless the logits of that token's row are not finite
    spoilt   [S] bool: there is no such token, because of its row's logits
    """

    lengths: Tensor
    spoilt: Tensor


def accept(
    sampled: Tensor,
    drafts: Sequence[int],
    allowed: Sequence[Sequence[int]],
    on_device: Callable[[NDArray[Any], torch.device], Tensor],
) -> Accepted:
    """The host does not wait for the device.

    sampled    [R] int64: the rows of each request in order, one more than it has `drafts`; negative where the logits
               are not finite
    drafts     number of drafts of each request
    allowed    the drafts that may be accepted: all of a request's, or the first of them
    on_device  copies an array to a device without waiting
    """
    counts = np.array(drafts, np.int64)
    first = np.cumsum(counts + 1) - counts - 1
    width = int(counts.max(initial=0)) + 1
    staged = np.full((2, len(drafts), width), _NONE, np.int64)  # the drafts; no token equals the last column
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
    """[R] bool: the rows with tokens to keep, the first `lengths` [S] of each request's."""
    counts = np.array(drafts, np.int64) + 1
    owners = np.repeat(np.arange(len(drafts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    owner, offset = on_device(np.stack([owners, offsets]), lengths.device).unbind()
    return offset < lengths[owner]
