"""KV sharded along the sequence on GPUs: answers of one GPU with a cache of the same type within bfloat16's tolerance,
through graphs where there are two GPUs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from tests.multi_gpu.test_ranks import PROMPTS, Answers, compare, of_one

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(not GPUS, reason="needs a CUDA device")
CONFIG: dict[str, Any] = dict(device="cuda", max_model_len=1024, max_num_seqs=4, kv_blocks=80, seed=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "two GPUs": dict(tp=2, kv_shards=2),
    "two GPUs, packed": dict(tp=2, kv_shards=2, kv_dtype="fp8"),
    "one GPU": dict(tp=2, kv_shards=2, gpus="0,0"),
}


@pytest.fixture(scope="module")
def ones() -> dict[str, Answers]:
    """By the cache's type: e4m3 latents move log-probabilities by more than ranks do."""
    return {kv_dtype: of_one(kv_dtype=kv_dtype) for kv_dtype in ("bfloat16", "fp8")}


@pytest.fixture(scope="module", params=LAYOUTS)
def two(request: pytest.FixtureRequest, ones: dict[str, Answers]) -> Iterator[LLM]:
    if GPUS < 2 and "gpus" not in LAYOUTS[request.param]:
        pytest.skip(f"{request.param}: needs two GPUs, and there is {GPUS}")
    with LLM("kimi-nano", **CONFIG, draft="hybrid", draft_tokens=2, **LAYOUTS[request.param]) as llm:
        assert (llm.info.kv_shards, llm.info.block_size) == (2, 128)
        assert ("exchange", "gloo" if "gpus" in LAYOUTS[request.param] else "peer") in [m[:2] for m in llm.info.choices]
        yield llm


@pytest.mark.parametrize("draft", ["off", "eagle3"])
def test_greedy_answers_and_scores_are_those_of_one_gpu(ones: dict[str, Answers], two: LLM, draft: str) -> None:
    assert two._engine is not None
    two._engine.use_drafts(draft, 2, shared=True)
    compare(ones[two._engine.config.kv_dtype], two)


def test_steps_run_as_graphs(two: LLM) -> None:
    params = [SamplingParams(temperature=t, seed=1, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0, 0.0, 0.7)]
    first, again = two.generate(PROMPTS, params), two.generate(PROMPTS, params)
    assert all(len(c.token_ids) == 40 for c in (*first, *again))
    assert again[3].cached_tokens > 128
    assert two._engine is not None
    graphs = two._engine.runner.graphs
    if graphs is not None:  # ranks that share a GPU have none
        assert graphs.broken is None and len(graphs) > 2
