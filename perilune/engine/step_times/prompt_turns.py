"""Splits a step's prompt tokens among the prompts that could be computed. Pure policy: no tensors."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from perilune.core.request import Request
from perilune.engine.step_times.pacing import Pacer

SEEN_REQUESTS = 4  # waiting requests that get a share. More: longer planning while prompts wait.


@dataclass(slots=True)
class PromptTurns:
    """The prompt tokens of one step.

    shares  by rid: max tokens of running requests with a prompt to compute, and of the first SEEN_REQUESTS waiting ones
    tokens  prompt tokens of the whole step; other waiting requests may take those that remain
    """

    shares: dict[int, int]
    tokens: int


def choose(
    pacer: Pacer | None,
    max_step_tokens: int,
    running: Sequence[Request],
    waiting: Sequence[Request],
    cached: Callable[[Request], int],
) -> PromptTurns:
    """The prompt tokens of the next step. `running` and `waiting` are sorted by rank; `waiting` is empty if no slot is
    free. cached: gives how many tokens of a waiting request are in the prefix cache."""
    begun = [r for r in running if r.todo > 1]
    if not begun and not waiting:
        return PromptTurns({}, 0)
    seen = list(islice(waiting, SEEN_REQUESTS))
    left = [r.todo for r in begun] + [r.known - cached(r) for r in seen]
    decoding = sum(r.todo <= 1 and r.planned < r.barrier for r in running)
    tokens = max(max_step_tokens - decoding, 1)
    if pacer is not None:
        sizes = [r.horizon - r.begun_at for r in begun] + left[len(begun) :]
        now = time.monotonic()
        waited = [now - r.ready for r in (*begun, *seen)]
        tokens = pacer.prompt_tokens(decoding, list(zip(sizes, left, waited)))
    shares = share(tokens, [(r.rank[0], n) for r, n in zip((*begun, *seen), left)])
    return PromptTurns({r.rid: n for r, n in zip((*begun, *seen), shares)}, tokens)


def share(tokens: int, prompts: Sequence[tuple[float, int]]) -> list[int]:
    """Splits a step's tokens among prompts, each (priority, tokens left), sorted by rank. The first gets half of them,
    so that it always advances. The other half goes to prompts of the same priority with at most half as many tokens
    left as the first, shortest first: they delay it little. What remains is given by rank."""
    shares = [0] * len(prompts)

    def give(at: int, most: int) -> None:
        nonlocal tokens
        more = min(prompts[at][1] - shares[at], most)
        shares[at] += more
        tokens -= more

    if prompts:
        give(0, -(-tokens // 2))
    for at in sorted(range(1, len(prompts)), key=lambda i: prompts[i]):
        if prompts[at][0] == prompts[0][0] and 2 * prompts[at][1] <= prompts[0][1]:
            give(at, tokens)
    for at in range(len(prompts)):
        give(at, tokens)
    return shares
