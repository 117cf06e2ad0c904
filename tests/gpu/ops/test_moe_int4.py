"""The experts' CUDA kernels beyond their cases: what a token gets does not depend on who else is there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.harness import workspace
from perilune.ops.harness.case import K2, NANO, Make
from perilune.ops.layouts.operands import Routing
from perilune.ops.moe import moe_int4, router
from perilune.ops.moe.chosen import Chosen

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CUDA = torch.device("cuda", 0)
FACTORS = [2.0**-30, 1.0, 2.0**20]


def _run(args: dict[str, Any], rows: list[int]) -> Tensor:
    """Of some rows; of all if `rows` is empty."""
    some = dict(args)
    if rows:
        some |= {"x": args["x"][rows], "chosen": Chosen(args["chosen"].ids[rows], args["chosen"].weights[rows])}
    y: Tensor = moe_int4.op.impls["cuda"].run(*{**some, "partial": True}.values())
    return y


@pytest.mark.parametrize("width", [K2.width, K2.width // 4])
@pytest.mark.parametrize("compact", [False, True])
def test_a_tokens_rows_do_not_depend_on_the_batch(width: int, compact: bool) -> None:
    """24 experts for 16 tokens: most are chosen by several, in segments of every size. A lone token is another path."""
    case = moe_int4.Case(16, K2.top_k, 24, K2.hidden, width, S=width, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 3))
    y = _run(args, list(range(16)))
    assert y.isfinite().all()
    for rows in ([5, 3], [0, 15], [1, 2, 6], list(range(4)), list(range(8)), list(range(9)), list(range(4, 16))):
        assert torch.equal(_run(args, rows), y[rows]), f"{rows=}"


@pytest.mark.parametrize("tokens", [4, 20])
def test_a_choice_that_is_no_expert_is_passed_over(tokens: int) -> None:
    """Up to 32 pairs are grouped in another way than more."""
    case = moe_int4.Case(tokens, NANO.top_k, NANO.experts, NANO.hidden, NANO.width)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 4))
    whole = _run(args, list(range(tokens)))
    args["chosen"].ids[1, 0] = -1
    args["chosen"].ids[2, 1] = NANO.experts
    again = _run(args, list(range(tokens)))
    kept = torch.ones(tokens, NANO.top_k, dtype=torch.bool)
    kept[1, 0] = kept[2, 1] = False
    assert torch.equal(again[kept], whole[kept])


@pytest.mark.parametrize(
    ("tokens", "compact", "fp8"),
    [(8, False, True), (16, False, False), (16, False, True), (16, True, True), (64, False, False), (200, True, False)],
)
def test_the_same_again_gives_the_same_bits(tokens: int, compact: bool, fp8: bool) -> None:
    """Where products outlast the copies the ring is full, and what is refilled under those who still read it shows."""
    S = K2.width if tokens <= moe_int4.MAX_SHARED else 0
    case = moe_int4.Case(tokens, K2.top_k, 48, K2.hidden, K2.width, S=S, shared_fp8=fp8, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 5))
    first = _run(args, list(range(tokens)))
    for _ in range(40):
        assert torch.equal(_run(args, list(range(tokens))), first)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("tokens", "width"), [(1, 256), (1, 512), (1, 1024), (2, 512), (4, 512), (4, 256), (8, 256)])
def test_one_launch_gives_the_bits_of_two(tokens: int, width: int, compact: bool) -> None:
    """In a graph, so that launches follow each other closely: counters of finished tiles are used by turns."""
    case = moe_int4.Case(tokens, K2.top_k, 96, K2.hidden, width, S=width, shared_fp8=True, compact=compact)
    many = [moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 7))]
    for seed in range(6):
        many.append(many[0] | {"chosen": moe_int4.chosen(case, Make(torch.bfloat16, CUDA, seed))})
    with workspace.Workspaces(alone=False).use():
        wanted = [_run(args, []).clone() for args in many]
    with workspace.owned():
        _run(many[0], [])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [_run(args, []) for args in many]
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(y, w) for y, w in zip(found, wanted))
        del graph


@pytest.mark.parametrize(("tokens", "experts"), [(128, 384), (300, 48), (512, 384), (512, 3)])
def test_tall_tiles_give_the_bits_of_the_others_each_time(tokens: int, experts: int) -> None:
    """Rings of weights and of activations that do not wait for each other, and work from a counter: a wait too few
    shows as other bits, one too many as a hang. 3 experts: more pairs of one than a tile takes."""
    case = moe_int4.Case(tokens, min(8, experts), experts, K2.hidden, K2.width // 4)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 6))
    wanted = moe_int4.op.impls["cuda_prefill"].run(*args.values())
    for _ in range(20):
        assert torch.equal(moe_int4.op.impls["cuda_tall"].run(*args.values()), wanted)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(1, 384), (128, 384), (300, 48), (2000, 384), (512, 3)])
def test_clusters_give_the_bits_of_the_others_each_time(tokens: int, experts: int, compact: bool) -> None:
    """Rings that two CTAs fill for each other: a wait too few shows as other bits, one too many as a hang."""
    case = moe_int4.Case(tokens, min(8, experts), experts, K2.hidden, K2.width // 4, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 6))
    wanted = moe_int4.op.impls["cuda_prefill"].run(*args.values())
    for _ in range(20):
        assert torch.equal(moe_int4.op.impls["cuda_cluster"].run(*args.values()), wanted)


def check_passed_over(device: torch.device) -> None:
    """One token in one launch: a CTA's units of down depend on the number of ids that are experts."""
    case = moe_int4.Case(1, 4, 9, 1792, 256, S=256, shared_fp8=True, compact=True)
    args = moe_int4.inputs(case, Make(torch.bfloat16, device, 4))
    ids = args["chosen"].ids[0]
    with workspace.owned():
        whole = _run(args, []).clone()
        ids[0], ids[2] = -1, case.E
        assert torch.equal(_run(args, [])[0, [1, 3, 4]], whole[0, [1, 3, 4]])
        ids[:] = -1
        assert torch.equal(_run(args, [])[0, 4], whole[0, 4])


def test_a_lone_token_passes_over_a_choice_that_is_no_expert() -> None:
    check_passed_over(CUDA)


def check_magnitude(factor: float, device: torch.device) -> None:
    """One token's x and h are multiplied in fixed point, a scale for 32 values: x has groups of zeros, of one value
    1,000 times the others, and of values that differ by 2^12. The shared expert takes magnitudes below 2^47 only
    (int4_mma.cuh), which h exceeds at 2^20."""
    case = moe_int4.Case(1, 2, 4, 1792, 256, S=256)
    args = moe_int4.inputs(case, Make(torch.bfloat16, device, 9))
    x = args["x"][0]
    x[64:96] = 0
    x[128] *= 1000
    x[256:288] *= torch.logspace(0, -12, 32, base=2.0, dtype=x.dtype, device=device)
    x *= factor
    alone = args | {"shared": None}
    for given in [alone] if factor > 1 else [alone, args]:
        y, wanted = moe_int4.op.impls["cuda"].run(*given.values()), moe_int4.reference(*given.values())
        assert (y - wanted).norm() < 0.01 * wanted.norm()
    x[:] = 0
    assert not moe_int4.op.impls["cuda"].run(*alone.values()).any()
    x[700] = float("inf")
    assert not moe_int4.op.impls["cuda"].run(*alone.values()).isfinite().any()


@pytest.mark.parametrize("factor", FACTORS)
def test_one_token_of_any_magnitude(factor: float) -> None:
    check_magnitude(factor, CUDA)


@pytest.mark.parametrize("width", [K2.width, K2.width // 8])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_choice_that_is_published(fp8: bool, width: int) -> None:
    """In a graph, where the experts start before x is there: the same bits as those of a call that waits."""
    case = moe_int4.Case(1, K2.top_k, 24, K2.hidden, width, S=width, shared_fp8=fp8)
    make = Make(torch.bfloat16, CUDA, 5)
    args = moe_int4.inputs(case, make)
    gate, bias = make.randn(case.E, case.D, scale=case.D**-0.5), torch.zeros(case.E, device=CUDA)
    given = args["x"].clone()

    def step() -> tuple[Tensor, Chosen, Tensor]:
        x = given * 2
        chosen = router.op.impls["cuda"].run(x, gate, bias, Routing(case.k, 1, 1, 1.0, True))
        assert chosen.publication is not None and chosen.publication.number > 0
        return x, chosen, _run({**args, "x": x, "chosen": chosen}, [])

    graph = torch.cuda.CUDAGraph()
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x, chosen, y = step()
    for seed in range(5):
        given.copy_(Make(torch.bfloat16, CUDA, seed).randn(1, case.D))
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x, given * 2) and y.isfinite().all()
        assert torch.equal(_run({**args, "x": x, "chosen": Chosen(chosen.ids, chosen.weights)}, []), y)
