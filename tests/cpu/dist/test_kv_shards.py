"""Every token of a request is on exactly one rank, where its block table finds it."""

import pytest
import torch

from perilune.core.config import EngineConfig, build
from perilune.core.errors import ConfigError
from perilune.dist.kv_shards import KvShards


@pytest.mark.parametrize(("ranks", "tokens"), [(2, 16), (4, 3), (1, 8)])
def test_each_rank_holds_its_tokens_in_the_order_of_positions(ranks: int, tokens: int) -> None:
    table, positions = torch.tensor([5, 0, 3, 7]), torch.arange(4 * ranks * tokens)
    block = ranks * tokens
    slots = table[positions // block] * block + positions % block
    owners = torch.zeros_like(positions)
    for rank in range(ranks):
        shards = KvShards(rank, ranks, tokens)
        own, context = shards.rows(slots, positions)
        owners += own >= 0
        here = positions[own >= 0]
        local = torch.arange(len(here))  # the rank's rows through the same table, in blocks of `tokens`
        assert torch.equal(own[own >= 0], table[local // tokens] * tokens + local % tokens)
        assert torch.equal(context, (here[:, None] <= positions).sum(0).int())
        assert shards.rows(torch.tensor([-1, -5]), torch.tensor([0, 7]))[0].tolist() == [-1, -1]
    assert (owners == 1).all()


def test_a_number_of_shards_is_one_or_the_ranks() -> None:
    assert build(EngineConfig, {"tp": 4, "kv_shards": 4}).kv_shards == 4
    for wrong in (2, 0, 8):
        with pytest.raises(ConfigError, match=f"kv_shards={wrong} with 4 ranks: .*give 1, 4 or auto"):
            build(EngineConfig, {"tp": 4, "kv_shards": wrong})
    with pytest.raises(ConfigError, match=r"kv_shards=2 with 1 rank: .*leave it out"):
        build(EngineConfig, {"kv_shards": 2})
