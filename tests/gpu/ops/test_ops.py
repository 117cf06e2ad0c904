"""Every op against its reference on all its cases, on a GPU."""

from typing import Any

import pytest
import torch

from perilune.ops.harness import check, registry
from tests import ran

CUDA = torch.device("cuda", 0)
OPS = registry.all_ops()
GRID = [(name, case, dtype) for name, op in OPS.items() for case in check.cases(op, CUDA) for dtype in op.dtypes]

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@pytest.mark.parametrize(("name", "case", "dtype"), GRID, ids=[f"{n}-{c}-{check.short(d)}" for n, c, d in GRID])
def test_implementations_agree_with_the_reference(name: str, case: Any, dtype: torch.dtype) -> None:
    for verdict in check.check(OPS[name], case, dtype, CUDA):
        assert verdict.failed is None, f"{verdict.impl}: {verdict.failed}"


@pytest.mark.parametrize(("name", "case", "dtype"), GRID, ids=[f"{n}-{c}-{check.short(d)}" for n, c, d in GRID])
def test_what_ran_is_what_was_logged(
    name: str, case: Any, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    ran.what_ran_is_what_was_logged(OPS[name], case, dtype, CUDA, caplog)


@pytest.mark.parametrize("name", OPS)
def test_what_decides_decides(name: str) -> None:
    ran.what_decides_decides(OPS[name], CUDA)


def test_rows_are_sampled_alike_in_any_batch() -> None:
    op = OPS["sample"]
    case = next(c for c in op.cases if c.rows == 64 and c.mode == "mixed" and c.big)
    args = list(op.inputs(case, check.Make(torch.float32, CUDA, 5)).values())
    for impl in (c for c in op.candidates if op.refusal(c.name, args) is None):
        whole = impl.run(*args)
        some = torch.tensor([63, 5, 17], device=CUDA)
        assert torch.equal(impl.run(*(a[some] for a in args)), whole[some])
