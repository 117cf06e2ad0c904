"""The placeholder tokens of pictures and videos in a prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perilune.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Span:
    """The placeholder tokens of media item `item`, from position `start` of the prompt up to `stop`."""

    item: int
    start: int
    stop: int


def spans(tokens: Sequence[int], pad: int, counts: Sequence[int]) -> list[Span]:
    """The runs of the placeholder `pad`, one for each item in order. `counts` are the items' tokens.

    RequestError if there are fewer or more runs, or one is of another length: then the prompt and the media differ.
    """
    if not counts and pad not in tokens:  # as almost all prompts
        return []
    is_pad = np.concatenate(([False], np.asarray(tokens, dtype=np.int64) == pad, [False]))
    edges = np.flatnonzero(is_pad[1:] != is_pad[:-1]).reshape(-1, 2).tolist()
    lengths = [stop - start for start, stop in edges]
    if lengths != list(counts):
        at = next((i for i, (a, b) in enumerate(zip(lengths, counts)) if a != b), min(len(lengths), len(counts)))
        found = f"{lengths[at]} placeholder tokens" if at < len(lengths) else "no placeholder"
        wanted = f"has {counts[at]} tokens" if at < len(counts) else "does not exist"
        raise RequestError(f"the prompt has {found} for media item {at}, which {wanted}: send each item once, in order")
    return [Span(i, start, stop) for i, (start, stop) in enumerate(edges)]


def expanded(tokens: Sequence[int], pad: int, counts: Sequence[int]) -> list[int]:
    """The prompt with each single placeholder repeated once per token of its item. Longer runs stay as they are."""
    runs, found = 0, list[int]()
    for i, token in enumerate(tokens):
        found.append(token)
        if token == pad and (i == 0 or tokens[i - 1] != pad):
            single = i + 1 == len(tokens) or tokens[i + 1] != pad
            if single and runs < len(counts):
                found += [pad] * (counts[runs] - 1)
            runs += 1
    return found
