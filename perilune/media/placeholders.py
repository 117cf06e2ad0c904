"""Where media lie in a prompt, and which rows of their embeddings a step over a part of the prompt needs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from perilune.core.errors import RequestError


@dataclass(frozen=True, slots=True)
class Span:
    """The placeholder tokens of media item `item`, from position `start` of the prompt up to `stop`."""

    item: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `source` of an item's embeddings replace rows `target` of a step."""

    item: int
    source: slice
    target: slice


def spans(tokens: Sequence[int], pad: int, counts: Sequence[int]) -> list[Span]:
    """The runs of the placeholder `pad`, one for each item in order. `counts` are the items' tokens.

    RequestError if there are fewer or more runs, or one is of another length: then the prompt and the media differ.
    """
    is_pad = np.concatenate(([False], np.asarray(tokens, dtype=np.int64) == pad, [False]))
    edges = np.flatnonzero(is_pad[1:] != is_pad[:-1]).reshape(-1, 2).tolist()
    lengths = [stop - start for start, stop in edges]
    if lengths != list(counts):
        at = next((i for i, (a, b) in enumerate(zip(lengths, counts)) if a != b), min(len(lengths), len(counts)))
        found = f"{lengths[at]} placeholder tokens" if at < len(lengths) else "no placeholder"
        wanted = f"has {counts[at]} tokens" if at < len(counts) else "does not exist"
        raise RequestError(f"the prompt has {found} for media item {at}, which {wanted}: send each item once, in order")
    return [Span(i, start, stop) for i, (start, stop) in enumerate(edges)]


def rows(found: Sequence[Span], start: int, stop: int) -> Iterator[Rows]:
    """What replaces embeddings in a step over positions start up to stop of the prompt; items that it cuts in part."""
    for span in found:
        first, end = max(span.start, start), min(span.stop, stop)
        if first < end:
            yield Rows(span.item, slice(first - span.start, end - span.start), slice(first - start, end - start))
