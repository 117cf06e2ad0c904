"""What host memory keeps, against LRU and against what could be kept, on the index that serves."""

from typing import Any

import pytest

from perilune.bench.traces import Session
from perilune.kv import retention
from perilune.kv.retention import KINDS, MAX_COUNT, MIN_CHANCE, REMEMBERED, TRUSTED_DROPS, Retention
from runs.kv_retention import Visit, ideal, lru, mixed, rows_of, tool_agents


def rows(sessions: list[Session], *shares: float, disk: float = 0.0) -> list[dict[str, Any]]:
    return list(rows_of("", sessions, shares, disk=disk))


def test_agents_keep_more_than_lru_does() -> None:
    """Blocks that pages have too give their rows to others."""
    for row in rows(mixed(8, 0, 1), 0.1, 0.3):
        assert row["lru"] + 0.02 < row["kept"] <= row["ideal"] <= row["possible"] > 0.9, row


def test_sessions_that_come_back_outlive_single_questions() -> None:
    (row,) = rows(mixed(8, 240, 1), 0.1)
    assert 1.03 * row["lru"] < row["kept"] <= row["ideal"], row
    assert rows(mixed(3, 30, 1), 0.1) == rows(mixed(3, 30, 1), 0.1)


def test_tool_agents_lose_nothing() -> None:
    for row in rows(tool_agents(600, 3), 0.1, 0.25):
        assert row["ideal"] >= row["kept"] >= 0.98 * row["lru"] and 0.45 < row["possible"] < 0.75, row


def visit(start: float, end: float, blocks: str) -> Visit:
    return Visit(start, end, tuple(block.encode() for block in blocks), len(blocks))


def test_the_ideal_drops_what_is_asked_for_last() -> None:
    """Worked out by hand: room for two blocks beside those of a running request."""
    three = [visit(at, at + 1, blocks) for at, blocks in enumerate(("a", "b", "c", "a", "b", "c", "a", "b"))]
    assert ideal(three, 3) == 5 / 8 and ideal(three, 2) == 4 / 8 and ideal(three, 0) == 0.0
    assert lru(three, 0, 3) == 5 / 8 and lru(three, 0, 1) == lru(three, 1, 0) == 0.0
    chains = [visit(0, 1, "abc"), visit(2, 3, "xy"), visit(4, 5, "ab"), visit(6, 7, "xy")]
    assert ideal(chains, 3) == 3 / 9, "a prefix stays before what follows it"


def test_what_runs_is_in_pages_without_room_of_its_own() -> None:
    both = [visit(0, 5, "ab"), visit(1, 2, "ac"), visit(6, 7, "ab")]
    assert ideal(both, 0) == lru(both, 0, 0) == 1 / 6 and ideal(both, 2) == 3 / 6


def test_counts_are_learned_and_bounded() -> None:
    retention = Retention()
    assert len({retention.chance(kind) for kind in range(KINDS)}) == 1
    for number in range(REMEMBERED + 9):
        retention.dropped(number.to_bytes(16, "big"), 0)
        retention.returned(1)
    assert retention.chance(0) == MIN_CHANCE and retention.chance(1) > 0.99
    assert max(retention._gone[0], retention._back[1]) <= MAX_COUNT and len(retention._dropped) == REMEMBERED
    before = retention.chance(0)
    for number in range(REMEMBERED - 3000, REMEMBERED):
        retention.stored(number.to_bytes(16, "big"))  # dropped too soon
    assert retention.chance(0) > before


def test_kinds_that_never_come_back_late_are_not_written() -> None:
    kept = Retention()
    for number in range(TRUSTED_DROPS - 1):
        kept.dropped(number.to_bytes(16, "big"), 0)
    assert kept.worth_writing(0), "too few to say"
    for number in range(TRUSTED_DROPS - 1, 2 * MAX_COUNT):
        kept.dropped(number.to_bytes(16, "big"), 0)
    assert not kept.worth_writing(0) and kept.worth_writing(1)
    for number in range(2 * MAX_COUNT - 2000, 2 * MAX_COUNT):
        kept.stored(number.to_bytes(16, "big"))  # an eighth or more of those that count
    assert kept.worth_writing(0)


def test_single_questions_are_written_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "TRUSTED_DROPS", 1 << 8)
    (chosen,) = rows(mixed(4, 240, 1), 0.05, disk=4.0)
    monkeypatch.setattr(retention, "MIN_LATE_CHANCE", 0.0)
    (everything,) = rows(mixed(4, 240, 1), 0.05, disk=4.0)
    assert chosen["writes"] < 0.8 * everything["writes"], (chosen, everything)
    assert chosen["kept"] > 0.99 * everything["kept"] and chosen["from_disk"] > 0
