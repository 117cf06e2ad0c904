"""Decides whether restoring KV is faster than computing it, from measured times of both."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.kv.tiers import DISK, HOST

# An estimate is the median of the last 9 measurements. More: one slow disk access matters less, a change is seen later.
MEASUREMENTS = 9
TRUSTED_MEASUREMENTS = 5  # With fewer there is no estimate: the first restores and prompts warm caches up.
RETRY_AFTER_RESTORES = 64  # One of 64 refused restores is made anyway, to measure the tier again.


@dataclass(slots=True)
class _Speed:
    """The latest measurements, seconds per block. `seconds`: their median, or None while there are too few."""

    latest: deque[float] = field(default_factory=lambda: deque(maxlen=MEASUREMENTS))
    seconds: float | None = None

    def learn(self, seconds: float) -> None:
        self.latest.append(seconds)
        if len(self.latest) >= TRUSTED_MEASUREMENTS:
            self.seconds = statistics.median(self.latest)


@dataclass(slots=True)
class Worth:
    """Estimated seconds per block of computing and of restoring. Until there are enough measurements an estimate is
    None, and restoring is assumed to be faster.

    saved_seconds    since the start: estimated time of computing what was restored, less the time of restoring it
    """

    compute: _Speed = field(default_factory=_Speed)
    tiers: dict[str, _Speed] = field(default_factory=lambda: {HOST: _Speed(), DISK: _Speed()})
    refusals: dict[str, int] = field(default_factory=lambda: {HOST: 0, DISK: 0})
    saved_seconds: float = 0.0

    def computed(self, blocks: float, seconds: float) -> None:
        """Learns from a step of `seconds` that computed `blocks` blocks of prompts and little else."""
        self.compute.learn(seconds / blocks)

    def restored(self, host: int, disk: int, seconds: float) -> None:
        """Learns from a complete restore of `host` and `disk` blocks. With both, it counts for the disk, which is much
        slower, less the estimated time of the `host` blocks."""
        expected = host * (self.tiers[HOST].seconds or 0.0) if disk else 0.0
        self.tiers[DISK if disk else HOST].learn(max(seconds - expected, 0.0) / (disk or host))
        if self.compute.latest:
            self.saved_seconds += (host + disk) * self.block_seconds - seconds

    @property
    def block_seconds(self) -> float:
        """Seconds to compute a block: the median so far; 0 without a measurement."""
        return statistics.median(self.compute.latest) if self.compute.latest else 0.0

    def pays(self, tier: str) -> bool:
        """Whether restoring a block from the tier is faster than computing it."""
        moved, made = self.tiers[tier].seconds, self.compute.seconds
        return moved is None or made is None or moved < made

    def beginning(self, found: Sequence[str]) -> int:
        """How many of these blocks, found in this order in HOST or DISK, to restore: those before the first one that is
        faster to compute. One of RETRY_AFTER_RESTORES refused blocks is restored anyway, to measure its tier again."""
        for count, tier in enumerate(found):
            if self.pays(tier):
                continue
            self.refusals[tier] += 1
            if self.refusals[tier] % RETRY_AFTER_RESTORES:
                return count
        return len(found)
