"""A rank for which every 30th step takes 4 s of computing: as perilune.engine.rank otherwise."""

import time
from typing import Any

from torch import Tensor

from perilune.dist import group
from perilune.dist.vocabulary import Vocabulary
from perilune.engine import rank

SECONDS = 4.0
_argmax, _calls = Vocabulary.argmax, 0


def argmax(self: Any, logits: Tensor) -> Tensor:
    global _calls
    _calls += 1
    end = time.monotonic() + SECONDS
    while _calls % 30 == 0 and time.monotonic() < end:
        pass
    return _argmax(self, logits)


Vocabulary.argmax = argmax  # type: ignore[method-assign]

if __name__ == "__main__":
    group.BUSY_SECONDS = 1e-3  # Of CPU time in a second: on a busy machine it computes for less than a tenth of one.
    rank.main()
