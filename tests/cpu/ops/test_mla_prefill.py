"""Which requests of a step share the launches of mla_prefill.cu, and where their keys lie."""

from itertools import accumulate

from perilune.ops.attention.mla_prefill import MAX_REQUESTS, TILE, together


def test_requests_with_queries_share_launches_up_to_some_keys() -> None:
    assert together([0, 200, 200, 330], [200, 9, 700], 10_000) == [[(0, 0, 200, 200, 0), (2, 200, 130, 700, 256)]]
    assert [[r[0] for r in some] for some in together([0, 1, 2, 3, 4], [129, 128, 900, 1], 512)] == [[0, 1], [2], [3]]
    assert together([0, 0], [77], 512) == []


def test_no_launch_has_too_many_requests_or_a_tile_of_two() -> None:
    counts = [1 + 37 * i % 300 for i in range(200)]
    found = together([0, *accumulate(counts)], counts, 1 << 30)
    assert [len(some) for some in found] == [MAX_REQUESTS] * 3 + [200 - 3 * MAX_REQUESTS]
    for some in found:
        ends = [key + length for _, _, _, length, key in some]
        assert all(key % TILE == 0 and key >= end for end, (*_, key) in zip(ends, some[1:]))
