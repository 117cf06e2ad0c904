"""Drafts without a model (n-gram or prompt lookup): the tokens that followed earlier occurrences of the last tokens.

A pointer is a position in a text: in the request's own prompt and output, or in the text of a recently finished
request. The tokens before it equal the last tokens of the request, so the token at it is a draft. When the request gets
a token, pointers at an equal token advance by one and the others are dropped; an index of all positions, by the
GRAM_TOKENS tokens before them, gives new pointers. So a token costs a few microseconds at any length of the text, and
the length of a match, on which its reliability depends, is known without a search.

Texts are matched only with texts of equal cache keys (`salt`): the speed of accepted drafts from another tenant's
answer would reveal that answer.

Memory: about 250 bytes per token of a live request. The texts of finished requests are kept up to STORE_BYTES, and the
least recently used one is dropped first.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GRAM_TOKENS = 2  # Tokens by which positions are indexed. Larger: fewer, longer matches.
MAX_MATCH_TOKENS = 32  # Longer matches count as this long. Larger: one long match outweighs more short ones.
MAX_POINTERS = 8  # Pointers of a request. More: more Python per token, better drafts.
MAX_PLACES = 5  # Positions tried for an n-gram, latest first: 5 in the request's own text, then 5 in the store.
CONTEXT_TOKENS = 32  # Tokens of the prompt that are stored before a finished answer.
TOKEN_BYTES = 256  # Memory of a stored token with its index entry, about.
STORE_BYTES = 64 << 20  # Memory of all stored texts, at most. Larger: older answers still match.

_BITS = 21  # per id in the key of an n-gram; larger ids may collide, which `_match_length` detects
_MASK = (1 << (_BITS * GRAM_TOKENS)) - 1
_NOWHERE = -1
_POSITION_BITS = 32  # a place in the store: number of the text << 32 | position


def salted(root: bytes) -> int:
    """The salt of requests with this root of cache keys (b"": none): `salt | n-gram` is a key of the store's index."""
    return int.from_bytes(root, "big") << _BITS * GRAM_TOKENS


@dataclass(frozen=True, slots=True)
class Match:
    """A drafted token. `length`: matching tokens before it, at most MAX_MATCH_TOKENS. `share`: weight of the matches
    that continue with this token, over the weight of all; `single`: there was only one match."""

    token: int
    length: int
    share: float
    single: bool


class Store:
    """The texts of finished requests, of about `limit` bytes in all."""

    def __init__(self, limit: int = STORE_BYTES) -> None:
        self._limit = limit
        self._texts: OrderedDict[int, _Text] = OrderedDict()  # least recently used first
        self._latest: dict[int, int] = {}  # n-gram -> latest place after it
        self._count = 0
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, tokens: Sequence[int], salt: int = 0) -> None:
        """Keeps a text for requests with the same `salt` (see `salted`)."""
        if len(tokens) <= GRAM_TOKENS or len(tokens) * TOKEN_BYTES > self._limit:
            return
        number, self._count = self._count, self._count + 1
        text = self._texts[number] = _Text(list(tokens), [], salt)
        key = 0
        for position, token in enumerate(tokens, 1):
            key = (key << _BITS | token) & _MASK
            if position < GRAM_TOKENS:
                text.before.append(_NOWHERE)
                continue
            text.before.append(self._latest.get(salt | key, _NOWHERE))
            self._latest[salt | key] = number << _POSITION_BITS | position
        self.bytes += len(tokens) * TOKEN_BYTES
        while self.bytes > self._limit:
            self._drop(*self._texts.popitem(last=False))

    def places(self, key: int, salt: int = 0) -> Iterator[tuple[int, list[int], int]]:
        """(number of the text, its tokens, position after this n-gram) of texts with this salt, latest first."""
        place = self._latest.get(salt | key, _NOWHERE)
        for _ in range(MAX_PLACES):
            if place == _NOWHERE:
                return
            number, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            text = self._texts.get(number)
            if text is None:  # the text was dropped, and with it the link to older places
                return
            yield number, text.tokens, position
            place = text.before[position - 1]

    def touch(self, number: int) -> None:
        """Marks a text as most recently used."""
        if number in self._texts:
            self._texts.move_to_end(number)

    def _drop(self, number: int, text: "_Text") -> None:
        key = 0
        for position, token in enumerate(text.tokens, 1):
            key = (key << _BITS | token) & _MASK
            place, salted_key = number << _POSITION_BITS | position, text.salt | key
            if self._latest.get(salted_key) == place:
                # The index points to this text: point it to the latest older place outside it, if there is one.
                above = text.before[position - 1]
                while above != _NOWHERE and above >> _POSITION_BITS == number:
                    above = text.before[(above & ((1 << _POSITION_BITS) - 1)) - 1]
                if above >> _POSITION_BITS in self._texts:
                    self._latest[salted_key] = above
                else:
                    del self._latest[salted_key]
        self.bytes -= len(text.tokens) * TOKEN_BYTES


@dataclass(slots=True)
class _Text:
    tokens: list[int]
    before: list[int]  # by position - 1: the previous place after the same n-gram
    salt: int


@dataclass(slots=True)
class _Pointer:
    tokens: list[int]
    position: int  # index of the drafted token in `tokens`
    length: int
    number: int  # a stored text's number, or _NOWHERE for the request's own text


class SuffixMatcher:
    """One request's text, and the positions where the same tokens came before."""

    def __init__(self, prompt: Sequence[int], store: Store | None, salt: int = 0) -> None:
        self.salt = salt
        self.tokens: list[int] = []
        self.prompt_len = len(prompt)
        self._unindexed = list(reversed(prompt))  # the tokens of the prompt not indexed yet, reversed
        self._store = store
        self._latest: dict[int, int] = {}  # n-gram -> latest position after it
        self._before: list[int] = []
        self._key = 0
        self._pointers: list[_Pointer] = []
        self._next: list[Match] | None = None  # the result of `next_match` until the text changes

    @property
    def unindexed(self) -> int:
        """Number of tokens that are not indexed yet; there are no drafts until all are."""
        return len(self._unindexed)

    def index_prompt(self, max_tokens: int) -> int:
        """Indexes up to `max_tokens` more tokens; returns how many."""
        count = min(max_tokens, len(self._unindexed))
        for _ in range(count):
            self._index(self._unindexed.pop())
        if not self._unindexed:
            self._find_pointers()
        return count

    def next_match(self) -> Match | None:
        """The likeliest next token; None without a match."""
        if self._next is None:
            self._next = self.drafts(1)
        return self._next[0] if self._next else None

    def append(self, token: int) -> None:
        """Indexes the next token of the text; matches that it continues grow by one."""
        if self._unindexed:
            self._unindexed.insert(0, token)
            return
        moved = []
        for pointer in self._pointers:
            if pointer.position < len(pointer.tokens) and pointer.tokens[pointer.position] == token:
                pointer.position += 1
                pointer.length = min(pointer.length + 1, MAX_MATCH_TOKENS)
                moved.append(pointer)
                if pointer.number != _NOWHERE and self._store is not None:
                    self._store.touch(pointer.number)
        self._pointers = moved
        self._index(token)
        self._find_pointers()

    def skip(self, tokens: Sequence[int]) -> None:
        """As `append` for each token, but several times faster: pointers are dropped and looked up once at the end."""
        if self._unindexed:
            self._unindexed[:0] = reversed(tokens)
            return
        for token in tokens:
            self._index(token)
        self._pointers.clear()
        self._find_pointers()

    def drafts(self, max_drafts: int, after: Sequence[int] = ()) -> list[Match]:
        """Drafts that continue the text and `after`, as long as there are matches: `max_drafts` at most."""
        return self.compare(max_drafts, after)[1]

    def compare(self, max_drafts: int, after: Sequence[int]) -> tuple[list[Match | None], list[Match]]:
        """For each token of `after` the match at its position, given the tokens before it; and `drafts`."""
        tokens, base = self.tokens, len(self.tokens)
        beyond = list(after)  # tokens after the text: `after`, then the drafts found so far
        alternatives: list[Match | None] = []
        found: list[Match] = []
        live = [(p.tokens, p.position, p.length) for p in self._pointers]
        for i in range(len(after) + max_drafts):
            if i == len(after) > 0:
                live += self._places_after(beyond, {(id(text), position) for text, position, _ in live})
            votes: dict[int, int] = {}
            voters = []
            for text, position, length in live:
                if text is tokens and position >= base:
                    token = beyond[position - base] if position - base < len(beyond) else _NOWHERE
                else:
                    token = text[position] if position < len(text) else _NOWHERE
                if token != _NOWHERE:
                    votes[token] = votes.get(token, 0) + length * length
                    voters.append((token, text, position, length))
            draft = None
            if votes:
                chosen = max(votes, key=votes.__getitem__)
                longest = max(length for token, _, _, length in voters if token == chosen)
                draft = Match(chosen, longest, votes[chosen] / sum(votes.values()), len(voters) == 1)
            if i < len(after):
                alternatives.append(draft)
                chosen = after[i]
            elif draft is None:
                break
            else:
                found.append(draft)
                beyond.append(chosen)
            live = [(t, p + 1, min(n + 1, MAX_MATCH_TOKENS)) for token, t, p, n in voters if token == chosen]
        return alternatives, found

    def _places_after(self, after: list[int], known: set[tuple[int, int]]) -> list[tuple[list[int], int, int]]:
        """Positions that match the text and `after`, except those `known`: (text, position, length of the match)."""
        tail = [*self.tokens[-MAX_MATCH_TOKENS:], *after]
        if len(tail) < GRAM_TOKENS:
            return []
        key = 0
        for token in tail[-GRAM_TOKENS:]:
            key = (key << _BITS | token) & _MASK
        found = []
        for _, text, position in self._places(key):
            if position < len(text) and (id(text), position) not in known:
                length = _match_length(text, position, tail)
                if length >= GRAM_TOKENS:
                    found.append((text, position, length))
        return found

    def _places(self, key: int) -> Iterator[tuple[int, list[int], int]]:
        """As Store.places, in the request's own text and then in the store."""
        place = self._latest.get(key, _NOWHERE)
        for _ in range(MAX_PLACES):
            if place == _NOWHERE:
                break
            yield _NOWHERE, self.tokens, place
            place = self._before[place - 1]
        if self._store is not None:
            yield from self._store.places(key, self.salt)

    def answer(self) -> list[int]:
        """The text to store when the request has finished: its output and CONTEXT_TOKENS tokens before it."""
        return self.tokens[max(self.prompt_len - CONTEXT_TOKENS, 0) :] if not self._unindexed else []

    def _index(self, token: int) -> None:
        self._next = None
        self.tokens.append(token)
        self._key = key = (self._key << _BITS | token) & _MASK
        self._before.append(self._latest.get(key, _NOWHERE))
        if len(self.tokens) >= GRAM_TOKENS:
            self._latest[key] = len(self.tokens)

    def _find_pointers(self) -> None:
        """Adds pointers to positions after the text's last GRAM_TOKENS tokens."""
        if len(self.tokens) < GRAM_TOKENS or len(self._pointers) >= MAX_POINTERS:
            return
        known = {(p.number, p.position) for p in self._pointers}
        for number, tokens, position in self._places(self._key):
            # In the request's own text, the latest position is the end of the text: nothing follows.
            if position < len(tokens) and (number, position) not in known and len(self._pointers) < MAX_POINTERS:
                length = _match_length(tokens, position, self.tokens)
                if length >= GRAM_TOKENS:
                    self._pointers.append(_Pointer(tokens, position, length, number))


def _match_length(text: list[int], position: int, tokens: list[int]) -> int:
    """How many tokens before `position` equal the last ones of `tokens`: MAX_MATCH_TOKENS at most."""
    end, limit = len(tokens), min(position, MAX_MATCH_TOKENS, len(tokens))
    for n in range(1, limit + 1):
        if text[position - n] != tokens[end - n]:
            return n - 1
    return limit
