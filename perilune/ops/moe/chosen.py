"""The experts that a router chose, and the mailbox from which the expert kernel of one token reads them while the
router runs."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.harness.case import FLOAT32
from perilune.ops.harness.workspace import Workspace

MAX_NUMBER = (1 << 22) - 1  # of a launch: what a mailbox word holds beside an id; then numbers begin again


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What x is the norm of, for a kernel that makes x itself: `residual` [D / 2] words of a mailbox that
    mla_decode_output's kernel may still be writing (cuda/residual_mailbox.cuh), the norm's weights [D], its epsilon."""

    residual: Tensor
    norm: Tensor
    eps: float


class Publication(NamedTuple):
    """One launch's use of a mailbox: it will write "x is ready" and the ids there, each word with `number`."""

    mailbox: "Mailbox"
    number: int
    x: Tensor
    source: Source | None


class Mailbox:
    """From the router to the expert kernel of one token (cuda/router_mailbox.cuh), one per stream.

    moe_int4's first kernel may start while the router still runs, if it finds "x is ready" and the ids here. It waits
    for words with the number of that router launch, so words of other launches mean nothing; but it would wait for ever
    for words that a later launch has overwritten or that a reader has cleared. `take` therefore gives the publication
    of the latest launch only, and once: in every other case the expert kernel waits for the end of the kernel before
    it, which is always right. In a CUDA graph the numbers are those of the capture, and the same in every replay: the
    kernel that reads the ids last clears the words (moe_int4's second kernel).
    """

    def __init__(self, memory: Workspace) -> None:
        self.words = memory.zeros("router.mailbox", 64)
        self._launches = 0
        self._latest = 0  # 0: nothing is published, or it was taken

    def publish(self, x: Tensor, source: Source | None = None) -> Publication:
        """For the launch that comes next on the mailbox's stream."""
        self._launches += 1
        self._latest = (self._launches - 1) % MAX_NUMBER + 1
        return Publication(self, self._latest, x, source)

    def take(self, found: Publication | None, x: Tensor) -> Publication | None:
        """`found` if the launch that comes next on this stream may read it; x is what that launch reads."""
        if found is None:
            return None
        assert found.mailbox is self, "the experts were chosen on another stream, or for another engine"
        assert found.x is x, "the experts were chosen for another x"
        if found.number != self._latest:
            return None
        self._latest = 0
        return found


def mailbox(memory: Workspace) -> Mailbox:
    return memory.kept("router", lambda: Mailbox(memory))


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """The experts of T tokens: ids [T, k] int32, distinct within a row; weights [T, k] float32."""

    ids: Tensor
    weights: Tensor
    publication: Publication | None = None

    @property
    def kind(self) -> Hashable:
        return self.ids.shape

    def check(self, tokens: int) -> None:
        ids, weights = self.ids, self.weights
        assert ids.shape == weights.shape and ids.shape[0] == tokens, f"{tokens=} {ids.shape=} {weights.shape=}"
        assert ids.dtype == torch.int32 and weights.dtype == FLOAT32, f"{ids.dtype=} {weights.dtype=}"
