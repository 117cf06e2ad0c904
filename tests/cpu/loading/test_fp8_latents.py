"""The latent cache in FP8: what it holds, what it costs the logits, and that every path reads it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.loading import fp8_latents
from perilune.ops.attention import mla_absorb_query
from perilune.ops.harness.case import BFLOAT16, FLOAT32, Make
from perilune.ops.layouts import latent_cache
from tests import oracle

CPU = torch.device("cpu")


def test_rows_keep_what_their_types_can_hold() -> None:
    c, k_pe = torch.tensor([[0.0, -1.5, 500.0, 2.0**-9]]), torch.tensor([[1e4, -3.25]])
    rows = latent_cache.pack(c, k_pe, latent_cache.PACKED)
    assert rows.shape == (1, latent_cache.width(4, 2, latent_cache.PACKED)) and rows.dtype == torch.uint8
    assert latent_cache.unpack(rows, 4).tolist() == [[0.0, -1.5, 448.0, 2.0**-9, 9984.0, -3.25]]
    assert latent_cache.unpack(latent_cache.pack(c, k_pe, BFLOAT16), 4, BFLOAT16).dtype == BFLOAT16


def test_a_row_of_kimi_takes_640_bytes() -> None:
    assert latent_cache.width(512, 64, latent_cache.PACKED) == 640


@pytest.mark.parametrize("R", [4, 512, 1024])
def test_no_normalised_latent_is_too_large(R: int) -> None:
    c = fp8_latents.constant(R)
    assert c * math.sqrt(R) <= latent_cache.LARGEST < 2 * c * math.sqrt(R)


def test_a_row_is_written_as_the_reference_writes_it() -> None:
    case = mla_absorb_query.Case(9, 3, 16, 64, 8, 4, padding=2, strided=True)
    args = mla_absorb_query.inputs(case, Make(FLOAT32, CPU, 3))
    written = []
    for run in (mla_absorb_query.reference, mla_absorb_query.composed):
        latents = args["latents"]
        cache = torch.full((*latents.pages.shape[:2], 64 + 2 * 8), 0x7F, dtype=latent_cache.PACKED)
        run(**{**args, "latents": replace(latents, pages=cache)})
        written.append(latent_cache.unpack(cache, 64))
    assert torch.equal(written[0].isnan(), written[1].isnan())
    torch.testing.assert_close(written[1], written[0], rtol=0.07, atol=1e-3, equal_nan=True)
    flipped = (written[0] != written[1]) & ~written[0].isnan()
    assert flipped.float().mean() < 0.01


CONFIG = dict(device="cpu", dtype="float32", qk_norm_eps=1e-6, max_model_len=128, kv_blocks=40)


def test_scores_move_little_and_every_path_reads_the_same_cache(tmp_path: Path) -> None:
    checkpoint = oracle.make(tmp_path / "model")
    tokens = oracle.random_prompts(3, [60], checkpoint.vocab_size)[0]
    exact = checkpoint.logits(tokens[:-1]).log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    seen = []
    for how in (dict(absorb_limit=16), dict(absorb_limit=0), dict(max_step_tokens=7, absorb_limit=3)):
        with LLM(checkpoint.path, **(CONFIG | how | dict(kv_dtype="fp8"))) as llm:
            seen.append(torch.tensor(llm.score(tokens)))
    for scores in seen:
        assert 0 < (scores - exact).abs().mean() < 0.06, "rounded, and not more than rounded"
    for scores in seen[1:]:
        torch.testing.assert_close(scores, seen[0], rtol=0, atol=2e-2)


def test_blocks_shrink_and_generation_works(tmp_path: Path) -> None:
    checkpoint = oracle.make(tmp_path / "model")
    prompts = oracle.random_prompts(5, [9, 33], checkpoint.vocab_size)
    sizes, tokens = {}, {}
    for kv_dtype in ("float32", "bfloat16", "fp8"):
        with LLM(checkpoint.path, **CONFIG, kv_dtype=kv_dtype) as llm:
            sizes[kv_dtype] = llm._engine.runner.pages.data.nbytes
            tokens[kv_dtype] = [
                len(c.token_ids) for c in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8))
            ]
    assert sizes["float32"] == 2 * sizes["bfloat16"] > 2 * sizes["fp8"]
    assert tokens["fp8"] == tokens["float32"]
