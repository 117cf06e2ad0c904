"""A batch of chains from rows: the padded grids of their attention, and the weights of drafted tokens in the loss."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.draft.corpus import Row

GROUPS = 4  # groups of a batch's rows, each padded to one grid. Larger: less padding, more launches
LONGEST_UNROLL = 8  # chain steps that training unrolls, at most


@dataclass(frozen=True, slots=True)
class Group:
    """Adjacent rows, padded to grids: b rows, Q chains and K tokens of the longest row.

    Grids are filled by copies to distinct places, so that the backward pass is a copy, too. With an index that repeats
    places, it would have to sort them to sum their gradients.

    chains, tokens  the group's slices of the batch's chains and tokens
    chain_places    [chains of the group] their places in the flat grid [b Q]; token_places of the tokens in [b K]
    hidden          [b, 1, Q, K] true where a chain must not attend
    """

    chains: slice
    tokens: slice
    chain_places: Tensor
    token_places: Tensor
    hidden: Tensor

    def chain_grid(self, x: Tensor) -> Tensor:
        """[M, H, d] -> [b, H, Q, d]."""
        b, _, count, _ = self.hidden.shape
        return _grid(x[self.chains], self.chain_places, b, count)

    def token_grid(self, x: Tensor) -> Tensor:
        """[N, H, d] -> [b, H, K, d]."""
        b, _, _, count = self.hidden.shape
        return _grid(x[self.tokens], self.token_places, b, count)


def _grid(x: Tensor, places: Tensor, b: int, count: int) -> Tensor:
    flat = x.new_zeros(b * count, *x.shape[1:]).index_copy(0, places, x)
    return flat.view(b, count, *x.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Batch:
    """Concatenated rows: N tokens and M chains, each numbered over the whole batch.

    tokens, positions  [N]
    taught             [L] numbers of the answers' tokens, which training teaches
    lesson             [N] each token's index in `taught`; arbitrary for tokens of prompts
    begin              [M] the token at which the chain begins, with its hidden state
    last               [M] the last token of the chain's row
    weight             [M] of a chain in the loss
    totals, counts     [LONGEST_UNROLL] by chain step: sum of weights of the drafted tokens, and their number; over all
                       parts of the batch, divided by the number of parts
    """

    tokens: Tensor
    positions: Tensor
    taught: Tensor
    lesson: Tensor
    begin: Tensor
    last: Tensor
    weight: Tensor
    totals: Tensor
    counts: Tensor
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        own = (self.tokens, self.positions, self.taught, self.lesson, self.begin, self.last, self.weight)
        grids = (t for g in self.groups for t in (g.chain_places, g.token_places, g.hidden))
        return sum(t.nbytes for t in (*own, *grids))

    @classmethod
    def of(
        cls, rows: Sequence[Row], device: torch.device, *, whole: Sequence[Row] | None = None, shares: int = 1
    ) -> "Batch":
        """Every row must have a prompt and an answer of LEAST_ANSWER tokens or more. Sorted rows need less padding.

        whole   all rows of the batch of which `rows` are one of `shares` parts: the mean of the parts' losses is then
                the loss of the whole
        """
        lengths = torch.tensor([len(row.ids) for row in rows])
        given = torch.tensor([row.given for row in rows])
        starts, chains = lengths.cumsum(0) - lengths, lengths - 1 - given  # chains begin from given - 1 to length - 3
        bounds = sorted({len(rows) * g // GROUPS for g in range(GROUPS + 1)})
        groups = tuple(
            _group(lengths[i:j], given[i:j], int(starts[i]), int(chains[:i].sum()), device)
            for i, j in itertools.pairwise(bounds)
        )
        offset = torch.arange(int(chains.sum())) - (chains.cumsum(0) - chains).repeat_interleave(chains)
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        answer = positions >= given.repeat_interleave(lengths)
        totals, counts = _totals(rows if whole is None else whole)
        return cls(
            tokens=torch.tensor([t for row in rows for t in row.ids]).to(device),
            positions=positions.to(device),
            taught=answer.nonzero().squeeze(1).to(device),
            lesson=(answer.cumsum(0) - 1).clamp_min(0).to(device),
            begin=((starts + given - 1).repeat_interleave(chains) + offset).to(device),
            last=(starts + lengths - 1).repeat_interleave(chains).to(device),
            weight=torch.tensor([row.weight for row in rows]).repeat_interleave(chains).to(device),
            totals=(totals / shares).float().to(device),
            counts=(counts / shares).float().to(device),
            groups=groups,
        )


def _totals(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """(totals, counts), [LONGEST_UNROLL] float64 each: by chain step, the sum of the weights of all chains that draft a
    token in it, and how many of these weights are above 0. 1 instead of 0, to divide by: the dividend is then 0."""
    chains = torch.tensor([len(row.ids) - 1 - row.given for row in rows])
    reach = (chains[:, None] - torch.arange(LONGEST_UNROLL)).clamp_min(0).double()
    weights = torch.tensor([row.weight for row in rows], dtype=torch.float64)
    totals, counts = weights @ reach, (weights > 0).double() @ reach
    return totals.where(totals > 0, 1.0), counts.where(counts > 0, 1.0)


def _group(lengths: Tensor, given: Tensor, token: int, chain: int, device: torch.device) -> Group:
    """The Group of rows with these lengths and prompts; `token`, `chain`: the numbers of its first token and chain."""
    chains = lengths - 1 - given
    q, k = torch.arange(int(chains.max())), torch.arange(int(lengths.max()))
    hidden = k > (given[:, None] - 1 + q)[:, :, None]
    return Group(
        chains=slice(chain, chain + int(chains.sum())),
        tokens=slice(token, token + int(lengths.sum())),
        chain_places=(q < chains[:, None]).flatten().nonzero().squeeze(1).to(device),
        token_places=(k < lengths[:, None]).flatten().nonzero().squeeze(1).to(device),
        hidden=hidden[:, None].to(device),
    )
