"""Everything but the routed experts in FP8, as an option at load: halves most of the bytes that a one-token step reads.

Projections of the attention, shared experts, dense layers and lm_head become e4m3 with a scale for each output row. The
router, the norms, the embedding and W_UK stay as they are. W_UV, which attention reads per head, is rounded to e4m3
times a power of two for each of kv_b_proj's rows. bfloat16 holds these values exactly, so most kernels read them as
bfloat16, and the kernel for one token reads an FP8 copy of the same values. FP8 copies of W_UK gained no speed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perilune.loading.rounding import decibels
from perilune.model.weights import Matrix, Mlp, Moe, Weights
from perilune.ops.linear.linear_fp8 import quantize_exactly, quantize_rows

_SPLIT_ROWS = ("o", "down")
PIECE_ROWS = 4096  # rows quantised at once. Larger: more memory for their float32 copy


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of the conversion. `sqnr_db`: 10 log10 of signal over error energy; `worst_db`: of the matrix `worst`."""

    matrices: int
    saved_bytes: int
    sqnr_db: float
    worst_db: float
    worst: str


Agree = Callable[[Tensor], Tensor]


def to_fp8(weights: Weights, agree: Agree | None = None, *, activations: bool = False) -> Loss:
    """Replaces the dense linear layers in place, one at a time, and returns the loss. If `to_fp8_latents` is wanted,
    call it before: it multiplies weights that are rounded here.

    agree  all-reduce of the elementwise maximum, if there are several ranks: rows split over ranks then get the scales
           that they would have on one rank. Every rank must call this function
    activations  allows rounding prompts' activations, too, except the input of lm_head
    """
    signal = error = 0.0
    matrices = saved = 0
    worst_db, worst = float("inf"), "none"

    def count(name: str, s: float, e: float) -> None:
        nonlocal signal, error, matrices, worst_db, worst
        matrices += 1
        signal, error = signal + s, error + e
        if (db := decibels(s, e)) < worst_db:
            worst_db, worst = db, name

    for name, holder, field in _places(weights):
        old = getattr(holder, field)
        if old.format != "dense" or old.weight.shape[1] % 64:
            continue
        new, s, e = quantize(old.weight, agree if field in _SPLIT_ROWS else None)
        setattr(holder, field, replace(new, fp8_activations=activations and field != "lm_head"))
        saved += old.weight.nbytes - new.nbytes
        count(name, s, e)
    for i, layer in enumerate(weights.layers):
        a = layer.attention
        if a.o.format == "fp8" and a.uv_fp8 is None:
            a.uv_fp8, s, e = round_values(a.w_uv)
            saved -= a.uv_fp8.nbytes
            count(f"layers.{i}.attention.w_uv", s, e)
    return Loss(matrices, saved, decibels(signal, error), worst_db, worst)


def round_values(w_uv: Tensor) -> tuple[Matrix, float, float]:
    """Rounds W_UV [H, R, v] in place; returns (FP8 copy with scale [H, v], sum of squares before rounding, sum of
    squared errors)."""
    q, scale = quantize_exactly(w_uv, 1)
    rounded = q.float() * scale
    signal, error = w_uv.double().square().sum(), (rounded - w_uv).double().square().sum()
    w_uv.copy_(rounded)
    return Matrix(q, scale.squeeze(1)), float(signal), float(error)


def quantize(weight: Tensor, agree: Agree | None = None) -> tuple[Matrix, float, float]:
    """(the matrix in FP8, its sum of squares, sum of squared errors); `agree` as in `to_fp8`."""
    rows = weight.shape[0]
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(rows, dtype=torch.float32, device=weight.device)
    signal = torch.zeros((), dtype=torch.float64, device=weight.device)
    error = signal.clone()
    for begin in range(0, rows, PIECE_ROWS):
        part = slice(begin, begin + PIECE_ROWS)
        exact = weight[part].float()
        q, scale = quantize_rows(exact, agree or _own)
        values[part], scales[part] = q, scale
        signal += exact.double().square().sum()
        error += (q.float() * scale.unsqueeze(-1) - exact).double().square().sum()
    return Matrix(values, scales), float(signal), float(error)


def _places(weights: Weights) -> Iterator[tuple[str, object, str]]:
    """(name, record, field) of every linear layer outside the routed experts."""
    for i, layer in enumerate(weights.layers):
        for field in ("qkv_a", "q_b", "o"):
            yield f"layers.{i}.attention.{field}", layer.attention, field
        mlp: Mlp | None = layer.ffn.shared if isinstance(layer.ffn, Moe) else layer.ffn
        if mlp is not None:
            for field in ("gate_up", "down"):
                yield f"layers.{i}.mlp.{field}", mlp, field
    yield "lm_head", weights, "lm_head"


def _own(largest: Tensor) -> Tensor:
    return largest
