"""What followed the last time the text went like this, and what finished requests said."""

import random
from collections.abc import Sequence

import pytest

from perilune.speculation import suffix
from perilune.speculation.suffix import GRAM, LONGEST, TOKEN_BYTES, Store, Trail


def trail(text: Sequence[int], store: Store | None = None) -> Trail:
    made = Trail(text, store)
    made.catch_up(len(text))
    return made


def tokens(made: Trail, most: int, after: Sequence[int] = ()) -> list[int]:
    return [g.token for g in made.guesses(most, after)]


class TestTrail:
    def test_what_followed_last_time_follows_again(self) -> None:
        made = trail([1, 2, 3, 4, 5, 9, 9, 2, 3])
        assert tokens(made, 3) == [4, 5, 9]
        assert tokens(made, 2, after=[4, 5]) == [9, 9] and tokens(made, 2, after=[7]) == []
        assert [g.length for g in made.guesses(3)] == [2, 3, 4]
        made.append(4)
        assert tokens(made, 2) == [5, 9] and made.foretold() == made.guesses(1)[0]
        made.append(8)
        assert tokens(made, 2) == [] and made.foretold() is None

    def test_a_period_goes_on_beyond_the_end_of_the_text(self) -> None:
        assert tokens(trail([7, 1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]
        assert tokens(trail([5, 5, 5, 5]), 4) == [5, 5, 5, 5]

    def test_the_longer_match_wins_and_shares_are_told(self) -> None:
        made = trail([1, 2, 3, 7, 0, 2, 3, 8, 9, 1, 2, 3])
        (guess,) = made.guesses(1)
        assert guess.token == 7 and guess.length == 3 and 0.5 < guess.share < 1 and not guess.alone
        assert trail([1, 2, 3, 4, 2, 3]).guesses(1)[0].alone

    @pytest.mark.parametrize("seed", range(20))
    def test_against_looking_through_the_whole_text(self, seed: int) -> None:
        """The first guess follows one of the longest matches that the text has, as far as pointers were kept."""
        rng = random.Random(seed)
        made, text = trail([]), []
        for _ in range(150):
            text.append(rng.randrange(4) if rng.random() < 0.7 else text[len(text) // 2] if text else 0)
            made.append(text[-1])
            lengths = {}
            for end in range(GRAM, len(text)):
                n = 0
                while n < min(end, LONGEST) and text[end - 1 - n] == text[len(text) - 1 - n]:
                    n += 1
                if n >= GRAM:
                    lengths[text[end]] = max(lengths.get(text[end], 0), n)
            guess = made.foretold()
            assert (guess is None) == (not lengths)
            if guess is not None:
                assert guess.length <= lengths[guess.token]

    def test_a_prompt_is_taken_in_by_pieces(self) -> None:
        text = [random.Random(0).randrange(9) for _ in range(100)]
        made = Trail(text, None)
        assert [made.catch_up(40), made.behind, made.guesses(3)] == [40, 60, []]
        made.append(3)  # while it is still behind
        made.catch_up(1000)
        assert made.tokens == [*text, 3] and made.guesses(4) == trail([*text, 3]).guesses(4)


class TestStore:
    def test_answers_of_others_are_found_behind_their_context(self) -> None:
        store = Store()
        first = trail([1, 2, 3], store)
        for token in (4, 5, 6, 7):
            first.append(token)
        store.add(first.answer())
        assert tokens(trail([9, 9, 2, 3], store), 5) == [4, 5, 6, 7]

    def test_it_is_bounded_and_forgets_what_was_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = random.Random(3)
        store = Store(50 * 10 * TOKEN_BYTES)  # 50 texts of 10 tokens
        texts = [[rng.randrange(1000) for _ in range(10)] for _ in range(120)]
        for text in texts:
            store.add(text)
            used = trail(texts[0][:3], store)
            assert tokens(used, 3) == texts[0][3:6]
            used.append(texts[0][3])  # right: the text was of use
            assert store.bytes <= 50 * 10 * TOKEN_BYTES and len(store) <= 50
        assert tokens(trail(texts[1][:3], store), 3) == []
        assert tokens(trail(texts[-1][:3], store), 3) == texts[-1][3:6]
        assert len(store._latest) <= 50 * 9
        store.add([0] * 10**6)  # larger than the whole store
        assert len(store) == 50

    def test_places_survive_that_others_are_forgotten(self) -> None:
        """Texts that share their grams, forgotten in random order: no place of a forgotten one is left."""
        rng = random.Random(5)
        store = Store(8 * 12 * TOKEN_BYTES)
        for _ in range(300):
            store.add([rng.randrange(4) for _ in range(12)])
            store.touch(rng.choice(list(store._texts)))
            for place in store._latest.values():
                assert place >> 32 in store._texts
            probe = [rng.randrange(4) for _ in range(GRAM)]
            key = 0
            for token in probe:
                key = key << 21 | token
            for _, text, position in store.places(key):
                assert text[position - GRAM : position] == probe

    def test_skipped_tokens_are_known_all_the_same(self) -> None:
        rng = random.Random(3)
        for begun in (0, 5, 30):
            text, more = ([rng.randrange(3) for _ in range(30)] for _ in "ab")
            one, other = Trail(text, None), Trail(text, None)
            one.catch_up(begun), other.catch_up(begun)
            for token in more:
                one.append(token)
            other.skip(more)
            one.catch_up(60), other.catch_up(60)
            assert one.tokens == other.tokens == text + more and one._latest == other._latest
            assert one.foretold() is None or other.foretold() is not None


def test_the_module_names_its_grams_in_63_bits() -> None:
    assert suffix.GRAM * 21 <= 63
