"""What stands before attention for up to four tokens in one launch, beyond its cases: in graphs, on streams."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.attention import mla_pre_attention
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make
from perilune.ops.layouts import latent_cache
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.linear.linear import linear

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0)
    or torch.cuda.get_device_properties(0).multi_processor_count < mla_pre_attention.PROCESSORS,
    reason="for Hopper GPUs of 132 processors",
)


def _inputs(fp8: bool, seed: int, tokens: int = 1) -> dict[str, Any]:
    case = mla_pre_attention.Case(tokens, K2.heads, K2.hidden, K2.q_rank, parts=9, fp8=fp8)
    return mla_pre_attention.inputs(case, Make(BFLOAT16, CUDA, seed))


def _run(args: dict[str, Any], impl: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """(queries, residual, cache), the arguments left as they are."""
    latents = replace(args["latents"], pages=torch.zeros_like(args["latents"].pages))
    own = {**args, "residual": args["residual"].clone(), "latents": latents}
    return mla_pre_attention.op.impls[impl].run(*own.values()), own["residual"], latents.pages


def _same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a, b))


@pytest.mark.parametrize("fp8", [False, True])
def test_launches_in_a_graph_give_the_bits_of_a_lone_one(fp8: bool) -> None:
    """One board serves them all, replay after replay; launches beside others start before those have ended."""
    sets, order = [_inputs(fp8, tokens, tokens) for tokens in (1, 2, 3, 4)], (0, 3, 1, 2, 2, 0, 3, 0)
    flood = Make(BFLOAT16, CUDA, 3).randn(4096, K2.hidden)
    want = [_run(args) for args in sets]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _run(sets[0])  # the stream's board is made outside of the graph
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        got = []
        for n in order:
            linear(sets[n]["residual"], flood)
            got.append(_run(sets[n]))
    for _ in range(40):
        for queries, *_ in got:
            queries.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        for n, result in zip(order, got):
            assert _same(result, want[n])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_a_token_gets_the_same_bits_beside_others(tokens: int, fp8: bool, packed: bool) -> None:
    args = _inputs(fp8, 7, tokens)
    slots, rotary = args["latents"].slots, args["rotary"]
    slots[-1] = -1
    if packed:
        width = latent_cache.width(K2.latent, K2.rope, latent_cache.PACKED)
        args["latents"] = Latents(torch.zeros(2, 64, width, dtype=latent_cache.PACKED, device=CUDA), slots)
    queries, residual, cache = _run(args)
    written = torch.zeros_like(cache)
    for n in range(tokens):
        rows = [n, (n + 1) % tokens]
        placed = {
            "rotary": Rotary(rotary.cos[rows], rotary.sin[rows]),
            "latents": replace(args["latents"], slots=slots[rows]),
        }
        two = _run(args | {name: args[name][rows] for name in ("residual", "x")} | placed)
        assert _same((queries[n], residual[n]), (two[0][0], two[1][0]))
        slot = int(slots[n])
        if slot >= 0:
            written.view(128, -1)[slot] = two[2].view(128, -1)[slot]
    assert torch.equal(cache, written)


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_graph_of_one_launch(tokens: int) -> None:
    args = _inputs(False, 4, tokens)
    want = _run(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = _run(args)
    for _ in range(40):
        got[0].fill_(float("nan"))
        graph.replay()
    torch.cuda.synchronize()
    assert _same(got, want)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("size", (1e-4, 1.0, 1e4))
def test_residuals_of_any_size(size: float, tokens: int) -> None:
    """One value far above the others: products with e4m3 weights are of fp16."""
    args = _inputs(True, 5, tokens)
    args["residual"] = (args["residual"].float() * size).to(BFLOAT16)
    args["residual"][-1, 77] *= 300
    args["x"] = args["x"].to(FLOAT32) * size
    got, want = _run(args), _run(args, "composed")
    for a, b in zip(got, want):
        assert a.isfinite().all()
        assert (a.double() - b.double()).norm() <= 6e-3 * b.double().norm()
    for a, b in zip(got[0], want[0]):  # of each token: the others' sizes are nothing to it
        assert (a.double() - b.double()).norm() <= 6e-3 * b.double().norm()
