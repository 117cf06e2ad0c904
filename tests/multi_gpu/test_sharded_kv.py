"""KV sharded along the sequence on GPUs: answers of one GPU within bfloat16's tolerance, through graphs where there are
two GPUs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
CONFIG: dict[str, Any] = dict(device="cuda", max_model_len=1024, max_num_seqs=8, kv_blocks=80, seed=1)
LAYOUTS = {
    "two GPUs": dict(tp=2, kv_shards=2),
    "two GPUs, packed": dict(tp=2, kv_shards=2, kv_dtype="fp8"),
    "one GPU": dict(tp=2, kv_shards=2, gpus="0,0"),
}
LONG = "The quick brown fox jumps over the lazy dog, and then it runs home. " * 12  # more than two blocks of 128 tokens
PROMPTS = ["What is 347 + 589?", "Once upon a time", LONG, "The days are Monday,"]
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
        assert (llm.info.kv_shards, llm.info.block_size) == (2, 128)
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
    text = list(expected[0].token_ids) + list(expected[1].token_ids) + list(expected[2].token_ids) * 5
    pairs = list(zip(two.score(text), one.score(text)))
    assert sum(abs(a - b) for a, b in pairs) / len(pairs) < MAX_NATS


def test_steps_run_as_graphs(two: LLM) -> None:
    params = [SamplingParams(temperature=t, seed=1, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.7)]
    first, again = two.generate(PROMPTS, params), two.generate(PROMPTS, params)
    assert all(len(c.token_ids) == 40 for c in (*first, *again))
    assert again[2].cached_tokens > 128
    assert two._engine is not None
    graphs = two._engine.runner.graphs
    if graphs is not None:  # ranks that share a GPU have none
        assert graphs.broken is None and len(graphs) > 2
