"""Where drafts come from and how many are made: matches with earlier text, the store, costs and the policy."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perilune.core.messages import Delta, EngineStats
from perilune.core.plan import LEFT_OUT, MAX_DRAFTS, PENDING, Output, StepPlan, Work
from perilune.core.sampling import SamplingParams
from perilune.spec import suffix
from perilune.spec.costs import WAITING, Costs, Curve, How, Pace, measure
from perilune.spec.earnings import ENOUGH, PAUSE, SOON, TRIAL, TURN, Earnings, Way
from perilune.spec.policy import Acceptance, Chance, Worth, best_chain, choose, model_cell, net_worth, suffix_cell
from perilune.spec.speculator import EFFORT, HEEDED, SPARE, Speculator
from perilune.spec.suffix import GRAM, LONGEST, TOKEN_BYTES, Store, Trail

CHEAP = Costs(Curve((1, 2, 64), (1.0, 1.05, 4.0)), Curve((1,), (0.0,)), Curve((1,), (0.1,)))
TRAILING = Costs(
    Curve((1, 2, 64), (1.0, 1.05, 4.0)),
    Curve((1,), (0.0,)),
    Curve((1,), (0.1,)),
    Curve((1,), (0.6,)),
    Curve((1, 2, 64), (0.8, 0.85, 3.0)),
)  # steps are planned behind drafts in flight
DEAR = Costs(Curve((1, 64), (1.0, 64.0)), Curve((1,), (0.0,)), Curve((1,), (1.0,)))  # every token its full price


def vars_of(costs: Costs) -> tuple[Curve, ...]:
    assert costs.ahead is not None and costs.followed is not None
    return costs.base, costs.reach, costs.chain, costs.ahead, costs.followed


def trail(text: Sequence[int], store: Store | None = None) -> Trail:
    made = Trail(text, store)
    made.catch_up(len(text))
    return made


def tokens(made: Trail, most: int, after: Sequence[int] = ()) -> list[int]:
    return [g.token for g in made.guesses(most, after)]


class TestTrail:
    def test_what_followed_last_time_follows_again(self) -> None:
        made = trail([1, 2, 3, 4, 5, 9, 9, 2, 3])
        assert tokens(made, 3) == [4, 5, 9]
        assert tokens(made, 2, after=[4, 5]) == [9, 9] and tokens(made, 2, after=[7]) == []
        assert [g.length for g in made.guesses(3)] == [2, 3, 4]
        made.append(4)
        assert tokens(made, 2) == [5, 9] and made.foretold() == made.guesses(1)[0]
        made.append(8)
        assert tokens(made, 2) == [] and made.foretold() is None

    def test_a_period_goes_on_beyond_the_end_of_the_text(self) -> None:
        assert tokens(trail([7, 1, 2, 3, 1, 2, 3, 1, 2]), 7) == [3, 1, 2, 3, 1, 2, 3]
        assert tokens(trail([5, 5, 5, 5]), 4) == [5, 5, 5, 5]

    def test_the_longer_match_wins_and_shares_are_told(self) -> None:
        made = trail([1, 2, 3, 7, 0, 2, 3, 8, 9, 1, 2, 3])
        (guess,) = made.guesses(1)
        assert guess.token == 7 and guess.length == 3 and 0.5 < guess.share < 1 and not guess.alone
        assert trail([1, 2, 3, 4, 2, 3]).guesses(1)[0].alone

    @pytest.mark.parametrize("seed", range(20))
    def test_against_looking_through_the_whole_text(self, seed: int) -> None:
        """The first guess follows one of the longest matches that the text has, as far as pointers were kept."""
        rng = random.Random(seed)
        made, text = trail([]), []
        for _ in range(150):
            text.append(rng.randrange(4) if rng.random() < 0.7 else text[len(text) // 2] if text else 0)
            made.append(text[-1])
            lengths = {}
            for end in range(GRAM, len(text)):
                n = 0
                while n < min(end, LONGEST) and text[end - 1 - n] == text[len(text) - 1 - n]:
                    n += 1
                if n >= GRAM:
                    lengths[text[end]] = max(lengths.get(text[end], 0), n)
            guess = made.foretold()
            assert (guess is None) == (not lengths)
            if guess is not None:
                assert guess.length <= lengths[guess.token]

    def test_a_prompt_is_taken_in_by_pieces(self) -> None:
        text = [random.Random(0).randrange(9) for _ in range(100)]
        made = Trail(text, None)
        assert [made.catch_up(40), made.behind, made.guesses(3)] == [40, 60, []]
        made.append(3)  # while it is still behind
        made.catch_up(1000)
        assert made.tokens == [*text, 3] and made.guesses(4) == trail([*text, 3]).guesses(4)


class TestStore:
    def test_answers_of_others_are_found_behind_their_context(self) -> None:
        store = Store()
        first = trail([1, 2, 3], store)
        for token in (4, 5, 6, 7):
            first.append(token)
        store.add(first.answer())
        assert tokens(trail([9, 9, 2, 3], store), 5) == [4, 5, 6, 7]

    def test_it_is_bounded_and_forgets_what_was_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = random.Random(3)
        store = Store(50 * 10 * TOKEN_BYTES)  # 50 texts of 10 tokens
        texts = [[rng.randrange(1000) for _ in range(10)] for _ in range(120)]
        for text in texts:
            store.add(text)
            used = trail(texts[0][:3], store)
            assert tokens(used, 3) == texts[0][3:6]
            used.append(texts[0][3])  # right: the text was of use
            assert store.bytes <= 50 * 10 * TOKEN_BYTES and len(store) <= 50
        assert tokens(trail(texts[1][:3], store), 3) == []
        assert tokens(trail(texts[-1][:3], store), 3) == texts[-1][3:6]
        assert len(store._latest) <= 50 * 9
        store.add([0] * 10**6)  # larger than the whole store
        assert len(store) == 50

    def test_places_survive_that_others_are_forgotten(self) -> None:
        """Texts that share their grams, forgotten in random order: no place of a forgotten one is left."""
        rng = random.Random(5)
        store = Store(8 * 12 * TOKEN_BYTES)
        for _ in range(300):
            store.add([rng.randrange(4) for _ in range(12)])
            store.touch(rng.choice(list(store._texts)))
            for place in store._latest.values():
                assert place >> 32 in store._texts
            probe = [rng.randrange(4) for _ in range(GRAM)]
            key = 0
            for token in probe:
                key = key << 21 | token
            for _, text, position in store.places(key):
                assert text[position - GRAM : position] == probe

    def test_skipped_tokens_are_known_all_the_same(self) -> None:
        rng = random.Random(3)
        for begun in (0, 5, 30):
            text, more = ([rng.randrange(3) for _ in range(30)] for _ in "ab")
            one, other = Trail(text, None), Trail(text, None)
            one.catch_up(begun), other.catch_up(begun)
            for token in more:
                one.append(token)
            other.skip(more)
            one.catch_up(60), other.catch_up(60)
            assert one.tokens == other.tokens == text + more and one._latest == other._latest
            assert one.foretold() is None or other.foretold() is not None


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


class TestPolicy:
    def test_drafts_stop_where_they_cease_to_pay(self) -> None:
        sure = [Chance(1, 10, True, [0.95**i for i in range(1, 9)])]
        assert choose(sure, CHEAP, 8, 1.0) > 2 and sure[0].taken == 8
        assert choose(sure, DEAR, 8, 1.0) == 0.0 and sure[0].taken == 0
        unsure = [Chance(1, 10, True, [0.02, 0.0004])]
        assert choose(unsure, CHEAP, 8, 1.0) == 0.0 and unsure[0].taken == 0
        assert choose(sure, CHEAP, 3, 1.0) > 1 and sure[0].taken == 3

    def test_where_time_is_dear_less_is_drafted(self) -> None:
        taken = []
        for price in (0.1, 1.0, 10.0, 20.0, 1000.0):
            chance = [Chance(1, 10, True, [0.8**i for i in range(1, 9)])]
            choose(chance, CHEAP, 8, price)
            taken.append(chance[0].taken)
        assert taken == sorted(taken, reverse=True) and taken[0] == 8 and taken[-1] == 0 < taken[2] < 8

    def test_the_likeliest_of_all_requests_come_first(self) -> None:
        one, other = Chance(1, 10, True, [0.9, 0.8, 0.7]), Chance(1, 10, True, [0.4, 0.1, 0.01])
        choose([one, other], CHEAP, 4, 1.0)
        assert (one.taken, other.taken) == (3, 1)

    def test_a_large_batch_drafts_less(self) -> None:
        costs = Costs(Curve((1, 16, 64), (1.0, 1.5, 6.0)), Curve((1,), (0.0,)))
        taken = {}
        for batch in (1, 4, 16, 64):
            chances = [Chance(1, 10, True, [0.6, 0.36, 0.2]) for _ in range(batch)]
            choose(chances, costs, 1000, batch / costs.base(batch))
            taken[batch] = sum(c.taken for c in chances) / batch
        assert taken[1] >= taken[4] > taken[16] >= taken[64] == 0

    def test_context_and_overhead_count(self) -> None:
        costs = Costs(CHEAP.base, Curve((1, 9), (0.0, 0.01)))
        near, far = [Chance(1, 10, True, [0.5])], [Chance(1, 10_000, True, [0.5])]
        choose(near, costs, 8, 1.0), choose(far, costs, 8, 1.0)
        assert (near[0].taken, far[0].taken) == (1, 0)
        assert choose(near, costs, 8, 1.0, overhead=1.0) == 0.0

    def test_a_chain_is_worth_its_right_drafts_less_what_they_cost(self) -> None:
        free = [0.0, 0.0, 0.0]
        assert net_worth([0.9, 0.8, 0.1], free, 0.0, 3) == pytest.approx([0.9, 1.7, 1.8])
        assert net_worth([0.9, 0.8, 0.1], [0.2, 0.4, 0.6], 0.0, 3) == pytest.approx([0.7, 1.3, 1.3])
        assert net_worth([0.9, 0.8, 0.1], free, 0.5, 3) == pytest.approx([0.4, 0.7, 0.3])
        # One that ended after the second would have cost no more for being asked for a third.
        assert net_worth([0.9, 0.8, 0.0], free, 0.5, 2) == pytest.approx([0.4, 0.7, 0.7])

    def test_chains_are_as_long_as_they_were_worth(self) -> None:
        assert best_chain([[0.4, 0.7, 0.3], [0.1, 0.1, 0.1]], lost=0.5) == 2
        assert best_chain([[0.4, 0.7, 0.3], [0.1, 0.1, 0.1]], lost=0.9) == best_chain([], lost=0.0) == 0
        worth = Worth([1.0, 1.0], 1.0, 10.0)
        worth.saw([0.0, 2.0])
        assert worth.by_length == [0.5, 1.5]
        for _ in range(100):
            worth.saw([0.25, 0.5])
        assert worth.by_length == pytest.approx([0.25, 0.5], abs=0.01)

    def test_what_is_learned(self) -> None:
        a = Acceptance()
        good, bad = suffix_cell(9, 1.0, True), suffix_cell(2, 0.3, False)
        rng = random.Random(0)
        for i in range(2000):
            a.learn(i, good, 5, rng.random() < 0.9)
            a.learn(i, bad, 5, rng.random() < 0.1)
        assert a.probability(-1, good, 77) == pytest.approx(0.9, abs=0.05)
        assert a.probability(-1, bad, 77) == pytest.approx(0.1, abs=0.05)
        for _ in range(200):
            a.learn(1, good, 6, False)
        assert a.probability(1, good, 77) < a.probability(-1, good, 77)  # this request, besides what all learn
        assert a.probability(-1, good, 6) < a.probability(-1, good, 77)  # this token
        a.drop(1)
        for _ in range(400):
            a.learn(2, model_cell("eagle3", 0, 0.9, None), 5, True)
        first, both = a.typical(-1, 2)
        assert first > 0.95 and both == pytest.approx(first**2)  # never seen: as the one before
        for _ in range(400):
            a.learn(2, model_cell("eagle3", 1, 0.5, None), 5, False)
        assert a.typical(-1, 2)[1] < 0.05
        for _ in range(400):
            a.learn(3, model_cell("eagle3", 0, 0.5, True), 5, True)
        assert a.probability(-1, model_cell("eagle3", 4, 0.5, True), 5) > 0.9  # the match says the same
        assert a.probability(-1, model_cell("eagle3", 4, 0.5, False), 5) < 0.7


class TestSpeculator:
    def work(self, rid: int, text: Sequence[int], prompt: int, **other: object) -> Work:
        fields = dict(left=50, drafts=0) | other
        return Work(rid, rid, len(text) - 1, (text[-1],), (0,), True, len(text) - prompt, SamplingParams(), 0, **fields)  # type: ignore[arg-type]

    def test_fixed_drafts_and_their_statistics(self) -> None:
        s = Speculator(suffix=True, fixed=3, shared=True)
        s.open(1, [1, 2, 3, 4, 5, 6, 1, 2])
        s.tidy()
        plan = StepPlan(0, (self.work(1, [1, 2, 3, 4, 5, 6, 1, 2], 8),))
        assert s.wanted(plan) and s.propose(plan) == {1: [3, 4, 5]} and s.chain(plan) == 0
        s.observe([Delta(1, (3, 4, 9), drafted=3, accepted=2)], [])
        stats = s.report(EngineStats())
        assert stats.verified == 1
        assert stats.drafts == (("suffix", 0, 1, 1), ("suffix", 1, 1, 1), ("suffix", 2, 1, 0))
        text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 9]
        assert s.propose(StepPlan(1, (self.work(1, text, 8),))) == {}
        with pytest.raises(AssertionError, match="tokens seen"):
            s.propose(StepPlan(1, (self.work(1, [*text, 1], 8),)))
        assert s.propose(StepPlan(1, (Work(1, 1, 11, (PENDING,), (0,), True, 3, SamplingParams(), 0),))) == {}
        s.drop(1), s.drop(1), s.tidy()
        s.open(2, [7, 3, 4])
        s.tidy()
        assert s.propose(StepPlan(2, (self.work(2, [7, 3, 4], 3),))) == {2: [9]}  # what the other one said

    def test_room_is_kept_to(self) -> None:
        s = Speculator(suffix=True, fixed=8, shared=False)
        s.open(1, [1] * 20)
        s.tidy()
        assert s.propose(StepPlan(0, (self.work(1, [1] * 20, 20, left=3),))) == {1: [1, 1]}
        assert s.propose(StepPlan(0, (self.work(1, [1] * 20, 20, left=1),))) == {}

    def test_hopeless_text_is_left_alone_and_repetition_is_seized(self) -> None:
        s = Speculator(suffix=True, costs=CHEAP, shared=False)
        rng = random.Random(0)
        text = [rng.randrange(3) for _ in range(50)]
        s.open(1, text)
        s.tidy()
        for turn in range(800):
            came = rng.randrange(3) if turn < 400 else (0, 1, 2, 2)[turn % 4]
            text.append(came)
            s.observe([Delta(1, (came,))], [])
            s.tidy()
            if turn == 399:
                plan = StepPlan(0, (self.work(1, text, 50),))
                assert len(s.propose(plan).get(1, ())) <= 2
        plan = StepPlan(0, (self.work(1, text, 50),))
        assert s.wanted(plan) and len(s.propose(plan)[1]) == MAX_DRAFTS
        dear = Speculator(suffix=True, costs=DEAR, shared=False)
        dear.open(1, text)
        dear.tidy()
        assert not dear.wanted(plan) and dear.propose(plan) == {}

    @pytest.mark.parametrize("seconds", [1.0, 1e-4])
    def test_where_steps_are_short_matches_wait_until_one_runs(self, seconds: float) -> None:
        costs = Costs(*(Curve(c.xs, tuple(y * seconds for y in c.ys)) for c in (CHEAP.base, CHEAP.reach, CHEAP.chain)))
        s = Speculator(suffix=True, longest=8, costs=costs, shared=False)
        text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
        s.open(1, text)
        s.tidy()
        s.observe([Delta(1, (4,))], [Output(1, (4,), chain=((5, 0.99), (6, 0.99)))])
        text.append(4)
        guesses = list(s.propose(StepPlan(0, (self.work(1, text, 11),)))[1])
        assert guesses[:2] == [5, 6] and (len(guesses) > 2) == (seconds == 1.0)  # what matches behind the chain
        s.tidy()
        s.observe([Delta(1, (5, 6, 7), drafted=2, accepted=2)], [Output(1, (5, 6, 7))])
        text += [5, 6, 7]
        assert s.propose(StepPlan(1, (self.work(1, text, 11),)))[1][0] == 9  # without a chain they are asked at once
        trail = s._minds[1].trail
        assert trail is not None and trail.tokens == text

    def test_an_unlikely_draft_gives_way_to_what_a_match_foretells(self) -> None:
        s = Speculator(suffix=True, longest=8, fixed=4, shared=False)
        s.open(1, [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])
        s.tidy()
        s.observe([Delta(1, (5,))], [Output(1, (5,), chain=((6, 0.99), (0, 0.1), (0, 0.1)))])
        text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]
        assert s.propose(StepPlan(0, (self.work(1, text, 20),))) == {1: [6, 7, 8, 1]}
        s.observe([Delta(1, (6, 7, 9), drafted=4, accepted=2)], [Output(1, (6, 7, 9))])
        assert [(source, i) for source, i, _, _ in s.report(EngineStats()).drafts] == [
            ("eagle3", 0), ("suffix", 1), ("suffix", 2), ("suffix", 3)
        ]  # fmt: skip

    def test_chains_that_never_pay_are_given_up_and_then_the_model_is_left_out(self) -> None:
        costs = Costs(Curve((1, 2, 64), (1.0, 1.3, 20.0)), Curve((1,), (0.0,)), Curve((1,), (0.2,)))
        s = Speculator(suffix=False, longest=8, costs=costs, shared=False)
        text, asked, waits = [1, 2, 3], [], []
        s.open(1, text)
        for _ in range(3000):
            plan = StepPlan(0, (self.work(1, text, 3),))
            drafts = s.propose(plan)
            asked.append(s.chain(plan))
            plan = StepPlan(0, plan.work, asked[-1])
            text.append(1)
            chain = tuple((2, 0.1) for _ in range(asked[-1]))
            s.observe([Delta(1, (1,), drafted=len(drafts))], [Output(1, (1,), chain=chain)])
            waits.append(s.wanted(plan))
            s.timed(plan, costs.base(1) + max(asked[-1], 0) * 0.2 + 0.1 * waits[-1], waits[-1])
            s.tidy()
        assert sum(waits[500:]) < 0.02 * 2500

    def test_how_steps_are_planned_behind_others(self) -> None:
        def running(chain: int, drafts: int = 0) -> StepPlan:
            work = self.work(1, [1, 2, 3], 3)
            tokens = (PENDING,) * (1 + drafts) if drafts else work.tokens
            return StepPlan(0, (replace(work, tokens=tokens, drafts=drafts, behind=drafts > 0),), chain)

        fixed = Speculator(suffix=False, longest=8, fixed=3, shared=False)
        assert [fixed.behind(running(c)) for c in (0, 2, 3)] == [0, 2, 3] and fixed.behind(running(8)) == 3
        assert Speculator(suffix=True, longest=8, fixed=3, shared=False).behind(running(3)) is None
        s = Speculator(suffix=False, longest=8, costs=TRAILING, shared=False)
        s.open(1, [1, 2, 3])
        assert s.behind(running(5)) == s.behind(running(5, 8)) == 5
        assert s.behind(running(0, 4)) == 0 and s.behind(running(0)) is None and s.behind(running(LEFT_OUT)) is None
        assert s._earnings is not None
        s._earnings._of(1, 3).way = Way.PLAIN
        assert s.behind(running(5, 4)) == 0 and s.behind(running(5)) is None and s.chain(running(0)) == LEFT_OUT

    def test_the_statistics_of_drafts_that_nobody_saw_planned(self) -> None:
        s = Speculator(suffix=True, longest=8, costs=TRAILING, shared=False)
        s.open(1, [1, 2, 3, 4, 5, 1, 2])
        s.tidy()
        s.observe([Delta(1, (3,))], [Output(1, (3,), chain=((4, 0.9), (9, 0.5), (9, 0.5)))])
        s.observe([Delta(1, (4, 5), drafted=3, accepted=1)], [Output(1, (4, 5), chain=((1, 0.9), (2, 0.9)))])
        s.observe([Delta(1, (1, 2, 3), drafted=2, accepted=2)], [Output(1, (1, 2, 3))])
        s.tidy()
        assert s.report(EngineStats()).drafts == (("eagle3", 0, 2, 2), ("eagle3", 1, 2, 1), ("eagle3", 2, 1, 0))
        text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
        assert s.propose(StepPlan(1, (self.work(1, text, 7),)))[1][:3] == [4, 5, 1]  # and then one that was
        s.observe([Delta(1, (4, 5), drafted=2, accepted=1)], [Output(1, (4, 5), chain=((1, 0.9),))])
        assert s.report(EngineStats()).drafts[-2:] == (("suffix", 0, 1, 1), ("suffix", 1, 1, 0))

    def test_of_many_requests_some_are_learned_from_in_turns(self) -> None:
        for trails, costs in ((True, TRAILING), (False, CHEAP)):
            s = Speculator(suffix=False, longest=8, costs=costs, shared=False)
            taught = []
            for rid in range(16):
                s.open(rid, [1, 2, 3])
            for _ in range(5):
                s.observe([Delta(r, (7,)) for r in range(16)], [Output(r, (7,), chain=((7, 0.9),)) for r in range(16)])
                taught.append([lesson[0] for lesson in s._lessons])
                s.tidy()
            assert taught[0] == [] and all(len(rids) == (HEEDED if trails else 16) for rids in taught[1:])
            assert sorted({rid for rids in taught for rid in rids}) == list(range(16))

    def test_a_match_that_promises_more_than_the_chain_is_waited_for(self) -> None:
        text = [*range(100, 140), *range(100, 110)]
        work = replace(self.work(1, text, 50), tokens=(PENDING, PENDING), drafts=1, behind=True)
        for promising in (True, False):
            s = Speculator(suffix=True, longest=8, costs=TRAILING, shared=False)
            s.open(1, text[:-1])
            s.tidy()
            assert s.wanted(StepPlan(0, (work,), 2))  # before the draft model turns out to be of no use
            for _ in range(200):
                for length in (10, 16):
                    s._acceptance.learn(2, suffix_cell(length, 1.0, True), 5, promising)
                s._acceptance.learn(2, model_cell("eagle3", 0, 0.5, None), 5, False)
            s.observe([Delta(1, (109,))], [Output(1, (109,), chain=((110, 0.9),))])
            s.tidy()
            plan = StepPlan(0, (work,), 2)
            assert s.behind(plan) == (None if promising else 2)
            assert s.wanted(plan)

    def test_matches_that_would_hold_up_short_steps_are_left_alone(self) -> None:
        short = Costs(*(Curve(c.xs, tuple(1e-4 * y for y in c.ys)) for c in vars_of(TRAILING)))
        s = Speculator(suffix=True, longest=8, costs=short, shared=True)
        text = [*range(100, 140), *range(100, 110)]
        s.open(1, text)
        s.tidy()
        for token in range(110, 120):
            s.observe([Delta(1, (token,))], [Output(1, (token,), chain=((token + 1, 0.9),))])
            s.tidy()
        mind = s._minds[1]
        assert mind.trail is not None and mind.lag == [*range(110, 120)] and mind.trail.tokens == []
        s.observe([Delta(1, (120,), finish_reason="stop")], [Output(1, (120,))])
        s.tidy()
        assert mind.trail.tokens == [] and s._store is not None and len(s._store) == 0

    def test_matches_are_taken_up_where_steps_become_long_enough_for_them(self) -> None:
        even = Curve((1,), (3 * EFFORT / SPARE,))  # three requests' matches are what a step has time for
        s = Speculator(suffix=True, longest=8, costs=replace(TRAILING, base=even, followed=even), shared=True)
        text = [*range(100, 140), *range(100, 110)]
        for rid in range(4):
            s.open(rid, text)
        for token in range(110, 120):
            s.observe([Delta(r, (token,)) for r in range(4)], [Output(r, (token,)) for r in range(4)])
            s.tidy()
        mind = s._minds[3]
        assert mind.trail is not None and mind.trail.tokens == []
        for rid in range(3):
            s.drop(rid)
        s.observe([Delta(3, (120,))], [Output(3, (120,))])
        s.tidy()
        s.tidy()
        assert mind.trail.tokens == [*text, *range(110, 121)] and mind.ready is mind.trail
        s.observe([Delta(3, (121,), finish_reason="stop")], [Output(3, (121,))])
        s.tidy()
        assert s._store is not None and len(s._store) == 1  # of the others, who slept, nothing is known

    def test_a_chain_is_continued_by_what_matches_behind_it(self) -> None:
        s = Speculator(suffix=True, longest=8, fixed=4, shared=False)
        s.open(1, [1, 2, 3, 4, 5, 6, 7, 9])
        s.tidy()
        plan = StepPlan(0, (self.work(1, [1, 2, 3, 4, 5, 6, 7, 9], 8),))
        assert s.chain(plan) == 4
        s.observe([Delta(1, (8,))], [Output(1, (8,), chain=((2, 0.9), (3, 0.8)))])
        text = [1, 2, 3, 4, 5, 6, 7, 9, 8]
        assert s.propose(StepPlan(1, (self.work(1, text, 8),))) == {1: [2, 3, 4, 5]}
        s.observe([Delta(1, (2, 3, 4, 8), drafted=4, accepted=3)], [Output(1, (2, 3, 4, 8))])
        assert [(source, i) for source, i, _, _ in s.report(EngineStats()).drafts] == [
            ("eagle3", 0), ("eagle3", 1), ("suffix", 2), ("suffix", 3)
        ]  # fmt: skip

    def test_a_model_that_is_never_right_is_asked_now_and_then_and_seized_when_it_is(self) -> None:
        s = Speculator(suffix=False, longest=8, costs=CHEAP, shared=False)
        text, asked = [1, 2, 3], []
        s.open(1, text)
        for turn in range(4000):
            plan = StepPlan(0, (self.work(1, text, 3),))
            drafts = s.propose(plan)
            asked.append(max(s.chain(plan), 0))
            right = turn >= 2000
            came = (1,) * (1 + right * len(drafts.get(1, ())))
            text += came
            chain = tuple((1, 0.99) if right else (2, 0.1) for _ in range(asked[-1]))
            s.observe([Delta(1, came, drafted=len(drafts), accepted=len(came) - 1)], [Output(1, came, chain=chain)])
            s.timed(StepPlan(0, plan.work, asked[-1]), CHEAP.base(1) + 0.1 * asked[-1], True)
            s.tidy()
        assert asked[0] > 1 and 2 <= sum(a > 0 for a in asked[200:2000]) <= 60
        assert sum(asked[-1000:]) > 7 * 1000


def test_the_module_names_its_grams_in_63_bits() -> None:
    assert suffix.GRAM * 21 <= 63
