"""What steps cost, by the clock, and which mode of drafting to go."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from perilune.speculation.live_costs import FIRST_WAITED_RATIO, LiveCosts
from perilune.speculation.modes import (
    DRAFT_TRIAL_STEPS,
    JUDGE_STEPS,
    MIN_INTERVAL_STEPS,
    PLAIN_TRIAL_STEPS,
    PROMPT_WINDOW_STEPS,
    Batch,
    Mode,
    ModeChoice,
    Modes,
)
from perilune.speculation.step_cost import Costs, Curve, StepKind, measure

CHEAP = Costs(Curve((1, 2, 64), (1.0, 1.05, 4.0)), Curve((1,), (0.0,)), Curve((1,), (0.1,)))
CHAINED = Costs(
    Curve((1, 2, 64), (1.0, 1.05, 4.0)),
    Curve((1,), (0.0,)),
    Curve((1,), (0.1,)),
    Curve((1,), (0.6,)),
    Curve((1, 2, 64), (0.8, 0.85, 3.0)),
)  # steps are planned behind drafts in flight
ONE = Batch(1, 10)
DEAR = Costs(Curve((1, 64), (1.0, 64.0)), Curve((1,), (0.0,)), Curve((1,), (1.0,)))  # every token its full price


# ---- costs


def test_curve() -> None:
    curve = Curve((1, 2, 6), (1.0, 3.0, 5.0))
    assert [curve(x) for x in (0, 1, 1.5, 2, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert Curve((1,), (2.0,))(9) == 2.0


def test_what_was_timed_comes_out() -> None:
    calls = []

    def timer(counts: Sequence[int], context: int, chain: int = 0, ahead: int = 1) -> float:
        calls.append((tuple(counts), context, chain))
        if ahead > 1:
            return 0.5 + 0.01 * len(counts)
        return 1 + 0.1 * sum(counts) + 1e-3 * context * len(counts) + 0.5 * chain * len(counts)

    found = measure(timer, max_requests=8, max_tokens=32, max_context=10_000, drafter=True)
    assert found.base.xs == (1, 2, 3, 4, 6, 9, 16, 32)
    assert all(len(counts) <= 8 and sum(counts) <= 32 for counts, _, _ in calls)
    assert found.base(2) == pytest.approx(1.2 + 0.032)
    assert found.attention(1) == pytest.approx(1e-3) and found.draft_token(4) == pytest.approx(0.5 * 4)
    assert (
        found.overlapped is not None
        and found.overlapped.xs == (1, 2, 4, 8)
        and found.overlapped(8) == pytest.approx(0.58)
    )
    assert LiveCosts(found).plain(8, 0) == pytest.approx(0.58) and LiveCosts(found).waited.overhead(8) > 1.0
    assert found.chained is None
    assert found.drafter.xs == (1, 32) and found.drafter(1) == pytest.approx(0.5)  # the draft model's part
    assert found.base_without_drafter(1) == pytest.approx(found.base(1) - 0.5) and found.base_without_drafter(
        32
    ) == pytest.approx(found.base(32) - 4)
    alone, costs = found.without_drafter(), LiveCosts(found)
    assert (
        alone.base == found.base_without_drafter
        and alone.overlapped == found.overlapped
        and alone.draft_token(1) == alone.drafter(9) == 0.0
    )
    assert costs.waited_without_drafter.base(1) == pytest.approx(
        FIRST_WAITED_RATIO * found.base_without_drafter(1)
    ) and costs.waited_without_drafter.overhead(8) < costs.waited.overhead(8)
    calls.clear()
    chained = measure(timer, max_requests=8, max_tokens=32, max_context=10_000, drafter=True, can_chain=True).chained
    assert chained is not None and chained.xs == found.base.xs and chained(32) == pytest.approx(0.58)
    small = measure(timer, max_requests=1, max_tokens=4, max_context=40, drafter=False)
    assert small.base.xs == (1, 2, 3, 4) and small.attention(1) == 0.0


# ---- live costs


def test_it_begins_with_the_table_and_follows_the_clock() -> None:
    costs, rng = LiveCosts(CHEAP), random.Random(0)
    assert costs.plain(1, 10) == 1.0 and costs.waited.base(2) == pytest.approx(1.05 * FIRST_WAITED_RATIO)
    assert costs.draft_token(1) == 0.1 and costs.waited.overhead(1) == pytest.approx(FIRST_WAITED_RATIO - 1)
    for _ in range(600):  # twice as slow where planning waits, chains three times
        drafts, chain = rng.randrange(5), rng.randrange(5)
        costs.record([1 + drafts], [10], chain, StepKind.WAITED, 2 * CHEAP.base(1 + drafts) + chain * 0.3)
        costs.record([1], [10], 0, StepKind.OVERLAPPED, 1.0)
    assert costs.plain(1, 10) == pytest.approx(1.0, rel=0.1)
    assert costs.waited.base(2) == pytest.approx(2.1, rel=0.1) and costs.draft_token(1) == pytest.approx(0.3, rel=0.15)
    assert costs.waited.overhead(1) == pytest.approx(1.0, rel=0.15)


def test_what_came_in_between_counts_little_and_a_slow_machine_slows_all() -> None:
    costs = LiveCosts(CHEAP)
    costs.record([1], [10], 0, StepKind.OVERLAPPED, 1e6)
    assert costs.plain(1, 10) < 1.05
    for _ in range(300):
        costs.record([1], [10], 0, StepKind.OVERLAPPED, 2.0)
    assert costs.plain(1, 10) == pytest.approx(2.0, rel=0.01)
    assert costs.waited.base(4) > 1.15 * FIRST_WAITED_RATIO * CHEAP.base(4)  # though it was not seen


def test_each_mode_of_planning_has_its_own() -> None:
    costs, rng = LiveCosts(CHAINED), random.Random(0)
    assert costs.can_chain and not LiveCosts(CHEAP).can_chain
    assert costs.verifying.base(2) == pytest.approx(0.85) and costs.verifying.overhead(1) == pytest.approx(0.2)
    assert LiveCosts(CHEAP).verifying.base(2) == LiveCosts(CHEAP).waited.base(2) and not LiveCosts(CHEAP).can_chain
    for _ in range(600):  # steps that are followed take half as long again, plain ones do not
        drafts = rng.randrange(5)
        costs.record([1 + drafts], [10], 0, StepKind.CHAINED, 1.5 * 0.85)
        costs.record([1], [10], 0, StepKind.OVERLAPPED, 0.6)
    assert costs.plain(1, 10) == pytest.approx(0.6, rel=0.1) and costs.verifying.base(3) == pytest.approx(
        1.275, rel=0.1
    )


def test_a_larger_step_is_never_cheaper() -> None:
    costs = LiveCosts(CHEAP)
    for _ in range(200):
        costs.record([1], [10], 0, StepKind.WAITED, 5.0)
    assert costs.waited.base(1) <= costs.waited.base(2) <= costs.waited.base(64)


# ---- modes


def steps(e: ModeChoice, count: int, drafted: float, plain: float) -> list[bool]:
    """Seconds of steps of one request; with drafting they bring two tokens."""
    modes = []
    for _ in range(count):
        mode = e.current
        modes.append(mode == Mode.ALL)
        e.record_step(ONE, mode, 2 if modes[-1] else 1, drafted if modes[-1] else plain)
    return modes


def choice() -> ModeChoice:
    return ModeChoice(LiveCosts(CHEAP), lambda batch: [Mode.ALL, Mode.PLAIN], ONE)


def test_the_price_is_what_steps_bring() -> None:
    modes = Modes(LiveCosts(CHEAP), lambda batch: [Mode.ALL, Mode.PLAIN])
    e, eight = modes.choice(ONE), Batch(8, 10)
    assert e.tokens_per_second(ONE) == 1.0
    steps(e, 100, 1.0, 1.0)
    assert e.tokens_per_second(ONE) == pytest.approx(2.0, rel=0.02)
    assert modes.choice(eight).tokens_per_second(eight) == pytest.approx(8 / CHEAP.base(8))  # another size


def test_where_drafting_loses_it_is_given_up_but_for_trials() -> None:
    e = choice()
    modes = steps(e, 20_000, 2.2, 1.0)
    assert (
        all(modes[: int(JUDGE_STEPS[Mode.ALL])])
        and sum(modes[int(JUDGE_STEPS[Mode.ALL]) : MIN_INTERVAL_STEPS]) < PLAIN_TRIAL_STEPS
    )
    assert 0 < sum(modes[1000:]) < 0.03 * 19_000
    modes = steps(e, 6000, 1.0, 1.0)  # a text that is easier
    assert sum(modes[-3000:]) > 0.98 * 3000


def test_where_it_pays_it_is_hardly_ever_left_out() -> None:
    modes = steps(choice(), 20_000, 1.2, 1.0)
    assert sum(modes) > 0.99 * len(modes) and DRAFT_TRIAL_STEPS > PLAIN_TRIAL_STEPS


@pytest.mark.parametrize(
    ("seconds", "best"),
    [({Mode.ALL: 2.2, Mode.MATCHES: 1.5}, Mode.MATCHES), ({Mode.ALL: 1.2, Mode.MATCHES: 1.5}, Mode.ALL),
     ({Mode.ALL: 4.0, Mode.MATCHES: 2.5}, Mode.PLAIN)],
)  # fmt: skip
@pytest.mark.parametrize("first", [Mode.ALL, Mode.MATCHES])
def test_the_best_mode_is_found_and_trials_cost_little(seconds: dict[Mode, float], best: Mode, first: Mode) -> None:
    """Steps of one request that bring two tokens, or one in a second."""
    e = ModeChoice(LiveCosts(CHEAP), lambda batch: sorted(Mode, key=lambda mode: mode != first), ONE)
    steps, spent, tokens = Counter[Mode](), 0.0, 0
    for step in range(20_000):
        mode = e.current
        took, brought = seconds.get(mode, 1.0), 2 if mode else 1
        e.record_step(ONE, mode, brought, took)
        if step >= 1000:
            steps[mode] += 1
            spent, tokens = spent + took, tokens + brought
    assert steps[best] > 0.98 * steps.total() and all(steps[mode] for mode in Mode)
    assert spent < 1.01 * tokens * (seconds[best] / 2 if best else 1.0)


def test_a_draft_model_is_tried_with_a_prompt_and_what_was_planned_before_does_not_count() -> None:
    def begun(left: int) -> ModeChoice:
        e = choice()
        e.mode, e.steps_left = Mode.PLAIN, left
        return e

    for left, mode in ((PROMPT_WINDOW_STEPS + 1, Mode.PLAIN), (PROMPT_WINDOW_STEPS, Mode.ALL), (0, Mode.ALL)):
        e = begun(left)
        e.prompt_started(ONE)
        assert e.current == mode and (e.trial is not None) == (mode == Mode.ALL)
    for _ in range(DRAFT_TRIAL_STEPS):
        e.record_step(ONE, Mode.PLAIN, 1, 1.0)
    assert e.current == Mode.ALL and e.tokens_per_second(ONE) == pytest.approx(1.0)
    e = begun(5)
    for _ in range(5 + PROMPT_WINDOW_STEPS - 1):
        e.record_step(ONE, Mode.PLAIN, 1, 1.0)
    assert e.current == Mode.PLAIN and e.plain_steps_left == 0
    e.record_step(ONE, Mode.PLAIN, 1, 1.0)
    assert e.current == Mode.ALL  # no prompt has come
