"""Launches that overlap, and what kernels rely on beyond CUDA's promises."""

import dataclasses

import pytest
import torch

from perilune.ops.harness import check, registry
from perilune.ops.harness.case import BFLOAT16, Make, clone
from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated, together

pytestmark = library.needed

CPU = torch.device("cpu")
OPS = registry.all_ops()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_experts_begin_while_the_router_runs(mode: str, joined: bool) -> None:
    """One token: gate_up reads x and the ids from the router's mailbox (cuda/router_mailbox.cuh). joined: widths for
    which gate_up and down are one launch."""
    router, experts = OPS["router"], OPS["moe_int4"]
    case = next(c for c in experts.cases if c.T == 1 and c.D == 384 and c.S and not c.compact)
    if joined:
        case = dataclasses.replace(case, D=1792, I=256, S=256)
    args = experts.inputs(case, Make(BFLOAT16, CPU, 1))
    x, g = args.pop("x"), torch.Generator().manual_seed(4)
    gate, bias = torch.randn(case.E, case.D, generator=g).to(BFLOAT16), torch.randn(case.E, generator=g)
    routing = router.inputs(next(c for c in router.cases if c.k == case.k and c.E == case.E), Make(BFLOAT16, CPU, 1))
    chosen = router.reference(x, gate, bias, routing["routing"])
    args["partial"] = True  # else torch sums the parts, before the launches have run
    rest = list(args.values())[1:]
    want = experts.reference(x, chosen, *rest)
    with emulated(sms=16, mode=mode, seed=2, overlap=True):
        for _ in range(3):  # the mailbox serves launch after launch
            with together():
                found = router.impls["cuda"].run(x, gate, bias, routing["routing"])
                assert found.publication is not None
                y = experts.impls["cuda"].run(x, found, *rest)
            assert torch.equal(found.ids.sort().values, chosen.ids.sort().values)
            tol = check.tolerances(experts, case, BFLOAT16)["y"]
            assert check.difference(y.sum(1, keepdim=True), want, tol) is None


def test_ctas_agree_on_a_plan_whatever_the_order_of_atomics() -> None:
    """Each CTA groups all pairs for itself, and CUDA promises no order among the atomics of a warp's lanes."""
    op = OPS["moe_int4"]
    case = next(c for c in op.cases if c.T == 33 and c.k == 1)
    args = op.inputs(case, Make(BFLOAT16, CPU, 1))
    with emulated(shuffle=True):
        got = check.outputs(op, op.impls["cuda"], clone(args))["y"]
    want = op.reference(*clone(args).values())
    assert check.difference(got.sum(1, keepdim=True), want, check.tolerances(op, case, BFLOAT16)["y"]) is None
