"""Launches that overlap, and what kernels rely on beyond CUDA's promises."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.exchange import exchange_add_rmsnorm
from perilune.ops.exchange.peers import HALF_BYTES, Mailboxes, Peers
from perilune.ops.harness import check, registry, workspace
from perilune.ops.harness.case import BFLOAT16, Make, clone
from perilune.ops.layouts.operands import Norm
from perilune.ops.moe import add_norm_router, moe_int4, router
from perilune.ops.moe.chosen import Chosen
from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated, stream, together

pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason=f"the emulator needs a compiler: {library.missing()}"
)

CPU = torch.device("cpu")
OPS = registry.all_ops()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["cuda", "cuda_eager", "cuda_beside"])
def test_experts_begin_while_the_router_runs(name: str, mode: str) -> None:
    """One token: gate_up reads x and the ids from the router's mailbox (cuda/router_mailbox.cuh)."""
    router, experts = OPS["router"], OPS["moe_int4"]
    case = next(c for c in experts.cases if c.T == 1 and c.D == 384 and c.S and not c.compact)
    args = experts.inputs(case, Make(BFLOAT16, CPU, 1))
    x, g = args.pop("x"), torch.Generator().manual_seed(4)
    gate, bias = torch.randn(case.E, case.D, generator=g).to(BFLOAT16), torch.randn(case.E, generator=g)
    routing = router.inputs(next(c for c in router.cases if c.k == case.k and c.E == case.E), Make(BFLOAT16, CPU, 1))
    chosen = router.reference(x, gate, bias, routing["routing"])
    args["partial"] = True  # the sum of the parts is torch's, which would read them before the launches have run
    rest = list(args.values())[1:]
    want = experts.reference(x, chosen, *rest)
    with emulated(sms=20, mode=mode, seed=2, overlap=True):
        for _ in range(3):  # the mailbox serves launch after launch
            with together():
                found = router.impls["cuda"].run(x, gate, bias, routing["routing"])
                assert found.publication is not None
                y = experts.impls[name].run(x, found, *rest)
            assert torch.equal(found.ids.sort().values, chosen.ids.sort().values)
            tol = check.tolerances(experts, case, BFLOAT16)["y"]
            assert check.difference(y.sum(1, keepdim=True), want, tol) is None


def _routed(T: int, E: int, seed: int) -> dict[str, Any]:
    case = add_norm_router.Case(T, 2 * add_norm_router.PART, E, add_norm_router.CHOICES)
    args = add_norm_router.inputs(case, Make(BFLOAT16, CPU, 1))
    return args | {
        name: Make(BFLOAT16, CPU, seed).randn(T, case.D, scale=0.1) + args[name] for name in ("residual", "y")
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eager", [2, 40])
def test_experts_begin_while_several_tokens_choose(mode: str, eager: int) -> None:
    """gate_up may start, and read x, as soon as add_norm_router has written x."""
    case = moe_int4.Case(4, add_norm_router.CHOICES, 80, 2 * add_norm_router.PART, 128, S=128)
    rest = [v for name, v in moe_int4.inputs(case, Make(BFLOAT16, CPU, 1)).items() if name not in ("x", "chosen")]
    rest[-1] = True  # partial
    with emulated(sms=16, mode=mode, seed=2, overlap=True, eager=eager):
        for seed in range(2):
            args = _routed(case.T, case.E, seed)
            residual, apart = args["residual"].clone(), args["residual"].clone()
            with together():
                x, chosen = add_norm_router.op.impls["cuda"].run(*(args | {"residual": residual}).values())
                y = moe_int4.op.impls["cuda"].run(x, chosen, *rest)
            want = exchange_add_rmsnorm.add_norm_reference(apart, args["y"], args["norm"])
            assert torch.equal(residual, apart) and (x - want).abs().max() < 0.1
            gate = args["gate"]
            found = router.op.impls["cuda"].run(x, gate.weight, gate.bias, gate.routing)
            assert torch.equal(chosen.ids, found.ids) and torch.allclose(chosen.weights, found.weights, rtol=1e-4)
            late = moe_int4.op.impls["cuda"].run(x, Chosen(chosen.ids, chosen.weights), *rest)
            assert torch.equal(y, late)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_choose_in_any_order(ranks: int, mode: str) -> None:
    """Each rank is a stream. Other launches use the same places of the mailboxes between: all count the same epochs."""
    memory = [torch.zeros(2 * ranks * HALF_BYTES, dtype=torch.uint8) for _ in range(ranks)]
    boxes = [Mailboxes(r, [m.data_ptr() for m in memory], CPU, 3600.0) for r in range(ranks)]
    launches = [(4, True), (2, False), (4, False), (3, True), (8, True), (2, True), (8, False), (5, True)]
    given = [_routed(T, 180, n) for n, (T, _) in enumerate(launches)]
    parts = [Make(BFLOAT16, CPU, n).randn(ranks, *args["y"].shape, scale=0.1) for n, args in enumerate(given)]
    held = [[args["residual"].clone() for args in given] for _ in range(ranks)]
    made: list[list[tuple[Tensor, Chosen | None]]] = [[] for _ in range(ranks)]
    with emulated(sms=8 * ranks, mode=mode, seed=ranks, overlap=True, eager=24), together():
        for r in range(ranks):
            peers = Peers(r, ranks, torch.clone, boxes[r])
            with stream(r + 1), workspace.owned():
                for n, ((_, routes), args) in enumerate(zip(launches, given)):
                    norm, own = replace(args["norm"], peers=peers), parts[n][r]
                    if routes:
                        made[r].append(add_norm_router.op.impls["cuda"].run(held[r][n], own, norm, args["gate"]))
                    else:
                        y = exchange_add_rmsnorm.cuda(held[r][n], own, norm.weight, norm.eps, peers)
                        made[r].append((y, None))
    for n, args in enumerate(given):
        want = args["residual"].clone()
        norm: Norm = replace(args["norm"], peers=Peers(0, ranks, lambda own, n=n: parts[n]))
        x, chosen = add_norm_router.reference(want, parts[n][0], norm, args["gate"])
        for r in range(ranks):
            found, experts = made[r][n]
            assert torch.equal(held[r][n], want), (n, r)
            assert torch.equal(found, made[0][n][0]) and (found - x).abs().max() < 0.1
            assert experts is None or torch.equal(experts.ids, chosen.ids)


def test_ctas_agree_on_a_plan_whatever_the_order_of_atomics() -> None:
    """Each CTA groups all pairs for itself, and CUDA promises no order among the atomics of a warp's lanes."""
    op = OPS["moe_int4"]
    case = next(c for c in op.cases if c.T == 33 and c.k == 1)
    args = op.inputs(case, Make(BFLOAT16, CPU, 1))
    with emulated(shuffle=True):
        got = check.outputs(op, op.impls["cuda"], clone(args))["y"]
    want = op.reference(*clone(args).values())
    assert check.difference(got.sum(1, keepdim=True), want, check.tolerances(op, case, BFLOAT16)["y"]) is None
