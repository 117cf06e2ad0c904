"""Long prompts on a GPU: the kernels that compute them, put together, against the references of their ops."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch

from perilune.bench import prefill
from perilune.bench.shapes import SHAPES
from perilune.loading.synthetic import random_weights
from perilune.model import kimi_k2
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.model.weights import Weights
from perilune.ops.attention import mla_prefill, mla_rotate_query, paged_inputs
from perilune.ops.harness import registry
from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.layouts import latent_cache
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.router import router

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Kimi's head sizes, so that its kernels take it; everything else small.
SMALL = KimiConfig.from_dict(
    {
        **SHAPES["kimi-k2.5"],
        "vocab_size": 1024,
        "hidden_size": 1024,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "n_routed_experts": 32,
        "num_experts_per_tok": 4,
        "q_lora_rank": 256,
        "eos_token_id": 1,
        "bos_token_id": 0,
        "pad_token_id": 2,
    }
)
FAST = {
    "router": "cuda_many",
    "moe_int4": "cuda_prefill",
    "mla_rotate_query": "cuda",
    "mla_prefill": "cuda",
    "swiglu": "cuda",
}
REFERENCES = dict.fromkeys((*FAST, "add_rmsnorm", "rmsnorm"), registry.REFERENCE)
BLOCK = 64


def states(weights: Weights, parts: list[int], impls: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a prompt computed in steps of so many tokens: [T, D] after the final norm, and the experts of every token,
    [T, layers, k] in ascending order."""
    device, total = torch.device("cuda"), sum(parts)
    model = KimiK2(SMALL, weights, max_positions=total)
    tokens = torch.randint(SMALL.vocab_size, (total,), generator=torch.Generator(device).manual_seed(1), device=device)
    blocks = -(-total // BLOCK)
    cache = torch.full(
        (SMALL.num_hidden_layers, blocks + 1, BLOCK, 576), float("nan"), dtype=torch.bfloat16, device=device
    )
    table = torch.randperm(blocks, device=device).to(torch.int32).view(1, blocks)
    found, chosen, first = [], [], 0

    def recording(*args: Any) -> Chosen:
        made = router(*args)
        chosen[-1].append(made.ids.sort(-1).values)
        return made

    with registry.using(impls), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kimi_k2, "router", recording)
        for count in parts:
            where = torch.arange(first, first + count, device=device)
            slots = table[0].long()[where // BLOCK] * BLOCK + where % BLOCK
            counts = torch.tensor([0, count], dtype=torch.int32), torch.tensor([first + count], dtype=torch.int32)
            step = Step(tokens[where], where, slots, None, Span(table, *counts, slice(0, count)))
            chosen.append([])
            found.append(model.hidden_with_aux(step, cache, ())[0].float())
            first += count
    return torch.cat(found), torch.cat([torch.stack(layers, 1) for layers in chosen])


@pytest.mark.parametrize("compact", [False, True], ids=["bf16-scales", "compact"])
@pytest.mark.parametrize("parts", [[700], [257, 300, 443]], ids=["one-step", "behind-a-prefix"])
def test_kernels_compute_what_the_references_do(compact: bool, parts: list[int]) -> None:
    weights = random_weights(SMALL, dtype=torch.bfloat16, device="cuda", seed=5)
    if compact:
        weights = prefill.compacted(weights)
    (got, ids), (want, wanted) = states(weights, parts, FAST), states(weights, parts, REFERENCES)
    assert got.isfinite().all()
    # A token between two experts that suit it alike may go to the other one, and is another token from there on.
    same = (ids == wanted).all(-1).all(-1)
    apart = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert same.float().mean() > 0.8, f"{same.float().mean()=}"
    assert apart[same].median() < 0.03 and (apart[same] > 0.1).float().mean() < 0.01, (
        f"{apart[same].median()=} {apart[same].max()=}"
    )


def test_a_request_does_not_depend_on_what_others_hold() -> None:
    """Nor on slots of its own blocks that no token was written to."""
    case = mla_prefill.Case((200, 130, 257), (200, 700, 300), 16, 128, 64, 128, 512, 64, big=True)
    args = mla_prefill.inputs(case, Make(BFLOAT16, torch.device("cuda"), 7))
    span = args["span"]
    want = mla_prefill.cuda(**args)
    assert want.isfinite().all()
    flat = args["pages"].view(-1, 576)
    for b, length in enumerate(case.contexts):
        own = paged_inputs.slots(span.tables[b], torch.arange(length, device="cuda"), 64)
        broken = torch.full_like(flat, float("nan"))
        broken[own] = flat[own]
        rows = slice(*span.query_start[b : b + 2].tolist())
        got = mla_prefill.cuda(**{**args, "pages": broken.view_as(args["pages"])})
        assert torch.equal(got[rows], want[rows]), b


def test_the_comparison_sees_a_wrong_weight() -> None:
    weights = random_weights(SMALL, dtype=torch.bfloat16, device="cuda", seed=5)
    want, _ = states(weights, [300], FAST)
    attention = weights.layers[1].attention
    other = dataclasses.replace(attention, w_uv=attention.w_uv.roll(1, 0))
    weights.layers[1] = dataclasses.replace(weights.layers[1], attention=other)
    got, _ = states(weights, [300], FAST)
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() > 0.1


@pytest.mark.parametrize("T", [1, 40, 700])
def test_packed_rows_are_those_of_the_reference(T: int) -> None:
    case = mla_rotate_query.Case(T, 16, strided=True)
    args = mla_rotate_query.inputs(case, Make(BFLOAT16, torch.device("cuda"), T))
    args["kv_norm"] = torch.full_like(args["kv_norm"], 16.0)
    caches = []
    for run in (mla_rotate_query.reference, mla_rotate_query.cuda):
        width = latent_cache.width(case.R, case.r, latent_cache.PACKED)
        latents = args["latents"]
        cache = torch.full((*latents.pages.shape[:2], width), 0x7F, dtype=latent_cache.PACKED, device="cuda")
        run(**{**args, "q": args["q"].clone(), "latents": replace(latents, pages=cache)})
        caches.append(latent_cache.unpack(cache, case.R))
    want, got = caches
    assert torch.equal(want.isnan(), got.isnan()), "rows without a token were written, or rows with one were not"
    written = ~want.isnan()
    # A value that two orders of rounding put on two sides of a tie differs by one step of e4m3; few do.
    torch.testing.assert_close(got[written], want[written], rtol=0.13, atol=2.0**-8)
    assert (want[written] != got[written]).float().mean() < 1e-3
