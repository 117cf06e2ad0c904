"""Finds pieces of text on which a drafter loses tokens, by domain, as weighted training windows.

A chain begins at every token of an answer. Its loss (`Scored.lost`) is the number of accepted tokens of a drafter that
always drafts the target's likeliest token, minus that of this drafter. Neighbouring chains with a loss form a window:
everything before it, the beginning of the answer included, is its context, and only its own tokens are taught. No torch
here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from perilune.core.errors import ConfigError
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Row
from perilune.speculation.rejection_log import Record

GAP = 4  # largest distance of neighbouring chains with a loss in one window. Larger: fewer, longer windows
LIGHTEST, HEAVIEST = 0.25, 4.0  # bounds of a window's weight. Wider: few windows dominate the loss


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer and its chains' losses: chain c begins with the token before `row.ids[row.given + c]` and loses
    `lost[c]` tokens; None without a draft. There are len(ids) - given - 1 chains; `domain` is a number."""

    row: Row
    lost: tuple[float | None, ...]
    domain: int


@dataclass(frozen=True, slots=True)
class Window:
    row: Row  # `given` counts the context; `family` is the domain
    lost: float  # accepted tokens lost by all its chains together

    @property
    def taught(self) -> int:
        """Chains that begin in it."""
        return len(self.row.ids) - self.row.given - 1


@dataclass(slots=True)
class Domain:
    """A line of the summary: numbers of `answers`, all chains (`text`), scored chains (`chains`), tokens that these
    `lost`, and `windows`. `share`: wanted share of all taught tokens. `kept` of its windows were chosen; they have
    `taught` tokens in all and mean `weight`."""

    name: str
    answers: int = 0
    text: int = 0
    chains: int = 0
    lost: float = 0.0
    windows: int = 0
    share: float = 0.0
    kept: int = 0
    taught: int = 0
    weight: float = 0.0

    @property
    def rate(self) -> float:
        """Lost tokens per chain."""
        return self.lost / self.chains if self.chains else 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """How windows are chosen.

    tokens   taught in all; fewer if there are no more
    after    chain steps that training unrolls: as many tokens follow a window's last losing chain
    focus    a domain's share grows with this power of its loss per chain
    balance  0: a domain's share also grows with its part of the text; 1: it does not, so rare domains count as much
    guard    share of the taught tokens that is divided in proportion to the text alone, against forgetting
    """

    tokens: int
    after: int = 5
    focus: float = 2.0
    balance: float = 1.0
    guard: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.after < 1:
            raise ConfigError("mining needs at least one token, and one token after each window")
        if not (self.focus >= 0 and 0 <= self.balance <= 1):
            raise ConfigError(f"focus must be 0 or more and balance between 0 and 1, not {self.focus}, {self.balance}")
        if not 0 <= self.guard <= 1:
            raise ConfigError(f"guard must be between 0 and 1, not {self.guard}")


def windows_of(scored: Scored, after: int) -> list[Window]:
    """The windows of an answer, in order: pieces with losing chains."""
    row, found = scored.row, []
    if not row.given or len(row.ids) - row.given < LEAST_ANSWER:
        return []
    assert len(scored.lost) == len(row.ids) - row.given - 1, (len(scored.lost), len(row.ids), row.given)
    losing = [c for c, lost in enumerate(scored.lost) if lost]
    while losing:
        first = last = losing.pop(0)
        while losing and losing[0] - last <= GAP:
            last = losing.pop(0)
        end = min(row.given + last + max(after + 1, LEAST_ANSWER), len(row.ids))
        given = min(row.given + first, end - LEAST_ANSWER)
        lost = sum(x or 0.0 for x in scored.lost[first : last + 1])
        found.append(Window(replace(row, ids=row.ids[:end], given=given, family=scored.domain), lost))
    return found


def mine(answers: Sequence[Scored], names: Sequence[str], rule: Rule) -> tuple[list[Window], list[Domain]]:
    """The windows to learn, weighted, and the summary by domain.

    Windows of a domain are sampled in proportion to their loss. If a domain has too few for its share, they get higher
    weights. Within a domain, weights follow the square root of the loss per taught token; their mean is 1.
    """
    domains = [Domain(name) for name in names]
    pools: list[list[Window]] = [[] for _ in names]
    for scored in answers:
        domain = domains[scored.domain]
        known = [x for x in scored.lost if x is not None]
        domain.answers += 1
        domain.text += len(scored.lost)
        domain.chains += len(known)
        domain.lost += sum(known)
        found = windows_of(scored, rule.after)
        domain.windows += len(found)
        pools[scored.domain] += found
    _share(domains, rule)
    chosen: list[Window] = []
    for domain, pool in zip(domains, pools):
        wanted = domain.share * rule.tokens
        kept = _draw(pool, wanted, Random(f"{rule.seed}:{domain.name}"))
        domain.kept, domain.taught = len(kept), sum(w.taught for w in kept)
        if kept:
            weighed = _weigh(kept, wanted / domain.taught)
            domain.weight = sum(w.row.weight * w.taught for w in weighed) / domain.taught
            chosen += weighed
    Random(f"{rule.seed}:order").shuffle(chosen)
    return chosen, domains


def _share(domains: Sequence[Domain], rule: Rule) -> None:
    """Sets the shares of the domains that have windows; their sum is 1."""
    having = [d for d in domains if d.windows]
    text = sum(d.text for d in having)
    highest = max((d.rate for d in having), default=1.0)  # rates relative to it: a large focus makes no power 0 for all
    wanted = [(d.rate / highest) ** rule.focus * (d.text / text) ** (1 - rule.balance) for d in having]
    whole = sum(wanted)
    for d, want in zip(having, wanted):
        d.share = (1 - rule.guard) * want / whole + rule.guard * d.text / text


def _draw(pool: Sequence[Window], wanted: float, rng: Random) -> list[Window]:
    """Windows with `wanted` taught tokens or a few more, sampled without replacement in proportion to their loss."""
    # Equivalent to such sampling: sort by exponentially distributed random times, with the losses as rates.
    ranked = sorted(pool, key=lambda w: -math.log(1.0 - rng.random()) / w.lost)
    kept: list[Window] = []
    taught = 0
    for window in ranked:
        if taught >= wanted:
            break
        kept.append(window)
        taught += window.taught
    return kept


def _weigh(windows: Sequence[Window], level: float) -> list[Window]:
    """The windows with weights of mean `level` over taught tokens, as far as the bounds of weights allow."""
    density = [math.sqrt(w.lost / w.taught) for w in windows]
    mean = sum(d * w.taught for d, w in zip(density, windows)) / sum(w.taught for w in windows)
    return [
        replace(w, row=replace(w.row, weight=min(max(level * d / mean, LIGHTEST), HEAVIEST)))
        for d, w in zip(density, windows)
    ]


def of_records(records: Sequence[Record]) -> list[Scored]:
    """Scores from a server's log of rejections: a rejection loses its drafts that were not accepted; the loss of other
    chains is unknown (None)."""
    found = []
    for record in records:
        row = Row(record.ids, record.given, 0, record.greedy)
        lost: list[float | None] = [None] * (len(record.ids) - record.given - 1)
        for rejection in record.rejected:
            # The chain's first draft was for index `at`; it begins at index at - 2, before the last known token.
            if 0 <= (chain := rejection.at - record.given - 1) < len(lost):
                lost[chain] = float(len(rejection.drafts) - rejection.accepted)
        found.append(Scored(row, tuple(lost), 0))
    return found
