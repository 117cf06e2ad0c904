"""The scheduler, one situation per test (scheduler_rig.py); random histories are in test_scheduler_traces.py."""

import random

import pytest

from perilune.core.errors import RequestError
from perilune.core.messages import FIRST_COME, Order, Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import MAX_DRAFTS, PENDING, StepResult
from perilune.engine.scheduler import Scheduler
from tests.cpu.engine.scheduler_rig import VOCAB, FakeRunner, Rig, alone, first_answer_token, modes, prompt_of


@modes
def test_one_request(overlapped):
    rig = Rig(overlapped=overlapped)
    rig.submit(7, prompt_of(5), seed=99, max_tokens=6, logprobs=0)
    rig.finish()
    rig.expect(7, cached=0)
    works = rig.works(7)
    assert [w.count for w in works] == [5, 1, 1, 1, 1, 1]
    assert [w.output_index for w in works] == [0, 1, 2, 3, 4, 5]
    assert all(w.sample and w.seed == 99 and w.slot == works[0].slot for w in works)
    assert [w.tokens == (PENDING,) for w in works] == [False] + [overlapped] * 5
    stats = rig.scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens, stats.preemptions) == (5, 0, 6, 0)


@modes
def test_max_tokens_1(overlapped):
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt_of(9), max_tokens=1)
    rig.finish()
    rig.expect(1)
    assert len(rig.works(1)) == 1  # never planned beyond what is known in advance


@modes
def test_max_model_len_ends_a_request(overlapped):
    rig = Rig(overlapped=overlapped, max_model_len=12)
    rig.submit(1, prompt_of(11))
    rig.submit(2, prompt_of(3, seed=2))
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert (len(rig.answers[1].tokens), len(rig.answers[2].tokens)) == (1, 9)


@modes
def test_stop_token_on_the_very_first_token(overlapped):
    prompt = prompt_of(8)
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt, max_tokens=9, stop_token_ids=(first_answer_token(prompt),))
    rig.finish()
    rig.expect(1)
    assert rig.answers[1].finish == "stop" and len(rig.answers[1].tokens) == 1
    assert len(rig.works(1)) == 1 + overlapped  # the optimistic step is computed in vain and ignored


@modes
def test_chunked_prompt_lets_the_next_use_the_rest_of_the_budget(overlapped):
    rig = Rig(overlapped=overlapped, max_step_tokens=8)
    rig.submit(1, prompt_of(19), max_tokens=4)
    rig.submit(2, prompt_of(10, seed=2), max_tokens=4)
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert [(w.start, w.count, w.sample) for w in rig.works(1)[:3]] == [(0, 8, False), (8, 8, False), (16, 3, True)]
    assert [(w.rid, w.count) for w in rig.plans[2].work] == [(1, 3), (2, 5)]
    assert [(w.rid, w.count) for w in rig.plans[3].work] == [(1, 1), (2, 5)]


@modes
@pytest.mark.parametrize("length", [4, 8, 16])
def test_prompt_is_a_multiple_of_block_size(overlapped, length):
    rig = Rig(overlapped=overlapped)
    rig.submit(1, prompt_of(length), max_tokens=5)
    rig.finish()
    rig.expect(1)
    assert [len(w.blocks) for w in rig.works(1)[:2]] == [length // 4, length // 4 + 1]


@modes
def test_prompt_fully_cached_recomputes_its_last_block(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(12)
    for rid in (1, 2):
        rig.submit(rid, prompt, max_tokens=3)
        rig.finish()
    rig.expect(1, cached=0)
    rig.expect(2, cached=8)  # at least one token must be computed, or there are no logits
    first = rig.works(2)[0]
    assert (first.start, first.count) == (8, 4)
    assert first.blocks[:2] == rig.works(1)[0].blocks[:2]
    assert rig.scheduler.stats().blocks_cached == 3  # the recomputed block was not kept twice
    assert rig.scheduler.stats().cached_tokens == 8


@modes
def test_two_identical_prompts_at_once(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(13)
    rig.submit(1, prompt, max_tokens=8)
    rig.submit(2, prompt, max_tokens=8)
    rig.finish()
    rig.expect(1, cached=0), rig.expect(2, cached=0)
    one, two = rig.works(1), rig.works(2)
    assert not set(one[0].blocks) & set(two[0].blocks)
    assert one[-1].blocks[:3] == two[-1].blocks[:3]  # the second adopted the blocks of the first


@modes
def test_conversation_finds_its_own_answer_cached(overlapped):
    rig = Rig(overlapped=overlapped)
    prompt = prompt_of(6)
    rig.submit(1, prompt, max_tokens=7)
    rig.finish()
    rig.submit(2, (*prompt, *rig.answers[1].tokens, *prompt_of(3, seed=9)), max_tokens=2)
    rig.finish()
    rig.expect(2, cached=12)


@modes
def test_prefix_cache_off(overlapped):
    rig = Rig(overlapped=overlapped, prefix_cache=False)
    for rid in (1, 2):
        rig.submit(rid, prompt_of(12), max_tokens=3)
        rig.finish()
        rig.expect(rid, cached=0)
    assert rig.scheduler.stats().blocks_cached == 0


@modes
def test_pool_of_the_minimal_size(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=1, max_num_seqs=2)
    rig.submit(1, prompt_of(4), max_tokens=9)  # the last token needs no room
    rig.submit(2, prompt_of(2, seed=2), max_tokens=3)
    rig.submit(3, prompt_of(1, seed=3))  # no limit: ends when the cache is full
    with pytest.raises(RequestError, match="KV cache holds 4: shorten it, or start the engine with more kv_blocks"):
        rig.submit(4, prompt_of(5))
    rig.finish()
    for rid, count in ((1, 1), (2, 3), (3, 4)):
        rig.expect(rid)
        assert len(rig.answers[rid].tokens) == count


@modes
def test_preemption_takes_the_youngest_and_loses_nothing(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24)
    for rid in (1, 2, 3):
        rig.submit(rid, prompt_of(5, seed=rid), max_tokens=14)
    rig.finish()
    for rid in (1, 2, 3):
        rig.expect(rid)
    assert rig.scheduler.stats().preemptions > 0
    assert [w.start for w in rig.works(1)] == [0, *range(5, 18)]  # the oldest was never preempted
    assert sum(w.count > 1 for w in rig.works(2)) > 1  # the second was, and recomputed what it had


def test_request_preempted_with_a_pending_sample_keeps_its_token():
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12)
    # Both fill a block with their third token; the third block can then be had by one of them only.
    rig.submit(1, prompt_of(3, seed=1), max_tokens=8)
    rig.submit(2, prompt_of(3, seed=2), max_tokens=8)
    while not rig.scheduler.stats().preemptions:
        plan = rig.tick()
    assert [w.rid for w in plan.work] == [1]
    assert [w.rid for w in rig.plans[-2].work if w.sample] == [1, 2]  # the victim's sample was in flight
    delivered = len(rig.answers[2].tokens)
    assert delivered == 2  # and was delivered when it arrived
    rig.finish()
    rig.expect(1), rig.expect(2)
    resumed = next(w for w in rig.works(2)[2:] if w.count > 1)
    assert PENDING not in resumed.tokens
    assert resumed.end == 3 + delivered and resumed.output_index == delivered


def rig_that_preempts_2_while_its_second_token_is_on_the_way(**kwargs):
    """Step 1 gives request 2 the last block; step 2 takes it away, because request 1 wants one."""
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12, **kwargs)
    rig.submit(1, prompt_of(3, seed=1), max_tokens=8)
    rig.submit(2, prompt_of(4, seed=2), max_tokens=2)
    for _ in range(3):
        assert rig.scheduler.stats().preemptions == 0
        assert rig.answers[2].finish is None
        rig.tick()
    assert rig.scheduler.stats().preemptions == 1
    return rig


def test_preempted_request_finishes_with_its_pending_sample():
    rig = rig_that_preempts_2_while_its_second_token_is_on_the_way()
    assert rig.answers[2].finish == "length"
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert len(rig.works(2)) == 2


def test_request_that_preempts_itself_does_not_resume_before_its_sample_arrives():
    rig = Rig(overlapped=True, num_blocks=3, max_num_seqs=2, max_model_len=12)
    rig.submit(1, prompt_of(6, seed=1), max_tokens=3)  # never wants a third block: nothing is reserved for it
    rig.submit(2, prompt_of(3, seed=2), max_tokens=6)
    rig.tick(), rig.tick()
    plan = rig.tick()
    assert rig.scheduler.stats().preemptions == 1
    assert [w.rid for w in plan.work] == [1]  # what 2 gave back would do for its known tokens
    rig.finish()
    rig.expect(1), rig.expect(2)


def test_error_of_a_preempted_request():
    rig = rig_that_preempts_2_while_its_second_token_is_on_the_way(errors={2: 1})
    assert (rig.answers[2].finish, len(rig.answers[2].tokens)) == ("error", 1)
    rig.finish()
    rig.expect(1)
    rig.submit(3, rig.prompts[2], max_tokens=2)
    rig.finish()
    rig.expect(3, cached=0)


@modes
def test_cancel_while_in_flight(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    rig.submit(1, prompt_of(6), max_tokens=20)
    rig.submit(2, prompt_of(6, seed=2), max_tokens=4)
    rig.tick()
    rig.tick()
    before = len(rig.answers[1].tokens)
    rig.tick(between=lambda: rig.cancel(1))
    assert rig.scheduler.stats().waiting == 1
    rig.submit(1, prompt_of(7, seed=3), max_tokens=3)  # the id may be used again at once
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert before < 4
    assert rig.works(2)[0].slot == rig.works(1)[0].slot


def test_cancel_unknown_waiting_and_finished():
    rig = Rig(max_num_seqs=1)
    rig.scheduler.cancel(5)
    rig.submit(1, prompt_of(3), max_tokens=2)
    rig.submit(2, prompt_of(3), max_tokens=2)
    rig.tick()
    rig.cancel(2)
    rig.finish()
    rig.cancel(1)
    rig.expect(1)
    assert rig.answers[2].deltas == []


@modes
def test_error_ends_one_request_and_its_blocks_are_not_found_again(overlapped):
    rig = Rig(overlapped=overlapped, errors={2: 6})
    rig.submit(1, prompt_of(6, seed=1), max_tokens=12)
    rig.submit(2, prompt_of(9, seed=2), max_tokens=12)
    rig.finish()
    rig.expect(1)
    answer = rig.answers[2]
    assert (answer.finish, answer.error) == ("error", "logits are not finite")
    assert tuple(answer.tokens) == alone(rig.prompts[2], rig.params[2], 64)[0][:6]
    rig.submit(3, prompt_of(9, seed=2), max_tokens=12)
    rig.submit(4, prompt_of(6, seed=1), max_tokens=12)
    rig.finish()
    rig.expect(3, cached=0), rig.expect(4, cached=4)


@modes
def test_error_leaves_those_who_share_the_blocks_alone(overlapped):
    prompt = prompt_of(16)
    rig = Rig(overlapped=overlapped, errors={1: 4})
    rig.submit(1, prompt, max_tokens=12)
    rig.tick(), rig.tick()
    rig.submit(2, (*prompt, 3), max_tokens=20)
    rig.finish()
    rig.expect(2, cached=16)
    assert rig.answers[1].finish == "error"
    assert rig.scheduler.stats().blocks_cached == 0  # nor is anything found that was computed on top of them
    rig.submit(3, prompt, max_tokens=2)
    rig.finish()
    rig.expect(3, cached=0)


@modes
def test_eviction_lets_cached_blocks_make_room(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=25)
    for rid in range(5):
        rig.submit(rid, prompt_of(13, seed=rid), max_tokens=8)
        rig.finish()
        rig.expect(rid, cached=0)
    assert rig.scheduler.stats().preemptions == 0
    rig.submit(9, prompt_of(13, seed=4), max_tokens=8)
    rig.finish()
    rig.expect(9, cached=12)


@modes
def test_admission_keeps_a_reserve_for_those_running(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24)
    rig.submit(1, prompt_of(11, seed=1), max_tokens=5)
    rig.submit(2, prompt_of(12, seed=2), max_tokens=2)  # three blocks are free, but 1 will soon want one of them
    rig.tick()
    assert (rig.scheduler.stats().running, rig.scheduler.stats().waiting) == (1, 1)
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0


@modes
def test_prompt_logprobs_come_complete_and_in_order(overlapped):
    rig = Rig(overlapped=overlapped, max_step_tokens=8)
    prompt = prompt_of(21)
    rig.submit(1, prompt, max_tokens=3)
    rig.finish()
    rig.submit(2, prompt, max_tokens=1, prompt_logprobs=0)
    rig.submit(3, prompt[:1], max_tokens=2, prompt_logprobs=0)
    rig.finish()
    rig.expect(2, cached=0), rig.expect(3, cached=0)  # every position had to be computed
    assert [(s.token, s.logprob) for s in rig.answers[2].scores] == [(t, -float(p)) for p, t in enumerate(prompt)][1:]
    # Request 3's single token is part of the first step.
    assert [w.prompt_targets for w in rig.works(2)] == [prompt[1:8], prompt[8:15], prompt[15:21]]
    assert rig.answers[3].scores == []
    assert all(w.prompt_targets == () for w in rig.works(1))


@modes
def test_prompt_logprobs_survive_preemption(overlapped):
    rig = Rig(overlapped=overlapped, num_blocks=6, max_model_len=24, max_step_tokens=5)
    for rid in (1, 2, 3):
        rig.submit(rid, prompt_of(7, seed=rid), max_tokens=12, prompt_logprobs=0)
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    for rid in (1, 2, 3):
        rig.expect(rid)
        assert [s.token for s in rig.answers[rid].scores] == list(rig.prompts[rid][1:])


@modes
def test_more_requests_than_budget_all_finish(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=4, max_step_tokens=2, num_blocks=40)
    for rid in range(8):
        rig.submit(rid, prompt_of(3 + rid, seed=rid), max_tokens=5)
    rig.finish()
    for rid in range(8):
        rig.expect(rid)
    ends = [max(p.step for p in rig.plans if any(w.rid == rid for w in p.work)) for rid in range(8)]
    assert ends == sorted(ends)


@pytest.mark.parametrize("chain", [0, 2])
def test_works_that_only_decode_are_of_few_series(chain):
    scheduler = Scheduler(num_blocks=40, block_size=16, max_num_seqs=4, max_step_tokens=64, max_model_len=256)
    for rid in (1, 2):
        scheduler.submit(Submit(rid, prompt_of(10, rid), SamplingParams(temperature=0.0, max_tokens=60)), rid)
    runner, found = FakeRunner(16, 4, chain=lambda rid, draw: [0, 0]), {}
    for rid in (1, 2):
        runner.submit(rid, prompt_of(10, rid))
    plan = scheduler.plan()
    while plan is not None and len(found.get(1, ())) < 30:
        for w in plan.work:
            found.setdefault(w.rid, []).append(w)
        after = scheduler.plan_chained(chain) if chain else scheduler.plan()
        scheduler.commit(runner.run(plan))
        plan = after or scheduler.plan()
    assert {w.series for w in found[1]}.isdisjoint(w.series for w in found[2])
    for works in found.values():
        assert len({w.series for w in works}) < len(works) / 3


def test_block_table_is_copied_only_when_it_grows():
    rig = Rig(num_blocks=600, max_model_len=2_400, max_step_tokens=4_096)
    rig.submit(1, prompt_of(2_001), max_tokens=12)
    rig.finish()
    rig.expect(1)
    tables = [w.blocks for w in rig.works(1)]
    assert len({id(t) for t in tables}) == len({len(t) for t in tables}) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "the prompt is empty"),
        (prompt_of(64), "the prompt has 64 tokens; this model's context of 64 leaves room for at most 63"),
        ((3, -1, 4), "token ids must be between 0 and"),
        ((3, 2**31), "token ids must be between 0 and"),
    ],
)
def test_unservable_prompts_are_refused(prompt, message):
    scheduler = Scheduler(num_blocks=99, block_size=4, max_num_seqs=2, max_step_tokens=8, max_model_len=64)
    with pytest.raises(RequestError, match=message) as error:
        scheduler.submit(Submit(1, prompt, SamplingParams()), 0)
    assert error.value.param == "prompt"
    assert not scheduler.has_work and scheduler.plan() is None


def test_contract_with_the_loop():
    rig = Rig()
    rig.submit(1, prompt_of(6), max_tokens=9)
    with pytest.raises(AssertionError, match="live already"):
        rig.scheduler.submit(Submit(1, (1,), SamplingParams()), 0)
    first = rig.scheduler.plan()
    assert first is not None
    with pytest.raises(AssertionError, match="not the oldest"):
        rig.scheduler.commit(StepResult(first.step + 1, ()))
    rig.scheduler.plan()
    with pytest.raises(AssertionError, match="before planning a third"):
        rig.scheduler.plan()
    with pytest.raises(AssertionError, match="brought no token"):
        rig.scheduler.commit(StepResult(first.step, ()))


@modes
def test_waiting_requests_are_admitted_by_priority_then_deadline_then_arrival(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    orders = [FIRST_COME, Order(5), Order(1), Order(1, 60.0), Order(1, 30.0), FIRST_COME]
    for rid, order in enumerate(orders):
        rig.submit(rid, prompt_of(5, seed=rid), max_tokens=3, order=order)
        if rid == 0:
            rig.tick()  # runs: no later request stops it
    rig.finish()
    assert rig.ended == [0, 5, 4, 3, 2, 1]
    for rid in range(len(orders)):
        rig.expect(rid)


def test_the_last_priority_gives_its_blocks_back_first():
    rig = Rig(num_blocks=6, max_model_len=24)
    rig.submit(1, prompt_of(5, seed=1), max_tokens=14, order=Order(9))
    rig.tick()
    rig.submit(2, prompt_of(5, seed=2), max_tokens=14)
    rig.submit(3, prompt_of(5, seed=3), max_tokens=14)
    rig.finish()
    assert rig.scheduler.stats().preemptions > 0
    assert [w.start for w in rig.works(2)] == [0, *range(5, 18)] and sum(w.count > 1 for w in rig.works(1)) > 1
    for rid in (1, 2, 3):
        rig.expect(rid)


@modes
def test_a_deadline_ends_waiting_and_running_requests(overlapped):
    rig = Rig(overlapped=overlapped, max_num_seqs=1)
    rig.submit(0, prompt_of(5, seed=0), max_tokens=30, order=Order(0, 10.0), now=100.0)
    rig.submit(1, prompt_of(5, seed=1), max_tokens=3, order=Order(0, 5.0), now=101.0)  # admitted first
    rig.submit(2, prompt_of(5, seed=2), max_tokens=3)
    rig.submit(3, prompt_of(5, seed=3), max_tokens=30, order=Order(0, 8.0), now=101.0)
    for _ in range(6):
        rig.tick()
    assert rig.expire(105.9) == [] and rig.expire(109.5) == [3]
    rig.tick()
    assert rig.expire(111.0) == [0]
    rig.finish()
    rig.expect(1)
    rig.expect(2)
    assert rig.expire(1e9) == []


def test_deadlines_of_ended_requests_take_bounded_room():
    rig = Rig(num_blocks=1)
    rig.submit(1000, (1, 2), order=Order(0, 2e6))
    rig.submit(1001, (1, 2))
    for rid in range(1000):
        rig.submit(rid, (1, 2), order=Order(0, 1e6))
        rig.cancel(rid)
    assert len(rig.scheduler._deadlines) < 200
    assert rig.expire(1.9e6) == [] and rig.expire(2e6) == [1000]


class Always(random.Random):
    """Whatever is left to chance is done, with as many drafts as there may be."""

    def random(self):
        return 0.0

    def choice(self, options):
        return options[-1]


def perfect(prompt, draw):
    return list(alone(prompt, SamplingParams(max_tokens=draw + 20), 10_000)[0][draw:])


def wrong(prompt, draw):
    return [(t + 1) % VOCAB for t in perfect(prompt, draw)]


@modes
def test_perfect_drafts_bring_their_number_and_one_more(overlapped):
    rig = Rig(overlapped=overlapped, drafter=perfect, num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(5), max_tokens=31, logprobs=0)
    rig.finish()
    rig.expect(1)
    assert [d.accepted for d in rig.answers[1].deltas] == [0] + [MAX_DRAFTS] * 3 + [2]
    assert [len(d.tokens) for d in rig.answers[1].deltas] == [1] + [MAX_DRAFTS + 1] * 3 + [3]  # up to max_tokens
    assert rig.scheduler.stats().generated_tokens == 31
    # What was accepted is in the cache as if it had been computed one by one: 36 tokens, the last of them not computed.
    rig.drafter = None
    rig.submit(2, (*prompt_of(5), *rig.answers[1].tokens, 1), max_tokens=2)
    rig.finish()
    rig.expect(2, cached=32)


@modes
def test_rejected_drafts_leave_no_trace(overlapped):
    rig = Rig(overlapped=overlapped, drafter=wrong, num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(7), max_tokens=20)
    rig.finish()
    rig.expect(1)
    assert all((d.accepted, len(d.tokens)) == (0, 1) for d in rig.answers[1].deltas)
    assert {d.drafted for d in rig.answers[1].deltas[1:-8]} == {MAX_DRAFTS}
    assert rig.scheduler.stats().blocks_cached == (7 + 20 - 1) // 4


def test_drafts_take_only_what_is_left_over():
    """Of the step's budget and of the pool: nobody is preempted or waits for the sake of a guess."""
    rig = Rig(overlapped=False, drafter=perfect, num_blocks=7, max_step_tokens=6, max_model_len=20)
    rig.submit(1, prompt_of(4), max_tokens=12)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].drafts == 5  # 1 + 5 = 6 tokens
    rig.submit(2, prompt_of(8, seed=2), max_tokens=2)
    rig.tick()
    assert [(w.rid, w.count, w.drafts) for w in rig.plans[-1].work] == [(1, 1, 0), (2, 5, 0)]
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0

    rig = Rig(overlapped=False, drafter=perfect, num_blocks=3, max_model_len=12)
    rig.submit(1, prompt_of(3), max_tokens=4)
    rig.submit(2, prompt_of(2, seed=2), max_tokens=6)
    rig.tick(), rig.tick()
    assert [w.drafts for w in rig.plans[-1].work] == [2, 1]  # the first one's take the last block
    rig.finish()
    rig.expect(1), rig.expect(2)
    assert rig.scheduler.stats().preemptions == 0


def test_a_request_with_drafts_in_flight_waits_for_them():
    rig = Rig(overlapped=True, drafter=perfect)
    rig.submit(1, prompt_of(5), max_tokens=40)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].drafts == MAX_DRAFTS
    assert rig.scheduler.plan() is None


def test_steps_behind_drafts_bring_their_number_and_one_more():
    rig = Rig(drafter=perfect, trails=Always(), num_blocks=40, max_model_len=150)
    rig.submit(1, prompt_of(5), max_tokens=50, logprobs=0)
    rig.finish()
    rig.expect(1)
    # Planned behind each other as long as the answer may go on after all of them; then it sits out until they landed.
    assert [len(d.tokens) for d in rig.answers[1].deltas] == [1] + [MAX_DRAFTS + 1] * 5 + [4]
    assert [w.chained for w in rig.works(1)] == [False] + [True] * 6
    assert rig.scheduler.stats().blocks_cached == (5 + 50 - 1) // 4


def test_nothing_is_planned_behind_where_somebody_waits():
    rig = Rig(drafter=perfect, trails=Always(), max_num_seqs=2, num_blocks=40, max_model_len=100)
    rig.submit(1, prompt_of(5), max_tokens=60)
    rig.tick(), rig.tick()
    assert rig.plans[-1].work[0].chained
    rig.submit(2, prompt_of(6, seed=2), max_tokens=60)
    rig.tick()  # which lands what is in flight, and admits the newcomer
    assert [(w.rid, w.chained) for w in rig.plans[-1].work] == [(1, False), (2, False)]
    rig.submit(3, prompt_of(4, seed=3), max_tokens=4)  # for whom there is no place
    rig.tick()
    assert [(w.rid, w.chained) for w in rig.plans[-1].work] == [(1, True), (2, True)]
    rig.finish()
    for rid in (1, 2, 3):
        rig.expect(rid)


def test_drafts_behind_others_take_only_what_is_left_over():
    rig = Rig(drafter=perfect, trails=Always(), num_blocks=5, max_model_len=20)
    for rid in (1, 2):
        rig.submit(rid, prompt_of(4, seed=rid), max_tokens=12)
    rig.tick(), rig.tick()
    assert [(w.chained, w.drafts) for w in rig.plans[-1].work] == [(True, 0)] * 2  # with 8 each it would take 8 blocks
    assert rig.scheduler.stats().preemptions == 0
    rig.finish()
    rig.expect(1), rig.expect(2)


def test_who_may_have_ended_sits_out_and_comes_back():
    rig = Rig(drafter=wrong, trails=Always(), num_blocks=40, max_model_len=100)
    rig.submit(1, prompt_of(5), max_tokens=60)
    rig.submit(2, prompt_of(6, seed=2), max_tokens=8)
    rig.finish()
    rig.expect(1), rig.expect(2)
    kinds = [[w.chained for w in p.work if w.rid == 2] for p in rig.plans]
    assert [False] in kinds[2:] and [] in kinds[: kinds.index([False], 2)], kinds
    assert all(w.chained for w in rig.works(1)[1:])
