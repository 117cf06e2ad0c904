"""Some of this project's kernels on the emulator, against the references of their ops. All of them: tests/emulate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.exchange.exchange_add_rmsnorm import cuda, launch, reference
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers
from perilune.ops.harness import build, check, registry
from perilune.ops.harness.case import BFLOAT16, Make
from perilune.ops.moe import exchange_pairs_add_rmsnorm as pairs_op
from perilune.ops.moe import scatter_pairs_add_rmsnorm as scatter_op
from perilune.ops.moe import scatter_pairs_add_rmsnorm_quantize as quantized_op
from perilune.ops.moe.combine_add_rmsnorm import summed
from perilune.ops.moe.scatter_pairs_add_rmsnorm import owned
from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated, stream, together

pytestmark = [pytest.mark.usefixtures("one_thread"), library.needed]

CPU = torch.device("cpu")
OPS = registry.all_ops()
# Kernels that compile within a second: clusters, wgmma with tensor maps, cp.async, bulk copies, launches that overlap.
FEW = {
    "add_rmsnorm": "parts=5",
    "rmsnorm": "T=7",
    "swiglu": "scale=200",
    "quantize_tokens": "T=5,",
    "exchange_pairs_add_rmsnorm": "T=3,",
    "scatter_pairs_add_rmsnorm_quantize": "T=3,",
    "mla_prefill": "n=128",
    "mla_absorb_query": "H=",
    "router": "T=1,",
    "sample": "rows=1, V=4096, mode='top_p'",
}


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


@pytest.mark.parametrize(("T", "mode"), [*((1, mode) for mode in MODES), (30, "random")])
def test_ranks_exchange_in_one_process(T: int, mode: str) -> None:
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


@pytest.mark.parametrize(("mode", "ranks", "T", "D"), [("random", 4, 37, 512), ("late", 4, 5, 512)])
def test_ranks_exchange_what_tokens_get_from_experts(mode: str, ranks: int, T: int, D: int) -> None:
    """All rows; then, as in a step of a prompt, each rank those that it owns, and after that another sum of all rows.
    CTAs take turns in a random order; launches of ranks overlap. T = 300: some CTAs have two rows; 5: rank 3 has 0."""
    make, eps = Make(BFLOAT16, CPU, ranks), 1e-5
    given = [pairs_op.inputs(pairs_op.Case(T, D, 3, mixed=ranks == 4), make) for _ in range(ranks)]
    before, w, pairs = given[0]["residual"], given[0]["w"], [one["pairs"] for one in given]
    sums, later = torch.stack([summed(p).to(BFLOAT16) for p in pairs]), make.randn(ranks, T, D)
    memory = [torch.zeros(2 * ranks * HALF_BYTES, dtype=torch.uint8) for _ in range(ranks)]
    boxes = [Mailboxes(r, [m.data_ptr() for m in memory], CPU, 60.0) for r in range(ranks)]
    peers = [Peers(r, ranks, lambda own: sums, box) for r, box in enumerate(boxes)]
    wanted = before.clone()
    y = reference(wanted, sums[0], w, eps, peers[0])
    final = wanted.clone()
    last = reference(final, later[0], w, eps, Peers(0, ranks, lambda own: later))
    residuals = [torch.empty_like(before) for _ in range(ranks)]

    def on_all(run: Callable[[int], Any]) -> list[Any]:
        with together():
            results = []
            for r in range(ranks):
                with stream(r + 1):
                    results.append(run(r))
        return results

    def of_pairs(op: Any) -> list[Any]:
        return on_all(lambda r: op.cuda(residuals[r], pairs[r], w, eps, peers[r]))

    def close(found: Tensor, want: Tensor) -> None:  # a sum that falls on the other side is an ulp off, its norm two
        torch.testing.assert_close(found.float(), want.float(), atol=2e-2, rtol=2**-6)

    with emulated(sms=8, mode=mode, seed=ranks, overlap=True):
        for op in (pairs_op, quantized_op, scatter_op):
            for residual in residuals:
                residual.copy_(before)
            found = of_pairs(op)
            for r in range(ranks):
                own = slice(None) if op is pairs_op else owned(T, peers[r])
                close(residuals[r][own], wanted[own])
                if op is not quantized_op:
                    close(found[r], y[own])
                    continue
                values, scale = found[r]
                factors = scale[:, : len(values)].T.repeat_interleave(128, 1)
                torch.testing.assert_close(values.float() * factors, y[own].float(), atol=2e-2, rtol=2**-3)
                assert not scale[:, len(values) :].any()
            found = on_all(lambda r: launch(residuals[r], later[r], w, eps, peers[r], True))
            for r in range(ranks):
                assert torch.equal(residuals[r], residuals[0]) and torch.equal(found[r], found[0])
            close(residuals[0], final)
            close(found[0], last)


def test_a_rank_that_is_missing_ends_the_wait() -> None:
    memory = [torch.zeros(4 * HALF_BYTES, dtype=torch.uint8) for _ in range(2)]
    boxes = Mailboxes(0, [m.data_ptr() for m in memory], CPU, 0.5)
    residual, x, w = (torch.ones(n, 384, dtype=BFLOAT16) for n in (1, 1, 1))
    with emulated():
        y = cuda(residual, x, w[0], 1e-5, Peers(0, 2, lambda own: own, boxes))
    assert boxes.failed.item() == 2
    assert y.isnan().all()
