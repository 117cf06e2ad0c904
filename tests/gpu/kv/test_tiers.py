"""KV tiers on a GPU: bytes that go to host memory and come back are the same, and so are the answers."""

import random
import time
from typing import Any

import pytest
import torch

from perilune import LLM, SamplingParams
from perilune.kv import transfer
from perilune.kv.copier import block_bytes, copier
from perilune.kv.host_memory import HostMemory
from perilune.kv.tiers import Copied, Name
from perilune.kv.transfer import Transfer, row_bytes
from perilune.ops.rows import mapped_copy

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


@pytest.mark.parametrize("count, first", [(1, 0), (6, 0), (4096, 0), (70_003, 0), (70_003, 1)])
def test_a_kernel_reads_and_writes_pinned_memory(count: int, first: int) -> None:
    """Also what the host has written since the last launch, and at addresses that are no multiple of 16."""
    host = torch.empty(count + first, dtype=torch.int32, pin_memory=True)[first:]
    back = torch.zeros(count + first, dtype=torch.int32, pin_memory=True)[first:]
    here = torch.zeros(count, dtype=torch.int32, device="cuda")
    assert mapped_copy.op.refusal("cuda", (here, host, False)) is None
    for number in range(20):
        host[:] = torch.arange(count) + number
        mapped_copy.mapped_copy(here, host, False)
        here += 1
        mapped_copy.mapped_copy(here, back, True)
        torch.cuda.synchronize()
        assert torch.equal(back, torch.arange(count, dtype=torch.int32) + number + 1)


def test_copies_leave_steps_a_share_of_the_link() -> None:
    """Paced by what the link does: half of it while steps run, all of it otherwise."""
    pages = torch.zeros(9, 600, 64, 576, dtype=torch.bfloat16, device="cuda")
    mover = Transfer([pages], 5000, None)
    try:
        while mover.rows < 5000:  # pinning, which takes a second, must not be in the speed that was measured
            time.sleep(0.01)

        def seconds() -> float:
            begin, left = time.perf_counter(), 512
            mover.store([(Name(i.to_bytes(16, "big"), bytes(16)), i, i) for i in range(512)])
            while left:
                mover.wait(1.0)
                left -= sum(isinstance(done, Copied) for done in mover.poll())
            return time.perf_counter() - begin

        quiet = min(seconds() for _ in range(3))
        mover.steps_run = True
        assert seconds() > 512 * block_bytes([pages]) / 60e9 / transfer.STORE_SHARE, "faster than any link at its share"
        assert 1.2 * quiet < seconds() < 8 * quiet
    finally:
        mover.close()


@pytest.mark.parametrize(
    "engine",
    [dict(kv_dtype="bfloat16"), dict(kv_dtype="fp8"), dict(tp=2, gpus="0,0"), dict(tp=2, gpus="0,0", kv_shards=2)],
    ids=["bfloat16", "fp8", "two ranks", "two ranks, sharded"],
)
def test_answers_are_those_of_a_cache_for_all(engine: dict[str, Any]) -> None:
    """Sessions that take turns on a cache for two of them, and on one for all: both find the same blocks, so that no
    prompt is cut otherwise, which would round otherwise. The drafter's cache comes along."""
    rng = random.Random(3)
    begun = [[rng.randrange(1000) for _ in range(700)] for _ in range(5)]
    turns = [[rng.randrange(1000) for _ in range(30)] for _ in range(10)]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def play(blocks: int, **tiers: float) -> tuple[list[tuple[int, ...]], int]:
        blocks //= engine.get("kv_shards", 1)
        config = dict(max_num_seqs=1, max_model_len=2048, kv_blocks=blocks, seed=1, **engine, **tiers)
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
