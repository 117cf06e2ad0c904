"""The CUDA implementation of moe_int4.py for many tokens: grouped products on the tensor cores (moe_int4_prefill.cu).

Arguments as there; y [T, 1, D] float32. Pairs (token, expert) are sorted by expert on the device; nothing waits for the
host. Dequantised weights, h and each expert's result are rounded to bfloat16; the weighted sum of a token's experts is
in fp32 and in the order of its choices. What the routed experts give a token does not depend on the batch; the shared
expert, if any, goes through the library's products, which may choose another order of sums for another T.

Memory beside the arguments, for at most `CHUNK` tokens at a time: (2 D + 2 I) bytes for each of T k + 7 E rows.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.ops import compile
from perilune.ops.case import BFLOAT16, FLOAT32
from perilune.ops.linear import aligned
from perilune.ops.swiglu import swiglu

SOURCE = "moe_int4_prefill.cu"
CHUNK = 16384  # tokens; what the workspace is sized for
BLOCK = 128  # values of k that a product takes at a time
WIDEST = 256  # pairs of a tile
WIDTHS = 15
MAX_EXPERTS = 1024


@functools.cache
def _kernel() -> Any:
    return compile.function(SOURCE, "moe_int4_prefill", "pl" + "p" * 12 + "l" * 8 + "p")


def needs(x: Tensor, gate_up_packed: Tensor, gate_up_scale: Tensor) -> tuple[tuple[bool, str], ...]:
    """What `compile.on_hopper` asks for."""
    E, both, words = gate_up_packed.shape
    return (
        (x.dtype == BFLOAT16 and gate_up_scale.dtype == BFLOAT16, "bfloat16 activations and scales"),
        (words * 8 % BLOCK == 0 and both % (2 * BLOCK) == 0, f"widths that are multiples of {BLOCK}"),
        (E <= MAX_EXPERTS, f"at most {MAX_EXPERTS} experts"),
    )


def prefill(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
) -> Tensor:
    T, D = x.shape
    y = torch.empty(T, 1, D, dtype=FLOAT32, device=x.device)
    gate_up_packed, gate_up_scale = gate_up_packed.contiguous(), gate_up_scale.contiguous()
    down_packed, down_scale = down_packed.contiguous(), down_scale.contiguous()
    size = -(-T // max(1, -(-T // CHUNK)))
    for first in range(0, T, max(1, size)):
        some = slice(first, first + size)
        shared = None
        if shared_gate_up is not None and shared_down is not None:
            h = swiglu(torch.nn.functional.linear(x[some], shared_gate_up))
            shared = torch.nn.functional.linear(h, shared_down)
        _chunk(
            x[some], ids[some].contiguous(), weights[some].contiguous(), gate_up_packed, gate_up_scale, down_packed,
            down_scale, shared, y[some],
        )  # fmt: skip
    return y


def _chunk(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up_packed: Tensor,
    gate_up_scale: Tensor,
    down_packed: Tensor,
    down_scale: Tensor,
    shared: Tensor | None,
    y: Tensor,
) -> None:
    x = aligned(x)
    (T, D), k, E, I = x.shape, ids.shape[1], down_packed.shape[0], down_packed.shape[2] * 8  # noqa: E741
    pairs = T * k
    tiles = pairs // WIDEST + E
    groups = -(-(pairs + 7 * min(E, pairs) + WIDEST) // 8)  # a tile reads up to its width past its rows
    device = x.device
    plan = torch.empty(16 + 3 * WIDTHS * tiles, dtype=torch.int32, device=device)
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    slabs = torch.empty(8 * groups, D, dtype=BFLOAT16, device=device)
    h = torch.empty(8 * groups, I, dtype=BFLOAT16, device=device)
    failed = _kernel()(
        x.data_ptr(),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        gate_up_packed.data_ptr(),
        gate_up_scale.data_ptr(),
        down_packed.data_ptr(),
        down_scale.data_ptr(),
        None if shared is None else shared.data_ptr(),
        y.data_ptr(),
        plan.data_ptr(),
        position.data_ptr(),
        slabs.data_ptr(),
        h.data_ptr(),
        T,
        k,
        E,
        D,
        I,
        tiles,
        groups,
        torch.cuda.get_device_properties(device).multi_processor_count,
        torch.cuda.current_stream(device).cuda_stream,
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate_up_packed.shape=}"
