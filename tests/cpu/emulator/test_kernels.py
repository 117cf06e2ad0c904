"""Some of this project's kernels on the emulator, against the references of their ops. All of them: tests/emulate."""

from collections.abc import Iterator

import pytest
import torch

from perilune.ops.exchange.exchange_add_rmsnorm import cuda, reference
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers
from perilune.ops.harness import build, check, registry
from perilune.ops.harness.case import BFLOAT16, Make
from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated, stream, together

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"the emulator needs a compiler: {library.missing()}"
)

CPU = torch.device("cpu")
OPS = registry.all_ops()
# Kernels that compile within a second: clusters, wgmma with tensor maps, cp.async, bulk copies, launches that overlap.
FEW = {
    "add_rmsnorm": "parts=5",
    "rmsnorm": "T=7",
    "swiglu": "scale=200",
    "quantize_tokens": "T=5,",
    "mla_prefill": "n=128",
    "mla_absorb_query": "H=",
    "router": "T=1,",
    "sample": "rows=1, V=4096, mode='top_p'",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FEW)
def test_kernels_agree_with_the_reference(name: str) -> None:
    op = OPS[name]
    passed = 0
    for case in check.cases(op, CPU, FEW[name])[:4]:
        for seed, mode in enumerate(MODES):
            with emulated(mode=mode, seed=seed, overlap=seed == 1):
                for outcome in check.check(op, case, op.dtypes[-1], CPU, [n for n in op.impls if n.startswith("cuda")]):
                    assert outcome.failed is None, f"{case} {mode}: {outcome.failed}"
                    passed += outcome.refused is None
    assert passed >= len(MODES)


def test_the_emulator_leaves_nothing_behind() -> None:
    op = OPS["rmsnorm"]
    args = list(op.inputs(op.cases[0], Make(BFLOAT16, CPU, 1)).values())
    with emulated():
        assert op.refusal("cuda", args) is None
    assert op.refusal("cuda", args) == "for CUDA"
    assert not build.is_hopper(CPU)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("T", [1, 30])
def test_ranks_exchange_in_one_process(mode: str, T: int) -> None:
    """4 ranks, a stream each; T = 30: each rank sums a part of the rows and sends the sums."""
    ranks, D, g = 4, 512, torch.Generator().manual_seed(3)
    parts = torch.randn(ranks, T, D, generator=g).to(BFLOAT16)
    before, w = torch.randn(T, D, generator=g).to(BFLOAT16), torch.randn(D, generator=g).to(BFLOAT16)
    memory = [torch.zeros(2 * ranks * HALF_BYTES, dtype=torch.uint8) for _ in range(ranks)]
    boxes = [Mailboxes(r, [m.data_ptr() for m in memory], CPU, 60.0) for r in range(ranks)]
    want = before.clone()
    y = reference(want, parts[0], w, 1e-5, Peers(0, ranks, lambda own: parts))
    with emulated(sms=8, mode=mode, seed=T, overlap=True):
        for _ in range(3):
            residuals = [before.clone() for _ in range(ranks)]
            with together():
                results = []
                for r in range(ranks):
                    with stream(r + 1):
                        peers = Peers(r, ranks, lambda own: parts, boxes[r])
                        results.append(cuda(residuals[r], parts[r], w, 1e-5, peers))
            for r in range(ranks):
                assert torch.equal(residuals[r], want)
                assert torch.equal(results[r], results[0])
    torch.testing.assert_close(results[0].float(), y.float(), atol=2e-2, rtol=2e-2)


def test_a_rank_that_is_missing_ends_the_wait() -> None:
    memory = [torch.zeros(4 * HALF_BYTES, dtype=torch.uint8) for _ in range(2)]
    boxes = Mailboxes(0, [m.data_ptr() for m in memory], CPU, 0.5)
    residual, x, w = (torch.ones(n, 384, dtype=BFLOAT16) for n in (1, 1, 1))
    with emulated():
        y = cuda(residual, x, w[0], 1e-5, Peers(0, 2, lambda own: own, boxes))
    assert boxes.failed.item() == 2
    assert y.isnan().all()
