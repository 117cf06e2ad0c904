"""On a GPU, merged parts of a sharded KV cache are attention over the whole, and a graph gives the same bits."""

from typing import Any

import pytest
import torch

from perilune.ops.attention import mla_decode_partial
from perilune.ops.harness import check
from perilune.ops.harness.case import BFLOAT16, K2, Make
from tests.cpu.ops.test_mla_decode_partial import parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("ranks", "counts", "contexts"),
    [
        *((ranks, [1], [c]) for ranks in (2, 4, 8) for c in (1, 100, 5000)),
        (2, [4], [100_000]),
        (2, [4, 1, 3, 1], [35, 3000, 3, 70]),
        (4, [1] * 64, list(range(20, 20 + 64 * 37, 37))),
    ],
)
def test_merged_parts_are_the_whole(ranks: int, counts: list[int], contexts: list[int], packed: bool) -> None:
    g = Make(BFLOAT16, CUDA, 3)
    found, expected = parts(g, ranks, counts, contexts, K2.heads, tokens=64, packed=packed)
    got = torch.cat(found, 1).float()
    assert bool(((got - expected.float()).abs() <= 2e-2 + 2e-2 * expected.float().abs()).all())
    assert (got - expected.float()).norm() <= 1e-2 * expected.float().norm()


def test_a_graph_follows_contexts_that_grow() -> None:
    op = mla_decode_partial.op
    case: Any = next(c for c in op.cases if c.contexts == (2560,) * 4)
    args = op.inputs(case, Make(BFLOAT16, CUDA, 1))
    run = op.impls["cuda"].run
    run(*args.values())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = run(*args.values())
    for contexts in ((2560, 1, 0, 700), (64, 65, 63, 2000)):
        args["span"].context.copy_(torch.tensor(contexts, dtype=torch.int32))
        graph.replay()
        want_o, want_lse = run(*args.values())
        assert check.same_bits(o, want_o) and check.same_bits(lse, want_lse)
        right = op.reference(*args.values())
        assert check.difference(lse, right[1], op.tol["lse"][BFLOAT16]) is None
        assert check.difference(o.contiguous(), right[0], op.tol["o"][BFLOAT16]) is None
