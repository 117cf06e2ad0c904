"""The experts that a router chose, and the mailbox from which one token's expert kernel reads their ids while the
router's kernel still runs."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from perilune.ops.harness.case import FLOAT32
from perilune.ops.harness.workspace import Workspace

MAX_NUMBER = (1 << 22) - 1  # largest launch number, 22 bits of a mailbox word beside the id's 10; the next is 1


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Inputs of x = rmsnorm(residual), for a kernel that computes x itself. residual: a mailbox [D] int32 that
    mla_decode_output's kernel may still be writing (cuda/residual_mailbox.cuh); norm [D] and eps: of the norm."""

    residual: Tensor
    norm: Tensor
    eps: float


class Publication(NamedTuple):
    """A router launch that writes "x is ready" and the ids to `mailbox`; each word carries the launch's `number`."""

    mailbox: "Mailbox"
    number: int
    x: Tensor
    source: Source | None


class Mailbox:
    """From the router to the expert kernels of one token (words and timeline: cuda/router_mailbox.cuh), one per stream.

    1. Router launch `number` writes "x is ready" and the ids, each word with that number.
    2. moe_int4's first kernel, which may run beside the router, waits for words with that number and ignores others.
    3. moe_int4's second kernel, the last reader, clears the words: a CUDA graph uses the same numbers in every replay.

    Step 2 would never end for words that a later launch has overwritten or a reader has cleared. So `take` returns only
    the latest publication, and only once. Otherwise the expert kernel waits for its predecessor's end: always correct.
    """

    def __init__(self, memory: Workspace) -> None:
        self.words = memory.zeros("router.mailbox", 64)
        self._launches = 0
        self._latest = 0  # 0: nothing is published, or it was taken

    def publish(self, x: Tensor, source: Source | None = None) -> Publication:
        """The publication of the next router launch on the mailbox's stream."""
        self._launches += 1
        self._latest = (self._launches - 1) % MAX_NUMBER + 1
        return Publication(self, self._latest, x, source)

    def take(self, found: Publication | None, x: Tensor) -> Publication | None:
        """`found` if the next expert kernel on this stream, with input x, may read it; else None."""
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
