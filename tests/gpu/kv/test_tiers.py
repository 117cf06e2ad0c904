"""KV tiers on a GPU: bytes that go to host memory and come back are the same, and so are the answers."""

import random
import time

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.kv.copier import block_bytes, copier
from perilune.kv.host_memory import HostMemory
from perilune.kv.transfer import row_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype, width", [(torch.bfloat16, 576), (torch.uint8, 640)])
def test_blocks_come_back_byte_for_byte(dtype: torch.dtype, width: int) -> None:
    device = torch.device("cuda")
    pages = torch.randint(0, 255, (7, 40, 64, width * dtype.itemsize), dtype=torch.uint8, device=device).view(dtype)
    drafts = torch.randint(0, 255, (50, 64, 512), dtype=torch.uint8, device=device).view(torch.bfloat16)
    caches = [pages, drafts]
    before = [cache.clone() for cache in caches]
    memory = HostMemory(20, row_bytes(caches), block_bytes(caches), device, at_once=20)
    queue = copier(caches)
    blocks = random.Random(0).sample(range(40), 20)
    try:
        queue.out([(block, memory.row(i)) for i, block in enumerate(blocks)])
        queue.wait()
        others = blocks[1:] + blocks[:1]  # each block gets the one before it
        queue.into([(block, memory.row(i)) for i, block in enumerate(others)])
        queue.wait()
        for cache, old in zip(caches, before):
            at = cache.dim() - 3
            assert torch.equal(
                cache.index_select(at, torch.tensor(others, device=device)).view(torch.uint8),
                old.index_select(at, torch.tensor(blocks, device=device)).view(torch.uint8),
            )
            untouched = torch.tensor([b for b in range(40) if b not in blocks], device=device)
            assert torch.equal(
                cache.index_select(at, untouched).view(torch.uint8), old.index_select(at, untouched).view(torch.uint8)
            )
    finally:
        memory.close()


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8"])
def test_answers_are_those_of_a_cache_for_all(kv_dtype: str) -> None:
    """Sessions that take turns on a cache for two of them, and on one for all: both find the same blocks, so that no
    prompt is cut otherwise, which would round otherwise. The drafter's cache comes along."""
    rng = random.Random(3)
    begun = [[rng.randrange(1000) for _ in range(700)] for _ in range(5)]
    turns = [[rng.randrange(1000) for _ in range(30)] for _ in range(10)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def play(blocks: int, **tiers: float) -> tuple[list[tuple[int, ...]], int]:
        config = dict(kv_dtype=kv_dtype, max_num_seqs=1, max_model_len=2048, kv_blocks=blocks, seed=1, **tiers)
        with LLM("kimi-nano", device="cuda", **config) as llm:
            texts, answers = [list(text) for text in begun], []
            for turn, more in enumerate(turns):
                (answer,) = llm.generate([texts[turn % 5]], params)
                answers.append(answer.token_ids)
                texts[turn % 5] += [*answer.token_ids, *more]
                time.sleep(0.02)
            return answers, sum(hits for _, hits, _, _ in llm._engine.stats().tiers)

    plain, _ = play(200)
    tiered, hits = play(40, kv_host_gb=0.5)
    assert hits >= 5 * 640
    assert tiered == plain
