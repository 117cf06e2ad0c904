"""Two ranks on GPUs: answers of one within bfloat16's tolerance, CUDA graphs that pass their test, no memory left."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.errors import EngineError
from perilune.engine.llm import Completion
from perilune.model import kimi_k2

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
CONFIG: dict[str, Any] = dict(device="cuda", max_model_len=1024, max_num_seqs=2, kv_blocks=48, seed=1)
NO_PEERS = {"exchange_add_rmsnorm": "gathered"}
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {  # and how partial outputs are added
    "two GPUs": (dict(tp=2), "peer"),
    "two GPUs, whole experts": (dict(tp=2, ep=2), "peer"),
    "two GPUs, no peer memory": (dict(tp=2, ops=NO_PEERS), "nccl"),
    "one GPU": (dict(tp=2, gpus="0,0"), "gloo"),
}
LONG_PROMPT = "The quick brown fox jumps over the lazy dog, and then it runs home. " * 30
PROMPTS = ["What is 347 + 589?", "Once upon a time", "def f(x):\n", LONG_PROMPT]
TOKENS = 24
# Limits from 40 prompts on the CPU, one rank against two with sharded KV, both in bfloat16, caches of one type:
# - Where their greedy tokens first differ, one rank's log-probabilities of the two differ by at most 1.18 nats (45
#   places, 6 above 0.25). Without the newest cache row of one rank: 8.7 on the long prompt here.
# - Of 24 tokens the log-probabilities differ by at most 0.10 on average (80 times); on the long prompt by 0.02, with
#   natural for binary log-sum-exps by 0.16.
MAX_NATS = 1.5  # between tokens of which two engines prefer different ones
MEAN_NATS = 0.13  # of an answer's tokens
SCORE_NATS = 0.25  # mean of a text's tokens
LEAST_TOKENS = 12  # that have a mean

GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
SCORED = replace(GREEDY, logprobs=5)
Answers = tuple[list[Completion], list[int], list[float]]


def of_one(**more: Any) -> Answers:
    """(greedy answers, a text, its scores) of one GPU. The engine is closed: beside another one on its GPU, ranks would
    not exchange over peer memory."""
    with LLM("kimi-nano", **CONFIG, draft="off", **more) as llm:
        answers = llm.generate(PROMPTS, SCORED)
        text = [*answers[0].token_ids, *answers[1].token_ids]
        return answers, text, llm.score(text)


@pytest.fixture(scope="module")
def one() -> Answers:
    return of_one()


@pytest.fixture(scope="module", params=LAYOUTS)
def two(request: pytest.FixtureRequest) -> Iterator[LLM]:
    config, exchange = LAYOUTS[request.param]
    if GPUS < 2 and "gpus" not in config:
        pytest.skip(f"{request.param}: needs two GPUs, and there is {GPUS}")
    with LLM("kimi-nano", **CONFIG, draft="hybrid", draft_tokens=2, **config) as llm:
        assert llm.info.tp == 2 and ("exchange", exchange) in [made[:2] for made in llm.info.choices]
        yield llm


# Runs before the tests of `two`: its last engine is closed at the end of this file, and ranks do not use peer memory
# while another engine of their process holds the GPU.
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_step_that_waits_for_it_and_leaves_no_memory(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "perilune.engine")
    before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]
    llm = LLM("kimi-nano", **CONFIG, draft="off", tp=2)
    assert llm.info.tp == 2 and ("exchange", "peer") in [made[:2] for made in llm.info.choices]
    assert llm._engine is not None and llm._engine._ranks is not None
    assert "self-test of" in caplog.text
    (rank,) = llm._engine._ranks._ranks
    at: list[float] = []

    def harm() -> None:
        at.append(time.monotonic())
        os.kill(rank.process.pid, number)

    thread = threading.Timer(1.0, harm)
    thread.start()
    with pytest.raises(EngineError, match="rank 1 of 2"):
        llm.generate(["a"] * 400, SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    seconds = time.monotonic() - at[0]
    begin = time.monotonic()
    llm.close()
    print(f"error {seconds:.2f} s after the signal; closed in {time.monotonic() - begin:.2f} s")
    assert seconds < 10 and time.monotonic() - begin < 10
    assert rank.process.poll() is not None
    torch.cuda.empty_cache()
    # Of GPU 0 this process keeps kernels and NCCL's code; of GPU 1 nothing.
    assert torch.cuda.mem_get_info(1)[0] > before[1] - (64 << 20)
    assert torch.cuda.mem_get_info(0)[0] > before[0] - (1 << 30)


@pytest.mark.parametrize("draft", ["off", "eagle3"])
def test_greedy_answers_and_scores_are_those_of_one_gpu(one: Any, two: LLM, draft: str) -> None:
    assert two._engine is not None
    two._engine.use_drafts(draft, 2, shared=True)
    compare(one, two)


def compare(one: Answers, two: LLM) -> None:
    """Answers of `two` are those of `one` up to bfloat16's rounding."""
    expected, text, scores = one
    for way in (GREEDY, SCORED):
        same = 0
        for a, b in zip(two.generate(PROMPTS, way), expected, strict=True):
            first = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), TOKENS)
            same += first
            if first < TOKENS:  # both were about as likely: bfloat16 sums in another order
                likely = dict(b.logprobs[first].top)
                assert likely[b.token_ids[first]] - likely.get(a.token_ids[first], -9.0) < MAX_NATS, (first, likely)
            apart = [abs(x.logprob - y.logprob) for x, y in zip(a.logprobs[:first], b.logprobs[:first])]
            if len(apart) >= LEAST_TOKENS:
                print(f"{sum(apart) / len(apart):.3f} nats on average of {len(apart)} tokens")
                assert sum(apart) / len(apart) < MEAN_NATS, apart
        print(f"{same} of {TOKENS * len(PROMPTS)} tokens before the first that differs")
        assert same >= TOKENS
    pairs = list(zip(two.score(text), scores, strict=True))
    assert sum(abs(a - b) for a, b in pairs) / len(pairs) < SCORE_NATS


def test_every_kind_of_request_is_answered_through_graphs(two: LLM) -> None:
    ways = [
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=48),
        SamplingParams(temperature=1.0, top_k=20, seed=1, max_tokens=48),
        SamplingParams(temperature=0.9, top_p=0.9, seed=2, max_tokens=48),
        SamplingParams(temperature=1.0, seed=3, presence_penalty=0.5, max_tokens=48),
    ]
    first, again = two.generate(PROMPTS, ways), two.generate(PROMPTS, ways)
    assert all(c.finish_reason in ("stop", "length") for c in (*first, *again))
    assert two._engine is not None
    graphs = two._engine.runner.graphs
    if graphs is not None:  # ranks that share a GPU have none
        assert graphs.broken is None and len(graphs) > 3
        assert {key.whole for key in graphs._graphs} == {True, False}


def test_the_progress_of_a_long_step_is_seen(two: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert two._engine is not None
    monkeypatch.setattr(kimi_k2, "LONG_STEP_TOKENS", 64)  # of rank 0
    model = two._engine.runner.model
    before = model.group.progress()
    two.generate("A new one. " + LONG_PROMPT, GREEDY)
    if model.group.name != "gloo":
        assert model.group.progress() - before >= len(model.weights.layers)
