"""The streams of weights (linear.cu): rows of any size against e4m3 weights, and a row's independence of the others."""

import pytest
import torch

from perilune.ops.harness.case import BFLOAT16
from perilune.ops.linear.linear import run_streamed
from perilune.ops.linear.linear_fp8 import quantize_rows

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="for Hopper GPUs"
)


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")


@pytest.mark.parametrize("size", (1e-37, 1e-30, 1e-6, 1.0, 1e30))
def test_e4m3_weights_meet_rows_of_any_size(size: float) -> None:
    x = rows(5, 2048, 1)
    x[:, 7] *= 300  # one value far above the others
    x[3] = 0
    x = (x * size).to(BFLOAT16)
    w, scale = quantize_rows(rows(512, 2048, 2) * 2048**-0.5)
    want = x.double() @ (w.double() * scale.double().unsqueeze(1)).T
    got = run_streamed(x, w, True, scale=scale).double()
    assert not got[3].any()
    assert (got - want).norm() <= 2e-6 * want.norm()


@pytest.mark.parametrize("kind", ("bfloat16", "e4m3"))
@pytest.mark.parametrize("normed", (False, True))
def test_a_row_does_not_depend_on_the_others(kind: str, normed: bool) -> None:
    x, w, scale = rows(16, 1536, 3).to(BFLOAT16), rows(264, 1536, 4) * 1536**-0.5, None
    x[9] *= 1e4
    w, scale = quantize_rows(w) if kind == "e4m3" else (w.to(BFLOAT16), None)
    norm = rows(1, 1536, 5)[0].to(BFLOAT16) if normed else None
    together = run_streamed(x, w, True, scale=scale, norm=norm, eps=1e-6)
    for count in (1, 2, 4, 5, 8, 9, 13):
        some = run_streamed(x[3 : 3 + count], w, True, scale=scale, norm=norm, eps=1e-6)
        assert torch.equal(some, together[3 : 3 + count]), count


def test_larger_copies_of_a_long_matrix_give_the_same_rows() -> None:
    x = rows(5, 7168, 8).to(BFLOAT16)
    w = (rows(67584, 7168, 9) * 7168**-0.5).to(BFLOAT16)
    together = run_streamed(x, w, True)  # five rows take copies of 256 bytes, up to four take 448
    want = x.double() @ w.double().T
    assert (together.double() - want).norm() <= 1e-5 * want.norm()
    for first, count in ((0, 1), (1, 4)):
        assert torch.equal(run_streamed(x[first : first + count], w, True), together[first : first + count]), count


@pytest.mark.parametrize("width", (7168, 8192))
def test_rows_split_between_two_processors_are_the_same_rows(width: int) -> None:
    x, w = rows(8, width + 8, 6).to(BFLOAT16)[:, :width], (rows(2120, width, 7) * width**-0.5).to(BFLOAT16)
    together = run_streamed(x, w, True)
    want = x.double() @ w.double().T
    assert (together.double() - want).norm() <= 1e-5 * want.norm()
    for first, count in ((0, 1), (3, 4), (2, 5), (1, 6)):
        assert torch.equal(run_streamed(x[first : first + count], w, True), together[first : first + count]), count
