"""Ranks as threads of one process."""

import threading
from collections.abc import Callable
from typing import Any


def on_ranks(ranks: int, run: Callable[[int], Any], seconds: float = 100) -> list[Any]:
    """The result of run(rank) of every rank, or the exception that it raised, each in a thread; None for a rank that
    has not ended in time."""
    found: list[Any] = [None] * ranks

    def rank(r: int) -> None:
        try:
            found[r] = run(r)
        except BaseException as e:
            found[r] = e

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(seconds)
    return found
