"""Estimates the probability that a draft is accepted: a table updated by every generated token, and two factors.

The table of n-gram matches has a cell for each length of the match and each share of matches that agree on the token.
Every generated token is compared with the match at its position, whether or not a step verified it as a draft: so the
table needs no trials, and has no bias towards verified drafts. The k-th draft after a match of n tokens counts as a
match of n + k - 1 tokens. The table of a draft model has a cell for each range of the model's confidence; it is updated
only by chains that were drafted.

The probability of a cell is multiplied by a factor of the request, because some texts repeat themselves more than
others, and for matches by a factor of the token: after the same tokens, commas and markers recur more often than digits
and names.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from perilune.speculation.suffix import Match

MEMORY_DRAFTS = 400.0  # Drafts that a cell averages over. Larger: smoother, slower to follow a change of text.
MAX_PROBABILITY = 0.995  # Upper limit for one draft. Larger: longer chains where everything was right lately.
PRIOR_DRAFTS = 4.0  # Weight of a cell's initial value, in drafts. Larger: slower to learn at first.
FIRST_PROBABILITY = 0.8  # Initial value for a draft model: optimistic, so that the model is tried at once.
# A request's factor averages over 96 drafts; its initial value 1 counts as 24 drafts. Larger: closer to the table.
REQUEST_MEMORY_DRAFTS, REQUEST_PRIOR_DRAFTS = 96.0, 24.0
TOKEN_MEMORY_DRAFTS, TOKEN_PRIOR_DRAFTS = 400.0, 5.0  # The same for a token's factor.
# With chained steps, learn from the chains of this many requests per step, round robin: Python must take less time than
# a step. Larger: learns faster, takes more Python per step.
LEARN_PER_STEP = 4

_LENGTHS = (3, 4, 5, 6, 7, 8, 10, 16, 32)  # rows by matched tokens: 2, 3, 4, ... 8-9, 10-15, 16-31, 32 and more
_SHARES = (0.5, 0.8, 1.0)  # columns by Match.share; a fifth column for several matches that all agree
_CONFIDENCES = (0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99, 0.997)  # finer near 1, where chains are long
_PRIOR_RATES = (0.2, 0.4, 0.55, 0.7, 0.82, 0.9, 0.95, 0.98, 0.99)  # initial value of each column of confidence

Cell = tuple[str, int, int]  # source, row and column: drafts of one cell share one acceptance rate
Draft = tuple[int, Cell]  # (token, cell)
Observation = tuple[int, Draft, bool]  # (rid, draft, whether it was right)


def of_match(match: Match) -> Draft:
    """The draft of a match, with its cell."""
    column = bisect_right(_SHARES, match.share) + (match.share == 1.0 and not match.single)
    return match.token, ("suffix", bisect_right(_LENGTHS, match.length), column)


def of_model(token: int, position: int, confidence: float, agrees: bool | None) -> Draft:
    """The draft of a draft model's token, with its cell. `position`: its index in the chain; `agrees`: whether the
    match at its position has the same token, None without a match."""
    agreement = 0 if agrees is None else 1 + agrees
    return token, ("eagle3", position, agreement * len(_PRIOR_RATES) + bisect_right(_CONFIDENCES, confidence))


@dataclass(slots=True)
class Rate:
    """A moving average: the quotient of two sums that decay exponentially, over about the last `memory` samples."""

    hits: float
    total: float
    samples: int = 0

    @property
    def mean(self) -> float:
        return self.hits / self.total

    def add(self, value: float, weight: float, memory: float) -> None:
        keep = 1 - 1 / memory
        self.hits = self.hits * keep + value
        self.total = self.total * keep + weight
        self.samples += 1


class AcceptanceRates:
    """P(a draft is right, given that those before it are), by cell.

    `apply` learns the queued `observations` and forgets the requests in `ended`: call it while a step runs.
    `by_turns`: learn from chains of only LEARN_PER_STEP requests per step; `turn` counts the steps.
    """

    def __init__(self, *, by_turns: bool = False) -> None:
        self.observations: list[Observation] = []
        self.ended: list[int] = []
        self.turn = 0
        self._by_turns = by_turns
        self._suffix: dict[Cell, Rate] = {}
        self._model = [Rate(PRIOR_DRAFTS * first, PRIOR_DRAFTS) for first in _PRIOR_RATES * 3]  # by column of the cell
        self._positions: list[Rate] = []  # by position in a draft model's chain
        self._requests: dict[int, dict[str, Rate]] = {}  # by rid and source: hits over expected hits
        self._tokens: dict[int, Rate] = {}  # by token, for suffix drafts: hits over expected hits

    @property
    def chains(self) -> float:
        """Number of chains learned from, recent ones weighted more."""
        return self._positions[0].total if self._positions else 0.0

    def probability(self, rid: int, draft: Draft) -> float:
        return self.survival(rid, (draft,))[0]

    def survival(self, rid: int, drafts: Iterable[Draft]) -> list[float]:
        """P(the first k of these drafts are all right), k = 1, 2, ..."""
        alive, survival = 1.0, []
        columns, model, suffix = self._model, self._factor(rid, "eagle3"), self._factor(rid, "suffix")
        for token, cell in drafts:
            if cell[0] == "suffix":
                p = self._cell(cell).mean * suffix
                if (factor := self._tokens.get(token)) is not None:
                    p *= factor.mean
            else:
                rate = columns[cell[2]]
                p = rate.hits / rate.total * model
            alive *= p if p < MAX_PROBABILITY else MAX_PROBABILITY
            survival.append(alive)
        return survival

    def typical(self, rid: int, length: int) -> list[float]:
        """P(the first k drafts are all right), k = 1 .. `length`, for a chain not drafted yet (mean over chains)."""
        alive, survival, p, factor = 1.0, [], FIRST_PROBABILITY, self._factor(rid, "eagle3")
        for position in range(length):
            if position < len(self._positions):  # a position with few samples takes the rate of the one before it
                rate = self._positions[position]
                p = (rate.hits + PRIOR_DRAFTS * p) / (rate.total + PRIOR_DRAFTS)
            alive *= min(p * factor, MAX_PROBABILITY)
            survival.append(alive)
        return survival

    def learn(self, rid: int, draft: Draft, right: bool) -> None:
        """Updates the request's and the token's factor (hits over those that the cell predicts), then the cell."""
        token, cell = draft
        source, position, _ = cell
        rate, hit = self._cell(cell), float(right)
        request = self._requests.setdefault(rid, {}).setdefault(
            source, Rate(REQUEST_PRIOR_DRAFTS, REQUEST_PRIOR_DRAFTS)
        )
        request.add(hit, rate.mean, REQUEST_MEMORY_DRAFTS)
        if source == "suffix":
            factor = self._tokens.setdefault(token, Rate(TOKEN_PRIOR_DRAFTS, TOKEN_PRIOR_DRAFTS))
            factor.add(hit, rate.mean, TOKEN_MEMORY_DRAFTS)
        else:
            while len(self._positions) <= position:
                self._positions.append(Rate(0.0, 0.0))
            self._positions[position].add(hit, 1.0, MEMORY_DRAFTS)
        rate.add(hit, 1.0, MEMORY_DRAFTS)

    def has_turn(self, rid: int, requests: int) -> bool:
        """Whether to learn from the chain of request `rid` in this step of `requests` requests."""
        if not self._by_turns or requests <= LEARN_PER_STEP:
            return True
        return (rid + self.turn) % (-(-requests // LEARN_PER_STEP)) == 0

    def apply(self) -> None:
        for observation in self.observations:
            self.learn(*observation)
        self.observations.clear()
        for rid in self.ended:
            self._requests.pop(rid, None)
        self.ended.clear()

    def _factor(self, rid: int, source: str) -> float:
        rate = self._requests.get(rid, {}).get(source)
        return 1.0 if rate is None else rate.mean

    def _cell(self, cell: Cell) -> Rate:
        source, row, column = cell
        if source != "suffix":  # a draft model's; `row`, the position in the chain, is ignored: it would add little
            return self._model[column]
        found = self._suffix.get(cell)
        if found is None:
            first = min((0.3 + 0.08 * row) * (0.5, 0.8, 0.9, 1.0, 1.2)[column], 0.95)
            found = self._suffix[cell] = Rate(PRIOR_DRAFTS * first, PRIOR_DRAFTS)
        return found
