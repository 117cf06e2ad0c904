"""Which pieces of text a drafter should see again: where it loses tokens, by domain, as weighted training windows.

A chain begins at every token of an answer. What it lost is how many tokens a drafter that always drafts the target's
likeliest would have brought there, minus what this one brings (`Scored.lost`). Neighbouring chains that lost something
are a window: its context is everything before it, the beginning of the answer included, and only its own tokens are
taught. Pure numbers: no tensors here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from perilune.core.errors import ConfigError
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Row
from perilune.speculation.rejection_log import Record

GAP = 4  # chains without a loss that do not part two windows
LIGHTEST, HEAVIEST = 0.25, 4.0  # a window's weight: more would let few windows decide


@dataclass(frozen=True, slots=True)
class Scored:
    """An answer and what its chains lost: `lost[c]` tokens by the chain that begins with the token before
    `row.ids[row.given + c]`; None without a draft. There are len(ids) - given - 1 chains; `domain` is a number."""

    row: Row
    lost: tuple[float | None, ...]
    domain: int


@dataclass(frozen=True, slots=True)
class Window:
    row: Row  # `given` counts the context; `family` is the domain
    lost: float  # tokens, by all its chains

    @property
    def taught(self) -> int:
        """Chains that begin in it."""
        return len(self.row.ids) - self.row.given - 1


@dataclass(slots=True)
class Domain:
    """A line of the summary. Of its `text`, chains in all, `chains` were scored, which lost `lost` tokens; `share` of
    the taught tokens are to be its own; of its `windows`, `kept` were chosen, with `taught` tokens in all, weighing
    `weight` on average."""

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
        """Tokens lost per chain."""
        return self.lost / self.chains if self.chains else 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """How windows are chosen.

    tokens   taught, in all; fewer if there are no more
    after    chain steps that training unrolls: so many tokens follow a window's last loss
    focus    a domain's share grows with this power of what its chains lose
    balance  0: a domain's share also grows with its part of the text; 1: it does not, rare ones count as much
    guard    so much of what is taught is shared out as the text is, whatever is lost: nothing shall be forgotten
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
    """The pieces of an answer in which chains lost something, in order."""
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

    Windows of a domain are drawn with chances by what they lost. Where a domain has too few for its share, its windows
    weigh more instead. Within a domain a window weighs by the root of its loss per taught token; the mean is 1.
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
    """Of the domains that have windows; together 1."""
    having = [d for d in domains if d.windows]
    text = sum(d.text for d in having)
    wanted = [d.rate**rule.focus * (d.text / text) ** (1 - rule.balance) for d in having]
    whole = sum(wanted)
    for d, want in zip(having, wanted):
        d.share = (1 - rule.guard) * want / whole + rule.guard * d.text / text


def _draw(pool: Sequence[Window], wanted: float, rng: Random) -> list[Window]:
    """Windows with `wanted` taught tokens or a few more, without repetition, chances by loss."""
    # The least of exponential times with rates by loss come first: sampling without replacement.
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
    """With weights of mean `level` over taught tokens, as far as their bounds let them."""
    density = [math.sqrt(w.lost / w.taught) for w in windows]
    mean = sum(d * w.taught for d, w in zip(density, windows)) / sum(w.taught for w in windows)
    return [
        replace(w, row=replace(w.row, weight=min(max(level * d / mean, LIGHTEST), HEAVIEST)))
        for d, w in zip(density, windows)
    ]


def of_records(records: Sequence[Record]) -> list[Scored]:
    """What a server logged: at a rejection, the drafts that were not accepted are lost; elsewhere nothing is known."""
    found = []
    for record in records:
        row = Row(record.ids, record.given, 0, record.greedy)
        lost: list[float | None] = [None] * (len(record.ids) - record.given - 1)
        for rejection in record.rejected:
            # The chain's first drafted token was for place `at`; it begins with the token before the last known one.
            if 0 <= (chain := rejection.at - record.given - 1) < len(lost):
                lost[chain] = float(len(rejection.drafts) - rejection.accepted)
        found.append(Scored(row, tuple(lost), 0))
    return found
