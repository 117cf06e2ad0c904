"""Decides from the ranks' heartbeats whether a step hangs. Called every BEAT_SECONDS by the thread that receives them.

A rank is late when it has not ended a step that rank 0 ended SILENT_SECONDS ago. All ranks are late when none has ended
a step, or reported any progress in computing one, for STILL_SECONDS. A step in which ranks do compute may take
STEP_SECONDS and SECONDS_PER_TOKEN for each of its tokens. While a rank compiles kernels, no step is late. Time is
counted in calls, not read from a clock, because the whole machine may be suspended between two calls.
"""

from collections.abc import Mapping
from dataclasses import dataclass

BEAT_SECONDS = 1.0
SILENT_SECONDS = 5.0  # Longer: requests get their error later. Shorter: a machine that swaps loses its ranks.
STILL_SECONDS = 5.0  # Longer: as above. Shorter: a pause of the machine, in which no layer ends, ends the group.
# The limit of a step, to which SECONDS_PER_TOKEN adds. Shorter: slow machines lose their ranks. Longer: requests wait
# longer for their error when ranks compute without an end.
STEP_SECONDS = 30.0
SECONDS_PER_TOKEN = 0.02


@dataclass(frozen=True, slots=True)
class Seen:
    """The state of the ranks at one moment.

    ended     number of steps that each other rank has ended, by its name in errors, in the order of ranks
    own, sent   number of steps that rank 0 has ended; number of steps that were sent to all ranks
    tokens    of the largest step that may be in flight
    building  whether a rank compiles kernels
    progress, begun   of each rank's Group (dist/group.py), rank 0 first
    silent    whether a rank's heartbeats are missing: if they stay missing, the group ends for that reason instead
    """

    ended: Mapping[str, int]
    own: int
    sent: int
    tokens: int
    building: bool
    progress: tuple[int, ...]
    begun: tuple[int, ...]
    silent: bool = False


class Lateness:
    def __init__(self) -> None:
        self._before: Seen | None = None
        self._late_seconds: dict[str, float] = {}
        self._still_seconds = 0.0  # since any rank last reported progress

    def look(self, seen: Seen) -> str | None:
        """The reason why the group must end; None: no rank is late, or one is silent. Call it every BEAT_SECONDS."""
        before, self._before = self._before, seen
        last = {} if before is None else before.ended
        for name, ended in seen.ended.items():
            late = ended == last.get(name, 0) and ended < seen.sent and not seen.building
            self._late_seconds[name] = self._late_seconds.get(name, 0.0) + BEAT_SECONDS if late else 0.0
        name = max(seen.ended, key=lambda name: self._late_seconds[name])
        late_seconds = self._late_seconds[name]
        still = before is not None and (before.progress, before.ended) == (seen.progress, seen.ended)
        self._still_seconds = self._still_seconds + BEAT_SECONDS if still and late_seconds else 0.0
        if seen.silent:
            return None
        if late_seconds >= SILENT_SECONDS and seen.ended[name] < seen.own:
            return f"{name} has not ended a step that rank 0 ended {late_seconds:.0f} s ago"
        if self._still_seconds >= STILL_SECONDS:
            return f"{_behind(seen)} for {late_seconds:.0f} s, and no rank computes"
        if late_seconds >= STEP_SECONDS + SECONDS_PER_TOKEN * seen.tokens:
            return f"a step has not ended on {name} for {late_seconds:.0f} s"
        return None


def _behind(seen: Seen) -> str:
    """The error text for a step that no rank ends. It names the rank that the others wait for, if that is known."""
    fewest = min(seen.begun)
    if seen.begun.count(fewest) > 1:
        return "a step has ended on no rank"
    name = (f"rank 0 of {len(seen.begun)}", *seen.ended)[seen.begun.index(fewest)]
    return f"{name} has not begun an exchange in which others wait"
