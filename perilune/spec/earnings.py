"""What drafting brings by the clock: the price of time, and whether to draft at all.

A step's drafts are worth their tokens less their time, and time is worth what the engine makes of it: its tokens per
second. That price is what makes one step's decision right for all of them together: where a text is going well, time is
dear and an unlikely draft not worth it; where it is not, anything that still pays more than the rest is.

The same figure is the guard. With drafts no request may fare worse than without, whatever tables and probabilities
say: so now and then, for a few steps, nothing is drafted and the draft model is left out; where that is the faster way
it is kept, and drafting is what is tried now and then.
"""

from dataclasses import dataclass

from perilune.spec.costs import Pace

MEMORY, PRIOR = 64.0, 4.0  # steps that a price is made of; plain ones that it begins with
LEAST = 1.02  # times what plain steps bring: for less drafting is not worth its risk
ENOUGH = 24.0  # steps with drafts before they are judged
GLANCE, HOPELESS = 8.0, 0.9  # steps of a trial after which it ends, if they brought less than that times plain ones
TURN = 8  # steps without drafts, tried at a time
TRIAL = 32  # steps with drafts, likewise
FIRST, LAST = 128, 2048  # steps until the first trial; at most, doubling where it changes nothing


@dataclass(slots=True)
class _Size:
    """Batches of about the same number of requests. Tokens of one request."""

    tokens: float
    seconds: float
    steps: float = 0.0  # with drafting, that these are made of
    drafting: bool = True
    trying: bool = False  # the other way, for a few steps
    left: int = FIRST  # steps until a trial begins or ends
    period: int = FIRST  # between two


class Earnings:
    """By number of requests, because what pays for one does not for fifty."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._sizes: dict[int, _Size] = {}

    def price(self, requests: int, context: int) -> float:
        """What a second is worth, in tokens of all requests."""
        size = self._of(requests, context)
        return requests * size.tokens / size.seconds

    def drafting(self, requests: int, context: int) -> bool:
        """Whether the next step may have drafts, or ask for some."""
        size = self._of(requests, context)
        return size.drafting != size.trying

    def earned(self, requests: int, context: int, tokens: int, seconds: float, steps: int = 1) -> None:
        """By a step of `requests` that decode, in which drafting was allowed or not as `drafting` said. It stands for
        `steps` of its like."""
        size = self._of(requests, context)
        if size.drafting != size.trying:
            keep = 1 - 1 / MEMORY
            size.tokens = size.tokens * keep + tokens / requests
            size.seconds = size.seconds * keep + seconds
            size.steps += 1
        size.left -= steps
        plain = requests / self._pace.plain(requests, context)
        better = self.price(requests, context) >= LEAST * plain or size.steps < ENOUGH
        if size.drafting:  # no need to go on losing until the trial is due
            hurry = not size.trying and not better and size.left <= size.period - ENOUGH
        else:  # nor until it is over
            hurry = size.trying and size.steps >= GLANCE and self.price(requests, context) < HOPELESS * plain
            better = better and not hurry
        if size.left > 0 and not hurry:
            return
        if size.trying:
            size.period = min(2 * size.period, LAST) if better == size.drafting else FIRST
            size.trying, size.drafting, size.left = False, better, size.period
        else:
            size.trying, size.left = True, TURN if size.drafting else TRIAL
            if not size.drafting:
                self._forget(size, requests, context)

    def _forget(self, size: _Size, requests: int, context: int) -> None:
        size.tokens, size.seconds, size.steps = PRIOR, PRIOR * self._pace.plain(requests, context), 0.0

    def _of(self, requests: int, context: int) -> _Size:
        number = (requests - 1).bit_length()  # 1, 2, 3-4, 5-8, ...
        size = self._sizes.get(number)
        if size is None:
            size = self._sizes[number] = _Size(PRIOR, PRIOR * self._pace.plain(requests, context))
        return size
