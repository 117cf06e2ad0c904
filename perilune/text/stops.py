"""Stop strings found in text that arrives in pieces."""

import functools
from collections.abc import Sequence

from perilune.core.sampling import MAX_STOPS


class StopMatcher:
    """Passes text on until a stop string is complete; text that may still become one is held back.

    With `keep` the stop string is passed on, too. While `armed` is false, a stop string that becomes complete is
    ordinary text.

    The stop string that is complete first wins (of several complete at the same character, the longest), so the
    result does not depend on how the text was cut. Time per character does not depend on the strings' lengths.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._keep = keep
        self._stops = tuple(stops)
        self._tables = [_fallbacks(s) for s in self._stops]
        self._depths = [0] * len(self._stops)
        self._firsts = {s[0] for s in self._stops}
        self.pending = ""  # held back: the longest beginning of a stop string that the text ends with
        self.matched: str | None = None
        self.active = bool(self._stops)  # whether there is anything to look for
        self.armed = True

    def push(self, text: str) -> str:
        """The text that no stop string can take back. After a match: what precedes it (with `keep`, and the match), and
        nothing for later pieces."""
        if self.matched is not None:
            return ""
        if not self.pending and self._firsts.isdisjoint(text):
            return text
        known = self.pending + text
        for at in range(len(self.pending), len(known)):
            if not self._advance(known[at]):
                continue
            if self.armed:
                matched = max((s for s, d in zip(self._stops, self._depths) if d == len(s)), key=len)
                self.pending, self.matched = "", matched
                return known[: at + 1 - (0 if self._keep else len(matched))]
            self._depths = [t[-1] if d == len(t) else d for d, t in zip(self._depths, self._tables)]
        cut = len(known) - max(self._depths, default=0)
        self.pending = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """The text that was held back and did not become a stop string."""
        text, self.pending = self.pending, ""
        self._depths = [0] * len(self._stops)
        return text

    def _advance(self, char: str) -> bool:
        hit = False
        for i, (stop, table) in enumerate(zip(self._stops, self._tables)):
            depth = self._depths[i]
            while depth and stop[depth] != char:
                depth = table[depth - 1]
            depth += stop[depth] == char
            self._depths[i] = depth
            hit |= depth == len(stop)
        return hit


@functools.lru_cache(MAX_STOPS)  # up to 128 answers of one request share the strings
def _fallbacks(word: str) -> list[int]:
    """Knuth-Morris-Pratt: entry i is the length of the longest proper prefix of word[: i + 1] that also ends it."""
    table = [0] * len(word)
    depth = 0
    for i in range(1, len(word)):
        while depth and word[i] != word[depth]:
            depth = table[depth - 1]
        depth += word[i] == word[depth]
        table[i] = depth
    return table
