"""From logits to tokens on a GPU: the values of the CPU, and not one wait of the host."""

from collections.abc import Iterator

import pytest
import torch

from perilune.engine import sampler
from perilune.engine.penalties import Adjuster
from tests.cpu.engine.test_sampling import MIXED, work

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

V, STEPS = 163840, 6


@pytest.fixture
def waiting_is_an_error() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@torch.inference_mode()
def test_adjusting_and_choosing_never_wait(waiting_is_an_error: None) -> None:
    g = torch.Generator().manual_seed(1)
    steps = [torch.randn(len(MIXED), V, generator=g) * 3 for _ in range(STEPS)]
    batches = [
        tuple(work(i, d, p, (1, 2, 3) if p.penalized and not d else ()) for i, p in enumerate(MIXED))
        for d in range(STEPS)
    ]
    there = [x.cuda() for x in steps]
    drawn = [torch.randint(V, (len(MIXED),), generator=g) for _ in steps]
    drawn_there = [x.cuda() for x in drawn]
    sampler.sample_tokens(Adjuster(8).adjust(there[0], batches[0]), batches[0])  # what is set up once may wait
    adjuster, got = Adjuster(8), []
    torch.cuda.set_sync_debug_mode("error")
    for x, batch, tokens in zip(there, batches, drawn_there):
        adjusted = adjuster.adjust(x, batch)
        got.append((adjusted, sampler.sample_tokens(adjusted, batch), sampler.finite(x)))
        adjuster.count(tokens)
    torch.cuda.set_sync_debug_mode("default")
    on_cpu = Adjuster(8)
    for x, batch, tokens, (adjusted, chosen, finite) in zip(steps, batches, drawn, got):
        want = on_cpu.adjust(x, batch)
        torch.testing.assert_close(adjusted.cpu(), want, rtol=1e-6, atol=1e-5)
        # The same random numbers and weights; what adjusts logits may round differently, which seldom moves a token.
        assert int((chosen.cpu() == sampler.sample_tokens(want, batch)).sum()) >= len(MIXED) - 1
        assert finite.all()
        on_cpu.count(tokens)
