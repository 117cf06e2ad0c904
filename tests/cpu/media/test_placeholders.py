"""Every placeholder gets its own row of its own item, however the prompt is cut into steps."""

import random
from itertools import pairwise

import pytest

from perilune.core.errors import RequestError
from perilune.media.placeholders import Span, rows, spans

PAD = 163605


def prompt(rng: random.Random, counts: list[int]) -> list[int]:
    tokens = [rng.randrange(100) for _ in range(rng.randrange(3))]
    for count in counts:
        tokens += [163602, 4017, 163603, *[PAD] * count, 163604, 198]
        tokens += [rng.randrange(100) for _ in range(rng.randrange(3))]
    return tokens


def test_any_cuts_replace_every_placeholder_once() -> None:
    rng = random.Random(0)
    for _ in range(200):
        counts = [rng.randrange(1, 30) for _ in range(rng.randrange(4))]
        tokens = prompt(rng, counts)
        found = spans(tokens, PAD, counts)
        assert [(s.item, s.stop - s.start) for s in found] == list(enumerate(counts))
        cuts = sorted({0, len(tokens), *(rng.randrange(len(tokens) + 1) for _ in range(4))})
        seen: dict[int, tuple[int, int]] = {}
        for start, stop in pairwise(cuts):
            for part in rows(found, start, stop):
                assert 0 <= part.target.start < part.target.stop <= stop - start
                targets = range(start + part.target.start, start + part.target.stop)
                sources = range(part.source.start, part.source.stop)
                seen |= {at: (part.item, row) for at, row in zip(targets, sources, strict=True)}
        expected = [(item, row) for item, count in enumerate(counts) for row in range(count)]
        places = [at for at, token in enumerate(tokens) if token == PAD]
        assert seen == dict(zip(places, expected, strict=True))


def test_spans_of_a_known_prompt() -> None:
    assert spans([1, PAD, PAD, 2, PAD], PAD, [2, 1]) == [Span(0, 1, 3), Span(1, 4, 5)]
    assert spans([], PAD, []) == spans([1, 2], PAD, []) == []


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ([2], "1 placeholder tokens for media item 1, which does not exist"),
        ([3, 1], "2 placeholder tokens for media item 0, which has 3 tokens"),
        ([2, 1, 4], "no placeholder for media item 2, which has 4 tokens"),
    ],
)
def test_a_prompt_of_other_media_is_refused(counts: list[int], says: str) -> None:
    with pytest.raises(RequestError) as e:
        spans([1, PAD, PAD, 2, PAD], PAD, counts)
    assert says in str(e.value)
