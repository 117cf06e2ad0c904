"""A rank with a 20th step that never ends, though its process reports every second: as perilune.engine.rank
otherwise."""

import threading
from typing import Any

from perilune.dist.vocabulary import Vocabulary
from perilune.engine import rank


def hang(owner: Any, name: str) -> None:
    """From its 20th call on, this function never returns."""
    real, calls = getattr(owner, name), 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 20:
            threading.Event().wait()
        return real(*args)

    setattr(owner, name, run)


if __name__ == "__main__":
    hang(Vocabulary, "argmax")  # rank 0 waits for it
    rank.main()
