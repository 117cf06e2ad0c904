"""A rank that chooses a wrong token, once, after the first hundred steps: as perilune.engine.rank otherwise."""

from typing import Any

from torch import Tensor

from perilune.dist.vocabulary import Vocabulary
from perilune.engine import rank

_argmax, _calls = Vocabulary.argmax, 0


def argmax(self: Any, logits: Tensor) -> Tensor:
    global _calls
    _calls += 1
    found = _argmax(self, logits)
    return found + 1 if _calls == 20 else found


Vocabulary.argmax = argmax  # type: ignore[method-assign]

if __name__ == "__main__":
    rank.main()
