"""How many drafts are made, and what the engine gets: the policy and the speculator."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from perilune.core.messages import Delta, EngineStats
from perilune.core.sampling import SamplingParams
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, PENDING, Output, StepPlan, Work
from perilune.speculation.acceptance_rates import LEARN_PER_STEP, AcceptanceRates, Draft, of_match, of_model
from perilune.speculation.adaptive import LOOKUP_LIMIT_SHARE, LOOKUP_SECONDS, Adaptive
from perilune.speculation.drafting import Speculator
from perilune.speculation.modes import Batch, Mode
from perilune.speculation.policy import Candidates, ChainGain, best_length, choose, net_gain
from perilune.speculation.step_cost import Costs, Curve
from perilune.speculation.suffix import Match
from tests.cpu.speculation.test_modes import CHAINED, CHEAP, DEAR


def vars_of(costs: Costs) -> tuple[Curve, ...]:
    assert costs.overlapped is not None and costs.chained is not None
    return costs.base, costs.attention, costs.draft_token, costs.overlapped, costs.chained


def matched(token: int, length: int, share: float, single: bool) -> Draft:
    return of_match(Match(token, length, share, single))


# ---- policy


def test_drafts_stop_where_they_cease_to_pay() -> None:
    sure = [Candidates(1, 10, [0.95**i for i in range(1, 9)])]
    assert choose(sure, CHEAP, 8, 1.0) > 2 and sure[0].taken == 8
    assert choose(sure, DEAR, 8, 1.0) == 0.0 and sure[0].taken == 0
    unsure = [Candidates(1, 10, [0.02, 0.0004])]
    assert choose(unsure, CHEAP, 8, 1.0) == 0.0 and unsure[0].taken == 0
    assert choose(sure, CHEAP, 3, 1.0) > 1 and sure[0].taken == 3


def test_where_time_is_dear_less_is_drafted() -> None:
    taken = []
    for price in (0.1, 1.0, 10.0, 20.0, 1000.0):
        request = [Candidates(1, 10, [0.8**i for i in range(1, 9)])]
        choose(request, CHEAP, 8, price)
        taken.append(request[0].taken)
    assert taken == sorted(taken, reverse=True) and taken[0] == 8 and taken[-1] == 0 < taken[2] < 8


def test_the_likeliest_of_all_requests_come_first() -> None:
    one, other = Candidates(1, 10, [0.9, 0.8, 0.7]), Candidates(1, 10, [0.4, 0.1, 0.01])
    choose([one, other], CHEAP, 4, 1.0)
    assert (one.taken, other.taken) == (3, 1)


def test_a_large_batch_drafts_less() -> None:
    costs = Costs(Curve((1, 16, 64), (1.0, 1.5, 6.0)), Curve((1,), (0.0,)))
    taken = {}
    for batch in (1, 4, 16, 64):
        requests = [Candidates(1, 10, [0.6, 0.36, 0.2]) for _ in range(batch)]
        choose(requests, costs, 1000, batch / costs.base(batch))
        taken[batch] = sum(c.taken for c in requests) / batch
    assert taken[1] >= taken[4] > taken[16] >= taken[64] == 0


def test_context_and_overhead_count() -> None:
    costs = Costs(CHEAP.base, Curve((1, 9), (0.0, 0.01)))
    near, far = [Candidates(1, 10, [0.5])], [Candidates(1, 10_000, [0.5])]
    choose(near, costs, 8, 1.0), choose(far, costs, 8, 1.0)
    assert (near[0].taken, far[0].taken) == (1, 0)
    assert choose(near, costs, 8, 1.0, overhead=1.0) == 0.0


def test_a_chain_is_worth_its_right_drafts_less_what_they_cost() -> None:
    free = [0.0, 0.0, 0.0]
    assert net_gain([0.9, 0.8, 0.1], free, 0.0, 3) == pytest.approx([0.9, 1.7, 1.8])
    assert net_gain([0.9, 0.8, 0.1], [0.2, 0.4, 0.6], 0.0, 3) == pytest.approx([0.7, 1.3, 1.3])
    assert net_gain([0.9, 0.8, 0.1], free, 0.5, 3) == pytest.approx([0.4, 0.7, 0.3])
    # One that ended after the second would have cost no more for being asked for a third.
    assert net_gain([0.9, 0.8, 0.0], free, 0.5, 2) == pytest.approx([0.4, 0.7, 0.7])


def test_chains_are_as_long_as_gained_most() -> None:
    assert best_length([[0.4, 0.7, 0.3], [0.1, 0.1, 0.1]], lost=0.5) == 2
    assert best_length([[0.4, 0.7, 0.3], [0.1, 0.1, 0.1]], lost=0.9) == best_length([], lost=0.0) == 0
    gain = ChainGain([1.0, 1.0], 1.0, 10.0)
    gain.add([0.0, 2.0])
    assert gain.by_length == [0.5, 1.5]
    for _ in range(100):
        gain.add([0.25, 0.5])
    assert gain.by_length == pytest.approx([0.25, 0.5], abs=0.01)


def test_what_is_learned() -> None:
    a = AcceptanceRates()

    def good(token: int) -> Draft:
        return matched(token, 9, 1.0, True)

    def bad(token: int) -> Draft:
        return matched(token, 2, 0.3, False)

    rng = random.Random(0)
    for i in range(2000):
        a.learn(i, good(5), rng.random() < 0.9)
        a.learn(i, bad(5), rng.random() < 0.1)
    assert a.probability(-1, good(77)) == pytest.approx(0.9, abs=0.05)
    assert a.probability(-1, bad(77)) == pytest.approx(0.1, abs=0.05)
    for _ in range(200):
        a.learn(1, good(6), False)
    assert a.probability(1, good(77)) < a.probability(-1, good(77))  # this request, besides what all learn
    assert a.probability(-1, good(6)) < a.probability(-1, good(77))  # this token
    a.ended.append(1)
    a.apply()
    assert a.probability(1, good(77)) == a.probability(-1, good(77))
    for _ in range(400):
        a.learn(2, of_model(5, 0, 0.9, None), True)
    first, both = a.typical(-1, 2)
    assert first > 0.95 and both == pytest.approx(first**2)  # never seen: as the one before
    for _ in range(400):
        a.learn(2, of_model(5, 1, 0.5, None), False)
    assert a.typical(-1, 2)[1] < 0.05
    for _ in range(400):
        a.learn(3, of_model(5, 0, 0.5, True), True)
    assert a.probability(-1, of_model(5, 4, 0.5, True)) > 0.9  # the match says the same
    assert a.probability(-1, of_model(5, 4, 0.5, False)) < 0.7


# ---- speculator


def work_of(rid: int, text: Sequence[int], prompt: int, **other: object) -> Work:
    fields = dict(left=50, drafts=0) | other
    return Work(rid, rid, len(text) - 1, (text[-1],), (0,), True, len(text) - prompt, SamplingParams(), 0, **fields)  # type: ignore[arg-type]


def test_fixed_drafts_and_their_statistics() -> None:
    s = Speculator(suffix=True, fixed=3, shared=True)
    s.open(1, [1, 2, 3, 4, 5, 6, 1, 2])
    s.maintain()
    plan = StepPlan(0, (work_of(1, [1, 2, 3, 4, 5, 6, 1, 2], 8),))
    assert s.worth_waiting(plan) and s.propose(plan) == {1: [3, 4, 5]} and s.chain_length(plan) == 0
    s.observe([Delta(1, (3, 4, 9), drafted=3, accepted=2)], [])
    stats = s.report(EngineStats())
    assert stats.verified == 1
    assert stats.drafts == (("suffix", 0, 1, 1), ("suffix", 1, 1, 1), ("suffix", 2, 1, 0))
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 9]
    assert s.propose(StepPlan(1, (work_of(1, text, 8),))) == {}
    with pytest.raises(AssertionError, match="tokens seen"):
        s.propose(StepPlan(1, (work_of(1, [*text, 1], 8),)))
    assert s.propose(StepPlan(1, (Work(1, 1, 11, (PENDING,), (0,), True, 3, SamplingParams(), 0),))) == {}
    s.drop(1), s.drop(1), s.maintain()
    s.open(2, [7, 3, 4])
    s.maintain()
    assert s.propose(StepPlan(2, (work_of(2, [7, 3, 4], 3),))) == {2: [9]}  # what the other one said


def test_room_is_kept_to() -> None:
    s = Speculator(suffix=True, fixed=8, shared=False)
    s.open(1, [1] * 20)
    s.maintain()
    assert s.propose(StepPlan(0, (work_of(1, [1] * 20, 20, left=3),))) == {1: [1, 1]}
    assert s.propose(StepPlan(0, (work_of(1, [1] * 20, 20, left=1),))) == {}


def test_text_without_matches_gets_no_drafts_and_repetition_does() -> None:
    s = Speculator(suffix=True, costs=CHEAP, shared=False)
    rng = random.Random(0)
    text = [rng.randrange(3) for _ in range(50)]
    s.open(1, text)
    s.maintain()
    for turn in range(800):
        came = rng.randrange(3) if turn < 400 else (0, 1, 2, 2)[turn % 4]
        text.append(came)
        s.observe([Delta(1, (came,))], [])
        s.maintain()
        if turn == 399:
            plan = StepPlan(0, (work_of(1, text, 50),))
            assert len(s.propose(plan).get(1, ())) <= 2
    plan = StepPlan(0, (work_of(1, text, 50),))
    assert s.worth_waiting(plan) and len(s.propose(plan)[1]) == MAX_DRAFTS
    dear = Speculator(suffix=True, costs=DEAR, shared=False)
    dear.open(1, text)
    dear.maintain()
    assert not dear.worth_waiting(plan) and dear.propose(plan) == {}


@pytest.mark.parametrize("seconds", [1.0, 1e-4])
def test_where_steps_are_short_matches_wait_until_one_runs(seconds: float) -> None:
    costs = Costs(
        *(Curve(c.xs, tuple(y * seconds for y in c.ys)) for c in (CHEAP.base, CHEAP.attention, CHEAP.draft_token))
    )
    s = Speculator(suffix=True, longest=8, costs=costs, shared=False)
    text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3]
    s.open(1, text)
    s.maintain()
    s.observe([Delta(1, (4,))], [Output(1, (4,), chain=((5, 0.99), (6, 0.99)))])
    text.append(4)
    drafts = list(s.propose(StepPlan(0, (work_of(1, text, 11),)))[1])
    assert drafts[:2] == [5, 6] and (len(drafts) > 2) == (seconds == 1.0)  # what matches behind the chain
    s.maintain()
    s.observe([Delta(1, (5, 6, 7), drafted=2, accepted=2)], [Output(1, (5, 6, 7))])
    text += [5, 6, 7]
    assert s.propose(StepPlan(1, (work_of(1, text, 11),)))[1][0] == 9  # without a chain they are asked at once
    matcher = s._requests.states[1].matcher
    assert matcher is not None and matcher.tokens == text


def test_a_likelier_match_replaces_the_rest_of_a_chain() -> None:
    s = Speculator(suffix=True, longest=8, fixed=4, shared=False)
    s.open(1, [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4])
    s.maintain()
    s.observe([Delta(1, (5,))], [Output(1, (5,), chain=((6, 0.99), (0, 0.1), (0, 0.1)))])
    text = [1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]
    assert s.propose(StepPlan(0, (work_of(1, text, 20),))) == {1: [6, 7, 8, 1]}
    s.observe([Delta(1, (6, 7, 9), drafted=4, accepted=2)], [Output(1, (6, 7, 9))])
    assert [(source, i) for source, i, _, _ in s.report(EngineStats()).drafts] == [
        ("eagle3", 0), ("suffix", 1), ("suffix", 2), ("suffix", 3)
    ]  # fmt: skip


def test_chains_that_never_pay_are_given_up_and_then_the_model_is_left_out() -> None:
    costs = Costs(Curve((1, 2, 64), (1.0, 1.3, 20.0)), Curve((1,), (0.0,)), Curve((1,), (0.2,)))
    s = Speculator(suffix=False, longest=8, costs=costs, shared=False)
    text, asked, waits = [1, 2, 3], [], []
    s.open(1, text)
    for _ in range(3000):
        plan = StepPlan(0, (work_of(1, text, 3),))
        drafts = s.propose(plan)
        asked.append(s.chain_length(plan))
        plan = StepPlan(0, plan.work, asked[-1])
        text.append(1)
        chain = tuple((2, 0.1) for _ in range(asked[-1]))
        s.observe([Delta(1, (1,), drafted=len(drafts))], [Output(1, (1,), chain=chain)])
        waits.append(s.worth_waiting(plan))
        s.record_time(plan, costs.base(1) + max(asked[-1], 0) * 0.2 + 0.1 * waits[-1], waits[-1])
        s.maintain()
    assert sum(waits[500:]) < 0.02 * 2500


def test_how_steps_are_planned_behind_others() -> None:
    def running(chain: int, drafts: int = 0) -> StepPlan:
        work = work_of(1, [1, 2, 3], 3)
        tokens = (PENDING,) * (1 + drafts) if drafts else work.tokens
        return StepPlan(0, (replace(work, tokens=tokens, drafts=drafts, chained=drafts > 0),), chain)

    fixed = Speculator(suffix=False, longest=8, fixed=3, shared=False)
    assert [fixed.chained(running(c)) for c in (0, 2, 3)] == [0, 2, 3] and fixed.chained(running(8)) == 3
    assert Speculator(suffix=True, longest=8, fixed=3, shared=False).chained(running(3)) is None
    s = Speculator(suffix=False, longest=8, costs=CHAINED, shared=False)
    s.open(1, [1, 2, 3])
    assert s.chained(running(5)) == s.chained(running(5, 8)) == 5
    assert s.chained(running(0, 4)) == 0 and s.chained(running(0)) is None and s.chained(running(LEFT_OUT)) is None
    assert isinstance(s._policy, Adaptive)
    s._policy.modes.choice(Batch(1, 3)).mode = Mode.PLAIN
    assert s.chained(running(5, 4)) == 0 and s.chained(running(5)) is None and s.chain_length(running(0)) == LEFT_OUT


def test_the_statistics_of_chained_drafts() -> None:
    s = Speculator(suffix=True, longest=8, costs=CHAINED, shared=False)
    s.open(1, [1, 2, 3, 4, 5, 1, 2])
    s.maintain()
    s.observe([Delta(1, (3,))], [Output(1, (3,), chain=((4, 0.9), (9, 0.5), (9, 0.5)))])
    s.observe([Delta(1, (4, 5), drafted=3, accepted=1)], [Output(1, (4, 5), chain=((1, 0.9), (2, 0.9)))])
    s.observe([Delta(1, (1, 2, 3), drafted=2, accepted=2)], [Output(1, (1, 2, 3))])
    s.maintain()
    assert s.report(EngineStats()).drafts == (("eagle3", 0, 2, 2), ("eagle3", 1, 2, 1), ("eagle3", 2, 1, 0))
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3]
    assert s.propose(StepPlan(1, (work_of(1, text, 7),)))[1][:3] == [4, 5, 1]  # and then one that was
    s.observe([Delta(1, (4, 5), drafted=2, accepted=1)], [Output(1, (4, 5), chain=((1, 0.9),))])
    assert s.report(EngineStats()).drafts[-2:] == (("suffix", 0, 1, 1), ("suffix", 1, 1, 0))


def test_of_many_requests_some_are_learned_from_in_turns() -> None:
    for chained, costs in ((True, CHAINED), (False, CHEAP)):
        s = Speculator(suffix=False, longest=8, costs=costs, shared=False)
        taught = []
        for rid in range(16):
            s.open(rid, [1, 2, 3])
        for _ in range(5):
            s.observe([Delta(r, (7,)) for r in range(16)], [Output(r, (7,), chain=((7, 0.9),)) for r in range(16)])
            taught.append([observation[0] for observation in s._rates.observations])
            s.maintain()
        assert taught[0] == [] and all(len(rids) == (LEARN_PER_STEP if chained else 16) for rids in taught[1:])
        assert sorted({rid for rids in taught for rid in rids}) == list(range(16))


def test_a_match_that_promises_more_than_the_chain_is_waited_for() -> None:
    text = [*range(100, 140), *range(100, 110)]
    work = replace(work_of(1, text, 50), tokens=(PENDING, PENDING), drafts=1, chained=True)
    for promising in (True, False):
        s = Speculator(suffix=True, longest=8, costs=CHAINED, shared=False)
        s.open(1, text[:-1])
        s.maintain()
        assert s.worth_waiting(StepPlan(0, (work,), 2))  # before the draft model turns out to be of no use
        for _ in range(200):
            for length in (10, 16):
                s._rates.learn(2, matched(5, length, 1.0, True), promising)
            s._rates.learn(2, of_model(5, 0, 0.5, None), False)
        s.observe([Delta(1, (109,))], [Output(1, (109,), chain=((110, 0.9),))])
        s.maintain()
        plan = StepPlan(0, (work,), 2)
        assert s.chained(plan) == (None if promising else 2)
        assert s.worth_waiting(plan)


def test_matches_that_would_hold_up_short_steps_are_left_alone() -> None:
    short = Costs(*(Curve(c.xs, tuple(1e-4 * y for y in c.ys)) for c in vars_of(CHAINED)))
    s = Speculator(suffix=True, longest=8, costs=short, shared=True)
    text = [*range(100, 140), *range(100, 110)]
    s.open(1, text)
    s.maintain()
    for token in range(110, 120):
        s.observe([Delta(1, (token,))], [Output(1, (token,), chain=((token + 1, 0.9),))])
        s.maintain()
    state = s._requests.states[1]
    assert state.matcher is not None and state.pending == [*range(110, 120)] and state.matcher.tokens == []
    s.observe([Delta(1, (120,), finish_reason="stop")], [Output(1, (120,))])
    s.maintain()
    assert state.matcher.tokens == [] and s._requests._store is not None and len(s._requests._store) == 0


def test_matches_are_taken_up_where_steps_become_long_enough_for_them() -> None:
    even = Curve(
        (1,), (3 * LOOKUP_SECONDS / LOOKUP_LIMIT_SHARE,)
    )  # three requests' matches are what a step has time for
    s = Speculator(suffix=True, longest=8, costs=replace(CHAINED, base=even, chained=even), shared=True)
    text = [*range(100, 140), *range(100, 110)]
    for rid in range(4):
        s.open(rid, text)
    for token in range(110, 120):
        s.observe([Delta(r, (token,)) for r in range(4)], [Output(r, (token,)) for r in range(4)])
        s.maintain()
    state = s._requests.states[3]
    assert state.matcher is not None and state.matcher.tokens == []
    for rid in range(3):
        s.drop(rid)
    s.observe([Delta(3, (120,))], [Output(3, (120,))])
    s.maintain()
    s.maintain()
    assert state.matcher.tokens == [*text, *range(110, 121)] and state.ready is state.matcher
    s.observe([Delta(3, (121,), finish_reason="stop")], [Output(3, (121,))])
    s.maintain()
    assert s._requests._store is not None and len(s._requests._store) == 1  # of the others, who slept, nothing is known


def test_a_chain_is_continued_by_what_matches_behind_it() -> None:
    s = Speculator(suffix=True, longest=8, fixed=4, shared=False)
    s.open(1, [1, 2, 3, 4, 5, 6, 7, 9])
    s.maintain()
    plan = StepPlan(0, (work_of(1, [1, 2, 3, 4, 5, 6, 7, 9], 8),))
    assert s.chain_length(plan) == 4
    s.observe([Delta(1, (8,))], [Output(1, (8,), chain=((2, 0.9), (3, 0.8)))])
    text = [1, 2, 3, 4, 5, 6, 7, 9, 8]
    assert s.propose(StepPlan(1, (work_of(1, text, 8),))) == {1: [2, 3, 4, 5]}
    s.observe([Delta(1, (2, 3, 4, 8), drafted=4, accepted=3)], [Output(1, (2, 3, 4, 8))])
    assert [(source, i) for source, i, _, _ in s.report(EngineStats()).drafts] == [
        ("eagle3", 0), ("eagle3", 1), ("suffix", 2), ("suffix", 3)
    ]  # fmt: skip


def test_a_model_that_is_never_right_is_asked_now_and_then_and_seized_when_it_is() -> None:
    s = Speculator(suffix=False, longest=8, costs=CHEAP, shared=False)
    text, asked = [1, 2, 3], []
    s.open(1, text)
    for turn in range(4000):
        plan = StepPlan(0, (work_of(1, text, 3),))
        drafts = s.propose(plan)
        asked.append(max(s.chain_length(plan), 0))
        right = turn >= 2000
        came = (1,) * (1 + right * len(drafts.get(1, ())))
        text += came
        chain = tuple((1, 0.99) if right else (2, 0.1) for _ in range(asked[-1]))
        s.observe([Delta(1, came, drafted=len(drafts), accepted=len(came) - 1)], [Output(1, came, chain=chain)])
        s.record_time(StepPlan(0, plan.work, asked[-1]), CHEAP.base(1) + 0.1 * asked[-1], True)
        s.maintain()
    assert asked[0] > 1 and 2 <= sum(a > 0 for a in asked[200:2000]) <= 60
    assert sum(asked[-1000:]) > 7 * 1000
