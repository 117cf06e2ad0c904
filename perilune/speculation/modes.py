"""What drafting brings by the clock: the price of time, and which way of drafting to go, if any.

A step's drafts are worth their tokens less their time, and time is worth what the engine makes of it: its tokens per
second. That price is what makes one step's decision right for all of them together: where a text is going well, time is
dear and an unlikely draft not worth it; where it is not, anything that still pays more than the rest is.

The same figure is the guard. With drafts no request may fare worse than without, whatever tables and probabilities
say, and a draft model that does not pay shall not be in the way of matches that do. So there are up to three ways
(`Way`), one is gone, and another one is tried for a few steps now and then; the fastest is kept. What a trial loses
decides when the next one may be: all of them together lose at most the share SPENT of the time.
"""

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from perilune.speculation.step_cost import Pace

MEMORY, PRIOR = 64.0, 4.0  # steps that a price is made of; those of the way before that it begins with
GLANCE, HOPELESS = 6.0, 0.9  # steps of a trial after which it ends, if they bring less than that times what there was
CLEAR = 1.3  # times what plain steps bring: after a glance there is no doubt
STAY = 1.02  # times as good must another way be
TURN = 8  # plain steps, tried at a time
TRIAL = 32  # steps with drafts, likewise
EARLY = 8  # steps until the first trial where there are two ways of drafting
PAUSE = 128  # steps between two trials, at least
FOREVER = 1 << 30  # where there is one way only
LATER = 512  # steps until the first one of a draft model that promises nothing
SOON = 64  # steps by which a trial of a draft model is put forward, or off, for a prompt: it should know the text
SPENT = (0.001, 0.004, 0.004)  # of the time, on trials of each Way


class Way(enum.IntEnum):
    """What steps do about drafts: nothing; take what matches foretell and leave the draft model out; all there is."""

    PLAIN = 0
    MATCHES = 1
    ALL = 2


# By Way: times what plain steps bring, that it must; steps before it is judged. Matches cost next to nothing where
# there are none, and what they bring comes in lumps.
LEAST, ENOUGH = (0.0, 0.98, 1.02), (0.0, 64.0, 24.0)
Ways = Callable[[int, int], list[Way]]  # those there are for so many requests at this context, most promising first


@dataclass(slots=True)
class _Rate:
    """Tokens of one request, over seconds."""

    tokens: float
    seconds: float
    steps: float = 0.0

    @property
    def value(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: float, seconds: float) -> None:
        keep = 1 - 1 / MEMORY
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.steps += 1


@dataclass(slots=True)
class _Size:
    """Batches of about the same number of requests."""

    ways: list[Way]
    way: Way
    left: int  # steps until a trial begins or ends
    rates: dict[Way, _Rate]  # of those with drafts
    trial: Way | None = None  # another way, for a few steps
    lasted: int = 0  # steps since one began or ended
    spent: float = 0.0  # by the trial: seconds
    brought: float = 0.0  # and tokens of one request
    trials: int = 0
    tried: dict[Way, int] = field(default_factory=dict)  # the number of the last trial of each

    @property
    def doing(self) -> Way:
        return self.way if self.trial is None else self.trial


class Earnings:
    """By number of requests, because what pays for one does not for fifty."""

    def __init__(self, pace: Pace, ways: Ways) -> None:
        self._pace = pace
        self._ways = ways
        self._sizes: dict[int, _Size] = {}

    def price(self, requests: int, context: int) -> float:
        """What a second is worth, in tokens of all requests."""
        size = self._of(requests, context)
        return requests * self._value(size, size.doing, requests, context)

    def way(self, requests: int, context: int) -> Way:
        """Which way the next step shall go."""
        return self._of(requests, context).doing

    def trying(self, requests: int, context: int) -> bool:
        """Whether that is a trial."""
        return self._of(requests, context).trial is not None

    def settled(self, requests: int, context: int) -> bool:
        """Whether enough is known of the way gone, and no other is being tried."""
        size = self._of(requests, context)
        if size.trial is not None or size.way == Way.PLAIN:
            return size.trial is None
        rate = size.rates[size.way]
        clear = rate.steps >= GLANCE and rate.value * self._pace.plain(requests, context) >= CLEAR
        return clear or rate.steps >= ENOUGH[size.way]

    def quiet(self, requests: int, context: int) -> int:
        """For how many plain steps nothing is going to change; 0 if there are drafts, or trials."""
        size = self._of(requests, context)
        return max(size.left, 0) if size.way == Way.PLAIN and size.trial is None else 0

    def prompted(self, requests: int, context: int) -> None:
        """The next step has a prompt: the best moment to begin with a draft model, if it is about to be tried."""
        size = self._of(requests, context)
        if size.trial is None and size.left <= SOON and self._next(size) == Way.ALL:
            self._try(size, requests, context)

    def earned(self, requests: int, context: int, way: Way, tokens: int, seconds: float, steps: int = 1) -> None:
        """By a step of `requests` that decode, planned that way. It stands for `steps` of its like."""
        size = self._of(requests, context)
        if way != size.doing or len(size.ways) == 1:
            return  # planned before that was decided; or there is nothing to decide
        size.left -= steps
        size.lasted += steps
        if way != Way.PLAIN:
            size.rates[way].add(tokens / requests, seconds)
        if size.trial is None:
            due = size.left <= (-SOON if self._next(size) == Way.ALL else 0)
            if due or self._fails(size, requests, context):
                self._try(size, requests, context)
            return
        size.spent += seconds
        size.brought += tokens / requests
        before = self._value(size, size.way, requests, context)
        hopeless = way != Way.PLAIN and size.rates[way].steps >= GLANCE and size.rates[way].value < HOPELESS * before
        if size.left <= 0 or hopeless:
            self._judge(size, requests, context)

    def _fails(self, size: _Size, requests: int, context: int) -> bool:
        """Whether there is no need to go on until the next trial is due."""
        if size.way == Way.PLAIN or size.lasted < GLANCE:
            return False
        value = size.rates[size.way].value * self._pace.plain(requests, context)
        if size.lasted < ENOUGH[size.way]:  # by the clock alone it might be a hard text
            return value < HOPELESS and self._ways(requests, context)[0] != size.way
        return value < LEAST[size.way]

    def _pays(self, size: _Size, way: Way, requests: int, context: int) -> bool:
        """As far as is known."""
        if way == Way.PLAIN or size.rates[way].steps < (GLANCE if way == size.trial else ENOUGH[way]):
            return True
        return size.rates[way].value >= LEAST[way] / self._pace.plain(requests, context)

    @staticmethod
    def _next(size: _Size) -> Way:
        """The way to be tried."""
        return min((way for way in size.ways if way != size.way), key=lambda w: (size.tried.get(w, -1), -w))

    def _try(self, size: _Size, requests: int, context: int) -> None:
        """Begins a trial."""
        size.trial = way = self._next(size)
        size.trials += 1
        size.tried[way] = size.trials
        size.left, size.lasted, size.spent, size.brought = TURN if way == Way.PLAIN else TRIAL, 0, 0.0, 0.0
        if way != Way.PLAIN:
            size.rates[way] = _Rate(PRIOR, PRIOR / self._value(size, size.way, requests, context))

    def _judge(self, size: _Size, requests: int, context: int) -> None:
        """Goes on with the best there is."""
        assert size.trial is not None

        def worth(way: Way) -> float:
            value = self._value(size, way, requests, context) if self._pays(size, way, requests, context) else 0.0
            return value * STAY if way == size.way else value

        best = max({Way.PLAIN, size.way, size.trial}, key=worth)
        plain, worse, lost = self._pace.plain(requests, context), size.trial, 0.0
        if best != size.trial:
            lost = size.spent - size.brought / self._value(size, best, requests, context)
        elif best == Way.PLAIN:  # what it took to find that out
            worse, rate = size.way, size.rates[size.way]
            lost = rate.seconds - rate.tokens * plain
        size.left = max(PAUSE, math.ceil(lost / SPENT[worse] / plain))
        size.way, size.trial, size.lasted = best, None, 0

    def _value(self, size: _Size, way: Way, requests: int, context: int) -> float:
        """Tokens of one request, per second."""
        return 1 / self._pace.plain(requests, context) if way == Way.PLAIN else size.rates[way].value

    def _of(self, requests: int, context: int) -> _Size:
        number = (requests - 1).bit_length()  # 1, 2, 3-4, 5-8, ...
        size = self._sizes.get(number)
        if size is None:
            ways = self._ways(requests, context)
            plain = self._pace.plain(requests, context)
            rates: dict[Way, _Rate] = {way: _Rate(PRIOR, PRIOR * plain) for way in ways if way != Way.PLAIN}
            left = EARLY if len(rates) > 1 else LATER if ways == [Way.PLAIN, Way.ALL] else PAUSE
            left += SOON if ways[0] == Way.MATCHES else 0  # not before there has been one step of them
            left = left if len(ways) > 1 else FOREVER
            size = self._sizes[number] = _Size(ways, ways[0], left, rates)
        return size
