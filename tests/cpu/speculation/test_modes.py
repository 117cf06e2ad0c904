"""What steps cost, by the clock, and which way of drafting to go."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from perilune.speculation.modes import ENOUGH, PAUSE, SOON, TRIAL, TURN, Earnings, Way
from perilune.speculation.step_cost import WAITING, Costs, Curve, How, Pace, measure

CHEAP = Costs(Curve((1, 2, 64), (1.0, 1.05, 4.0)), Curve((1,), (0.0,)), Curve((1,), (0.1,)))
TRAILING = Costs(
    Curve((1, 2, 64), (1.0, 1.05, 4.0)),
    Curve((1,), (0.0,)),
    Curve((1,), (0.1,)),
    Curve((1,), (0.6,)),
    Curve((1, 2, 64), (0.8, 0.85, 3.0)),
)  # steps are planned behind drafts in flight
DEAR = Costs(Curve((1, 64), (1.0, 64.0)), Curve((1,), (0.0,)), Curve((1,), (1.0,)))  # every token its full price


class TestCosts:
    def test_curve(self) -> None:
        curve = Curve((1, 2, 6), (1.0, 3.0, 5.0))
        assert [curve(x) for x in (0, 1, 1.5, 2, 4, 6, 8)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert Curve((1,), (2.0,))(9) == 2.0

    def test_what_was_timed_comes_out(self) -> None:
        calls = []

        def timer(counts: Sequence[int], context: int, chain: int = 0, ahead: int = 1) -> float:
            calls.append((tuple(counts), context, chain))
            if ahead > 1:
                return 0.5 + 0.01 * len(counts)
            return 1 + 0.1 * sum(counts) + 1e-3 * context * len(counts) + 0.5 * chain * len(counts)

        found = measure(timer, most_requests=8, most_tokens=32, longest=10_000, chains=True)
        assert found.base.xs == (1, 2, 3, 4, 6, 9, 16, 32)
        assert all(len(counts) <= 8 and sum(counts) <= 32 for counts, _, _ in calls)
        assert found.base(2) == pytest.approx(1.2 + 0.032)
        assert found.reach(1) == pytest.approx(1e-3) and found.chain(4) == pytest.approx(0.5 * 4)
        assert found.ahead is not None and found.ahead.xs == (1, 2, 4, 8) and found.ahead(8) == pytest.approx(0.58)
        assert Pace(found).plain(8, 0) == pytest.approx(0.58) and Pace(found).overhead(8) > 1.0
        assert found.followed is None
        assert found.follow.xs == (1, 32) and found.follow(1) == pytest.approx(0.5)  # the draft model's part
        assert found.bare(1) == pytest.approx(found.base(1) - 0.5) and found.bare(32) == pytest.approx(
            found.base(32) - 4
        )
        alone, pace = found.alone(), Pace(found)
        assert alone.base == found.bare and alone.ahead == found.ahead and alone.chain(1) == alone.follow(9) == 0.0
        assert pace.bare.base(1) == pytest.approx(WAITING * found.bare(1)) and pace.bare.overhead(8) < pace.overhead(8)
        calls.clear()
        trailing = measure(timer, most_requests=8, most_tokens=32, longest=10_000, chains=True, trails=True).followed
        assert trailing is not None and trailing.xs == found.base.xs and trailing(32) == pytest.approx(0.58)
        small = measure(timer, most_requests=1, most_tokens=4, longest=40, chains=False)
        assert small.base.xs == (1, 2, 3, 4) and small.reach(1) == 0.0


class TestPace:
    def test_it_begins_with_the_table_and_follows_the_clock(self) -> None:
        pace, rng = Pace(CHEAP), random.Random(0)
        assert pace.plain(1, 10) == 1.0 and pace.base(2) == pytest.approx(1.05 * WAITING)
        assert pace.chain(1) == 0.1 and pace.overhead(1) == pytest.approx(WAITING - 1)
        for _ in range(600):  # twice as slow where planning waits, chains three times
            drafts, chain = rng.randrange(5), rng.randrange(5)
            pace.saw([1 + drafts], [10], chain, How.WAITED, 2 * CHEAP.base(1 + drafts) + chain * 0.3)
            pace.saw([1], [10], 0, How.AHEAD, 1.0)
        assert pace.plain(1, 10) == pytest.approx(1.0, rel=0.1)
        assert pace.base(2) == pytest.approx(2.1, rel=0.1) and pace.chain(1) == pytest.approx(0.3, rel=0.15)
        assert pace.overhead(1) == pytest.approx(1.0, rel=0.15)

    def test_what_came_in_between_counts_little_and_a_slow_machine_slows_all(self) -> None:
        pace = Pace(CHEAP)
        pace.saw([1], [10], 0, How.AHEAD, 1e6)
        assert pace.plain(1, 10) < 1.05
        for _ in range(300):
            pace.saw([1], [10], 0, How.AHEAD, 2.0)
        assert pace.plain(1, 10) == pytest.approx(2.0, rel=0.01)
        assert pace.base(4) > 1.15 * WAITING * CHEAP.base(4)  # though it was not seen

    def test_each_way_of_planning_has_its_own(self) -> None:
        pace, rng = Pace(TRAILING), random.Random(0)
        assert pace.trails and not Pace(CHEAP).trails
        assert pace.drafting(2) == pytest.approx(0.85) and pace.following(1) == pytest.approx(0.2)
        assert Pace(CHEAP).drafting(2) == Pace(CHEAP).base(2) and Pace(CHEAP).following(1) == Pace(CHEAP).overhead(1)
        for _ in range(600):  # steps that are followed take half as long again, plain ones do not
            drafts = rng.randrange(5)
            pace.saw([1 + drafts], [10], 0, How.FOLLOWED, 1.5 * 0.85)
            pace.saw([1], [10], 0, How.AHEAD, 0.6)
        assert pace.plain(1, 10) == pytest.approx(0.6, rel=0.1) and pace.drafting(3) == pytest.approx(1.275, rel=0.1)

    def test_a_larger_step_is_never_cheaper(self) -> None:
        pace = Pace(CHEAP)
        for _ in range(200):
            pace.saw([1], [10], 0, How.WAITED, 5.0)
        assert pace.base(1) <= pace.base(2) <= pace.base(64)


class TestEarnings:
    def steps(self, e: Earnings, count: int, drafted: float, plain: float) -> list[bool]:
        """Seconds of steps of one request; with drafting they bring two tokens."""
        modes = []
        for _ in range(count):
            way = e.way(1, 10)
            modes.append(way == Way.ALL)
            e.earned(1, 10, way, 2 if modes[-1] else 1, drafted if modes[-1] else plain)
        return modes

    def earnings(self) -> Earnings:
        return Earnings(Pace(CHEAP), lambda requests, context: [Way.ALL, Way.PLAIN])

    def test_the_price_is_what_steps_bring(self) -> None:
        e = self.earnings()
        assert e.price(1, 10) == 1.0
        self.steps(e, 100, 1.0, 1.0)
        assert e.price(1, 10) == pytest.approx(2.0, rel=0.02)
        assert e.price(8, 10) == pytest.approx(8 / CHEAP.base(8))  # another size

    def test_where_drafting_loses_it_is_given_up_but_for_trials(self) -> None:
        e = self.earnings()
        modes = self.steps(e, 20_000, 2.2, 1.0)
        assert all(modes[: int(ENOUGH[Way.ALL])]) and sum(modes[int(ENOUGH[Way.ALL]) : PAUSE]) < TURN
        assert 0 < sum(modes[1000:]) < 0.03 * 19_000
        modes = self.steps(e, 6000, 1.0, 1.0)  # a text that is easier
        assert sum(modes[-3000:]) > 0.98 * 3000

    def test_where_it_pays_it_is_hardly_ever_left_out(self) -> None:
        modes = self.steps(self.earnings(), 20_000, 1.2, 1.0)
        assert sum(modes) > 0.99 * len(modes) and TRIAL > TURN

    @pytest.mark.parametrize(
        ("seconds", "best"),
        [({Way.ALL: 2.2, Way.MATCHES: 1.5}, Way.MATCHES), ({Way.ALL: 1.2, Way.MATCHES: 1.5}, Way.ALL),
         ({Way.ALL: 4.0, Way.MATCHES: 2.5}, Way.PLAIN)],
    )  # fmt: skip
    @pytest.mark.parametrize("first", [Way.ALL, Way.MATCHES])
    def test_the_best_way_is_found_and_trials_cost_little(
        self, seconds: dict[Way, float], best: Way, first: Way
    ) -> None:
        """Steps of one request that bring two tokens, or one in a second."""
        e = Earnings(Pace(CHEAP), lambda requests, context: sorted(Way, key=lambda way: way != first))
        steps, spent, tokens = Counter[Way](), 0.0, 0
        for step in range(20_000):
            way = e.way(1, 10)
            took, brought = seconds.get(way, 1.0), 2 if way else 1
            e.earned(1, 10, way, brought, took)
            if step >= 1000:
                steps[way] += 1
                spent, tokens = spent + took, tokens + brought
        assert steps[best] > 0.98 * steps.total() and all(steps[way] for way in Way)
        assert spent < 1.01 * tokens * (seconds[best] / 2 if best else 1.0)

    def test_a_draft_model_is_tried_with_a_prompt_and_what_was_planned_before_does_not_count(self) -> None:
        def begun(left: int) -> Earnings:
            e = self.earnings()
            size = e._of(1, 10)
            size.way, size.left = Way.PLAIN, left
            return e

        for left, way in ((SOON + 1, Way.PLAIN), (SOON, Way.ALL), (0, Way.ALL)):
            e = begun(left)
            e.prompted(1, 10)
            assert e.way(1, 10) == way and e.trying(1, 10) == (way == Way.ALL)
        for _ in range(TRIAL):
            e.earned(1, 10, Way.PLAIN, 1, 1.0)
        assert e.way(1, 10) == Way.ALL and e.price(1, 10) == pytest.approx(1.0)
        e = begun(5)
        for _ in range(5 + SOON - 1):
            e.earned(1, 10, Way.PLAIN, 1, 1.0)
        assert e.way(1, 10) == Way.PLAIN and e.quiet(1, 10) == 0
        e.earned(1, 10, Way.PLAIN, 1, 1.0)
        assert e.way(1, 10) == Way.ALL  # no prompt has come
