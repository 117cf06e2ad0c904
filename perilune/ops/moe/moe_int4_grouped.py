"""The CUDA implementation of moe_int4.py for many tokens: grouped products on the tensor cores (moe_int4_grouped.cuh).

Arguments as in moe_int4.py; y [T, 1, D] float32. Pairs (token, expert) are sorted by expert on the device, without
waiting for the host. Compact scales times the row's scale, dequantised weights, h and each expert's result are rounded
to bfloat16; scales are 0 or between 2^-78 and 2^42. The weighted sum of a token's experts is in fp32 and in the order
of its choices. A token's result from the routed experts does not depend on the batch; the shared expert's may, because
torch chooses the order of its sums by T.

Memory beside the arguments, for at most `CHUNK` tokens at a time: (2 D + 2 I) bytes for each of T k + 7 E rows.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16, FLOAT32
from perilune.ops.harness.tensors import address, aligned
from perilune.ops.layouts.operands import Matrix, Pairs, pointers
from perilune.ops.moe.chosen import Chosen

SOURCE, COMPACT = "moe_int4_grouped.cu", "moe_int4_grouped_compact.cu"
CHUNK = 16384  # max tokens at a time. Larger: more workspace memory.
BLOCK = 128  # values of k that a product takes at a time
NARROWEST, WIDEST, STEP = 16, 256, 8  # pairs of a tile
WIDTHS = 31
MAX_EXPERTS = 1024


@functools.cache
def _kernel(source: str) -> Any:
    return build.function(source, source.removesuffix(".cu"), "pl" + "p" * 14 + "l" * 9 + "p")


@functools.cache
def classes(T: int, k: int, E: int) -> int:
    """Bit mask of tile widths to launch, bit n for 16 + 8 n columns: every fourth width, and all widths near the tile
    size that tokens spread evenly over experts would have."""
    even = T * k / E
    size = even / max(1, math.ceil(even / WIDEST))
    most = max(1.6 * size, 64) if even < WIDEST / 1.6 else WIDEST
    widths = range(NARROWEST, WIDEST + 1, STEP)
    used = [w % 32 == 0 or w == NARROWEST or 0.5 * size <= w <= most for w in widths]
    return sum(1 << n for n, wanted in enumerate(used) if wanted)


def source_for(gate_up: Matrix) -> str:
    return SOURCE if gate_up.row_scale is None else COMPACT


def needs(x: Tensor, gate_up: Matrix) -> tuple[tuple[bool, str], ...]:
    """Conditions for `build.on_hopper`."""
    (E, both, words), scale = gate_up.weight.shape, gate_up.scale
    return (
        (x.dtype == BFLOAT16 and scale is not None and scale.dtype in (BFLOAT16, torch.uint8), "bfloat16"),
        (words * 8 % BLOCK == 0 and both % (2 * BLOCK) == 0, f"widths that are multiples of {BLOCK}"),
        (E <= MAX_EXPERTS, f"at most {MAX_EXPERTS} experts"),
    )


def prefill(
    x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """`shared` gives the shared expert's result for rows of x, in bfloat16."""
    T, D = x.shape
    y = torch.empty(T, 1, D, dtype=FLOAT32, device=x.device)
    size = -(-T // max(1, -(-T // CHUNK)))
    for first in range(0, T, max(1, size)):
        some = slice(first, first + size)
        added = None if shared is None else shared(x[some])
        part = Chosen(chosen.ids[some].contiguous(), chosen.weights[some].contiguous())
        _chunk(x[some], part, gate_up, down, added, y[some])
    return y


def unsummed(
    x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Callable[[Tensor], Tensor] | None
) -> Pairs:
    """As `prefill` for at most CHUNK tokens, with the results of pairs not yet summed."""
    added = None if shared is None else shared(x)
    chosen = Chosen(chosen.ids.contiguous(), chosen.weights.contiguous())
    slabs, position = _chunk(x, chosen, gate_up, down, added, None)
    return Pairs(slabs, position, chosen.weights, added, mixed=False)


def _chunk(
    x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Tensor | None, y: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(results of pairs [M, D], row of each pair in them [T, k]). Writes the sums of tokens to y, if given."""
    x = aligned(x)
    (T, D), k, (E, _, words) = x.shape, chosen.ids.shape[1], down.weight.shape
    I = 8 * words  # noqa: E741
    pairs = T * k
    tiles = pairs // WIDEST + E
    groups = -(-(pairs + 7 * min(E, pairs) + WIDEST) // 8)  # a tile reads up to its width past its rows
    device = x.device
    plan = torch.empty(3 * WIDTHS * (1 + tiles), dtype=torch.int32, device=device)
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    slabs = torch.empty(8 * groups, D, dtype=BFLOAT16, device=device)
    h = torch.empty(8 * groups, I, dtype=BFLOAT16, device=device)
    failed = _kernel(source_for(gate_up))(
        x.data_ptr(),
        x.stride(0),
        chosen.ids.data_ptr(),
        chosen.weights.data_ptr(),
        *pointers(gate_up),
        *pointers(down),
        address(shared),
        address(y),
        plan.data_ptr(),
        position.data_ptr(),
        slabs.data_ptr(),
        h.data_ptr(),
        T,
        k,
        E,
        D,
        I,
        classes(T, k, E),
        tiles,
        groups,
        build.sm_count(device),
        build.stream(device),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate_up.kind=}"
    return slabs, position.view(T, k)
