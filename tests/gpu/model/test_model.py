"""The engine on a GPU against transformers on the CPU, float32 and INT4."""

from pathlib import Path

import pytest
import torch

from perilune import LLM, SamplingParams
from tests import oracle

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# float32 without TF32; sums in another order than the CPU's.
TOL = 1e-4
CONFIG = dict(device="cuda", dtype="float32", qk_norm_eps=1e-6, max_model_len=512, max_num_seqs=8, kv_blocks=300)


@pytest.mark.parametrize("shape", [*oracle.SHAPES, "int4"])
def test_scores_and_greedy_tokens_equal_transformers(shape: str, tmp_path: Path) -> None:
    if shape == "int4":
        checkpoint = oracle.make(tmp_path / "model", int4=True)
    else:
        checkpoint = oracle.make(tmp_path / "model", **oracle.SHAPES[shape])
    prompts = oracle.random_prompts(3, [5, 40, 17, 64], checkpoint.vocab_size)
    expected = [checkpoint.greedy(p, 12) for p in prompts]
    params = SamplingParams(temperature=0, max_tokens=12)
    for how in (dict(), dict(absorb_limit=0), dict(max_step_tokens=9, absorb_limit=4), dict(kv_blocks=9)):
        with LLM(checkpoint.path, **(CONFIG | how | dict(max_model_len=120))) as llm:
            assert [list(c.token_ids) for c in llm.generate(prompts, params)] == expected
            for tokens in prompts:
                logprobs = checkpoint.logits(tokens[:-1]).log_softmax(-1)
                wanted = logprobs.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
                torch.testing.assert_close(torch.tensor(llm.score(tokens)), wanted, rtol=0, atol=TOL)


def test_sampling_is_the_same_on_both_devices(tmp_path: Path) -> None:
    """The random number of a token is a hash of seed and index, so only the logits' last bits differ."""
    checkpoint = oracle.make(tmp_path / "model")
    prompts = oracle.random_prompts(4, [9, 33], checkpoint.vocab_size)
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=s, max_tokens=8) for s in (1, 2)]
    tokens = []
    for device in ("cuda", "cpu"):
        with LLM(checkpoint.path, **(CONFIG | dict(device=device))) as llm:
            tokens.append([c.token_ids for c in llm.generate(prompts, params)])
    assert tokens[0] == tokens[1]


def test_closing_frees_the_memory(tmp_path: Path) -> None:
    checkpoint = oracle.make(tmp_path / "model")
    before = torch.cuda.memory_allocated()
    with LLM(checkpoint.path, **CONFIG) as llm:
        assert torch.cuda.memory_allocated() > before
        llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert torch.cuda.memory_allocated() <= before  # workspaces of the library, if others left any, go too


def test_a_step_that_cannot_be_captured_leaves_the_others_their_graphs(tmp_path: Path) -> None:
    checkpoint = oracle.make(tmp_path / "model")
    with LLM(checkpoint.path, **CONFIG) as llm:
        assert llm._engine is not None
        graphs = llm._engine.runner.graphs
        assert graphs is not None
        x = torch.arange(4.0, device="cuda")

        def records() -> list[float]:
            with pytest.raises(RuntimeError):
                graphs.recorder.record(lambda: (x + 1).sum().item(), "a host that waits")
            y = torch.zeros_like(x)
            replay = graphs.recorder.record(lambda: y.copy_(x * 2), "one that does not")
            y.zero_()
            replay()
            return y.tolist()

        assert llm._engine.runner.call(records) == [0.0, 2.0, 4.0, 6.0]
        llm._engine.runner.call(graphs.close)  # so that steps ask for new ones
        before = graphs.recorder.captured
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
        assert graphs.recorder.captured > before and graphs.broken is None
