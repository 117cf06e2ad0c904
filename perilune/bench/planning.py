"""CPU time of planning: the scheduler with a runner that computes nothing."""

import time
from typing import Literal

from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Output, StepPlan, StepResult, Work
from perilune.engine import wire
from perilune.engine.scheduler import Scheduler

BLOCK_TOKENS = 64
PROMPT_TOKENS = 1000
WARM_UP_STEPS = 40  # not timed, because the first ones compute prompts
STEPS = 300
DRAFTS = 3
TOKEN_ID = 7
Mode = Literal["plain", "drafts", "chained"]


def planning_us(requests: int, mode: Mode = "plain") -> float:
    """Median CPU time, us, of a step of `requests` decoding requests: its plan, its commit and the frame of its deltas.

    plain    planned while the step before runs
    drafts   with DRAFTS drafts of known text for each request, after the step before was committed
    chained  with DRAFTS drafts of a draft model, planned while the step before runs
    """
    scheduler = Scheduler(
        num_blocks=requests * 64,
        block_size=BLOCK_TOKENS,
        max_num_seqs=requests,
        max_step_tokens=8192,
        max_model_len=4096,
    )
    for rid in range(requests):
        prompt = tuple((rid * 7919 + i) % 1000 for i in range(PROMPT_TOKENS + rid))
        scheduler.submit(Submit(rid, prompt, SamplingParams(max_tokens=3000, stop_token_ids=(0,))), rid)
    drafts = dict.fromkeys(range(requests), (TOKEN_ID,) * DRAFTS)
    running: StepPlan | None = None
    spent: list[int] = []
    for _ in range(WARM_UP_STEPS + STEPS):
        result = None if running is None else _result(running)
        begin = time.thread_time_ns()
        if mode == "drafts" and result is not None:
            wire.encode(scheduler.commit(result))
            result = None
        plan = scheduler.plan_chained(DRAFTS) if mode == "chained" and running is not None else None
        if plan is None:
            if mode == "chained" and result is not None:
                wire.encode(scheduler.commit(result))
                result = None
            plan = scheduler.plan()
        assert plan is not None
        if mode == "drafts":
            plan = scheduler.add_drafts(plan, drafts)
        if result is not None:
            wire.encode(scheduler.commit(result))
        spent.append(time.thread_time_ns() - begin)
        running = plan
    steady = sorted(spent[WARM_UP_STEPS:])
    return steady[len(steady) // 2] / 1e3


def _result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, tuple(_output(w) for w in plan.work))


def _output(work: Work) -> Output:
    """The result of one work: one draft accepted in every other step of a request, else none."""
    right = min(work.drafts, work.start % 2)
    return Output(work.rid, (TOKEN_ID,) * (1 + right) if work.sample else ())
