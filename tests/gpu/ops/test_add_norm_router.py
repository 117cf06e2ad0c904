"""Norm, router and choice of several tokens in one launch (add_norm_router_mma.cu), beyond its cases: in graphs, with
the experts that read x while it runs, with peers that do not answer. tests/multi_gpu has real peers."""

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.exchange import exchange_add_rmsnorm
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers, loopback
from perilune.ops.harness.case import BFLOAT16, K2, Make
from perilune.ops.moe import add_norm_router, moe_int4, router
from perilune.ops.moe.chosen import Chosen

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper GPUs"
)


def _inputs(T: int, ranks: int, seed: int) -> dict[str, Any]:
    case = add_norm_router.Case(T, K2.hidden, K2.experts, K2.top_k, ranks=ranks)
    args = add_norm_router.inputs(case, Make(BFLOAT16, CUDA, seed))
    noise = Make(BFLOAT16, CUDA, seed + 100)
    return args | {name: noise.randn(T, case.D) for name in ("residual", "y")}


def _run(args: dict[str, Any]) -> tuple[Tensor, Tensor, Chosen]:
    """(the residual, x, the experts), the residual in new memory."""
    residual = args["residual"].clone()
    return residual, *add_norm_router.op.impls["cuda"].run(*(args | {"residual": residual}).values())


@pytest.mark.parametrize("ranks", [0, 2, 4, 8])
@pytest.mark.parametrize("T", range(2, 9))
def test_results_are_those_of_the_kernels_one_by_one(T: int, ranks: int) -> None:
    args = _inputs(T, ranks, T)
    apart, norm, gate = args["residual"].clone(), args["norm"], args["gate"]
    peers = loopback(max(ranks, 1), CUDA, 1.0)
    want = exchange_add_rmsnorm.cuda(apart, args["y"], norm.weight, norm.eps, peers)
    for _ in range(20):
        residual, x, chosen = _run(args)
        assert torch.equal(residual, apart) and torch.equal(x, want)
        found = router.op.impls["cuda"].run(x, gate.weight, gate.bias, gate.routing)
        same = (chosen.ids == found.ids).all(-1)  # scores are sums in another order: of random rows two may be as good
        assert same.sum() >= T - 1 and torch.allclose(chosen.weights[same], found.weights[same], rtol=1e-3)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("ranks", [0, 4])
def test_launches_in_a_graph_with_experts_give_the_bits_of_single_ones(ranks: int, fp8: bool) -> None:
    width = K2.width // 4
    inputs = [_inputs(T, ranks, T) for T in (4, 2, 3, 8, 4)]
    for args in inputs[1:]:
        args["norm"] = replace(args["norm"], peers=inputs[0]["norm"].peers)
    case = moe_int4.Case(4, K2.top_k, K2.experts, K2.hidden, width, S=width, shared_fp8=fp8)
    experts = {k: v for k, v in moe_int4.inputs(case, Make(BFLOAT16, CUDA, 11)).items() if k not in ("x", "chosen")}
    experts["partial"] = True

    def all_of_them(wait: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for args in inputs:
            residual, x, chosen = _run(args)
            if wait:
                torch.cuda.synchronize()
            y = moe_int4.op.impls["cuda"].run(x, chosen, *experts.values())
            assert isinstance(y, Tensor)
            found += [residual, x, chosen.ids, chosen.weights, y]
        return found

    want = all_of_them(wait=True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_them(wait=False)  # the stream's mailboxes are made outside of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = all_of_them(wait=False)
    for _ in range(100):
        for y in got:
            y.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, expected) for y, expected in zip(got, want))


def test_a_peer_that_sends_nothing_is_reported_and_never_waited_for_again() -> None:
    own, others = (torch.zeros(2 * 4 * HALF_BYTES, dtype=torch.uint8, device=CUDA) for _ in "ab")
    box = Mailboxes(0, [m.data_ptr() for m in (own, others, others, others)], CUDA, 0.3)
    args = _inputs(4, 0, 1)
    args["norm"] = replace(args["norm"], peers=Peers(0, 4, torch.clone, box))
    residual = _run(args)[0]
    torch.cuda.synchronize()
    assert int(box.failed) in (2, 3, 4) and bool(residual.isnan().all())
    begin = time.perf_counter()
    for _ in range(20):
        _, _, chosen = _run(args)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 0.25
    assert bool(((chosen.ids >= 0) & (chosen.ids < K2.experts)).all())
