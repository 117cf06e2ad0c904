"""How many drafts were verified and how many stood, by source and position: what statistics report."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from perilune.core.messages import EngineStats
from perilune.speculation.policy import Cell


class Tally:
    def __init__(self) -> None:
        self._verified = 0  # works that had drafts
        self._drafted: Counter[tuple[str, int]] = Counter()  # by source and position
        self._accepted: Counter[tuple[str, int]] = Counter()
        self._chains: Counter[tuple[int, int]] = Counter()  # works that verified so many of a chain: how many stood

    def chain(self, drafted: int, accepted: int) -> None:
        """A work verified so many of a draft model's tokens, of which so many stood."""
        self._verified += 1
        self._chains[drafted, accepted] += 1

    def add(self, told: Sequence[Cell], accepted: int) -> None:
        """As `chain`, of drafts told apart by `told`."""
        if told and told[-1][0] == "eagle3":  # matches only ever come behind a chain
            self.chain(len(told), accepted)
            return
        self._verified += 1
        for position, (source, _, _) in enumerate(told):
            self._drafted[source, position] += 1
            self._accepted[source, position] += position < accepted

    def report(self, stats: EngineStats) -> EngineStats:
        """The statistics, with those of drafts."""
        for (drafted, accepted), count in self._chains.items():
            for position in range(drafted):
                self._drafted["eagle3", position] += count
                self._accepted["eagle3", position] += count * (position < accepted)
        self._chains.clear()
        drafts = tuple((*key, count, self._accepted[key]) for key, count in sorted(self._drafted.items()))
        return dataclasses.replace(stats, verified=self._verified, drafts=drafts)
