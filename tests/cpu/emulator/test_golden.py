"""Instructions on the emulator give what torch computes: tensor cores, swizzles, conversions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, emulated, function

pytestmark = library.needed

SOURCE = Path(__file__).with_name("golden.cu")
BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def kernel(name: str, signature: str) -> Callable[..., int]:
    return function(SOURCE, f"golden_{name}", signature)


def places(*tensors: Tensor) -> list[int]:
    return [t.data_ptr() for t in tensors]


def whole(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Small whole numbers: sums of products are exact."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_mma(dtype: torch.dtype) -> None:
    a, b, y = whole(16, 16, dtype=dtype), whole(8, 16, dtype=dtype), torch.zeros(16, 8)
    with emulated():
        assert kernel("mma", "pppll")(*places(a, b, y), dtype is F16, 0) == 0
    assert torch.equal(y, a.float() @ b.float().T)


def test_mma_of_bytes() -> None:
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randint(-128, 128, (rows, 32), generator=g).to(torch.int8) for rows in (16, 8))
    y = torch.zeros(16, 8, dtype=torch.int32)
    with emulated():
        assert kernel("mma_bytes", "pppl")(*places(a, b, y), 0) == 0
    assert torch.equal(y, 3 + a.int() @ b.int().T)


def test_nibbles_as_bytes() -> None:
    """Nibble q at an even place, then at an odd one: 16 (q - 8), by LOP3's table."""
    q = torch.randint(0, 16, (32, 4, 2), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    w, y = q[..., 0] | q[..., 1] << 4, torch.zeros(2, 32, 4, dtype=torch.int8)
    with emulated():
        assert kernel("nibbles", "ppll")(*places(w, y), 32, 0) == 0
    assert torch.equal(y.movedim(0, -1).int(), 16 * (q.int() - 8))


@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(transposed: bool) -> None:
    x = torch.arange(4 * 64, dtype=torch.int16).view(4, 8, 8)
    y, back = torch.zeros(4, 8, 8, dtype=torch.int16), torch.zeros_like(x)
    with emulated():
        assert kernel("matrices", "pppll")(*places(x, y, back), transposed, 0) == 0
    # Lane 4 r + c holds values 2 c and 2 c + 1 of row r: the registers of 32 lanes are the matrix.
    assert torch.equal(y, x.mT if transposed else x)
    assert torch.equal(back, x)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_wgmma_of_what_tensor_maps_load(transposed: bool, mode: str) -> None:
    a, b = whole(64, 64), whole(64, 128) if transposed else whole(128, 64)
    y, raw = torch.zeros(64, 128), torch.zeros(64, 8, 8, dtype=BF16)
    with emulated(mode=mode):
        assert kernel("wgmma", "pppplll")(*places(a, b, y, raw), transposed, 1, 0) == 0
    assert torch.equal(y, a.float() @ (b.float() if transposed else b.float().T))
    rows = torch.arange(64)[:, None]
    assert torch.equal(raw[rows, torch.arange(8) ^ rows % 8], a.view(64, 8, 8)), "chunk c of row r lies at c ^ r"


@pytest.mark.parametrize("mode", MODES)
def test_wgmma_of_bytes(mode: str) -> None:
    """Whole numbers of 8 bits on sums that begin as floats of 2^23; e4m3 with rows of a in registers."""
    g, first = torch.Generator().manual_seed(4), 0x4B400000
    a, b = (torch.randint(-128, 128, (n, 128), generator=g).to(torch.int8) for n in (64, 128))
    y = torch.zeros(64, 128, dtype=torch.int32)
    with emulated(mode=mode):
        assert kernel("wgmma_bytes", "ppplll")(*places(a, b, y), 1, first, 0) == 0
    want = a.double() @ b.double().T
    assert torch.equal(y, (want + first).int())
    assert torch.equal(y.view(torch.float32).double() - 12582912, want)
    a, b = (torch.randint(-8, 9, (n, 128), generator=g).to(E4M3) for n in (64, 128))
    with emulated(mode=mode):
        assert kernel("wgmma_bytes", "ppplll")(*places(a, b, y), 0, 0, 0) == 0
    assert torch.equal(y.view(torch.float32), a.float() @ b.float().T)


@pytest.mark.parametrize(
    ("x", "y", "width", "half"), [(0, 0, 64, 1), (48, 16, 64, 1), (16, -3, 32, 0), (80, 20, 48, 0)]
)
def test_tensor_maps_swizzle_and_give_zeros_outside(x: int, y: int, width: int, half: int) -> None:
    held = torch.randint(1, 256, (24, 96), generator=torch.Generator().manual_seed(x)).to(torch.uint8)
    raw = torch.zeros(2, 16, width // 16, 16, dtype=torch.uint8)
    with emulated(mode="random"):
        assert kernel("tensor", "pplllll")(*places(held, raw), x, y, width, half, 0) == 0
    padded = torch.zeros(24 + 32, 96 + 128, dtype=torch.uint8)
    padded[16 : 16 + 24, 64 : 64 + 96] = held
    want = padded[16 + y : 32 + y, 64 + x : 64 + x + width].reshape(16, -1, 16)
    if half:  # chunk c of row r lies at c ^ r / 2
        want = want[torch.arange(16)[:, None], torch.arange(4) ^ torch.arange(16)[:, None] // 2 % 4]
    assert torch.equal(raw[0], want)
    assert torch.equal(raw[1], want), "multicast"


def test_a_map_that_the_driver_would_refuse() -> None:
    held = torch.zeros(24, 96, dtype=torch.uint8)
    with emulated():
        assert kernel("tensor", "pplllll")(*places(held, held), 0, 0, 96, 1, 0) == -1, "a box wider than the swizzle"


def test_sums_that_are_read_before_the_wait_are_not_there() -> None:
    a, b, y, raw = whole(64, 64), whole(128, 64), torch.zeros(64, 128), torch.zeros(64 * 64, dtype=BF16)
    with emulated(mode="late"):
        assert kernel("wgmma", "pppplll")(*places(a, b, y, raw), 0, 0, 0) == 0
    assert not torch.equal(y, a.float() @ b.float().T)


def test_roundings() -> None:
    g = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1 << 16,), generator=g).int()
    near = torch.arange(0, 256, dtype=torch.uint8).view(E4M3).float()
    middles = torch.cat([near, (near[:-1] + near[1:]) / 2, torch.randn(4096, generator=g) * 100])
    x = torch.cat([bits.view(torch.float32), middles, -middles, torch.randn(4097, generator=g) * 1e-5])
    x = x[~x.isnan()]
    x = x[: len(x) // 2 * 2].contiguous()
    bf, half, e4m3 = (
        torch.zeros(len(x), dtype=BF16),
        torch.zeros(len(x), dtype=F16),
        torch.zeros(len(x), dtype=torch.uint8),
    )
    with emulated():
        assert kernel("numbers", "ppppll")(*places(x, bf, half, e4m3), len(x), 0) == 0
    assert torch.equal(bf, x.to(BF16))
    assert torch.equal(half, x.to(F16))
    assert torch.equal(e4m3, x.clamp(-448, 448).to(E4M3).view(torch.uint8))


def test_pairs() -> None:
    every, g = torch.arange(256, dtype=torch.uint8), torch.Generator().manual_seed(2)
    a = (torch.randn(3, 128, generator=g) * 3).to(BF16)
    halves, product, total = torch.zeros(256, dtype=F16), torch.zeros(128, dtype=BF16), torch.zeros(128, dtype=BF16)
    with emulated():
        assert kernel("pairs", "pppppl")(*places(every, halves, a, product, total), 0) == 0
    torch.testing.assert_close(halves, every.view(E4M3).to(F16), rtol=0, atol=0, equal_nan=True)
    exact = a[0].double() * a[1].double()
    assert torch.equal(product, exact.float().to(BF16))  # a product has 16 bits: exact as float
    assert torch.equal(total, (exact + a[2].double()).to(BF16)), "rounded once"
