"""The CUDA implementation of moe_int4.py for 128 to 512 tokens: grouped products on the tensor cores with tall tiles
(moe_int4_tall.cu).

Arguments as in moe_int4.py; y [T, 1, D] float32. Sorting of pairs (token, expert), roundings, range of scales and order
of sums are those of moe_int4_grouped.py.

A tile is 256 weight rows and at most `WIDEST` pairs of one expert: an expert with more pairs is read again for each
further tile. Memory beside the arguments: 2 D bytes for each of T tokens, (2 D + 2 I) for each of T k + 7 E rows.
"""

import functools
import math

import torch
from torch import Tensor

from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32
from perilune.ops.harness.tensors import address, aligned
from perilune.ops.layouts.operands import Matrix, pointers
from perilune.ops.moe.chosen import Chosen

SOURCE = "moe_int4_tall.cu"
# For fewer tokens, moe_int4_mma_tma.cu is faster; for more tokens, moe_int4_cluster.py.
MIN_TOKENS, MAX_TOKENS = 128, 512
WIDE, MAX_TOKENS_WIDE = 1024, 383  # max tokens for experts wider than WIDE
BLOCK = 256  # values of k, and rows of weights, that a CTA loads at a time
STEP, WIDEST = 8, 96  # a tile has a multiple of 8 pairs, up to 96
MAX_EXPERTS = 1024


_kernel = build.launcher(SOURCE, "moe_int4_tall", "pl" + "p" * 14 + "l" * 9 + "p")


@functools.cache
def classes(T: int, k: int, E: int) -> int:
    """Bit mask of tile widths to launch besides the widest, bit n for 8 + 8 n columns: two widths. If tokens choose
    experts at random, the narrower one fits most experts' pairs (mean + 0.5 standard deviations), the wider one nearly
    all (mean + 2)."""
    even = T * k / E
    widths = (even + 0.5 * even**0.5, even + 2 * even**0.5)
    return sum({1 << max(1, math.ceil(w / STEP)) - 1 for w in widths if w <= WIDEST})


def needs(x: Tensor, gate_up: Matrix) -> tuple[tuple[bool, str], ...]:
    """Conditions for `build.on_hopper`."""
    T, (E, both, words) = x.shape[0], gate_up.weight.shape
    most = MAX_TOKENS_WIDE if both > 2 * WIDE else MAX_TOKENS
    return (
        (MIN_TOKENS <= T <= most, f"{MIN_TOKENS} to {most} tokens"),
        (x.dtype == BFLOAT16 and gate_up.row_scale is None, "bfloat16, of scales too"),
        (gate_up.scale is not None and gate_up.scale.dtype == BFLOAT16, "bfloat16, of scales too"),
        (words * 8 % BLOCK == 0 and both % (2 * BLOCK) == 0, f"widths that are multiples of {BLOCK}"),
        (E <= MAX_EXPERTS, f"at most {MAX_EXPERTS} experts"),
    )


def run(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Tensor | None) -> Tensor:
    """`shared` [T, D] bfloat16: the shared expert's result."""
    x = aligned(x)
    (T, D), k, (E, _, words) = x.shape, chosen.ids.shape[1], down.weight.shape
    I = 8 * words  # noqa: E741
    pairs, device = T * k, x.device
    tiles = pairs // WIDEST + E
    rows = -(-(pairs + 7 * min(E, pairs) + WIDEST) // 8) * 8  # a tile reads up to its width past its rows
    y = torch.empty(T, 1, D, dtype=FLOAT32, device=device)
    plan = torch.empty(3 * (WIDEST // STEP) * (1 + tiles), dtype=torch.int32, device=device)
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    source = torch.empty(rows, dtype=torch.int32, device=device)
    ordered = torch.empty(T, D, dtype=BFLOAT16, device=device)
    h = torch.empty(rows, I, dtype=BFLOAT16, device=device)
    part = torch.empty(rows, D, dtype=BFLOAT16, device=device)
    ids, weights = chosen.ids.contiguous(), chosen.weights.contiguous()
    failed = _kernel()(
        x.data_ptr(),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        *pointers(gate_up)[:2],
        *pointers(down)[:2],
        address(shared),
        *(t.data_ptr() for t in (y, plan, position, source, ordered, h, part)),
        T,
        k,
        E,
        D,
        I,
        classes(T, k, E),
        tiles,
        rows // 8,
        build.sm_count(device),
        build.stream(device),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate_up.kind=}"
    return y
