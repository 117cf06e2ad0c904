"""How long the step after the running one need not be planned. A prompt that comes meanwhile is in that step: it waits
for half a step on average, and for one and a half where the next is planned as soon as the running one begins.

With 8 users, 3 drafts and Kimi K2.5 on four H200s a cycle takes 22 ms; simulated
(tests/cpu/engine/test_spare_time.py), a prompt waits 17 ms for its step instead of 34.
"""

SEEN_STEPS = 4  # of one size, before the next is planned late
# Smaller: a host that is late, this rank's or another's, lets the device wait. Larger: prompts wait longer.
MARGIN_SECONDS = 0.004
RENEWED_STEPS = 256  # More: a step that a busy host made seem short is believed for longer.
FEWEST_SECONDS = 0.010  # With less to spare the next step is planned at once: there is little to gain.

Size = tuple[int, int]  # requests and tokens of a step in which all requests decode


class SpareTime:
    """The least of what steps of one size left counts, until it is learned anew: an interval that is long because its
    launch came too late must not make the next one later."""

    def __init__(self) -> None:
        self._size: Size | None = None
        self._least, self._steps = 0.0, 0

    def record(self, size: Size | None, seconds: float) -> None:
        """seconds: from the result before a step to its own, without planning and launching the next. size: None for
        steps with prompts, and for those of which the result was awaited first."""
        if size is None or size != self._size or self._steps == RENEWED_STEPS:
            self._size, self._least, self._steps = size, seconds, 0
        self._least = min(self._least, seconds)
        self._steps += 1

    def seconds(self, size: Size | None) -> float:
        """From the last result until a step of this size, which is running, leaves just time enough for the next."""
        if size is None or size != self._size or self._steps < SEEN_STEPS or self._least < FEWEST_SECONDS:
            return 0.0
        return self._least - MARGIN_SECONDS
