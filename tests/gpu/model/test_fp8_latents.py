"""Packed cache rows as the CUDA kernel writes them, and a model that decodes from them."""

from dataclasses import replace

import pytest
import torch

from perilune import LLM
from perilune.ops.attention import mla_absorb_query
from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.layouts import latent_cache
from perilune.tasks.families import FAMILIES, problems
from perilune.text.chat import template_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("T", [1, 3, 64, 500])
def test_rows_are_those_of_the_reference(T: int) -> None:
    case = mla_absorb_query.Case(T, 64, padding=T // 8, strided=True)
    args = mla_absorb_query.inputs(case, Make(BFLOAT16, torch.device("cuda"), T))
    R = case.R
    args["kv_norm"] = torch.full_like(args["kv_norm"], 16.0)
    results = []
    for run in (mla_absorb_query.reference, mla_absorb_query.cuda):
        width = latent_cache.width(R, case.r, latent_cache.PACKED)
        latents = args["latents"]
        cache = torch.full((*latents.pages.shape[:2], width), 0x7F, dtype=latent_cache.PACKED, device="cuda")
        q_full = run(**{**args, "latents": replace(latents, pages=cache)})
        results.append((q_full, cache))
    (q_want, want), (q_got, got) = results
    torch.testing.assert_close(q_got, q_want, rtol=1.6e-2, atol=1.6e-2)
    a, b = latent_cache.unpack(want, R), latent_cache.unpack(got, R)
    assert torch.equal(a.isnan(), b.isnan()), "rows without a token were written, or rows with one were not"
    written = ~a.isnan()
    # A value that two orders of rounding put on two sides of a tie differs by one step of e4m3; few do.
    torch.testing.assert_close(b[written], a[written], rtol=0.13, atol=2.0**-8)
    assert (a[written] != b[written]).float().mean() < 1e-3


@pytest.mark.parametrize("chunk", [8, 512])
def test_scores_are_as_near_the_cpus_as_with_a_bfloat16_cache(chunk: int) -> None:
    """Chunks of 8 tokens attend in the absorbed form, those of 512 in the plain one."""
    apart = {}
    for kv_dtype in ("bfloat16", "fp8"):
        with LLM("kimi-nano", device="cpu", kv_dtype=kv_dtype) as cpu:
            assert cpu.tokenizer is not None
            template = template_for(cpu.path)
            asked = [p for name in FAMILIES for p in problems(name, "heldout", 1, seed=23, thinking=True)]
            texts = [
                template.render_ids(cpu.tokenizer, p.messages, tools=p.tools or None, thinking=True) for p in asked
            ]
            wanted = torch.tensor([v for text in texts for v in cpu.score(text)])
        with LLM("kimi-nano", device="cuda", kv_dtype=kv_dtype, absorb_limit=8, max_step_tokens=chunk) as gpu:
            got = torch.tensor([v for text in texts for v in gpu.score(text)])
        apart[kv_dtype] = float((got - wanted).abs().mean())
    print(f"mean distance of log-probabilities: {apart}")
    # What differs in bfloat16's last bit now and then falls on two sides of a tie of e4m3; nothing else may differ.
    assert apart["fp8"] < 2 * apart["bfloat16"] + 0.02, f"{apart}"
