"""The experts' CUDA kernels beyond their cases: what a token gets does not depend on who else is there."""

from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops import moe_int4
from perilune.ops.case import K2, NANO, Make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
CUDA = torch.device("cuda", 0)


def _run(args: dict[str, Any], rows: list[int]) -> Tensor:
    some = {name: a[rows] if name in ("x", "ids", "weights") else a for name, a in args.items()}
    y: Tensor = moe_int4.op.impls["cuda"].run(*{**some, "partial": True}.values())
    return y


@pytest.mark.parametrize("width", [K2.width, K2.width // 4])
@pytest.mark.parametrize("compact", [False, True])
def test_a_tokens_rows_do_not_depend_on_the_batch(width: int, compact: bool) -> None:
    """24 experts for 16 tokens: most are chosen by several, in segments of every size. A lone token is another path,
    and more than 8 are, where a compact checkpoint's shared expert is library calls of its own."""
    case = moe_int4.Case(16, K2.top_k, 24, K2.hidden, width, S=0 if compact else width, compact=compact)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 3))
    for whole, parts in (
        (list(range(8)), ([5, 3], [0, 7], [1, 2, 6], list(range(4)))),
        (list(range(16)), (list(range(9)), list(range(4, 16)))),
    ):
        y = _run(args, whole)
        assert y.isfinite().all()
        for rows in parts:
            assert torch.equal(_run(args, rows), y[rows]), f"{rows=}"


def test_a_choice_that_is_no_expert_is_passed_over() -> None:
    case = moe_int4.Case(4, NANO.top_k, NANO.experts, NANO.hidden, NANO.width)
    args = moe_int4.inputs(case, Make(torch.bfloat16, CUDA, 4))
    whole = _run(args, [0, 1, 2, 3])
    args["ids"][1, 0] = -1
    args["ids"][2, 1] = NANO.experts
    again = _run(args, [0, 1, 2, 3])
    kept = torch.ones(4, NANO.top_k, dtype=torch.bool)
    kept[1, 0] = kept[2, 1] = False
    assert torch.equal(again[kept], whole[kept])
