"""When steps of ranks count as lost: rounds of what ranks report, no processes."""

from collections.abc import Iterable
from dataclasses import replace

from perilune.engine.step_times.lateness import Lateness, Seen

NONE = Seen({"rank 1": 4, "rank 2": 4}, 4, 4, 1, False, (7, 7, 7), (9, 9, 9))
RUNS = replace(NONE, sent=5)


def rounds(seen: Iterable[Seen]) -> tuple[int, str | None]:
    """(the round in which the ranks are lost, why)."""
    lateness = Lateness()
    lateness.look(NONE)
    number = 0
    for number, now in enumerate(seen, 1):
        if (why := lateness.look(now)) is not None:
            return number, why
    return number, None


def test_ranks_without_a_step_are_never_late() -> None:
    assert rounds([NONE] * 100) == (100, None)


def test_a_rank_that_rank_0_waits_for_is_named() -> None:
    seen = replace(RUNS, own=5, ended={"rank 1": 5, "rank 2": 4}, begun=(9, 9, 8))
    assert rounds([seen] * 9) == (5, "rank 2 has not ended a step that rank 0 ended 5 s ago")


def test_a_silent_rank_is_not_called_late() -> None:
    """A stopped rank's steps end for no rank. Where a busy machine lets steps stand still before, that would be
    the reason, and not the rank that was stopped."""
    silent = replace(RUNS, begun=(9, 8, 9), silent=True)
    assert rounds([RUNS, RUNS, *[silent] * 9]) == (11, None)
    number, why = rounds([RUNS, RUNS, *[silent] * 4, replace(silent, silent=False)])
    assert number == 7 and (why or "").startswith("rank 1 has not begun an exchange")


def test_a_step_that_none_computes_names_the_rank_that_has_not_begun() -> None:
    assert rounds([RUNS] * 9) == (5, "a step has ended on no rank for 5 s, and no rank computes")
    seen = replace(RUNS, begun=(9, 8, 9))
    assert rounds([seen] * 9) == (
        5,
        "rank 1 has not begun an exchange in which others wait for 5 s, and no rank computes",
    )
    assert (rounds([replace(RUNS, begun=(8, 9, 9))] * 9)[1] or "").startswith("rank 0 of 3 has not begun")


def test_a_step_that_ranks_compute_may_take_as_long_as_its_tokens_need() -> None:
    computing = [replace(RUNS, tokens=500, progress=(n, 7, 7)) for n in range(99)]
    assert rounds(computing) == (40, "a step has not ended on rank 1 for 40 s")
    assert rounds([replace(seen, building=True) for seen in computing]) == (99, None)
    paused = [*computing[:4], *[computing[4]] * 4, *computing[5:20]]  # four rounds without progress
    assert rounds(paused) == (len(paused), None)
