"""Pauses of drafting: where drafts do not pay, steps are those of an engine without drafts, and cost no Python here."""

PAUSE_STEPS = 48  # Steps of one pause, at most. Larger: prompts and texts of paused steps are taken in later, at once.


class Pause:
    """`steps` of the pause are left; 0 where drafting is not paused.

    until_trial  steps from the last pause's beginning until another mode is tried
    resumed      a pause has ended and no step has been timed since
    """

    def __init__(self) -> None:
        self.steps = self.until_trial = 0
        self.resumed = False
        self._max_requests = 0

    def begin(self, until_trial: int, requests: int) -> None:
        self.until_trial = until_trial
        self.steps = min(until_trial, PAUSE_STEPS)
        self._max_requests = 1 << (requests - 1).bit_length()  # the batch sizes of one ModeChoice

    def record_step(self, requests: int) -> None:
        """A paused step with so many requests has landed; another size of batch ends the pause."""
        self.steps -= 1
        if requests > self._max_requests or 2 * requests <= self._max_requests:
            self.steps = 0

    def end(self) -> None:
        self.steps, self.resumed = 0, True
