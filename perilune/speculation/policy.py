"""How many drafts each request gets in a step: as many as make tokens per second the most.

A draft is worth the probability that it and all before it are right, and costs the time that verifying it adds to the
step, at the price that time has (speculation/modes.py). Which drafts to take is then a matter of adding the likeliest
of all requests one by one, and stopping where worth less cost is greatest: a large batch, whose step has no idle
bandwidth left, stops at once, and so does a text that nobody foretells. How long a chain to ask of a draft model must
be decided before its confidence is known: by what chains of that length were lately worth to this request.

Probabilities come from what happened. Every token, drafted or not, says whether the suffix match before it was right,
so the table by length of the match and agreement of the matches costs nothing to learn, needs no probing, and is not
bent by drafting only where it looks good. Because a match grows by one with every draft that is right, the same table
tells about later drafts of a chain. A model's drafts are told apart by the model's own confidence, and are known only
where it was asked: so it is, now and then. On top of the table, which all share, come two factors: the request's own,
because some texts repeat themselves and some only seem to, and the token's own: commas and markers come where they did
before, digits and names less so.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.speculation.step_cost import Bare, Costs, Pace

MEMORY = 400.0  # observations a cell remembers
SUREST = 0.995  # that a draft is right, at most
PRIOR = 4.0  # observations the first guess of a cell is worth
FIRST = 0.8  # the first guess of how often a draft model is right: hopeful, so that it is tried at once
CHAINS = (1, 2, 3, 5, 8)  # lengths that are asked for: a GPU has a graph for each
OWN_MEMORY, OWN_PRIOR = 96.0, 24.0  # of a request's factor
TOKEN_MEMORY, TOKEN_PRIOR = 400.0, 5.0  # of a token's

_LENGTHS = (3, 4, 5, 6, 7, 8, 10, 16, 32)  # cells by matched tokens: 2, 3, 4, ... 8-9, 10-15, 16-31, 32 and more
_SHARES = (0.5, 0.8, 1.0)
_SURE = (
    0.3,
    0.5,
    0.7,
    0.85,
    0.93,
    0.97,
    0.99,
    0.997,
)  # cells by a draft model's confidence: finer where chains are long
_FIRST = (0.2, 0.4, 0.55, 0.7, 0.82, 0.9, 0.95, 0.98, 0.99)  # the first guess of each

Cell = tuple[str, int, int]  # the source of a draft, and what tells it from others: learned about one by one


def suffix_cell(length: int, share: float, alone: bool) -> Cell:
    """Of a token foretold by suffix matches: see spec.suffix.Guess."""
    return "suffix", bisect_right(_LENGTHS, length), bisect_right(_SHARES, share) + (share == 1.0 and not alone)


def model_cell(source: str, position: int, confidence: float, foretold: bool | None) -> Cell:
    """Of a drafter's token number `position` in its chain, in which it trusts as much as `confidence`, and whether
    suffix matches foretell the same; None: they foretell nothing."""
    agreement = 0 if foretold is None else 1 + foretold
    return source, position, agreement * (len(_SURE) + 1) + bisect_right(_SURE, confidence)


@dataclass(slots=True)
class _Rate:
    hits: float
    total: float

    @property
    def mean(self) -> float:
        return self.hits / self.total

    def add(self, value: float, weight: float, memory: float) -> None:
        keep = 1 - 1 / memory
        self.hits = self.hits * keep + value
        self.total = self.total * keep + weight


class Acceptance:
    """How often drafts of each kind are right if those before them are, of all requests and of each."""

    def __init__(self) -> None:
        self._cells: dict[Cell, _Rate] = {}  # of matches
        self._sure = [_Rate(PRIOR * first, PRIOR) for first in _FIRST * 3]  # of a draft model, by column of its cell
        self._positions: list[_Rate] = []  # of a draft model's chain
        self._own: dict[int, dict[str, _Rate]] = {}  # by rid and source: right over expected to be right
        self._tokens: dict[int, _Rate] = {}  # likewise, of suffix drafts

    @property
    def chains(self) -> float:
        """Chains that something was learned from."""
        return self._positions[0].total if self._positions else 0.0

    def probability(self, rid: int, cell: Cell, token: int) -> float:
        """That a draft is right if those before it are."""
        return self.survival(rid, (cell,), (token,))[0]

    def survival(self, rid: int, cells: Sequence[Cell], tokens: Sequence[int]) -> list[float]:
        """That the first, the first two, ... of these drafts are right."""
        alive, survival = 1.0, []
        sure, model, matches = self._sure, self._factor(rid, "eagle3"), self._factor(rid, "suffix")
        for cell, token in zip(cells, tokens):
            if cell[0] == "suffix":
                p = self._cell(cell).mean * matches
                if (said := self._tokens.get(token)) is not None:
                    p *= said.mean
            else:
                rate = sure[cell[2]]
                p = rate.hits / rate.total * model
            alive *= p if p < SUREST else SUREST
            survival.append(alive)
        return survival

    def typical(self, rid: int, length: int) -> list[float]:
        """That the first, the first two, ... of a chain that a draft model has not drafted yet will be right."""
        alive, survival, p, factor = 1.0, [], FIRST, self._factor(rid, "eagle3")
        for position in range(length):
            if position < len(self._positions):  # seldom seen, it is as the one before it: chains decay slowly
                rate = self._positions[position]
                p = (rate.hits + PRIOR * p) / (rate.total + PRIOR)
            alive *= min(p * factor, SUREST)
            survival.append(alive)
        return survival

    def learn(self, rid: int, cell: Cell, token: int, right: bool) -> None:
        source, position, _ = cell
        rate = self._cell(cell)
        if source == "suffix":
            self._tokens.setdefault(token, _Rate(TOKEN_PRIOR, TOKEN_PRIOR)).add(float(right), rate.mean, TOKEN_MEMORY)
        own = self._own.setdefault(rid, {}).setdefault(source, _Rate(OWN_PRIOR, OWN_PRIOR))
        own.add(float(right), rate.mean, OWN_MEMORY)
        rate.add(float(right), 1.0, MEMORY)
        if source != "suffix":
            while len(self._positions) <= position:
                self._positions.append(_Rate(0.0, 0.0))
            self._positions[position].add(float(right), 1.0, MEMORY)

    def drop(self, rid: int) -> None:
        self._own.pop(rid, None)

    def _factor(self, rid: int, source: str) -> float:
        own = self._own.get(rid, {}).get(source)
        return 1.0 if own is None else own.mean

    def _cell(self, cell: Cell) -> _Rate:
        source, row, column = cell
        if source != "suffix":  # a place in a chain says little beside the confidence
            return self._sure[column]
        found = self._cells.get(cell)
        if found is None:
            first = min((0.3 + 0.08 * row) * (0.5, 0.8, 0.9, 1.0, 1.2)[column], 0.95)
            found = self._cells[cell] = _Rate(PRIOR * first, PRIOR)
        return found


@dataclass(slots=True)
class Chance:
    """A request's part of a step: the `count` tokens it computes anyway behind `context`, whether it draws, and
    `survival[i]`, the probability that its drafts as far as number i are all right. With probability `ready` the drafts
    can be made at all: less than one while the token before them is still being drawn."""

    count: int
    context: int
    draws: bool
    survival: Sequence[float] = ()
    ready: float = 1.0
    taken: int = field(default=0)


def choose(
    chances: Sequence[Chance], costs: Costs | Pace | Bare, budget: int, price: float, overhead: float = 0.0
) -> float:
    """Sets `taken` of each, `budget` at most in all; returns by how many tokens that is better than no drafts.

    `price` is what a second is worth in tokens; `overhead` seconds are lost by drafting at all.
    """
    offers = sorted(
        ((s * c.ready, -i, owner) for owner, c in enumerate(chances) for i, s in enumerate(c.survival)), reverse=True
    )
    # survival never rises along a chain, so in this order a request's drafts come first to last
    size, best, best_net, net = sum(c.count for c in chances), 0, 0.0, -price * overhead
    taken = [0] * len(chances)
    base = costs.bases(size, 1 + min(len(offers), budget))
    longest = max((c.count + len(c.survival) for c in chances if c.survival), default=0)
    reach = [costs.reach(count) for count in range(longest + 1)]
    for index, (worth, _, owner) in enumerate(offers[:budget], 1):
        chance = chances[owner]
        count = chance.count + taken[owner]
        taken[owner] += 1
        more = base[index] - base[index - 1] + (reach[count + 1] - reach[count]) * chance.context
        net += worth - price * more * chance.ready
        if net > best_net:
            best, best_net = index, net
    for chance in chances:
        chance.taken = 0
    for _, _, owner in offers[:best]:
        chances[owner].taken += 1
    return best_net


def net_worth(
    survival: Sequence[float], verifying: Sequence[float], drafting: float, drafted: int, blindly: bool = False
) -> list[float]:
    """Tokens by which the first, the first two, ... of a chain's drafts bring more than they cost.

    With so many at hand as many are verified as pay, for `verifying[n - 1]` tokens in all; `blindly`: all of them are,
    because the step is planned before they are known. `drafting` is the cost of a draft in tokens, of which there were
    `drafted`: a chain that ended there would not have cost more for being asked for more.
    """
    best = alive = 0.0
    found = []
    for length, (s, price) in enumerate(zip(survival, verifying), 1):
        alive += s
        best = alive - price if blindly else max(best, alive - price)
        found.append(best - drafting * min(length, drafted))
    return found


class Worth:
    """What chains of each length were lately worth, `by_length`."""

    def __init__(self, first: Sequence[float], seen: float, memory: float) -> None:
        """`first` as if seen so many times."""
        self.by_length = list(first)
        self._seen, self._memory = seen, memory

    def saw(self, worth: Sequence[float]) -> None:
        """As net_worth."""
        self._seen = min(self._seen + 1, self._memory)
        for i, value in enumerate(worth):
            self.by_length[i] += (value - self.by_length[i]) / self._seen


def best_chain(worths: Sequence[Sequence[float]], lost: float) -> int:
    """How long chains a draft model should draft for requests of which a step is drawing the tokens before them: 0 if
    they are not worth the `lost` tokens that it takes to wait for them."""
    sums = {length: sum(column) for length, column in enumerate(zip(*worths), 1) if length in CHAINS}
    best = max(sums, key=sums.__getitem__, default=0)
    return best if best and sums[best] > lost else 0
