"""Every unit belongs to exactly one rank."""

import pytest

from perilune.core.errors import ConfigError
from perilune.dist.slicing import WHOLE, Slicing


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_parts_cover_all_units_once(ranks: int) -> None:
    units = [i for rank in range(ranks) for i in range(64)[Slicing(rank, ranks).part(64)]]
    assert units == list(range(64))


def test_one_rank_holds_all() -> None:
    assert WHOLE.part(7) == slice(0, 7)


def test_uneven_parts_and_missing_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="6 units cannot be split evenly over 4 ranks"):
        Slicing(0, 4).part(6)
    with pytest.raises(ConfigError, match="rank 2 of 2"):
        Slicing(2, 2)
