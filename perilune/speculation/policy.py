"""Chooses how many drafts each request gets in a step, for the most tokens per second.

A draft gains P(it and all drafts before it are right) tokens on average. It costs the seconds that verifying it adds to
the step, times the batch's tokens per second (modes.py). Drafts of all requests are added in order of probability, up
to the number at which total gain minus total cost is greatest. Large batches get few or none, because verifying is
cheap only while memory bandwidth limits a step; so do texts without likely drafts. The length of a draft model's chain
is chosen before its confidence is known: by the mean gain that each length had in the request's recent chains.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perilune.speculation.live_costs import KindCosts
from perilune.speculation.step_cost import Costs

CHAIN_TOKENS = (1, 2, 3, 5, 8)  # Lengths of chains: a GPU has a CUDA graph for each.


@dataclass(slots=True)
class Candidates:
    """A request's possible drafts in one step.

    count, context  tokens that the request computes without drafts, and its context including them
    survival        P(the first k drafts are all right), k = 1, 2, ...
    possible        P(these drafts can be used): below 1 if they assume a token that is still being sampled
    taken           number of drafts, set by `choose`
    """

    count: int
    context: int
    survival: Sequence[float] = ()
    possible: float = 1.0
    taken: int = 0


def choose(
    requests: Sequence[Candidates],
    costs: Costs | KindCosts,
    max_drafts: int,
    tokens_per_second: float,
    overhead: float = 0.0,
) -> float:
    """Sets `taken` of each request, at most `max_drafts` in all; returns the gain in tokens over a step without drafts.

    `overhead`: seconds that the step loses by having drafts at all, because it has to wait for them.
    """
    drafts = sorted(
        ((s * c.possible, -i, owner) for owner, c in enumerate(requests) for i, s in enumerate(c.survival)),
        reverse=True,
    )
    # Survival never rises along a chain, so the sorted order has each request's drafts from first to last.
    size, best, best_net, net = sum(c.count for c in requests), 0, 0.0, -tokens_per_second * overhead
    taken = [0] * len(requests)
    base = costs.bases(size, 1 + min(len(drafts), max_drafts))
    longest = max((c.count + len(c.survival) for c in requests if c.survival), default=0)
    attention = [costs.attention(count) for count in range(longest + 1)]
    for index, (gain, _, owner) in enumerate(drafts[:max_drafts], 1):
        request = requests[owner]
        count = request.count + taken[owner]
        taken[owner] += 1
        seconds = base[index] - base[index - 1] + (attention[count + 1] - attention[count]) * request.context
        net += gain - tokens_per_second * seconds * request.possible
        if net > best_net:
            best, best_net = index, net
    for request in requests:
        request.taken = 0
    for _, _, owner in drafts[:best]:
        requests[owner].taken += 1
    return best_net


def net_gain(
    survival: Sequence[float], verifying: Sequence[float], drafting: float, drafted: int, verify_all: bool = False
) -> list[float]:
    """Tokens that the first k drafts of a chain gain over their cost, k = 1, 2, ...

    verifying   cost in tokens of verifying k drafts. The number with the greatest gain is verified; with `verify_all`
                all of them are, as in a chained step, which is planned before the drafts are known
    drafting    cost in tokens of drafting one token
    drafted     tokens that were drafted: low confidence ended the chain, so a longer one would have cost no more
    """
    best = alive = 0.0
    gains = []
    for length, (s, cost) in enumerate(zip(survival, verifying), 1):
        alive += s
        best = alive - cost if verify_all else max(best, alive - cost)
        gains.append(best - drafting * min(length, drafted))
    return gains


class ChainGain:
    """Moving averages of the results of `net_gain`, by length of chain: `by_length`."""

    def __init__(self, first: Sequence[float], samples: float, max_samples: float) -> None:
        """`first`: initial values, weighted as `samples` samples; the average is over about `max_samples`."""
        self.by_length = list(first)
        self._samples, self._max_samples = samples, max_samples

    def add(self, gains: Sequence[float]) -> None:
        self._samples = min(self._samples + 1, self._max_samples)
        for i, gain in enumerate(gains):
            self.by_length[i] += (gain - self.by_length[i]) / self._samples


def best_length(gains: Sequence[Sequence[float]], lost: float) -> int:
    """The length of chain with the greatest total gain (`gains` by request and length); 0 if the gain is at most
    `lost`, the tokens that waiting for chains costs."""
    sums = {length: sum(column) for length, column in enumerate(zip(*gains), 1) if length in CHAIN_TOKENS}
    best = max(sums, key=sums.__getitem__, default=0)
    return best if best and sums[best] > lost else 0
