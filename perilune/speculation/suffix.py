"""Drafts without a model: what followed the last time the text went like this.

A pointer is a place in some text whose past is the past of the request: its own prompt and output, or what requests
finished lately said. With every token the pointers that foretold it move on and the others go; new ones come from an
index of all places by the GRAM tokens before them. So a token costs a few microseconds however long the text is, and
the length of a match, by which one can tell how far to trust it, is known without searching.

Memory: about 250 bytes per token of a live request. What finished requests said is kept up to a bound, and the text
not used for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

GRAM = 2
LONGEST = 32  # tokens of a match that are told apart
POINTERS = 8
LOOK_BACK = 5  # places of the same gram that are looked at in one text or store, latest first
CONTEXT = 32  # tokens of the prompt kept before a finished answer
TOKEN_BYTES = 256  # of a stored token with its index entry, about
STORE_BYTES = 64 << 20

_BITS = 21  # an id; grams of larger ones may share a key, which `_length` finds out
_MASK = (1 << (_BITS * GRAM)) - 1
_NOWHERE = -1
_PLACE_BITS = 32  # a place in the store: number of the text, then position


@dataclass(frozen=True, slots=True)
class Guess:
    """A drafted token. `length` tokens before it match where it comes from, as far as `LONGEST`; `share` of the weight
    of all matches is for it, `alone` if it was the only match there."""

    token: int
    length: int
    share: float
    alone: bool


class Store:
    """What finished requests said, by the order in which it was used. `limit` in bytes, about."""

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self._limit = limit
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # least recently used first
        self._latest: dict[int, int] = {}  # gram -> place after it
        self._count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens) <= GRAM or len(tokens) * TOKEN_BYTES > self._limit:
            return
        number, self._count = self._count, self._count + 1
        text = self._texts[number] = _Text(list(tokens), [])
        key = 0
        for position, token in enumerate(tokens, 1):
            key = (key << _BITS | token) & _MASK
            if position < GRAM:
                text.before.append(_NOWHERE)
                continue
            text.before.append(self._latest.get(key, _NOWHERE))
            self._latest[key] = number << _PLACE_BITS | position
        self.bytes += len(tokens) * TOKEN_BYTES
        while self.bytes > self._limit:
            self._forget(*self._texts.popitem(last=False))

    def places(self, key: int) -> Iterator[tuple[int, list[int], int]]:
        """(number of the text, its tokens, position) after this gram, latest first."""
        place = self._latest.get(key, _NOWHERE)
        for _ in range(LOOK_BACK):
            if place == _NOWHERE:
                return
            number, position = place >> _PLACE_BITS, place & ((1 << _PLACE_BITS) - 1)
            text = self._texts.get(number)
            if text is None:  # forgotten, and with it what came before
                return
            yield number, text.tokens, position
            place = text.before[position - 1]

    def touch(self, number: int) -> None:
        """The text was of use."""
        if number in self._texts:
            self._texts.move_to_end(number)

    def _forget(self, number: int, text: "_Text") -> None:
        key = 0
        for position, token in enumerate(text.tokens, 1):
            key = (key << _BITS | token) & _MASK
            place = number << _PLACE_BITS | position
            if self._latest.get(key) == place:
                # Only the latest of the text's own places is found here, and what it leads to may be of the same text.
                above = text.before[position - 1]
                while above != _NOWHERE and above >> _PLACE_BITS == number:
                    above = text.before[(above & ((1 << _PLACE_BITS) - 1)) - 1]
                if above != _NOWHERE and above >> _PLACE_BITS in self._texts:
                    self._latest[key] = above
                else:
                    del self._latest[key]
        self.bytes -= len(text.tokens) * TOKEN_BYTES


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    before: list[int]  # by position - 1: the place after the same gram that was the latest until this one


@dataclass(slots=True)
class _Pointer:
    tokens: list[int]
    position: int  # of the token it foretells
    length: int
    number: int  # of a stored text, or _NOWHERE for the request's own


class Trail:
    """One request's text, and where it has been before."""

    def __init__(self, prompt: Sequence[int], store: Store | None) -> None:
        self.tokens: list[int] = []
        self.prompt_len = len(prompt)
        self._ahead = list(reversed(prompt))  # not indexed yet
        self._store = store
        self._latest: dict[int, int] = {}  # gram -> position after it
        self._before: list[int] = []
        self._key = 0
        self._pointers: list[_Pointer] = []
        self._next: list[Guess] | None = None  # what `foretold` found, while it holds

    @property
    def behind(self) -> int:
        """Tokens of the prompt that `catch_up` has not come to."""
        return len(self._ahead)

    def catch_up(self, most: int) -> int:
        """Takes in up to that many tokens of the prompt; returns how many."""
        count = min(most, len(self._ahead))
        for _ in range(count):
            self._index(self._ahead.pop())
        if not self._ahead:
            self._look()
        return count

    def foretold(self) -> Guess | None:
        """The likeliest next token, if any match tells one."""
        if self._next is None:
            self._next = self.guesses(1)
        return self._next[0] if self._next else None

    def append(self, token: int) -> None:
        """The text goes on."""
        if self._ahead:
            self._ahead.insert(0, token)
            return
        moved = []
        for pointer in self._pointers:
            if pointer.position < len(pointer.tokens) and pointer.tokens[pointer.position] == token:
                pointer.position += 1
                pointer.length = min(pointer.length + 1, LONGEST)
                moved.append(pointer)
                if pointer.number != _NOWHERE and self._store is not None:
                    self._store.touch(pointer.number)
        self._pointers = moved
        self._index(token)
        self._look()

    def skip(self, tokens: Sequence[int]) -> None:
        """As `append` of each, in a fraction of the time: matches are looked for anew behind the last."""
        if self._ahead:
            self._ahead[:0] = reversed(tokens)
            return
        for token in tokens:
            self._index(token)
        self._pointers.clear()
        self._look()

    def guesses(self, most: int, after: Sequence[int] = ()) -> list[Guess]:
        """How the text may go on after `after`, as far as it is foretold, `most` tokens at most."""
        return self.compare(most, after)[1]

    def compare(self, most: int, after: Sequence[int]) -> tuple[list[Guess | None], list[Guess]]:
        """What had been foretold in the place of each of `after`, supposing those before it; and `guesses`."""
        tokens, base = self.tokens, len(self.tokens)
        ahead = list(after)
        instead: list[Guess | None] = []
        found: list[Guess] = []
        live = [(p.tokens, p.position, p.length) for p in self._pointers]
        for i in range(len(after) + most):
            if i == len(after) > 0:
                live += self._behind(ahead, {(id(text), position) for text, position, _ in live})
            votes: dict[int, int] = {}
            foretold = []
            for text, position, length in live:
                if text is tokens and position >= base:
                    token = ahead[position - base] if position - base < len(ahead) else _NOWHERE
                else:
                    token = text[position] if position < len(text) else _NOWHERE
                if token != _NOWHERE:
                    votes[token] = votes.get(token, 0) + length * length
                    foretold.append((token, text, position, length))
            guess = None
            if votes:
                chosen = max(votes, key=votes.__getitem__)
                longest = max(length for token, _, _, length in foretold if token == chosen)
                guess = Guess(chosen, longest, votes[chosen] / sum(votes.values()), len(foretold) == 1)
            if i < len(after):
                instead.append(guess)
                chosen = after[i]
            elif guess is None:
                break
            else:
                found.append(guess)
                ahead.append(chosen)
            live = [(t, p + 1, min(n + 1, LONGEST)) for token, t, p, n in foretold if token == chosen]
        return instead, found

    def _behind(self, after: list[int], known: set[tuple[int, int]]) -> list[tuple[list[int], int, int]]:
        """Places to go on from behind `after`, besides those `known`: (text, position, length of the match)."""
        tail = [*self.tokens[-LONGEST:], *after]
        if len(tail) < GRAM:
            return []
        key = 0
        for token in tail[-GRAM:]:
            key = (key << _BITS | token) & _MASK
        places = [*self._own_places(key), *(self._store.places(key) if self._store is not None else ())]
        found = []
        for _, text, position in places:
            if position < len(text) and (id(text), position) not in known:
                length = _length(text, position, tail)
                if length >= GRAM:
                    found.append((text, position, length))
        return found

    def _own_places(self, key: int) -> Iterator[tuple[int, list[int], int]]:
        """As Store.places, in the request's own text."""
        place = self._latest.get(key, _NOWHERE)
        for _ in range(LOOK_BACK):
            if place == _NOWHERE:
                return
            yield _NOWHERE, self.tokens, place
            place = self._before[place - 1]

    def answer(self) -> list[int]:
        """What is worth keeping when the request has finished: its output, and a little before."""
        return self.tokens[max(self.prompt_len - CONTEXT, 0) :] if not self._ahead else []

    def _index(self, token: int) -> None:
        self._next = None
        self.tokens.append(token)
        self._key = key = (self._key << _BITS | token) & _MASK
        self._before.append(self._latest.get(key, _NOWHERE))
        if len(self.tokens) >= GRAM:
            self._latest[key] = len(self.tokens)

    def _look(self) -> None:
        """Adds pointers to where the last GRAM tokens stood before."""
        if len(self.tokens) < GRAM or len(self._pointers) >= POINTERS:
            return
        known = {(p.number, p.position) for p in self._pointers}
        own = self._own_places(self._key)
        stored = self._store.places(self._key) if self._store is not None else ()
        for number, tokens, position in chain(own, stored):
            # The latest own place is where the text ends.
            if position < len(tokens) and (number, position) not in known and len(self._pointers) < POINTERS:
                length = _length(tokens, position, self.tokens)
                if length >= GRAM:
                    self._pointers.append(_Pointer(tokens, position, length, number))


def _length(text: list[int], position: int, tokens: list[int]) -> int:
    """How many tokens before `position` are the last of `tokens`, as far as LONGEST."""
    end, most = len(tokens), min(position, LONGEST, len(tokens))
    for n in range(1, most + 1):
        if text[position - n] != tokens[end - n]:
            return n - 1
    return most
