"""The ops over packed experts: the dense op's bits, whatever the batch and the threads; bad ids and shapes refused."""

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from perilune.ops.harness.case import FLOAT32, Make
from perilune.ops.layouts.operands import Matrix
from perilune.ops.moe import experts_fp8, experts_int4_compact, experts_nvfp4
from perilune.ops.moe.chosen import Chosen
from perilune.ops.moe.experts import experts

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
E, D, I, K = 6, 288, 160, 3  # noqa: E741  (no multiple of 128: blocks are ragged)


def fp8(g: Make) -> tuple[Matrix, Matrix]:
    gate_up, down = g.e4m3(E, 2 * I, D, scale=20), g.e4m3(E, D, I, scale=1)
    down.view(torch.uint8)[0, 0, :16] = torch.arange(16, dtype=torch.uint8)  # zero, subnormal and the first normal ones
    return Matrix(gate_up, g.rand(E, 2, 2, 3) * 0.004), Matrix(down, g.rand(E, 3, 2) * 0.1)


def fp8_dense(gate_up: Matrix, down: Matrix) -> tuple[Tensor, Tensor]:
    assert gate_up.scale is not None
    halves = [Matrix(gate_up.weight[:, s], gate_up.scale[:, j]) for j, s in halves_of(I)]
    return torch.cat([experts_fp8.dequantize(w, FLOAT32) for w in halves], 1), experts_fp8.dequantize(down, FLOAT32)


def nvfp4(g: Make) -> tuple[Matrix, Matrix]:
    both, one = g.nvfp4(E, 2 * I, D), g.nvfp4(E, D, I)
    both[1].view(torch.uint8)[0, 0, :8] = torch.arange(8, dtype=torch.uint8)
    return Matrix(*both, g.rand(E, 2) * 3e-4), Matrix(*one, g.rand(E) * 3e-4)


def nvfp4_dense(gate_up: Matrix, down: Matrix) -> tuple[Tensor, Tensor]:
    packed, scale, factor = gate_up.weight, gate_up.scale, gate_up.row_scale
    assert scale is not None and factor is not None
    halves = [Matrix(packed[:, s], scale[:, s], factor[:, j]) for j, s in halves_of(I)]
    return torch.cat([experts_nvfp4.dequantize(w, FLOAT32) for w in halves], 1), experts_nvfp4.dequantize(down, FLOAT32)


def compact(g: Make) -> tuple[Matrix, Matrix]:
    return Matrix(*g.int4_compact(E, 2 * I, D)), Matrix(*g.int4_compact(E, D, I))


def compact_dense(gate_up: Matrix, down: Matrix) -> tuple[Tensor, Tensor]:
    return experts_int4_compact.dequantize(gate_up, FLOAT32), experts_int4_compact.dequantize(down, FLOAT32)


def halves_of(i: int) -> list[tuple[int, slice]]:
    return [(0, slice(0, i)), (1, slice(i, None))]


OPS: dict[str, tuple[Callable[..., Tensor], Callable[[Make], tuple[Matrix, Matrix]], Callable[..., Any]]]
OPS = {
    "fp8": (experts_fp8.experts_fp8, fp8, fp8_dense),
    "nvfp4": (experts_nvfp4.experts_nvfp4, nvfp4, nvfp4_dense),
    "int4-compact": (experts_int4_compact.experts_int4_compact, compact, compact_dense),
}


@needs_compiler
@pytest.mark.parametrize("name", OPS)
def test_bits_equal_dense_experts_and_depend_on_neither_batch_nor_threads(name: str) -> None:
    op, make, dense = OPS[name]
    g = Make(FLOAT32, torch.device("cpu"), 3)
    w = make(g)
    x, ids, shares = g.randn(40, D), g.rand(40, E).topk(K)[1].int(), g.rand(40, K)
    whole, dense_w = op(x, Chosen(ids, shares), *w), [Matrix(t) for t in dense(*w)]
    assert (
        torch.equal(whole, experts(x, Chosen(ids, shares), *dense_w)) and whole.isfinite().all() and whole.any(-1).all()
    )
    torch.set_num_threads(2)
    assert torch.equal(op(x, Chosen(ids, shares), *w), whole)
    torch.set_num_threads(1)
    for rows in (slice(0, 1), slice(7, 9), slice(11, 40)):
        assert torch.equal(op(x[rows], Chosen(ids[rows], shares[rows]), *w), whole[rows])
    x[2] = float("nan")
    got = op(x, Chosen(ids, shares), *w)
    assert got[2].isnan().all() and torch.equal(got[3:], whole[3:]) and torch.equal(got[:2], whole[:2])


@needs_compiler
@pytest.mark.parametrize("name", OPS)
def test_wrong_ids_are_refused_before_memory_is_touched(name: str) -> None:
    op, make, _ = OPS[name]
    g = Make(FLOAT32, torch.device("cpu"), 4)
    w = make(g)
    for bad in (-1, E):
        with pytest.raises(AssertionError, match="no expert"):
            op(g.randn(1, D), Chosen(torch.tensor([[bad]], dtype=torch.int32), torch.ones(1, 1)), *w)


@pytest.mark.parametrize("name", OPS)
def test_wrong_shapes_and_types_are_refused(name: str) -> None:
    op, make, _ = OPS[name]
    g = Make(FLOAT32, torch.device("cpu"), 5)
    w = make(g)
    x, ids, shares = g.randn(2, D), torch.tensor([[0], [1]], dtype=torch.int32), torch.ones(2, 1)
    chosen = Chosen(ids, shares)
    op(x, chosen, *w)
    for i, matrix in enumerate(w):
        for field in ("weight", "scale", "row_scale"):
            part = getattr(matrix, field)
            for wrong in () if part is None else (part[..., :-1], part.double(), None):
                if field == "weight" and wrong is None:
                    continue
                with pytest.raises(AssertionError):
                    op(x, chosen, *w[:i], dataclasses.replace(matrix, **{field: wrong}), *w[i + 1 :])
    for other in (Chosen(ids[:1], shares[:1]), Chosen(ids, shares[:1]), Chosen(ids.long(), shares)):
        with pytest.raises(AssertionError):
            op(x, other, *w)
