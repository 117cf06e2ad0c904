"""From a token's attention to its experts in launches that overlap (mla_decode_output_t1.cu, mla_decode_router_t1.cu,
moe_int4_t1.cu), beyond their cases: in graphs, on streams, with the experts that take x from the mailbox."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.attention import mla_decode_output
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, Make
from perilune.ops.moe import mla_decode_router, moe_int4, router
from perilune.ops.moe.chosen import Chosen

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not K2.heads <= build.sm_count(CUDA) <= mla_decode_output.MOST_PROCESSORS,
    reason="for Hopper GPUs",
)
EXPERTS = 48


def _inputs(context: int, fp8: bool, seed: int, heads: int = K2.heads, E: int = EXPERTS) -> dict[str, Any]:
    case = mla_decode_router.Case(counts=(1,), contexts=(context,), H=heads, D=K2.hidden, block_size=64, fp8=fp8, E=E)
    return mla_decode_router.inputs(case, Make(BFLOAT16, CUDA, seed))


def _run(args: dict[str, Any], impl: str = "cuda") -> tuple[Tensor, Tensor, Chosen]:
    """(the residual, x, the experts), the residual in new memory."""
    residual = args["residual"].clone()
    return residual, *mla_decode_router.op.impls[impl].run(*(args | {"residual": residual}).values())


def _experts(fp8: bool, compact: bool = False) -> dict[str, Any]:
    case = moe_int4.Case(1, K2.top_k, EXPERTS, K2.hidden, K2.width, S=K2.width, shared_fp8=fp8, compact=compact)
    args = moe_int4.inputs(case, Make(BFLOAT16, CUDA, 11))
    return {name: v for name, v in args.items() if name not in ("x", "chosen")} | {"partial": True}


def _mixed(x: Tensor, chosen: Chosen, experts: dict[str, Any]) -> Tensor:
    y = moe_int4.op.impls["cuda"].run(x, chosen, *experts.values())
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("context", [1, 1024, 9000])
def test_the_residual_is_that_of_the_ops_one_by_one(context: int, fp8: bool) -> None:
    args = _inputs(context, fp8, context, E=K2.experts)
    y = mla_decode_output.op.impls["cuda"].run(*list(args.values())[:5])
    residual, x, chosen = _run(args)
    assert torch.equal(residual, args["residual"] + y)
    assert (x.double() - _run(args, "composed")[1].double()).norm() < 1e-3 * x.double().norm()
    gate = args["gate"]
    want = router.op.impls["cuda"].run(x, gate.weight, gate.bias, gate.routing)
    assert torch.equal(chosen.ids, want.ids) and torch.allclose(chosen.weights, want.weights, rtol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("compact", [False, True])
def test_experts_make_the_very_same_x(fp8: bool, compact: bool) -> None:
    args, experts = _inputs(700, fp8, 5), _experts(fp8, compact)
    for _ in range(20):
        _, x, chosen = _run(args)
        early = _mixed(x, chosen, experts)
        assert torch.equal(early, _mixed(x, Chosen(chosen.ids, chosen.weights), experts))  # waits for the router's end
        assert torch.equal(early, _mixed(x, chosen, experts))  # so does a second call: the publication is taken


@pytest.mark.parametrize("fp8", [False, True])
def test_launches_in_a_graph_give_the_bits_of_a_single_one(fp8: bool) -> None:
    """An odd number of them, so that replays use the halves of the mailboxes in turns; one without experts."""
    inputs, experts = [_inputs(c, fp8, c) for c in (1024, 70, 5000, 700, 1)], _experts(fp8)

    def all_of_them() -> list[Tensor]:
        found: list[Tensor] = []
        for n, args in enumerate(inputs):
            residual, x, chosen = _run(args)
            found += [residual, x, chosen.ids, chosen.weights]
            if n != 2:
                found.append(_mixed(x, chosen, experts))
        return found

    want = all_of_them()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        all_of_them()  # the stream's mailboxes are made outside of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = all_of_them()
    for _ in range(40):
        for y in got:
            y.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        for y, expected in zip(got, want):
            assert torch.equal(y, expected)


def test_two_streams_at_once() -> None:
    inputs = [_inputs(c, fp8, c) for c, fp8 in ((1024, False), (2000, True))]
    experts = _experts(False)

    def both(args: dict[str, Any]) -> tuple[Tensor, ...]:
        residual, x, chosen = _run(args)
        return residual, x, chosen.ids, chosen.weights, _mixed(x, chosen, experts)

    want = [both(args) for args in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[tuple[Tensor, ...]]] = [[], []]
    for _ in range(60):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(both(inputs[n]))
    torch.cuda.synchronize()
    for results, expected in zip(got, want):
        for found in results:
            assert all(torch.equal(a, b) for a, b in zip(found, expected))
