"""The model and the engine against transformers' deepseek_v3, in float32, on random small configurations."""

import pytest
import torch

from perilune import LLM, SamplingParams
from tests import oracle

# Two float32 implementations that sum in different orders; logits here reach about 3.
TOL = 1e-4
# transformers gives the q and kv norms 1e-6 whatever the config says.
CONFIG = dict(dtype="float32", device="cpu", qk_norm_eps=1e-6, max_model_len=512, max_num_seqs=8, threads=1)


@pytest.fixture(scope="module", params=[*oracle.SHAPES, "int4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> oracle.Checkpoint:
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    if request.param == "int4":
        return oracle.make(path, int4=True)
    return oracle.make(path, **oracle.SHAPES[request.param])


def expected_scores(checkpoint: oracle.Checkpoint, tokens: list[int]) -> torch.Tensor:
    logprobs = checkpoint.logits(tokens[:-1]).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    "how",
    [
        dict(absorb_limit=0),
        dict(absorb_limit=10_000),
        dict(max_step_tokens=7, absorb_limit=3),
        dict(block_size=4),
    ],
    ids=["plain", "absorbed", "chunked", "small blocks"],
)
def test_scores_equal_transformers(checkpoint: oracle.Checkpoint, how: dict[str, int]) -> None:
    with LLM(checkpoint.path, **(CONFIG | how)) as llm:
        for tokens in oracle.random_prompts(1, [2, 33, 90], checkpoint.vocab_size):
            got = torch.tensor(llm.score(tokens))
            torch.testing.assert_close(got, expected_scores(checkpoint, tokens), rtol=0, atol=TOL)


def test_all_logits_equal_transformers(checkpoint: oracle.Checkpoint) -> None:
    """Not only the chosen token's: the 20 most likely at each position, ids and values."""
    (prompt,) = oracle.random_prompts(2, [40], checkpoint.vocab_size)
    with LLM(checkpoint.path, **CONFIG) as llm:
        (got,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=20))
    expected = checkpoint.logits(prompt[:-1]).log_softmax(-1)
    for row, record in zip(expected, got.prompt_logprobs, strict=True):
        values, _ = row.topk(20)
        got_ids, got_values = zip(*record.top)
        torch.testing.assert_close(torch.tensor(got_values), values, rtol=0, atol=TOL)
        torch.testing.assert_close(row[torch.tensor(got_ids)], values, rtol=0, atol=TOL)


def test_greedy_tokens_equal_transformers_batched_chunked_cached_and_preempted(checkpoint: oracle.Checkpoint) -> None:
    prompts = oracle.random_prompts(3, [5, 40, 17, 64, 1, 30], checkpoint.vocab_size)
    prompts[2] = prompts[1][:32] + prompts[2]  # shares two full blocks
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = [checkpoint.greedy(p, 12) for p in prompts]

    def tokens(**how: object) -> list[list[int]]:
        with LLM(checkpoint.path, **(CONFIG | how)) as llm:
            first = [list(c.token_ids) for c in llm.generate(prompts, params)]
            again = llm.generate(prompts, params)
            assert [list(c.token_ids) for c in again] == first
            assert (how.get("prefix_cache") is False) == (sum(c.cached_tokens for c in again) == 0)
            return first

    assert tokens() == expected
    assert tokens(prefix_cache=False) == expected
    assert tokens(max_step_tokens=9, absorb_limit=4) == expected
    # 11 blocks hold 176 tokens; the six requests need 252 at their ends: some are preempted and recomputed.
    assert tokens(kv_blocks=11, max_model_len=120) == expected
    assert tokens(ops={"mla_absorbed": "reference", "experts": "reference"}) == expected
    with LLM(checkpoint.path, **CONFIG) as llm:
        assert [list(llm.generate(p, params)[0].token_ids) for p in prompts] == expected
