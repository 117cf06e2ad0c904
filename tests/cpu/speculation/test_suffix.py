"""What followed the last time the text went like this, and what finished requests said."""

import random
from collections.abc import Sequence

import pytest

from perilune.kv.prefix import root_of
from perilune.speculation import suffix
from perilune.speculation.suffix import GRAM_TOKENS, MAX_MATCH_TOKENS, TOKEN_BYTES, Store, SuffixMatcher, salted


def matcher(text: Sequence[int], store: Store | None = None) -> SuffixMatcher:
    made = SuffixMatcher(text, store)
    made.index_prompt(len(text))
    return made


def tokens(made: SuffixMatcher, most: int, after: Sequence[int] = ()) -> list[int]:
    return [g.token for g in made.drafts(most, after)]


# ---- suffix matcher


def test_what_followed_last_time_follows_again() -> None:
    made = matcher([1, 2, 3, 4, 5, 9, 9, 2, 3])
    assert tokens(made, 3) == [4, 5, 9]
    assert tokens(made, 2, after=[4, 5]) == [9, 9] and tokens(made, 2, after=[7]) == []
    assert tokens(made, 2, after=[1, 2]) == [3, 4]
    assert [g.length for g in made.drafts(3)] == [2, 3, 4]
    made.append(4)
    assert tokens(made, 2) == [5, 9] and made.next_match() == made.drafts(1)[0]
    made.append(8)
    assert tokens(made, 2) == [] and made.next_match() is None


def test_a_period_goes_on_beyond_the_end_of_the_text() -> None:
    assert tokens(matcher([7, 1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]
    assert tokens(matcher([5, 5, 5, 5]), 4) == [5, 5, 5, 5]


def test_the_longer_match_wins_and_shares_add_up() -> None:
    made = matcher([1, 2, 3, 7, 0, 2, 3, 8, 9, 1, 2, 3])
    (match,) = made.drafts(1)
    assert match.token == 7 and match.length == 3 and 0.5 < match.share < 1 and not match.single
    assert matcher([1, 2, 3, 4, 2, 3]).drafts(1)[0].single


@pytest.mark.parametrize("seed", range(20))
def test_against_looking_through_the_whole_text(seed: int) -> None:
    """The first draft follows one of the longest matches that the text has, as far as pointers were kept."""
    rng = random.Random(seed)
    made, text = matcher([]), []
    for _ in range(150):
        text.append(rng.randrange(4) if rng.random() < 0.7 else text[len(text) // 2] if text else 0)
        made.append(text[-1])
        lengths = {}
        for end in range(GRAM_TOKENS, len(text)):
            n = 0
            while n < min(end, MAX_MATCH_TOKENS) and text[end - 1 - n] == text[len(text) - 1 - n]:
                n += 1
            if n >= GRAM_TOKENS:
                lengths[text[end]] = max(lengths.get(text[end], 0), n)
        match = made.next_match()
        assert (match is None) == (not lengths)
        if match is not None:
            assert match.length <= lengths[match.token]


def test_a_prompt_is_taken_in_by_pieces() -> None:
    text = [random.Random(0).randrange(9) for _ in range(100)]
    made = SuffixMatcher(text, None)
    assert [made.index_prompt(40), made.unindexed, made.drafts(3)] == [40, 60, []]
    made.append(3)  # while it is still behind
    made.index_prompt(1000)
    assert made.tokens == [*text, 3] and made.drafts(4) == matcher([*text, 3]).drafts(4)


# ---- store


def test_answers_of_others_are_found_behind_their_context() -> None:
    store = Store()
    first = matcher([1, 2, 3], store)
    for token in (4, 5, 6, 7):
        first.append(token)
    store.add(first.answer())
    assert tokens(matcher([9, 9, 2, 3], store), 5) == [4, 5, 6, 7]


def test_texts_of_another_salt_are_never_found() -> None:
    """Drafts from them would show, by their speed, what another tenant was answered."""
    store = Store(6 * 7 * TOKEN_BYTES)
    one, other = salted(root_of(["key:a"])), salted(root_of(["key:b"]))
    assert salted(root_of([])) == 0 != one != other
    text = [1, 2, 3, 4, 5, 6, 7]
    store.add(text, one)
    for salt, found in ((one, [4, 5]), (other, []), (0, [])):
        made = SuffixMatcher([9, 2, 3], store, salt)
        made.index_prompt(3)
        assert tokens(made, 2) == found and tokens(made, 1, after=[4, 5]) == ([6] if found else [])
    for _ in range(6):
        store.add(text, other)
    assert len(store) == 6 and {key >> 42 << 42 for key in store._latest} == {other}


def test_it_is_bounded_and_forgets_what_was_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    store = Store(50 * 10 * TOKEN_BYTES)  # 50 texts of 10 tokens
    texts = [[rng.randrange(1000) for _ in range(10)] for _ in range(120)]
    for text in texts:
        store.add(text)
        used = matcher(texts[0][:3], store)
        assert tokens(used, 3) == texts[0][3:6]
        used.append(texts[0][3])  # right: the text was of use
        assert store.bytes <= 50 * 10 * TOKEN_BYTES and len(store) <= 50
    assert tokens(matcher(texts[1][:3], store), 3) == []
    assert tokens(matcher(texts[-1][:3], store), 3) == texts[-1][3:6]
    assert len(store._latest) <= 50 * 9
    store.add([0] * 10**6)  # larger than the whole store
    assert len(store) == 50


def test_places_survive_that_others_are_forgotten() -> None:
    """Texts that share their grams, forgotten in random order: no place of a forgotten one is left."""
    rng = random.Random(5)
    store = Store(8 * 12 * TOKEN_BYTES)
    for _ in range(300):
        store.add([rng.randrange(4) for _ in range(12)])
        store.touch(rng.choice(list(store._texts)))
        for place in store._latest.values():
            assert place >> 32 in store._texts
        probe = [rng.randrange(4) for _ in range(GRAM_TOKENS)]
        key = 0
        for token in probe:
            key = key << 21 | token
        for _, text, position in store.places(key):
            assert text[position - GRAM_TOKENS : position] == probe


def test_skipped_tokens_are_known_all_the_same() -> None:
    rng = random.Random(3)
    for begun in (0, 5, 30):
        text, more = ([rng.randrange(3) for _ in range(30)] for _ in "ab")
        one, other = SuffixMatcher(text, None), SuffixMatcher(text, None)
        one.index_prompt(begun), other.index_prompt(begun)
        for token in more:
            one.append(token)
        other.skip(more)
        one.index_prompt(60), other.index_prompt(60)
        assert one.tokens == other.tokens == text + more and one._latest == other._latest
        assert one.next_match() is None or other.next_match() is not None


def test_the_module_names_its_grams_in_63_bits() -> None:
    assert suffix.GRAM_TOKENS * 21 <= 63
