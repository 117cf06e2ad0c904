"""Searches for a short completion of a partly matched text, so that no token limit cuts the answer off.

llguidance gives the bytes that may come next (the mask), not the distance to the end. The result is always a
completion, likely but not certainly the shortest.
"""

import functools
import heapq
import time
from collections.abc import Iterator, Sequence

from llguidance import LLMatcher

from perilune.grammar.clues import MAX_BYTES, Clues

# CPU time of all attempts at one completion. Ordinary schemas take milliseconds; where thousands of alternatives are
# open at once, each of 4,000 states takes up to 0.1 s.
MAX_SECONDS = 5.0
_BEAM = 4  # states of one cost that are expanded
_QUICK_STATES, _THOROUGH_STATES = 4_000, 12_000  # states of the quick and of the thorough search, about 10 us each
_MAX_YIELDED, _MAX_LONGER_BYTES = 4, 6  # a search yields up to 4 completions, up to 6 bytes longer than the shortest
_FREE_CHOICES = 300  # half of the steps of the first greedy attempt
_MAX_NEW_MASKS, _MAX_TRIED_BYTES = 8, 40  # places where `_greedy` looks for a new mask, and bytes that it tries at each
_MAX_ENDINGS = 400  # ends of hints that are tried at one place
_MIN_STRING_BYTES = 40  # if so many bytes may come next, the text is inside a string: between values there are fewer
_VALUES = b'"0123456789TZntf[{-'
_USUAL = _VALUES + b"aAzZ_@:./, +eE\\}]"
_FILLERS = b" -a0A_xf~/"  # characters that `_run` tries to repeat


def completions(start: LLMatcher, clues: Clues) -> Iterator[bytes]:
    """Byte strings that complete the text of a matcher over single bytes, which is not changed.

    The first may have any length, later ones are short. None after MAX_SECONDS.
    """
    if start.is_accepting():
        yield b""
        return
    deadline = time.thread_time() + MAX_SECONDS
    found = _greedy(start, clues, _FREE_CHOICES, deadline)
    if found is not None:
        yield found
    bound = MAX_BYTES if found is None else len(found) + _MAX_LONGER_BYTES
    for text in _search(start, clues, bound, deadline, few=True):
        found = text
        yield text
    if found is not None:
        return
    found = _greedy(start, clues, 10 * _FREE_CHOICES, deadline)
    if found is not None:
        yield found
    else:
        yield from _search(start, clues, MAX_BYTES, deadline, few=False)


def _greedy(start: LLMatcher, clues: Clues, choices: int, deadline: float) -> bytes | None:
    """One attempt without backtracking: writes a closing byte if one is allowed, else the first usual byte.

    Works for ordinary documents, not for patterns that count. Inside a string that may not end yet it tries in turn:
    one character repeated up to clues.count times, the end of a hint, and (_MAX_NEW_MASKS times) a byte that leads to
    a new mask. After writing the same text twice in a row, such as an array's item, it repeats this text while its
    masks stay equal.
    """
    state, text, count = start.deep_copy(), bytearray(), clues.count
    seen: set[bytes] = set()
    stuck: set[bytes] = set()  # masks where repeating one character did not help
    met: dict[bytes, tuple[int, bytes, LLMatcher]] = {}  # by mask: last index, text before it, matcher
    for _ in range(2 * choices):
        if state.is_accepting():
            return bytes(text)
        piece = bytes(state.compute_ff_bytes())
        mask = b"" if piece else bytes(state.compute_bitmask())
        if value := _value(state, piece, mask, clues.values):
            piece = value
        elif not piece:
            back = mask in met
            at, written, there = met.get(mask, (len(text), b"", state))
            period = bytes(text[at:])
            if count > 1 and period and period == written:
                state, times = _repeated(state, period, count, _along(there, period))
                text += period * times
                if times:
                    continue
            met[mask] = (len(text), period, state.deep_copy() if count > 1 else state)
            pieces = _continuations(mask, True)[:_MAX_TRIED_BYTES]
            piece = pieces[0] if pieces else b""
            again = text[-2:] == 2 * piece
            if named := _key(state, bytes(text), mask, clues.keys):
                piece = named
            elif piece and piece not in _CLOSERS and (again or back or _inside_string(mask)):
                run = _run(state, mask, count) if count > 1 and mask not in stuck else b""
                if run:
                    piece = run
                elif ending := _ending(state, mask, clues.hints):
                    piece = ending
                elif len(seen) < _MAX_NEW_MASKS:
                    piece = _unseen(state, pieces, seen) or piece
                    seen.add(mask)
                elif again:  # digits of a number that may not be zero
                    piece = pieces[len(text) % len(pieces)]
                if not run:
                    stuck.add(mask)
        late = time.thread_time() > deadline
        if late or not piece or len(text) > MAX_BYTES or not state.consume_tokens(list(piece)):
            return None
        text += piece
    return None


def _run(state: LLMatcher, mask: bytes, count: int) -> bytes:
    """One character, repeated until the string may end, about `count` times at most; empty if it may not even then."""
    for byte in _FILLERS:
        if _has(mask, byte):
            piece = bytes([byte])
            end, times = _repeated(state.deep_copy(), piece, count, _along(state, piece))
            return piece * times if times and _has(bytes(end.compute_bitmask()), _QUOTE) else b""
    return b""


def _repeated(state: LLMatcher, period: bytes, count: int, usual: list[tuple[bytes, bool]]) -> tuple[LLMatcher, int]:
    """(matcher, n) after n repetitions of `period`: as many as keep `_along` equal to `usual`, at most count + 1.

    Masks that have changed do not change back, so the step may double (exponential search).
    """
    done, step = 0, 1
    while step:
        child = state.deep_copy()
        before = list(period * (step - 1))
        fits = len(period) * (done + step) <= MAX_BYTES and done + step <= count + 1
        fits = fits and child.try_consume_tokens(before) == len(before) and _along(child, period) == usual
        if fits and child.try_consume_tokens(list(period)) == len(period):
            state, done, step = child, done + step, 2 * step
        else:
            step //= 2
    return state, done


def _along(state: LLMatcher, text: bytes) -> list[tuple[bytes, bool]]:
    """(mask, whether the text may end) before each byte of `text`, while it is accepted."""
    state, found = state.deep_copy(), []
    for byte in text:
        found.append((bytes(state.compute_bitmask()), state.is_accepting()))
        if not state.try_consume_tokens([byte]):
            break
    return found


def _key(state: LLMatcher, text: bytes, mask: bytes, keys: Sequence[bytes]) -> bytes:
    """The rest of the first of `keys` that can be written here, with its colon; empty if none can, or if a value may
    end here without a key."""
    if not keys or _inside_string(mask) or any(_has(mask, closer[0]) for closer in _CLOSERS):
        return b""
    begun = text.rpartition(b'"')[2]
    for key in keys:
        rest = key[len(begun) :] + b'":'
        likely = key.startswith(begun) and _has(mask, rest[0])
        if likely and state.deep_copy().try_consume_tokens(list(rest)) == len(rest):
            return rest
    return b""


def _value(state: LLMatcher, forced: bytes, mask: bytes, values: Sequence[bytes]) -> bytes:
    """The first of `values` that can be written here; empty if none can, or where something shorter may come.

    `forced`: bytes that must come next; if empty, `mask` has those that may.
    """
    if not values or (forced and forced[0] not in b"{["):
        return b""
    if mask and (not any(_has(mask, opener) for opener in b"{[") or any(_has(mask, byte) for byte in _SHORTER)):
        return b""
    for value in values:
        likely = not mask or _has(mask, value[0])
        if likely and state.deep_copy().try_consume_tokens(list(value)) == len(value):
            return value
    return b""


def _ending(state: LLMatcher, mask: bytes, hints: Sequence[bytes]) -> bytes:
    """The shortest end of a hint after which the string may end, with its quote; empty if there is none."""
    endings = sorted({hint[i:] for hint in hints for i in range(len(hint)) if _has(mask, hint[i])}, key=len)
    for text in endings[:_MAX_ENDINGS]:
        if state.deep_copy().try_consume_tokens(list(text + b'"')) == len(text) + 1:
            return text + b'"'
    return b""


def _unseen(state: LLMatcher, pieces: Sequence[bytes], seen: set[bytes]) -> bytes:
    """The first piece after which the mask is not in `seen`; empty if there is none."""
    for piece in pieces:
        child = state.deep_copy()
        if child.consume_tokens(list(piece)) and bytes(child.compute_bitmask()) not in seen:
            return piece
    return b""


def _search(start: LLMatcher, clues: Clues, bound: int, deadline: float, *, few: bool) -> Iterator[bytes]:
    """Uniform-cost search below `bound` bytes; a byte that is neither forced nor a closer costs double.

    Yields the cheapest, and some that cost a little more, which may take fewer tokens.

    States of equal length and equal continuations are merged. Per cost, _BEAM states are expanded, those with the most
    mask changes first: they have progressed furthest.
    """
    states: list[tuple[int, int, int, bytes, LLMatcher]] = [(0, 0, 0, b"", start)]
    looked_at: dict[int, int] = {}
    seen: set[tuple[int, bytes, bytes, bool]] = set()
    reached, given, dearest = 0, 0, 2 * MAX_BYTES
    max_states = _QUICK_STATES if few else _THOROUGH_STATES
    while states and reached < max_states and states[0][0] <= dearest and given < _MAX_YIELDED:
        cost, turns, _, text, state = heapq.heappop(states)
        if state.is_accepting():
            yield text
            given, dearest = given + 1, min(dearest, cost + 2 * _MAX_LONGER_BYTES)
            continue
        looked_at[cost] = looked_at.get(cost, 0) + 1
        if looked_at[cost] > _BEAM:
            continue
        pieces = [bytes(state.compute_ff_bytes())]
        mask, named, stuck = b"", b"", False
        if not pieces[0]:
            mask = bytes(state.compute_bitmask())
            stuck = _inside_string(mask) and not _has(mask, _QUOTE)
            named = _key(state, text, mask, clues.keys)
            if named:
                pieces = [named]
            else:
                pieces = [*_continuations(mask, few), *(h for h in clues.hints if stuck and _has(mask, h[0]))]
        for piece in pieces:
            if time.thread_time() > deadline:
                return
            child = state.deep_copy()  # copying takes longer after a long text, and counts for more
            reached += 1 + len(text) // 256
            if len(text) + len(piece) >= bound or child.try_consume_tokens(list(piece)) < len(piece):
                continue
            after = bytes(child.compute_bitmask())
            key = (len(text) + len(piece), after, bytes(child.compute_ff_bytes()), child.is_accepting())
            if key in seen:
                continue
            seen.add(key)
            if mask and after == mask and stuck and len(piece) == 1:
                child, times = _repeated(child, piece, clues.count, _along(child, piece))
                piece += piece * times
            free = bool(mask) and piece not in _CLOSERS and not named
            cost_there = cost + len(piece) * (1 + free)
            further = len(piece) if named else int(after != mask)
            heapq.heappush(states, (cost_there, turns - further, reached, text + piece, child))


_QUOTE = ord('"')
_CLOSERS = (b'"', b"}", b"]", b",")
_SHORTER = b'"0123456789tfn}],'  # bytes of something shorter than an object or an array


def _has(mask: bytes, byte: int) -> bool:
    return bool(mask[byte >> 3] >> (byte & 7) & 1)


def _inside_string(mask: bytes) -> bool:
    return int.from_bytes(mask[:32], "little").bit_count() >= _MIN_STRING_BYTES


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
