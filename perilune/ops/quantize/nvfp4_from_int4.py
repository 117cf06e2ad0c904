"""Converts INT4 weights to NVFP4, with nearly the smallest squared error that e4m3 block scales allow.

packed [o, i / 8] int32 and scale [o, i / 32] bfloat16 as checkpoints hold INT4 (element 2b of a row in the low nibble
of byte b, plus 8); exponent, an integer above log2 of the largest scale minus 7; often [i] uint8, 1 to 15, or None: the
weight of the error at each input, relative to the 15 others of its block. Returns
values [o, i / 2] uint8    e2m1 codes, element 2b in the low nibble
steps  [o, i / 16] float8_e4m3fn: W = e2m1 * steps * 2 ** exponent
energy [o, 2] float64      of each row: the sum of squares of the INT4 weights, and of the errors against them
i is a multiple of 32; scales are finite and not negative. Weights with a scale below 2 ** (exponent - 11) become 0:
e4m3 has no steps that small.

Why this is exact and fast: INT4 weights are q * s. With a power of two as the matrix's scale, the ratio of a block
scale to s depends only on s's seven mantissa bits and the candidate, so the cost of a whole block is a sum over nine
levels of (how often the level occurs) x (a table's entry). 32 candidates cover 1/4 to 7 times s, beyond which
none can win. Table entries are whole numbers of 2 ** -14 step^2 and sums of 16 of them are exact in float32: every
implementation decides alike, ties going to the smaller step. The codes come from a second table, nibble to nibble.

With `often`, sums of 16 become sums of up to 240, and the costs are rounded 16 times coarser.

The cost is the squared error plus a small bias term: rounding with the smallest squared error shrinks weights by 0.6 %
(the error e is orthogonal to the result, so w . e < 0). Unlike the rest of the error, the shrinkage adds up over the
inputs of a layer and over layers. The term TILT * 2 w . e removes it and costs 0.02 dB.

"cpp" takes 0.06 s for one of Kimi K2's expert matrices on two cores. "cuda", with a lane for every candidate, takes 0.4
ms on an H200; the reference, with a gather and a sum per level, 10 ms.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from perilune.core.cost import Cost
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, EXACT, K2, NANO, Make, Sized, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses

GROUP, BLOCK = 32, 16
CANDIDATES = 32  # block scales to try: four octaves of eight e4m3 mantissas, from half of s's power of two on
LOWEST, HIGHEST = -11, 6  # powers of two of s, relative to the exponent, for which a candidate exists
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UNIT = 2.0**-14  # unit of the error table, in squared INT4 steps
MOST = 2**19 - 1  # largest table entry: 16 of them, plus PRICE for a scale that e4m3 cannot hold, stay below 2 ** 24
PRICE = 2.0**23
OFTEN = 15  # largest weight of an input in `often`
COARSE = 16
TILT = 0.005
CHUNK = 1 << 16  # blocks that the reference works on at once, 60 MB; 16 times as many on a GPU


@dataclass(frozen=True)
class Case(Sized):
    o: int
    i: int
    exponent: int = -9  # scales come out between 2 ** -9 and 2 ** -3
    octaves: int = 6
    weighed: bool = False


CASES = [
    Case(K2.width, K2.hidden, big=True),
    Case(K2.hidden, K2.width, big=True),
    Case(NANO.width, NANO.hidden),
    Case(NANO.hidden, NANO.width, octaves=20),
    Case(0, 64),
    Case(1, 32),
    Case(5, 96, octaves=0),
    Case(K2.width, K2.hidden, weighed=True, big=True),
    Case(NANO.hidden, NANO.width, octaves=20, weighed=True),
    Case(3, 32, weighed=True),
]
_ENERGY = Tol(1e-300, 1e-12, 1e-12, "double sums in another order")
TOL = {"values": {BFLOAT16: EXACT}, "steps": {BFLOAT16: EXACT}, "energy": {BFLOAT16: _ENERGY}}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    packed = g.integers(-(2**31), 2**31, c.o, c.i // 8, dtype=torch.int32)
    # Bits of positive bfloat16 numbers of the top octaves below 2 ** (exponent + 7), any mantissa; a few zeros.
    top = (c.exponent + HIGHEST + 127 + 1) << 7
    bits = g.integers(top - 128 * max(c.octaves, 1), top, c.o, c.i // GROUP, dtype=torch.int32)
    bits *= g.integers(0, 50, c.o, c.i // GROUP, dtype=torch.int32) > 0
    often = g.integers(1, OFTEN + 1, c.i, dtype=torch.uint8) if c.weighed else None
    return {"packed": packed, "scale": bits.to(torch.int16).view(BFLOAT16), "exponent": c.exponent, "often": often}


def cost(c: Case, dtype: torch.dtype) -> Cost:
    blocks = c.o * c.i / BLOCK
    return Cost(2 * 8 * CANDIDATES * blocks, c.o * c.i * (0.5 + 2 / GROUP + 0.5 + 1 / BLOCK))


@dataclass(frozen=True, slots=True)
class Tables:
    """cost, coarse and error [128, 9, 32] float32: of a level (absolute value), by s's mantissa and candidate; the
    candidate of least cost (coarse, with `often`) wins. codes [128, 32, 16] uint8: e2m1, for each INT4 nibble. price
    [18, 32] float32 (0; PRICE if e4m3 lacks the scale) and byte [18, 32] uint8 (e4m3): of a candidate, by s's power of
    two from LOWEST on.
    """

    cost: Tensor
    coarse: Tensor
    error: Tensor
    codes: Tensor
    price: Tensor
    byte: Tensor

    def to(self, device: torch.device) -> "Tables":
        return Tables(*(getattr(self, field.name).to(device) for field in fields(self)))


def tables(device: torch.device) -> Tables:
    if device.type == "cpu":
        return _tables()
    return workspace.current(device).kept("nvfp4_from_int4.tables", lambda: _tables().to(device))


@functools.cache
def _tables() -> Tables:
    wide = torch.float64
    mantissa = 1 + torch.arange(128, dtype=wide) / 128
    k = torch.arange(CANDIDATES)
    candidate = (1 + (k % 8) / 8).to(wide) * torch.exp2((k // 8 - 1).to(wide))
    ratio = (candidate / mantissa[:, None]).unsqueeze(-1)  # [128, 32, 1]: the candidate in INT4 steps
    numbers = torch.tensor(E2M1, dtype=wide)

    def cheapest(levels: Tensor) -> Tensor:
        return (levels * (1 + TILT) / ratio).unsqueeze(-1).sub(numbers).abs().argmin(-1)

    level = torch.arange(9, dtype=wide)
    change = numbers[cheapest(level)] * ratio - level
    error = change.square()
    cost = error - 2 * TILT * level * change
    cost -= cost.amin(1, keepdim=True)  # the same for all candidates, so that none is negative
    q = torch.arange(16, dtype=wide) - 8
    codes = cheapest(q.abs()) | (q < 0).long() << 3
    codes[(codes == 8)] = 0  # no negative zeros

    power = torch.arange(LOWEST, HIGHEST + 1, dtype=wide)
    wanted = torch.exp2(power)[:, None] * candidate
    stored = wanted.clamp(max=448).to(torch.float8_e4m3fn)
    price = torch.where(stored.to(wide) == wanted, 0.0, PRICE)

    def whole(x: Tensor, coarse: int = 1) -> Tensor:
        units = (x / (UNIT * coarse)).round().clamp(max=MOST // coarse)
        return units.transpose(1, 2).float().contiguous()

    return Tables(
        whole(cost),
        whole(cost, COARSE),
        whole(error),
        codes.to(torch.uint8),
        price.float(),
        stored.view(torch.uint8),
    )


def reference(packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    (o, words), device = packed.shape, packed.device
    t = tables(device)
    cost = t.cost if often is None else t.coarse
    nibbles = packed.contiguous().view(torch.uint8).view(-1, BLOCK // 2)
    bits = scale.contiguous().view(torch.int16).int().reshape(-1).repeat_interleave(GROUP // BLOCK)
    values = torch.empty(nibbles.shape, dtype=torch.uint8, device=device)
    steps = torch.empty(bits.shape, dtype=torch.uint8, device=device)
    energy = torch.empty(bits.numel(), 2, dtype=torch.float64, device=device)
    lanes = torch.arange(CANDIDATES, dtype=torch.int32, device=device)
    _require_sound(scale, exponent)
    step = CHUNK if device.type == "cpu" else 16 * CHUNK
    for begin in range(0, bits.numel(), step):
        part = slice(begin, begin + step)
        raw, b = nibbles[part], bits[part]
        q = torch.stack((raw & 15, raw >> 4), -1).flatten(1)
        power = (b >> 7) - 127 - exponent
        row, mantissa = (power - LOWEST).clamp(min=0), b & 127
        levels = (q.int() - 8).abs()
        counts = torch.stack([(levels == level).sum(-1) for level in range(9)], -1).float()
        judged = counts
        if often is not None:
            place = torch.arange(begin, begin + len(b), device=device) % (words * 8 // BLOCK)
            shares = often.view(-1, BLOCK)[place].int()
            judged = torch.stack([((levels == level) * shares).sum(-1) for level in range(9)], -1).float()
        total = t.price[row]
        for level in range(1, 9):
            total += judged[:, level, None] * cost[mantissa, level]
        k, kept = ((total.int() << 5) + lanes).amin(-1) & 31, power >= LOWEST
        lost = (counts * t.error[mantissa, :, k]).sum(-1)
        codes = t.codes[mantissa, k].gather(1, q.long()) * kept[:, None]
        values[part] = codes[:, 0::2] | codes[:, 1::2] << 4
        steps[part] = t.byte[row, k] * kept
        squares = torch.arange(9, dtype=torch.float64, device=device).square()
        square = b.to(torch.int16).view(BFLOAT16).double().square()
        signal = (counts.double() * squares).sum(-1) * square
        energy[part, 0] = signal
        energy[part, 1] = torch.where(kept, lost.double() * UNIT * square, signal)
    inputs = words * 8
    return (
        values.view(o, inputs // 2),
        steps.view(torch.float8_e4m3fn).view(o, inputs // BLOCK),
        energy.view(o, inputs // BLOCK, 2).sum(1),
    )


def _require_sound(scale: Tensor, exponent: int) -> None:
    bits = scale.view(torch.int16)
    if bits.numel():
        low, high = (int(x) for x in bits.aminmax())
        assert low >= 0 and (high >> 7) - 127 - exponent <= HIGHEST, "scales are beyond the exponent"


op = Op("nvfp4_from_int4", CASES, TOL, inputs, cost, reference, dtypes=(BFLOAT16,))


def _results(packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """values, steps and energy, for a kernel to write."""
    (o, words), device = packed.shape, packed.device
    return (
        torch.empty(o, words * 4, dtype=torch.uint8, device=device),
        torch.empty(o, words * 8 // BLOCK, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(o, 2, dtype=torch.float64, device=device),
    )


def _arguments(
    packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None, results: tuple[Tensor, ...]
) -> tuple[int | None, ...]:
    """The arguments of both kernels, without the last one (threads or stream)."""
    (o, words), t = packed.shape, tables(packed.device)
    return (
        *addresses(packed, scale, often), o, words * 8, exponent,
        *addresses(t.cost if often is None else t.coarse, t.error, t.codes, t.price, t.byte, *results),
    )  # fmt: skip


@op.impl("cpp", when=lambda a, device: build.on_cpu("nvfp4_from_int4", device))
def cpp(packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    packed, scale, results = packed.contiguous(), scale.contiguous(), _results(packed)
    run = build.function("nvfp4_from_int4", "nvfp4_from_int4", "ppplllppppppppl")
    beyond = run(*_arguments(packed, scale, exponent, often, results), torch.get_num_threads())
    assert not beyond, "scales are beyond the exponent"
    return results


@op.impl("cuda", when=lambda a, device: build.on_hopper("nvfp4_from_int4.cu", device))
def cuda(packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    packed, scale, results = packed.contiguous(), scale.contiguous(), _results(packed)
    _require_sound(scale, exponent)
    if not len(packed):
        return results
    run = build.function("nvfp4_from_int4.cu", "nvfp4_from_int4", "ppplllppppppppp")
    with torch.cuda.device(packed.device):  # conversions use all GPUs of a machine
        failed = run(*_arguments(packed, scale, exponent, often, results), build.stream())
    assert not failed, f"CUDA error {failed}: {packed.shape=}"
    return results


def nvfp4_from_int4(
    packed: Tensor, scale: Tensor, exponent: int, often: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    assert packed.dtype == torch.int32 and scale.dtype == BFLOAT16, f"{packed.dtype=} {scale.dtype=}"
    assert scale.shape == (packed.shape[0], packed.shape[1] * 8 // GROUP), f"{packed.shape=} {scale.shape=}"
    assert packed.shape[1] * 8 % GROUP == 0, f"{packed.shape=}"
    if often is not None:
        assert often.dtype == torch.uint8 and often.shape == (packed.shape[1] * 8,), f"{often.dtype=} {often.shape=}"
        assert often.device == packed.device and often.is_contiguous(), f"{often.device=} {often.stride()=}"
    return op(packed, scale, exponent, often)
