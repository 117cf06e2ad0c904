"""Absorbed MLA with its output projection, the residual, its norm, and the router: everything in a MoE layer between
queries and experts.

y = `mla_decode_output`(q_full, pages, span, attention, scale); residual [T, D] += y in place, or, if the norm has
peers, += the sum of all ranks' y, as in `exchange_add_rmsnorm`; x [T, D] = the norm of the residual; the experts
are those of `router`(x, gate). -> x, `Chosen`. Types, layouts and roundings are those of these ops and of
`add_rmsnorm`; y is rounded before it is added.

"cuda" and "cuda_mma" are for one token, in three launches:
1. attention;
2. the output projection, as in `mla_decode_output`'s implementation of the same name. It adds y, and the y that peers
   send, to the residual and writes the sums to a mailbox;
3. mla_decode_router_t1.cu starts while launch 2 runs, loads the gate to shared memory, then polls the mailbox for the
   sums. It does not wait for launch 2 to end.
The expert kernel may read the same mailbox: `Chosen.publication` names it (chosen.py). "cuda_mma" is for 8 or 16 heads
in FP8, "cuda" for others. "composed" calls the ops; it also runs for 8 or 16 heads in FP8 if "cuda_mma" lacks the width
or the number of SMs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.attention import mla_decode, mla_decode_output
from perilune.ops.exchange import exchange_add_rmsnorm, peers
from perilune.ops.harness import build, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, Make, Tol
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts.operands import Attention, Gate, Norm, Routing, Span
from perilune.ops.moe import router
from perilune.ops.moe.chosen import Chosen, Source, mailbox

SEGMENT = 256  # columns of x that one warp reads at once
MOST_WIDTH = 7168  # max columns of x: the experts' gate_up holds all of them in registers
LEAST_GATE, MOST_GATE = 3, 4  # rows of the gate per CTA


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Fields of a case for residual, norm and gate."""

    E: int = K2.experts
    k: int = K2.top_k
    wide_gate: bool = False  # float32
    normalise: bool = True
    against: bool = False  # rows of the gate have the other sign: the order of experts is reversed
    ties: bool = False  # all scores are equal
    ranks: int = 0  # number of ranks over which y is summed; 0: y is whole


@dataclass(frozen=True, kw_only=True)
class Case(Stream, mla_decode_output.Case):
    pass


def _one(context: int, **other: Any) -> Case:
    """One token, the sizes of Kimi K2."""
    return Case(
        counts=(1,), contexts=(context,), **{"H": K2.heads, "block_size": 64, "D": K2.hidden, "big": True} | other
    )


CASES = [
    *(_one(c, fp8=fp8, against=fp8) for c in (1, 500, 1024, 2000, 10240, 102400) for fp8 in (False, True)),
    *(_one(300, H=32, block_size=16, fp8=fp8) for fp8 in (False, True)),
    *(_one(70, D=4352, E=256, k=6, fp8=fp8, normalise=fp8) for fp8 in (False, True)),
    _one(900, E=500, k=32),
    _one(64, E=40, k=1, against=True),
    *(_one(200, E=n, ties=True) for n in (K2.experts, 130)),
    _one(1030, packed=True),
    _one(130, wide_gate=True),
    *(
        _one(c, H=K2.heads // n, fp8=fp8, ranks=n)
        for c in (1, 1024, 10240)
        for n in (2, 4, 8)
        for fp8 in (False, True)
    ),
    _one(130, H=16),
    _one(130, H=16, ranks=4, wide_gate=True),
    Case(counts=(2, 1), contexts=(40, 100), H=16, D=K2.hidden, ranks=4, big=True),
    _one(300, block_size=8),
    _one(300, E=520),
    _one(300, E=64, k=40),
    _one(0),
    Case(counts=(2, 1), contexts=(40, 100), H=K2.heads, D=K2.hidden, big=True),
    Case(counts=(1,), contexts=(256,), D=384, E=16, k=4, ranks=2),
    Case(counts=(1,), contexts=(30,), D=64, E=16, k=4, ties=True),
    Case(counts=(3, 1, 0, 5), contexts=(3, 16, 9, 17), H=3, D=40, E=12, k=3),
    Case(counts=(1, 2), contexts=(20, 30), H=4, R=64, r=16, v=16, D=64, E=8, k=2, fp8=True, rows=1),
    Case(counts=(), contexts=(), H=2, R=8, r=8, v=8, D=8, E=5, k=5),
]  # fmt: skip
_SUMS = {
    FLOAT32: Tol(2e-4, 4e-4, 2e-5, "fp32 sums in another order, then exponentials of scores of some tens"),
    BFLOAT16: Tol(2e-2, 2e-2, 8e-3, "bf16 rounding of what `mla_decode_output` rounds, of the residual and of x"),
}
TOL = {
    "residual": _SUMS,
    "x": _SUMS,
    "ids": {dtype: Tol(0, 0, 0, "scores are far apart") for dtype in (FLOAT32, BFLOAT16)},
    "weights": {
        FLOAT32: Tol(1e-3, 1e-3, 1e-3, "sigmoids of products with x"),
        BFLOAT16: Tol(2e-2, 2e-2, 2e-2, "sigmoids of products with x"),
    },
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    args = mla_decode_output.inputs(c, g)
    args = {"attention" if name == "weights" else name: value for name, value in args.items()}
    return args | stream_inputs(sum(c.counts) + c.rows, c.D, c, g)


def stream_inputs(T: int, D: int, c: Stream, g: Make) -> dict[str, Any]:
    """Residual, norm and gate. Rows of the gate are multiples of one vector that the residual is nearly parallel to, so
    that rounding errors cannot change the ids."""
    along = g.randn(D, dtype=FLOAT32)
    multiples = (g.permutation(c.E).float() + 1) / c.E * (0 if c.ties else -1 if c.against else 1)
    residual = g.randn(T, D, dtype=FLOAT32) + along
    rows = 4 * multiples.unsqueeze(1) * along / D
    return {
        "residual": residual.to(g.dtype),
        "norm": Norm(g.randn(D, scale=0.1) + 1, 1e-5, peers.loopback(c.ranks, g.device, 1.0) if c.ranks else None),
        "gate": Gate(
            rows.to(FLOAT32 if c.wide_gate else BFLOAT16),
            multiples * (0 if c.against else -2),  # the bias reverses the choice; weights ignore it
            Routing(c.k, 1, 1, 2.827, c.normalise),
        ),
    }


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    T = sum(c.counts) + c.rows
    return (
        mla_decode_output.cost(c, dtype)
        + costs.add_rmsnorm(T, c.D, dtype.itemsize)
        + costs.router(T, c.D, c.E, c.k, dtype.itemsize)
    )


def reference(
    q_full: Tensor,
    pages: Tensor,
    span: Span,
    attention: Attention,
    scale: float,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    y = mla_decode_output.reference(q_full, pages, span, attention, scale)
    x = exchange_add_rmsnorm.add_norm_reference(residual, y, norm)
    return x, router.reference(x, gate.weight, gate.bias, gate.routing)


op = Op(
    "mla_decode_router", CASES, TOL, inputs, cost, reference, decides=("q_full", "pages", "attention", "norm", "gate")
)


_choose = build.launcher("mla_decode_router_t1.cu", "mla_decode_router", "p" * 10 + "l" * 6 + "ffp")


def _fits(a: Any, device: torch.device, mma: bool) -> bool | str:
    return fits(a.q_full.shape[:2], a, device, mma, *mla_decode.needs(a.q_full, a.pages))


def fits(counts: Sequence[int], a: Any, device: torch.device, mma: bool, *needs: tuple[bool, str]) -> bool | str:
    """Whether `run` takes counts = (tokens, heads) and the op's arguments a, and `needs` hold: True, or the first unmet
    need."""
    takes = mla_decode_output.fits_mma if mma else mla_decode_output.fits
    found = takes(counts, a.attention, device, (counts[0] == 1, "one token"), *needs)
    if found is not True:
        return found
    (E, D), routing = a.gate.weight.shape, a.gate.routing
    return build.on_hopper(
        "mla_decode_router_t1.cu",
        device,
        (D % SEGMENT == 0 and D <= MOST_WIDTH, f"a width in {SEGMENT}s up to {MOST_WIDTH}"),
        (a.gate.weight.dtype == BFLOAT16, "a bfloat16 gate"),
        (routing.n_group == routing.topk_group, "one choice among all experts"),
        (E <= router.MOST_EXPERTS, f"at most {router.MOST_EXPERTS} experts"),
        (_rows(E, device) <= MOST_GATE, f"a processor for every {MOST_GATE} experts"),
        (routing.top_k <= router.MOST_CHOICES, f"at most {router.MOST_CHOICES} choices"),
        *peers.needs(a.norm.peers),
    )


def _rows(experts: int, device: torch.device) -> int:
    """Rows of the gate per CTA. The CTA that selects the experts has none."""
    return max(LEAST_GATE, -(-experts // (build.sm_count(device) - 1)))


def run(
    mma: bool,
    read: Callable[[], mla_decode_output.Ranges],
    attention: Attention,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    """Launches 2 and 3. read() launches attention, if needed, and returns the ranges that launch 2 combines."""
    H, (E, D), device, routing = len(attention.w_uv), gate.weight.shape, residual.device, gate.routing
    assert all(t.is_contiguous() for t in (norm.weight, gate.weight, gate.bias)), f"{gate.weight.stride()=}"
    memory = workspace.current(device)
    box = mailbox(memory)
    # Kernels count the CTAs of a launch in these mailboxes (mla_decode_output_t1.cu, mla_decode_router_t1.cu), so
    # each number of CTAs needs mailboxes of its own.
    values, sums, launches, scores = (
        memory.zeros((f"mla_decode_router.{'mma.' if mma else ''}{name}", H, D, E), n)
        for name, n in (
            ("values", mla_decode_output.mma_mailbox(H, 1) if mma else H * K2.value + 2),
            ("sums", D),
            ("launches", 2),
            ("scores", router.MOST_EXPERTS),
        )
    )
    # Allocate before the launches: these are written while the output projection may still run, so the allocator must
    # not place them in memory that it reads.
    x = torch.empty_like(residual)
    ids = torch.empty(1, routing.top_k, dtype=torch.int32, device=device)
    weights = torch.empty(1, routing.top_k, device=device)
    publication = box.publish(x, Source(sums, norm.weight, norm.eps))
    mla_decode_output.launch(read(), 1, attention, values, (residual, sums, norm.peers), mma)
    failed = _choose()(
        *addresses(sums, launches, norm.weight, gate.weight, gate.bias, x, scores, box.words, ids, weights),
        publication.number, D, E, routing.top_k, routing.normalise, _rows(E, device), norm.eps, routing.factor,
        memory.stream,
    )  # fmt: skip
    assert not failed, f"mla_decode_router does not start: CUDA error {failed}"
    return x, Chosen(ids, weights, publication)


@op.impl(
    "cuda_mma",
    when=lambda a, device: _fits(a, device, mma=True),
    alone=True,
    waits=("mla_decode_output_mma.cu", "mla_decode_router_t1.cu"),
)
def cuda_mma(
    q_full: Tensor,
    pages: Tensor,
    span: Span,
    attention: Attention,
    scale: float,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    return run(True, lambda: mla_decode_output.attend(q_full, pages, span, scale), attention, residual, norm, gate)


@op.impl(
    "cuda",
    when=lambda a, device: _fits(a, device, mma=False),
    alone=True,
    waits=("mla_decode_output_t1.cu", "mla_decode_router_t1.cu"),
)
def cuda(
    q_full: Tensor,
    pages: Tensor,
    span: Span,
    attention: Attention,
    scale: float,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    return run(False, lambda: mla_decode_output.attend(q_full, pages, span, scale), attention, residual, norm, gate)


@op.impl("composed")
def composed(
    q_full: Tensor,
    pages: Tensor,
    span: Span,
    attention: Attention,
    scale: float,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    y = mla_decode_output.mla_decode_output(q_full, pages, span, attention, scale)
    x = exchange_add_rmsnorm.add_norm(residual, y, norm)
    return x, router.router(x, gate.weight, gate.bias, gate.routing)


def mla_decode_router(
    q_full: Tensor,
    pages: Tensor,
    span: Span,
    attention: Attention,
    scale: float,
    residual: Tensor,
    norm: Norm,
    gate: Gate,
) -> tuple[Tensor, Chosen]:
    mla_decode_output.check(q_full, pages, span, attention)
    check_stream(len(q_full), attention, residual, norm, gate)
    return op(q_full, pages, span, attention, scale, residual, norm, gate)


def check_stream(T: int, attention: Attention, residual: Tensor, norm: Norm, gate: Gate) -> None:
    D, dtype = attention.o.weight.shape[0], attention.w_uv.dtype
    assert residual.shape == (T, D) and residual.dtype == dtype, f"{residual.shape=}"
    assert residual.is_contiguous(), f"{residual.stride()=}"
    assert norm.weight.shape == (D,) and norm.weight.dtype == residual.dtype, f"{norm.weight.shape=}"
    router.check(residual, gate.weight, gate.bias, gate.routing)
