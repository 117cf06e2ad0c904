"""The CUDA implementation of moe_int4.py for 128 to 5,000 tokens: grouped products on the tensor cores by
clusters of two CTAs that share activations (moe_int4_cluster.cuh).

Arguments as in moe_int4.py; y [T, 1, D] float32. Sorting of pairs (token, expert), roundings, range of scales and order
of sums are those of moe_int4_grouped.py.

A tile is 512 weight rows and at most `WIDEST` pairs of one expert: an expert with more pairs is dequantised again for
each further tile. Memory beside the arguments: (2 D + 2 I) bytes for each of T k + 7 E rows.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from perilune.ops.harness import build
from perilune.ops.harness.case import BFLOAT16
from perilune.ops.harness.tensors import address, aligned
from perilune.ops.layouts.operands import Matrix, Pairs, pointers
from perilune.ops.moe.chosen import Chosen

SOURCE, COMPACT = "moe_int4_cluster.cu", "moe_int4_cluster_compact.cu"
MIN_TOKENS, MAX_TOKENS = 128, 5000  # with more, moe_int4_grouped.py is faster
BLOCK = 256  # values of k, and rows of weights, that a CTA loads at a time
COMPACT_BLOCK = 512  # values of k for one 16-byte load of compact scales
WIDEST, CLASSES = 96, 12  # a tile has 8, 16, .. 96 pairs
MAX_EXPERTS = 1024


@functools.cache
def _kernel(source: str) -> Any:
    return build.function(source, source.removesuffix(".cu"), "pl" + "p" * 14 + "l" * 7 + "p")


def source_for(gate_up: Matrix) -> str:
    return SOURCE if gate_up.row_scale is None else COMPACT


def needs(x: Tensor, gate_up: Matrix) -> tuple[tuple[bool, str], ...]:
    """Conditions for `build.on_hopper`."""
    T, (E, both, words), scale = x.shape[0], gate_up.weight.shape, gate_up.scale
    block = BLOCK if gate_up.row_scale is None else COMPACT_BLOCK
    return (
        (MIN_TOKENS <= T <= MAX_TOKENS, f"{MIN_TOKENS} to {MAX_TOKENS} tokens"),
        (x.dtype == BFLOAT16 and scale is not None and scale.dtype in (BFLOAT16, torch.uint8), "bfloat16"),
        (words * 8 % block == 0 and both % (2 * block) == 0, f"widths that are multiples of {block}"),
        (E <= MAX_EXPERTS, f"at most {MAX_EXPERTS} experts"),
    )


def run(x: Tensor, chosen: Chosen, gate_up: Matrix, down: Matrix, shared: Tensor | None, y: Tensor | None) -> Pairs:
    """The unsummed results of pairs; also writes their sums to y, if given. `shared` [T, D] bfloat16: the shared
    expert's result."""
    x = aligned(x)
    (T, D), k, (E, _, words) = x.shape, chosen.ids.shape[1], down.weight.shape
    I = 8 * words  # noqa: E741
    pairs, device = T * k, x.device
    rows = -(-(pairs + 7 * min(E, pairs) + WIDEST) // 8) * 8  # a tile reads up to its width past its rows
    plan = torch.empty(CLASSES + 3 * (pairs // WIDEST + E), dtype=torch.int32, device=device)
    position = torch.empty(pairs, dtype=torch.int32, device=device)
    slabs = torch.empty(rows, D, dtype=BFLOAT16, device=device)
    h = torch.empty(rows, I, dtype=BFLOAT16, device=device)
    ids, weights = chosen.ids.contiguous(), chosen.weights.contiguous()
    failed = _kernel(source_for(gate_up))(
        x.data_ptr(),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        *pointers(gate_up),
        *pointers(down),
        address(shared),
        address(y),
        *(t.data_ptr() for t in (plan, position, slabs, h)),
        T,
        k,
        E,
        D,
        I,
        rows // 8,
        build.sm_count(device),
        build.stream(device),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate_up.kind=}"
    return Pairs(slabs, position.view(T, k), weights, shared, mixed=True)
