"""Whether restoring KV is quicker than computing it, from what both have taken so far."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.kv.tiers import DISK, HOST

MEASUREMENTS = 9  # of which the median counts. More: one slow disk access matters less, a change is seen later.
TRUSTED_MEASUREMENTS = 5  # Fewer say nothing: the first restores and the first prompts warm caches up.
RETRY_AFTER_RESTORES = 64  # After so many refusals of a tier one restore is made after all, to measure it again.


@dataclass(slots=True)
class _Speed:
    """The latest measurements in seconds per block; `seconds`: their median, None while they are too few."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS))
    seconds: float | None = None

    def learn(self, seconds: float) -> None:
        self.latest.append(seconds)
        if len(self.latest) >= TRUSTED_MEASUREMENTS:
            self.seconds = statistics.median(self.latest)


@dataclass(slots=True)
class Worth:
    """Estimates, each None until it is measured; what is not measured is taken to be worth it.

    saved_seconds    what restores took less than computing would have, since the start
    """

    compute: _Speed = field(default_factory=_Speed)
    tiers: dict[str, _Speed] = field(default_factory=lambda: {HOST: _Speed(), DISK: _Speed()})
    refusals: dict[str, int] = field(default_factory=lambda: {HOST: 0, DISK: 0})
    saved_seconds: float = 0.0

    def computed(self, blocks: float, seconds: float) -> None:
        """A step computed this much of prompts, and nothing else."""
        self.compute.learn(seconds / blocks)

    def restored(self, host: int, disk: int, seconds: float) -> None:
        """A restore is complete. One of both tiers teaches about the disk, by far the slower."""
        expected = host * (self.tiers[HOST].seconds or 0.0) if disk else 0.0
        self.tiers[DISK if disk else HOST].learn(max(seconds - expected, 0.0) / (disk or host))
        if self.compute.latest:
            self.saved_seconds += (host + disk) * statistics.median(self.compute.latest) - seconds

    def pays(self, tier: str) -> bool:
        """Whether a block of the tier is restored sooner than computed."""
        moved, made = self.tiers[tier].seconds, self.compute.seconds
        return moved is None or made is None or moved < made

    def beginning(self, found: Sequence[str]) -> int:
        """How many of these blocks, found in this order in HOST or DISK, to restore: up to the first that is computed
        sooner. Now and then a tier that does not pay is tried again."""
        for count, tier in enumerate(found):
            if self.pays(tier):
                continue
            self.refusals[tier] += 1
            if self.refusals[tier] % RETRY_AFTER_RESTORES:
                return count
        return len(found)
