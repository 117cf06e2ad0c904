"""Pauses of drafting: while drafts do not pay, steps are those of an engine without drafts and need no Python here."""

# Steps of one pause, at most. Larger: more tokens are added to the texts when the pause ends, which delays a step.
PAUSE_STEPS = 48


class Pause:
    """`steps`: steps left of the pause; 0: drafting is not paused.

    until_trial  steps from the beginning of the last pause until another mode is tried
    resumed      whether a pause has ended and no step has been timed since
    """

    def __init__(self) -> None:
        self.steps = self.until_trial = 0
        self.resumed = False
        self._max_requests = 0

    def begin(self, until_trial: int, requests: int) -> None:
        self.until_trial = until_trial
        self.steps = min(until_trial, PAUSE_STEPS)
        self._max_requests = 1 << (requests - 1).bit_length()  # the largest batch with the same ModeChoice

    def record_step(self, requests: int) -> None:
        """Counts a committed step of the pause; a batch of another size class ends the pause."""
        self.steps -= 1
        if requests > self._max_requests or 2 * requests <= self._max_requests:
            self.steps = 0

    def end(self) -> None:
        self.steps, self.resumed = 0, True
