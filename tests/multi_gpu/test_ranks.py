"""Two ranks on GPUs: answers of one within bfloat16's tolerance, CUDA graphs that pass their test, no memory left."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.core.errors import EngineError

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
CONFIG: dict[str, Any] = dict(device="cuda", max_model_len=1024, max_num_seqs=8, kv_blocks=160, seed=1)
LAYOUTS = {"two GPUs": dict(tp=2), "two GPUs, whole experts": dict(tp=2, ep=2), "one GPU": dict(tp=2, gpus="0,0")}
PROMPTS = ["What is 347 + 589?", "Once upon a time", "def f(x):\n", "The days are Monday,"]
TOKENS = 24
SAME_SHARE = 0.8  # of the tokens of greedy answers, up to the first that differs
MAX_NATS = 0.25  # mean difference of log-probabilities


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM("kimi-nano", **CONFIG, draft="off") as llm:
        yield llm


@pytest.fixture(scope="module", params=LAYOUTS)
def two(request: pytest.FixtureRequest) -> Iterator[LLM]:
    if GPUS < 2 and "gpus" not in LAYOUTS[request.param]:
        pytest.skip(f"{request.param} need two GPUs, and there is {GPUS}")
    with LLM("kimi-nano", **CONFIG, draft="hybrid", draft_tokens=2, **LAYOUTS[request.param]) as llm:
        assert llm.info.tp == 2
        yield llm


@pytest.mark.parametrize("draft", ["off", "eagle3"])
def test_greedy_answers_and_scores_are_those_of_one_gpu(one: LLM, two: LLM, draft: str) -> None:
    assert two._engine is not None
    two._engine.use_drafts(draft, 2, shared=True)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    found, expected = two.generate(PROMPTS, params), one.generate(PROMPTS, params)
    same = 0
    for a, b in zip(found, expected):
        same += next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids)) if x != y), TOKENS)
    print(f"{same} of {TOKENS * len(PROMPTS)} tokens before the first that differs")
    assert same >= SAME_SHARE * TOKENS * len(PROMPTS)
    text = list(expected[0].token_ids) + list(expected[1].token_ids)
    pairs = list(zip(two.score(text), one.score(text)))
    assert sum(abs(a - b) for a, b in pairs) / len(pairs) < MAX_NATS


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
        assert graphs.broken is None and len(graphs) > 6
        kinds = {(key.whole, key.narrow) for key in graphs._graphs}
        assert {(True, True), (True, False)} <= kinds


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_lost_rank_ends_the_step_that_waits_for_it_and_leaves_no_memory(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "perilune.engine")
    before = torch.cuda.mem_get_info(1)[0]
    llm = LLM("kimi-nano", **CONFIG, draft="off", tp=2)
    assert llm._engine is not None and llm._engine._ranks is not None
    assert "self-test of" in caplog.text
    (rank,) = llm._engine._ranks._ranks
    thread = threading.Timer(1.0, os.kill, (rank.process.pid, number))
    thread.start()
    begin = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 of 2"):
        llm.generate(["a"] * 4000, SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True))
    assert time.monotonic() - begin < 11
    llm.close()
    assert rank.process.poll() is not None
    assert torch.cuda.mem_get_info(1)[0] > before - (64 << 20)
