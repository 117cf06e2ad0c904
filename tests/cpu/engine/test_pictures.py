"""Prompts with pictures, from the front doors to the tokens: against transformers, which computes them whole."""

from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.media.decoder import Picture
from tests import oracle, seeing
from tests.seeing import PAD, Seeing, picture

CONFIG: dict[str, Any] = dict(
    dtype="float32",
    device="cpu",
    max_model_len=256,
    max_num_seqs=8,
    threads=1,
    draft="off",
    vision_cache_gb=0.001,
    qk_norm_eps=1e-6,  # as transformers
)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
TEXTS = oracle.random_prompts(3, [5, 20, 7, 9, 33], vocab=PAD)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return seeing.make(tmp_path_factory.mktemp("seeing") / "model")


def prompt(texts: list[list[int]], pictures: list[Picture]) -> list[int]:
    """Text, picture, text, picture, .. text."""
    found = list(texts[0])
    for text, p in zip(texts[1:], pictures, strict=True):
        found += [PAD] * p.tokens + text
    return found


PICTURES = [picture(8, 8, 1), picture(4, 10, 2), picture(12, 6, 3), picture(2, 2, 4)]


class TestAgainstTransformers:
    @pytest.mark.parametrize("step", [512, 7], ids=["whole prompts", "chunks of 7"])
    def test_tokens_and_probabilities(self, checkpoint: Seeing, step: int) -> None:
        cases = [
            (prompt(TEXTS[:2], PICTURES[:1]), PICTURES[:1]),
            (prompt(TEXTS, PICTURES), PICTURES),
            (TEXTS[1], []),
            (prompt([[], TEXTS[0]], PICTURES[1:2]), PICTURES[1:2]),
            (prompt([TEXTS[0], []], PICTURES[3:]), PICTURES[3:]),
        ]
        scored = SamplingParams(temperature=0, max_tokens=6, logprobs=0)
        with LLM(checkpoint.path, max_step_tokens=step, **CONFIG) as llm:
            found = llm.generate([p for p, _ in cases], scored, pictures=[shown for _, shown in cases])
        for (ids, shown), got in zip(cases, found, strict=True):
            assert list(got.token_ids) == checkpoint.greedy(ids, shown, 6)
            logits = checkpoint.logits([*ids, *got.token_ids], shown)[len(ids) - 1 : -1]
            want = logits.log_softmax(-1)[torch.arange(6), torch.tensor(got.token_ids)]
            assert [r.logprob for r in got.logprobs] == pytest.approx(want.tolist(), abs=1e-5)
