"""Every placeholder gets its own row of its own item, however the prompt is cut into steps."""

import random
from itertools import pairwise

import pytest

from perilune.core.errors import RequestError
from perilune.core.request import Placed, Request
from perilune.core.sampling import SamplingParams
from perilune.media.placeholders import Span, expanded, spans

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
        tokens = [1, *prompt(rng, counts)]
        found = spans(tokens, PAD, counts)
        assert [(s.item, s.stop - s.start) for s in found] == list(enumerate(counts))
        cuts = sorted({0, len(tokens), *(rng.randrange(len(tokens) + 1) for _ in range(4))})
        placed = tuple(Placed(s.item, s.start, s.stop, bytes([s.item]), (1, 2, 2)) for s in found)
        request = Request(0, 0, tokens, len(tokens), SamplingParams(), 0, len(tokens) + 1, pictures=placed)
        seen: dict[int, tuple[int, int]] = {}
        for start, stop in pairwise(cuts):
            request.planned = start
            for digest, first, target, count in request.media(stop - start):
                assert 0 <= target < target + count <= stop - start
                seen |= {start + target + i: (int.from_bytes(digest), first + i) for i in range(count)}
        expected = [(item, row) for item, count in enumerate(counts) for row in range(count)]
        places = [at for at, token in enumerate(tokens) if token == PAD]
        assert seen == dict(zip(places, expected, strict=True))


def test_spans_of_a_known_prompt() -> None:
    assert spans([1, PAD, PAD, 2, PAD], PAD, [2, 1]) == [Span(0, 1, 3), Span(1, 4, 5)]
    assert spans([], PAD, []) == spans([1, 2], PAD, []) == []


def test_single_placeholders_become_as_many_as_the_items_have_tokens() -> None:
    assert expanded([1, PAD, 2, PAD], PAD, [3, 2]) == [1, PAD, PAD, PAD, 2, PAD, PAD]
    assert expanded([PAD, PAD, 2, PAD], PAD, [2, 1]) == [PAD, PAD, 2, PAD]
    assert expanded([PAD, 2, PAD], PAD, [2]) == [PAD, PAD, 2, PAD]  # which `spans` refuses


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
