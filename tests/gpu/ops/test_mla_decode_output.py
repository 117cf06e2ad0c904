"""What follows attention in one launch (mla_decode_output_t1.cu, mla_decode_output_mma.cu), beyond its cases: in
graphs, on streams."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.attention import mla_decode, mla_decode_output
from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, K2, Make
from perilune.ops.layouts.operands import Matrix
from perilune.ops.linear import linear_fp8
from perilune.ops.linear.linear import linear

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or not K2.heads <= build.sm_count(CUDA) <= mla_decode_output.MOST_PROCESSORS,
    reason="for Hopper GPUs",
)


def _inputs(context: int, heads: int, fp8: bool, seed: int, tokens: int = 1) -> dict[str, Any]:
    case = mla_decode_output.Case(counts=(tokens,), contexts=(context,), H=heads, D=K2.hidden, block_size=64, fp8=fp8)
    return mla_decode_output.inputs(case, Make(BFLOAT16, CUDA, seed))


def _run(args: dict[str, Any], name: str = "cuda") -> Tensor:
    out = mla_decode_output.op.impls[name].run(*args.values())
    assert isinstance(out, Tensor)
    return out


MANY_HEADS = ((1024, 64, 1), (70, 64, 1), (5000, 64, 1), (700, 32, 1), (1, 64, 1))
FEW_HEADS = (
    *((1024, 16, 1), (70, 16, 4), (5000, 8, 3), (700, 8, 1), (4, 16, 4), (900, 16, 2), (1, 8, 1)),
    *((1024, 64, 4), (700, 32, 3)),
)


@pytest.mark.parametrize(
    ("name", "fp8", "launches"),
    [("cuda", False, (*MANY_HEADS, (900, 16, 1))), ("cuda", True, MANY_HEADS), ("cuda_mma", True, FEW_HEADS)],
)
def test_launches_in_a_graph_give_the_bits_of_a_lone_one(
    name: str, fp8: bool, launches: tuple[tuple[int, int, int], ...]
) -> None:
    """One board serves them in turns, replay after replay, whatever their number and the kernels between."""
    inputs = [_inputs(c, h, fp8, c, tokens) for c, h, tokens in launches]
    want = [_run(args, name) for args in inputs]
    flood = Make(BFLOAT16, CUDA, 3).randn(4096, K2.hidden)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for args in inputs:
            _run(args, name)  # the stream's boards are made outside of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = []
        for args in inputs:
            got.append(_run(args, name))
            linear(got[-1], flood)
    for _ in range(40):
        for y in got:
            y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for y, expected in zip(got, want):
            assert torch.equal(y, expected)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("heads", "block_size"), [(64, 64), (64, 16), (32, 32)])
def test_attention_beside_it_is_attention_before_it(heads: int, block_size: int, fp8: bool) -> None:
    """A wider table, which holds no more, takes the kernel that leaves no room beside it."""
    most = build.sm_count(CUDA) // (heads // mla_decode.QUARTER) * mla_decode.FEW // block_size
    for context in (1, (most - 1) * block_size, *torch.randint(2, (most - 1) * block_size + 1, (8,)).tolist()):
        case = mla_decode_output.Case((1,), (context,), heads, block_size=block_size, D=K2.hidden, fp8=fp8)
        args = mla_decode_output.inputs(case, Make(BFLOAT16, CUDA, context))
        tables = args["span"].tables
        wider = tables[:, -1:].expand(1, most + 1 - tables.shape[1])
        wide = args | {"span": replace(args["span"], tables=torch.cat([tables, wider], 1))}
        leasts = [mla_decode.attend_one(*(a[n] for n in ("q_full", "pages", "span", "scale")))[2] for a in (args, wide)]
        assert leasts[0] < 0 and leasts[1] == mla_decode.LEAST
        y, expected = _run(args).double(), _run(wide).double()
        assert (y - expected).norm() <= mla_decode_output.TOL["y"][BFLOAT16].norm * expected.norm()


def test_two_streams_at_once() -> None:
    inputs = [_inputs(c, 64, fp8, c) for c, fp8 in ((1024, False), (2000, True))]
    want = [_run(args) for args in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(100):
        for n, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got[n].append(_run(inputs[n]))
    torch.cuda.synchronize()
    for results, expected in zip(got, want):
        assert all(torch.equal(y, expected) for y in results)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_values_of_any_size(size: float) -> None:
    """Products with e4m3 weights are of fp16."""
    args = _inputs(300, 64, True, 5)
    weights = args["weights"]
    w_uv = weights.w_uv.float() * size
    w_uv[3] *= 300
    q, scale = linear_fp8.quantize_exactly(w_uv, 1)
    weights.w_uv, weights.uv_fp8 = (q.float() * scale).to(BFLOAT16), Matrix(q, scale.squeeze(1))
    y, expected = _run(args).double(), mla_decode_output.reference(*args.values()).double()
    assert (y - expected).norm() <= mla_decode_output.TOL["y"][BFLOAT16].norm * expected.norm()
