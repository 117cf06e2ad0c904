"""The learned score against LRU, on the index that serves."""

from perilune.kv.retention import KINDS, MAX_COUNT, MIN_CHANCE, Retention
from runs.kv_retention import mixed, rows_of, tool_agents


def test_where_all_come_back_alike_it_is_lru() -> None:
    for row in rows_of("agents", mixed(8, 0, 1), (200,)):
        assert row["learned"] >= 0.98 * row["lru"] and row["ideal"] > 0.9


def test_sessions_that_come_back_outlive_single_questions() -> None:
    for row in rows_of("mixed", mixed(8, 240, 1), (400,)):
        assert row["learned"] > 1.03 * row["lru"], row
    assert rows_of("mixed", mixed(3, 30, 1), (100,)) == rows_of("mixed", mixed(3, 30, 1), (100,))


def test_tool_agents_lose_nothing() -> None:
    for row in rows_of("tool agents", tool_agents(600, 3), (300, 900)):
        assert row["learned"] >= 0.98 * row["lru"] and 0.45 < row["ideal"] < 0.75, row


def test_counts_are_learned_and_bounded() -> None:
    retention = Retention()
    assert len({retention.chance(kind) for kind in range(KINDS)}) == 1
    for number in range(2 * MAX_COUNT):
        retention.dropped(number.to_bytes(16, "big"), 0)
        retention.returned(1)
    assert retention.chance(0) == MIN_CHANCE and retention.chance(1) > 0.99
    assert max(retention._gone[0], retention._back[1]) <= MAX_COUNT and len(retention._dropped) <= 1 << 16
    before = retention.chance(0)
    for number in range(2 * MAX_COUNT - 3000, 2 * MAX_COUNT):
        retention.stored(number.to_bytes(16, "big"))  # dropped too soon
    assert retention.chance(0) > before
