"""Every CUDA kernel of the ops on the emulator, in every mode: `make emulate`. Takes tens of minutes on two cores.

The small cases of an op, as for CPUs; and for kernels that take only Kimi K2's sizes, single big cases.
"""

from typing import Any

import pytest
import torch

from perilune.ops.harness import check, registry
from perilune.ops.moe import moe_int4
from tests.cpu.emulator import test_kernels
from tests.cpu.ops import test_moe_int4_cluster
from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated
from tests.gpu.ops import test_moe_int4 as one_token

pytestmark = library.needed

CPU = torch.device("cpu")
OPS = registry.all_ops()
SMALL = [
    (name, impl, case)
    for name, op in OPS.items()
    for impl in op.impls
    if impl.startswith("cuda")
    for case in check.cases(op, CPU)
]
EIGHTH = "H=8, R=512, r=64, v=128, block_size=64, narrow=False, scale=1.0, rows=0, packed=False, D=7168, fp8=True"
# (op, implementation, text in the case's repr, SMs): the first such case
BIG = [
    ("add_rmsnorm", "cuda_many", "T=700", 8),
    ("linear", "cuda_many", "T=1, i=7168", 16),
    ("linear_fp8", "cuda_many", "T=1, i=7168", 16),
    ("linear_w8a8", "cuda", "T=129", 16),
    ("mla_decode", "cuda", "contexts=(1,), H=64", 16),
    ("mla_decode_output", "cuda", "contexts=(130,), H=8", 132),
    ("mla_decode_output", "cuda_mma", EIGHTH, 132),
    ("mla_decode_output", "cuda_mma", "counts=(4,), contexts=(1024,), H=16", 132),
    ("mla_decode_output", "cuda_mma", "contexts=(14001,), H=16", 132),
    ("mla_decode_router", "cuda", "contexts=(1,), H=8", 132),
    ("mla_decode_router", "cuda_mma", EIGHTH, 132),
    ("mla_decode_output", "cuda_mma", "counts=(4,), contexts=(1024,), H=64", 132),
    ("mla_merge_output", "cuda_mma", "T=3, H=32", 132),
    ("mla_merge_router", "cuda", "against=True, ties=False, ranks=2", 132),
    ("mla_pre_attention", "cuda", "T=1, H=8", 132),
    ("mla_pre_attention", "cuda", "T=2, H=16", 132),
    ("mla_prefill", "cuda", "counts=(512,)", 8),
    ("mla_prefill", "cuda", "contexts=(12000,), H=5", 8),
    ("mla_prefill_w8a8", "cuda", "contexts=(12000,), H=5", 8),
    ("mla_project_query", "cuda", "T=4, H=8", 16),
    ("moe_int4", "cuda", "T=1, k=8, E=48, D=7168, I=512", 132),
    ("moe_int4", "cuda", "T=1, k=8, E=48, D=7168, I=256, to_one=False, S=256, shared_fp8=True, compact=True", 132),
    ("moe_int4", "cuda_prefill", "T=600, k=2", 4),
    ("moe_int4", "cuda_prefill", "T=333", 4),
    ("rmsnorm_linear", "cuda", "T=1, i=1536", 16),
    ("router", "cuda", "T=1, D=7168", 16),
    ("router", "cuda_many", "T=64, D=7168", 16),
]


# Small cases for ops that have only large ones
OWN = [
    ("moe_int4", "cuda_tall", moe_int4.Case(130, 2, 4, 512, 256)),
    *(
        ("moe_int4", "cuda", moe_int4.Case(t, 8, 24, 512, width, S=width, shared_fp8=True, compact=compact))
        for t, width in ((4, 256), (8, 512))  # more tokens: another kernel computes the shared expert
        for compact in (False, True)
    ),
    *(
        ("moe_int4", "cuda", moe_int4.Case(1, 8, 24, 1792, width, S=S, shared_fp8=compact, compact=compact))
        for width, S in ((256, 256), (1024, 0), (1024, 512))
        for compact in (False, True)
    ),
    *(("moe_int4", "cuda_cluster", case) for case in test_moe_int4_cluster.CASES),
]


def run(name: str, impl: str, case: Any, mode: str, sms: int) -> bool:
    """Whether the implementation takes the case."""
    op = OPS[name]
    with emulated(sms=sms, mode=mode, seed=MODES.index(mode), overlap=mode == "random"):
        (outcome,) = check.check(op, case, op.dtypes[-1], CPU, [impl])
    assert outcome.failed is None, outcome.failed
    assert outcome.refused is None or "does not compile" not in outcome.refused, outcome.refused
    return outcome.refused is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "impl", "case"), SMALL, ids=[f"{n}/{i}-{c}" for n, i, c in SMALL])
def test_small_cases(name: str, impl: str, case: Any, mode: str) -> None:
    if not run(name, impl, case, mode, 4):
        pytest.skip("not for this case")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "impl", "case"), OWN)
def test_own_cases(name: str, impl: str, case: Any, mode: str) -> None:
    assert run(name, impl, case, mode, 4), f"{case} was refused"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "impl", "text", "sms"), BIG)
def test_big_cases(name: str, impl: str, text: str, sms: int, mode: str) -> None:
    case = next(c for c in OPS[name].cases if text in repr(c))
    assert run(name, impl, case, mode, sms), f"{case} was refused"


def test_one_token_whose_choices_are_no_experts() -> None:
    with emulated(sms=4):
        one_token.check_passed_over(CPU)


@pytest.mark.parametrize("factor", one_token.FACTORS)
def test_one_token_of_any_magnitude(factor: float) -> None:
    with emulated(sms=4):
        one_token.check_magnitude(factor, CPU)


@pytest.mark.parametrize("mode", MODES)
def test_exchanges(mode: str) -> None:
    test_kernels.test_ranks_exchange_in_one_process(30, mode)
    for ranks, tokens, width in ((4, 37, 512), (2, 300, 128)):
        test_kernels.test_ranks_exchange_what_tokens_get_from_experts(mode, ranks, tokens, width)
