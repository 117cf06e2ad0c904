"""Which drafts stand: the rule by which speculation cannot change a single token of an answer.

Output token number d of a request is a function: of the target's logits at its position, after penalties, bias,
grammar mask, temperature and filters, and of one number, uniform(seed, d) (engine/sampler.py). A step with drafts
evaluates that very function at every drafted position, each row supposing that the drafts before it are right. The
rows' tokens are then read in order. As long as a row's token is the draft that the next row supposed, the next row
computed what plain decoding would have computed; the first that is not is the token plain decoding would have drawn,
and whatever lies behind it was supposed wrongly and is thrown away. If every draft is right the last row gives one
token more. So with any seed, at any temperature, answers are those of plain decoding token for token (as far as the
target's arithmetic gives a row the same logits beside other rows): stronger than having the same distribution, and it
can be tested by comparing. `accept` is for steps queued call by call; in a CUDA graph it is
ops/drafts/accept_drafts.py.

Nothing is given away for a draft that is a single token. Rejection sampling accepts a draft x with probability
min(1, p(x) / q(x)) for target p and proposal q; for a proposal that puts all its mass on x that is p(x), and p(x) is
how often a token drawn from p equals x. Drawing drafts from a model's own distribution q instead, and rejecting
against it, would accept with probability sum(min(p, q)), more than the p(argmax q) had here where both are flat and
alike: a gain at high temperature only, and then an answer's tokens depend on what was drafted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NONE = -2  # equals no token, nor what a sampler writes for a row that failed


@dataclass(frozen=True, slots=True)
class Accepted:
    """S requests, R rows.

    lengths  [S] int64: tokens that stand: the accepted drafts and one more, unless that one's row failed
    spoilt   [S] bool: there is none more, because the row that should have drawn it failed
    """

    lengths: Tensor
    spoilt: Tensor


def accept(
    drawn: Tensor,
    drafts: Sequence[int],
    guesses: Sequence[Sequence[int]],
    on_device: Callable[[NDArray[Any], torch.device], Tensor],
) -> Accepted:
    """`drawn` [R] int64: each request's rows in a row, one more than it has `drafts`. Nothing waits for the device.

    `guesses` are the drafts that may be accepted, all of a request's or the first of them. A negative token was drawn
    from a row that failed.
    """
    counts = np.array(drafts, np.int64)
    first = np.cumsum(counts + 1) - counts - 1
    width = int(counts.max(initial=0)) + 1
    staged = np.full((2, len(drafts), width), _NONE, np.int64)  # what would be right, in the last column nothing
    for row, guess in zip(staged[0], guesses):
        row[: len(guess)] = guess
    staged[1] = np.minimum(first[:, None] + np.arange(width), (first + counts)[:, None])
    wanted, places = on_device(staged, drawn.device).unbind()
    table = drawn[places]
    hits = (table == wanted).cumprod(1).sum(1)
    spoilt = table.gather(1, hits[:, None]).squeeze(1) < 0
    return Accepted(hits + ~spoilt, spoilt)


def rows_kept(
    lengths: Tensor, drafts: Sequence[int], on_device: Callable[[NDArray[Any], torch.device], Tensor]
) -> Tensor:
    """[R] bool: the rows whose tokens stand, `lengths` [S] of each request's."""
    counts = np.array(drafts, np.int64) + 1
    owners = np.repeat(np.arange(len(drafts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    owner, offset = on_device(np.stack([owners, offsets]), lengths.device).unbind()
    return offset < lengths[owner]
