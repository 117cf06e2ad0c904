"""The shortest way to the end of a text that a grammar has begun to match: so that no bound on tokens cuts it off.

llguidance gives the bytes that may come next, not the distance to the end: the end has to be searched for. The result
is always a completion; that there is no shorter one is likely, not certain.
"""

import functools
import heapq
import re
import re._constants as sre  # type: ignore[import-not-found]  # typeshed leaves private modules out
import re._parser as parser  # type: ignore[import-not-found]  # as above
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher

MAX_BYTES = 16_384  # of a completion
_BEAM = 4  # states of one length that are looked into
_FEW, _MANY = 4_000, 12_000  # states reached at most, about ten microseconds each
_FREE_CHOICES = 300  # steps of a first attempt
_NEW, _TRIED = 8, 40
_ENDINGS = 400  # of hints, tried at one place
_RUN = 8_192  # bytes of a run, as of a string with a least length
_PROSE = 40  # bytes that may come next inside a string, at least; between values there are fewer
_VALUES = b'"0123456789TZntf[{-'
_USUAL = _VALUES + b"aAzZ_@:./, +eE\\}]"


def shortest(
    start: LLMatcher, hints: Sequence[bytes] = (), keys: Sequence[bytes] = (), *, enough: int = 0
) -> bytes | None:
    """Bytes that complete the text of a matcher over single bytes, which stays as it is; None if none were found.

    `hints` are pieces worth trying inside strings, `keys` those that have to be written where several might be. A
    completion of up to `enough` bytes need not be the shortest.
    """
    if start.is_accepting():
        return b""
    greedy = _greedy(start, hints, keys, _FREE_CHOICES)
    if greedy is not None and len(greedy) <= enough:
        return greedy
    found = _search(start, hints, keys, MAX_BYTES if greedy is None else len(greedy), few=True)
    return (
        found
        or greedy
        or _greedy(start, hints, keys, 10 * _FREE_CHOICES)
        or _search(start, hints, keys, MAX_BYTES, few=False)
    )


def _greedy(start: LLMatcher, hints: Sequence[bytes], keys: Sequence[bytes], choices: int) -> bytes | None:
    """Closes what can be closed, else goes the usual way: good for documents, lost where a pattern counts.

    In a string that may not end yet it takes the end of a hint that ends it; else it goes where it has not been, the
    first few times.
    """
    state, text = start.deep_copy(), bytearray()
    seen: set[bytes] = set()
    for _ in range(2 * choices):
        if state.is_accepting():
            return bytes(text)
        piece = bytes(state.compute_ff_bytes())
        if not piece:
            mask = bytes(state.compute_bitmask())
            pieces = _continuations(mask, True)[:_TRIED]
            piece = pieces[0] if pieces else b""
            again = text[-2:] == 2 * piece
            if named := _key(state, bytes(text), mask, keys):
                piece = named
            elif piece and piece not in _CLOSERS and (again or _inside_string(mask)):
                if ending := _ending(state, mask, hints):
                    piece = ending
                elif len(seen) < _NEW:
                    piece = _unseen(state, pieces, seen) or piece
                    seen.add(mask)
                elif again:  # digits of a number that may not be zero
                    piece = pieces[len(text) % len(pieces)]
        if not piece or not state.consume_tokens(list(piece)):
            return None
        text += piece
    return None


def _key(state: LLMatcher, text: bytes, mask: bytes, keys: Sequence[bytes]) -> bytes:
    """The rest of the first of `keys` that can be written here, with its colon; empty if none can or has to be."""
    if not keys or _inside_string(mask) or any(_has(mask, closer[0]) for closer in _CLOSERS):
        return b""
    begun = text.rpartition(b'"')[2]
    for key in keys:
        rest = key[len(begun) :] + b'":'
        likely = key.startswith(begun) and _has(mask, rest[0])
        if likely and state.deep_copy().try_consume_tokens(list(rest)) == len(rest):
            return rest
    return b""


def _ending(state: LLMatcher, mask: bytes, hints: Sequence[bytes]) -> bytes:
    """The shortest end of a hint after which the string may end, with its quote; empty if there is none."""
    endings = sorted({hint[i:] for hint in hints for i in range(len(hint)) if _has(mask, hint[i])}, key=len)
    for text in endings[:_ENDINGS]:
        if state.deep_copy().try_consume_tokens(list(text + b'"')) == len(text) + 1:
            return text + b'"'
    return b""


def _unseen(state: LLMatcher, pieces: Sequence[bytes], seen: set[bytes]) -> bytes:
    """The first piece after which what may come has not been seen; empty if there is none."""
    for piece in pieces:
        child = state.deep_copy()
        if child.consume_tokens(list(piece)) and bytes(child.compute_bitmask()) not in seen:
            return piece
    return b""


def _search(start: LLMatcher, hints: Sequence[bytes], keys: Sequence[bytes], bound: int, *, few: bool) -> bytes | None:
    """Uniform-cost search below `bound` bytes; a byte that is neither forced nor a closer costs double.

    States of one length after which the same may come count as the same state, and few of one cost are looked into:
    first the ones reached by the most changes, because they have got the furthest.
    """
    states: list[tuple[int, int, int, bytes, LLMatcher]] = [(0, 0, 0, b"", start)]
    looked_at: dict[int, int] = {}
    seen: set[tuple[int, bytes, bytes, bool]] = set()
    reached = 0
    while states and reached < (_FEW if few else _MANY):
        cost, turns, _, text, state = heapq.heappop(states)
        if state.is_accepting():
            return text
        looked_at[cost] = looked_at.get(cost, 0) + 1
        if looked_at[cost] > _BEAM:
            continue
        pieces = [bytes(state.compute_ff_bytes())]
        mask, named, stuck = b"", b"", False
        if not pieces[0]:
            mask = bytes(state.compute_bitmask())
            stuck = _inside_string(mask) and not _has(mask, _QUOTE)
            named = _key(state, text, mask, keys)
            if named:
                pieces = [named]
            else:
                pieces = [*_continuations(mask, few), *(h for h in hints if stuck and _has(mask, h[0]))]
        for piece in pieces:
            child = state.deep_copy()
            reached += 1
            if len(text) + len(piece) >= bound or child.try_consume_tokens(list(piece)) < len(piece):
                continue
            after = bytes(child.compute_bitmask())
            key = (len(text) + len(piece), after, bytes(child.compute_ff_bytes()), child.is_accepting())
            if key in seen:
                continue
            seen.add(key)
            if mask and after == mask and stuck:
                piece += _run_on(child, piece, mask)
            free = bool(mask) and piece not in _CLOSERS and not named
            cost_there = cost + len(piece) * (1 + free)
            further = len(piece) if named else int(after != mask)
            heapq.heappush(states, (cost_there, turns - further, reached, text + piece, child))
    return None


_QUOTE = ord('"')
_CLOSERS = (b'"', b"}", b"]", b",")


def _has(mask: bytes, byte: int) -> bool:
    return bool(mask[byte >> 3] >> (byte & 7) & 1)


def _inside_string(mask: bytes) -> bool:
    return int.from_bytes(mask[:32], "little").bit_count() >= _PROSE


@functools.lru_cache(4096)
def _continuations(mask: bytes, few: bool) -> tuple[bytes, ...]:
    """Bytes worth a try, the most promising first."""
    if _inside_string(mask):
        first = b'"'
        rest: Sequence[int] = () if few and _has(mask, _QUOTE) else _USUAL
    else:
        first = b"}],"
        rest = _VALUES if few and any(_has(mask, b) for b in first) else (*_VALUES, *range(256))
    every: Sequence[int] = () if few and rest is not _USUAL else range(256)
    if few and not any(_has(mask, b) for b in (*first, *rest)):
        every = range(256)
    return tuple(bytes([b]) for b in dict.fromkeys((*first, *rest, *every)) if _has(mask, b))


def _run_on(state: LLMatcher, piece: bytes, mask: bytes) -> bytes:
    """Repeats a byte as long as that changes nothing to be seen: a count that has to be reached."""
    run = 0
    while len(piece) == 1 and run < _RUN and state.try_consume_tokens([piece[0]]) == 1:
        run += 1
        if bytes(state.compute_bitmask()) != mask:
            break
    return piece[:1] * run


# ---- a match of a regular expression


def example(expression: str) -> bytes:
    """A short text that the expression finds, as UTF-8; empty if none is known.

    Read with Python's parser of expressions, with nearly llguidance's syntax: an estimate, to be checked by use.
    """
    try:
        return "".join(_match(parser.parse(expression))).encode()
    except (re.error, KeyError, OverflowError, RecursionError, UnicodeEncodeError):
        return b""


_CATEGORIES = {
    sre.CATEGORY_DIGIT: "0",
    sre.CATEGORY_NOT_DIGIT: "a",
    sre.CATEGORY_SPACE: " ",
    sre.CATEGORY_NOT_SPACE: "a",
    sre.CATEGORY_WORD: "a",
    sre.CATEGORY_NOT_WORD: " ",
}


def _match(sequence: Any) -> Iterator[str]:
    for kind, value in sequence:
        if kind is sre.LITERAL:
            yield chr(value)
        elif kind is sre.NOT_LITERAL:
            yield "a" if value != ord("a") else "b"
        elif kind is sre.ANY:
            yield "a"
        elif kind is sre.IN:
            yield _member(value)
        elif kind is sre.BRANCH:
            yield min(("".join(_match(branch)) for branch in value[1]), key=len)
        elif kind is sre.SUBPATTERN:
            yield from _match(value[-1])
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            yield "".join(_match(value[2])) * min(value[0], MAX_BYTES)
        elif kind is not sre.AT:
            raise KeyError(kind)


def _member(choices: Any) -> str:
    """A character of a class, a plain one if it may be."""
    negated = choices[0][0] is sre.NEGATE
    if not negated:
        kind, value = choices[0]
        return _CATEGORIES[value] if kind is sre.CATEGORY else chr(value if kind is sre.LITERAL else value[0])
    excluded: set[int] = set()
    for kind, value in choices[1:]:
        if kind is sre.LITERAL:
            excluded.add(value)
        elif kind is sre.RANGE:
            excluded.update(range(value[0], min(value[1], 127) + 1))
    return next(c for c in "a0 _Z~" if ord(c) not in excluded)
