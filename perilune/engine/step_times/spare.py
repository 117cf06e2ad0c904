"""How long the engine can delay planning step N+1 while step N runs. A prompt that arrives during the delay enters step
N+1: it waits for half a step on average. If N+1 is planned when N begins, it enters N+2 and waits for one and a half.

With 8 users, 3 drafts and Kimi K2.5 on four H200s a step with drafting takes 22 ms; simulated
(tests/cpu/engine/test_spare_time.py), a prompt waits 17 ms for its step instead of 34.
"""

SEEN_STEPS = 4  # steps of one size that are measured before planning is put off
# Plan this much earlier than the minimum. Smaller: the device waits if any rank's host is late. Larger: prompts wait.
MARGIN_SECONDS = 0.004
RENEWED_STEPS = 256  # After this many steps the minimum starts anew. More: one unusually short step counts for longer.
FEWEST_SECONDS = 0.010  # If less can be spared, the next step is planned at once: there is little to gain.

Size = tuple[int, int]  # requests and tokens of a step in which all requests decode


class SpareTime:
    """Learns how long planning can wait: the minimum of the spare seconds of steps of one size. Not their mean, because
    a step launched too late has a long interval, which must not delay the next launch even more."""

    def __init__(self) -> None:
        self._size: Size | None = None
        self._least, self._steps = 0.0, 0

    def record(self, size: Size | None, seconds: float) -> None:
        """seconds: from the previous step's result to this step's, less the time in which the host planned and launched
        the next step. size: None for a step with prompts, or one committed before the next was planned."""
        if size is None or size != self._size or self._steps == RENEWED_STEPS:
            self._size, self._least, self._steps = size, seconds, 0
        self._least = min(self._least, seconds)
        self._steps += 1

    def seconds(self, size: Size | None) -> float:
        """Seconds after the last result at which the next step must be planned, while a step of `size` runs."""
        if size is None or size != self._size or self._steps < SEEN_STEPS or self._least < FEWEST_SECONDS:
            return 0.0
        return self._least - MARGIN_SECONDS
