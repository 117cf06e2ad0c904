"""Checks every implementation of an op against its reference, on every case."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.ops.harness.case import Make, Tol, clone, tensors
from perilune.ops.harness.registry import Impl, Op

SEED = 1


@dataclass(frozen=True)
class Outcome:
    """The result of one implementation on one case: passed, refused (with the reason), or failed (with the error)."""

    impl: str
    refused: str | None = None
    failed: str | None = None


def cases(op: Op[..., Any], device: torch.device, pattern: str | None = None) -> list[Any]:
    """The cases to run on `device`: all on a GPU, on a CPU those not marked big. `pattern`: only cases with this text
    in their repr."""
    return [c for c in op.cases if (device.type != "cpu" or not c.big) and (pattern is None or pattern in repr(c))]


def check(
    op: Op[..., Any], case: Any, dtype: torch.dtype, device: torch.device, names: Iterable[str] | None = None
) -> Iterator[Outcome]:
    """The outcome of each implementation (of `names`, if given) but the reference.

    Compared in this order: shapes and types; where nan and infinity are; each value; the distance over the whole
    output; that inputs not written to are untouched; that a second run gives the same bits.
    """
    args = op.inputs(case, Make(dtype, device, SEED))
    want: dict[str, Tensor] | None = None
    for impl in op.impls.values():
        if names is not None and impl.name not in names:
            continue
        reason = op.refusal(impl.name, list(args.values()))
        if reason is not None:
            yield Outcome(impl.name, refused=reason)
            continue
        if want is None:
            want = outputs(op, op.candidates[-1], clone(args))
        yield Outcome(impl.name, failed=_compare(op, impl, args, tolerances(op, case, dtype), want))


def tolerances(op: Op[..., Any], case: Any, dtype: torch.dtype) -> dict[str, Tol]:
    """The tolerance of each output of the op on this case."""
    return {name: case.tol(name, dtype) or by_dtype[dtype] for name, by_dtype in op.tol.items()}


def outputs(op: Op[..., Any], impl: Impl, args: dict[str, Any]) -> dict[str, Tensor]:
    """Results by the names in the op's tolerances; names of arguments are those written in place."""
    result, given = impl.run(*args.values()), tensors(args)
    parts = result if isinstance(result, tuple) else (result,)
    returned = list(tensors({str(i): part for i, part in enumerate(parts)}).values())
    names = [name for name in op.tol if name not in given]
    assert len(names) == len(returned), f"{op.name}/{impl.name}: {len(returned)} results for {names}"
    return {**dict(zip(names, returned)), **{name: given[name] for name in op.tol if name in given}}


def _compare(
    op: Op[..., Any], impl: Impl, args: dict[str, Any], tol: dict[str, Tol], want: dict[str, Tensor]
) -> str | None:
    used = clone(args)
    got = outputs(op, impl, used)
    for name, expected in want.items():
        if why := difference(got[name], expected, tol[name]):
            return f"{name}: {why}"
    after = tensors(used)
    for name, before in tensors(args).items():
        if name not in op.tol and not same_bits(after[name], before):
            return f"the input {name} was written to"
    again = outputs(op, impl, clone(args))
    for name in want:
        if not same_bits(got[name], again[name]):
            return f"{name}: a second run gave other bits"
    return None


def difference(got: Tensor, want: Tensor, tol: Tol) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    if same_bits(got, want):
        return None
    if not want.dtype.is_floating_point:
        return f"{int((got != want).sum())} of {want.numel()} differ"
    g, w = got.double(), want.double()
    for text, here, there in (
        ("nan", g.isnan(), w.isnan()),
        ("+inf", g == float("inf"), w == float("inf")),
        ("-inf", g == float("-inf"), w == float("-inf")),
    ):
        if not torch.equal(here, there):
            return f"{text} at {int(here.sum())} places instead of {int(there.sum())}, or at others"
    finite = w.isfinite()
    g, w = g[finite], w[finite]
    error = (g - w).abs()
    over = error - (tol.abs + tol.rel * w.abs())
    if over.numel() and over.max() > 0:
        worst = over.argmax()
        return f"{g[worst]:.8g} instead of {w[worst]:.8g} ({int((over > 0).sum())} of {w.numel()} are off; {tol.why})"
    if error.norm() > tol.norm * w.norm():
        return f"relative distance {error.norm() / w.norm():.3g} above {tol.norm:.3g} ({tol.why})"
    return None


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype.is_floating_point:
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
        a, b = a.contiguous().view(kind), b.contiguous().view(kind)
    return torch.equal(a, b)
