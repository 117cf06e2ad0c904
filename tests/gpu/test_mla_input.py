"""What stands before attention for one token, in one launch (mla_input.cu), beyond its cases: in graphs, on streams."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops import mla_input
from perilune.ops.case import BFLOAT16, FLOAT32, K2, Make
from perilune.ops.linear import linear

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or torch.cuda.get_device_properties(0).multi_processor_count < mla_input.PROCESSORS,
    reason="for Hopper GPUs of 132 processors",
)


def _inputs(fp8: bool, seed: int) -> dict[str, Any]:
    case = mla_input.Case(1, K2.heads, K2.hidden, K2.q_rank, parts=9, fp8=fp8)
    return mla_input.inputs(case, Make(BFLOAT16, CUDA, seed))


def _run(args: dict[str, Any], impl: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """(queries, residual, cache), the arguments left as they are."""
    own = {**args, "residual": args["residual"].clone(), "cache": torch.zeros_like(args["cache"])}
    return mla_input.op.impls[impl].run(*own.values()), own["residual"], own["cache"]


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b))


@pytest.mark.parametrize("fp8", [False, True])
def test_launches_in_a_graph_give_the_bits_of_a_lone_one(fp8: bool) -> None:
    """One board serves them all, replay after replay; launches beside others start before those have ended."""
    some, others = _inputs(fp8, 1), _inputs(fp8, 2)
    flood = Make(BFLOAT16, CUDA, 3).randn(4096, K2.hidden)
    want = [_run(some), _run(others)]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(some)  # the stream's board is made outside of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = []
        for args in (some, others, others, some):
            linear(args["residual"], flood)
            got.append(_run(args))
    for _ in range(40):
        for queries, *_ in got:
            queries.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for n, result in zip((0, 1, 1, 0), got):
            assert _same(result, want[n])


def test_a_graph_of_one_launch() -> None:
    args = _inputs(False, 4)
    want = _run(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(args)
    for _ in range(40):
        got[0].fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert _same(got, want)


@pytest.mark.parametrize("size", (1e-4, 1.0, 1e4))
def test_residuals_of_any_size(size: float) -> None:
    """One value far above the others: products with e4m3 weights are of fp16."""
    args = _inputs(True, 5)
    args["residual"] = (args["residual"].float() * size).to(BFLOAT16)
    args["residual"][0, 77] *= 300
    args["x"] = args["x"].to(FLOAT32) * size
    got, want = _run(args), _run(args, "composed")
    for a, b in zip(got, want):
        assert a.isfinite().all()
        assert (a.double() - b.double()).norm() <= 6e-3 * b.double().norm()
