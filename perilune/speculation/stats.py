"""Counts verified and accepted drafts, by source and position, for EngineStats."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from perilune.core.messages import EngineStats
from perilune.speculation.acceptance_rates import Draft


class Tally:
    def __init__(self) -> None:
        self._verified = 0  # sum over steps of the number of requests with drafts
        self._drafted: Counter[tuple[str, int]] = Counter()  # by source and position
        self._accepted: Counter[tuple[str, int]] = Counter()
        self._chains: Counter[tuple[int, int]] = Counter()  # chains by tokens verified and accepted

    def add_chain(self, drafted: int, accepted: int) -> None:
        """A step verified `drafted` tokens of a draft model for one request, and accepted the first `accepted`."""
        self._verified += 1
        self._chains[drafted, accepted] += 1

    def add(self, drafts: Sequence[Draft], accepted: int) -> None:
        """A step verified `drafts` for one request, and accepted the first `accepted`."""
        if drafts and drafts[-1][1][0] == "eagle3":  # matches come only after a chain, so all of these are chain tokens
            self.add_chain(len(drafts), accepted)
            return
        self._verified += 1
        for position, (_, (source, _, _)) in enumerate(drafts):
            self._drafted[source, position] += 1
            self._accepted[source, position] += position < accepted

    def report(self, stats: EngineStats) -> EngineStats:
        for (drafted, accepted), count in self._chains.items():
            for position in range(drafted):
                self._drafted["eagle3", position] += count
                self._accepted["eagle3", position] += count * (position < accepted)
        self._chains.clear()
        drafts = tuple((*key, count, self._accepted[key]) for key, count in sorted(self._drafted.items()))
        return dataclasses.replace(stats, verified=self._verified, drafts=drafts)
