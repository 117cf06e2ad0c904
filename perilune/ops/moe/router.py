"""Which experts a token goes to and with what weight (noaux_tc, docs/formats.md section 2.3), all in fp32.

s = sigmoid(x gate^T); choice = s + bias; with n_group > 1 only the topk_group groups with the largest sum of their two
best choices stay; ids = the top_k largest choices, in descending order, ties to the lower id;
weights = s[ids] (without bias), divided by their sum + 1e-20 if `norm`, times scale.
x [T, D]; gate [E, D] float32, or bfloat16 if that is what the checkpoint holds; bias [E] float32
-> ids [T, top_k] int32, weights [T, top_k] float32. "cuda" (router_mma.cu) is one launch for up to 16
rows. A lone row is announced (router_mailbox.cuh): the kernel that follows may start before x is there, and learns of x
and of the choice from a board; `announced` says by which number. With more rows, it may start when x is there (see
moe_int4.py). Launches of one stream share a board and scratch; another stream has its own. `mla_decode_router`
announces its choice likewise, and what x is made of. "cuda_many" (router_topk.cu) chooses from the logits that a
product gives in fp32.
"""

import functools
import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, exact
from perilune.ops.harness.registry import Op
from perilune.ops.harness.workspace import Workspace
from perilune.ops.linear import skinny_gemm

MAX_ROWS = 16  # of the CUDA kernel
MOST_EXPERTS = 512
MOST_CHOICES = 32
MOST_CHUNKS = 14  # of 32 values of a row: what a warp holds


@dataclass(frozen=True)
class Case(Sized):
    T: int
    D: int
    E: int
    k: int
    groups: int = 1
    kept: int = 1
    norm: bool = True
    ties: bool = False
    narrow: bool = False  # a bfloat16 gate
    scale: float = 1.0  # of the logits


CASES = [
    *(Case(t, K2.hidden, K2.experts, K2.top_k, big=t > 1) for t in (1, 8, 64, 512)),
    *(Case(t, NANO.hidden, NANO.experts, NANO.top_k) for t in (1, 16, 512)),
    *(Case(t, K2.hidden, K2.experts, K2.top_k, narrow=True, big=True) for t in (1, 3, 8, 16)),
    *(Case(t, K2.hidden, K2.experts, K2.top_k, narrow=True, big=True) for t in (17, 64, 250, 257, 1000)),
    *(Case(t, NANO.hidden, NANO.experts, NANO.top_k, narrow=True) for t in (1, 16, 100)),
    Case(3, 512, 48, 8, ties=True, narrow=True),
    Case(300, 512, 48, 8, ties=True, narrow=True, big=True),
    Case(300, 512, 40, 3, norm=False, narrow=True, big=True),
    Case(2, 512, 40, 3, narrow=True, norm=False),
    Case(0, 64, 16, 4),
    Case(3, 8, 5, 5),
    Case(9, 64, 32, 4, groups=8, kept=3),
    Case(4, 64, 6, 2, groups=6, kept=2),
    Case(4, 64, 16, 4, norm=False),
    Case(3, 64, 48, 8, ties=True),
    Case(5, 64, 16, 4, scale=100.0),
]
_WEIGHTS = Tol(1e-6, 4e-6, 1e-6, "sigmoid and a short sum in fp32; the logits are exact here")
TOL = {"ids": exact(), "weights": {FLOAT32: _WEIGHTS, BFLOAT16: _WEIGHTS}}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    """Small whole multiples, so that every order of summation gives the same logits, and no near-ties by accident."""
    x = g.integers(-8, 9, c.T, c.D).float() / 8
    gate = g.integers(-8, 9, c.E, c.D).float() / 8 * (2.0 ** round(torch.tensor(c.D).rsqrt().log2().item()))
    bias = g.permutation(c.E).float() * 1e-3
    if c.ties:
        return _args(c, g, torch.zeros_like(x), gate, torch.zeros_like(bias))
    gate = gate * c.scale
    choice = torch.sigmoid(x.double() @ gate.double().T) + bias.double()
    top = choice.sort(dim=-1, descending=True)[0][:, : c.k + 1]
    near = (top[:, :-1] - top[:, 1:]).amin(-1) < 1e-6 if c.E > 1 else torch.zeros_like(x[:, 0], dtype=torch.bool)
    return _args(c, g, x.masked_fill(near.unsqueeze(-1), 0.0), gate, bias)


def _args(c: Case, g: Make, x: Tensor, gate: Tensor, bias: Tensor) -> dict[str, Any]:
    settings = {"top_k": c.k, "n_group": c.groups, "topk_group": c.kept, "scale": 2.827, "norm": c.norm}
    return {"x": x.to(g.dtype), "gate": gate.to(BFLOAT16 if c.narrow else FLOAT32), "bias": bias, **settings}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.router(c.T, c.D, c.E, c.k, dtype.itemsize)


def reference(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int, scale: float, norm: bool
) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x.float() @ gate.float().T)
    choice = s + bias
    if topk_group < n_group:
        grouped = choice.unflatten(-1, (n_group, -1))
        best_two = grouped.sort(dim=-1, descending=True)[0][..., :2].sum(-1)
        kept = best_two.sort(dim=-1, descending=True, stable=True)[1][:, :topk_group]
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = s.gather(-1, ids)
    if norm:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * scale


op = Op("router", CASES, TOL, inputs, cost, reference, decides=("x", "gate"))


@functools.cache
def _kernel() -> Any:
    return build.function("router", "router", "pppppp" + "l" * 8 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "router", device, (a.x.shape[1] % 8 == 0, "a hidden width that is a multiple of 8")
    ),
)
def cpp(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int, scale: float, norm: bool
) -> tuple[Tensor, Tensor]:
    x, gate, bias = x.float().contiguous(), gate.float().contiguous(), bias.contiguous()
    (T, D), E = x.shape, gate.shape[0]
    ids = torch.empty(T, top_k, dtype=torch.int32)
    weights = torch.empty(T, top_k)
    scores = torch.empty(T, E)
    _kernel()(
        x.data_ptr(),
        gate.data_ptr(),
        bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        scores.data_ptr(),
        T,
        D,
        E,
        top_k,
        n_group,
        topk_group,
        norm,
        threads.count(),
        scale,
    )
    return ids, weights


def _parts(D: int) -> int:
    """Processors that share a tile of the gate: two if each still has whole loads for every warp; 0 if none will do."""
    wanted = (2, 1, 4, 8) if D % 512 == 0 else (1, 2, 4, 8)
    fitting = (n for n in wanted if D % (32 * n) == 0 and D // n <= 32 * MOST_CHUNKS * _workers(D // n))
    return next(fitting, 0)


def _workers(width: int) -> int:
    return next((n for n in (8, 4, 2) if width % (32 * n) == 0), 1)


def mailbox(memory: Workspace) -> Tensor:
    """[64] int32, where the router announces: router_mailbox.cuh."""
    return memory.zeros("router.mailbox", 64)


@dataclass(frozen=True)
class Source:
    """What x is the norm of, on a board (mla_decode_output_t1.cu) on which it may still be being written."""

    fresh: Tensor
    norm: Tensor
    eps: float


@dataclass(frozen=True)
class Announced:
    """How a launch tells of x and of its choice (router_mailbox.cuh). number: 0 if it does not."""

    number: int = 0
    source: Source | None = None


_numbers = itertools.count()
_latest: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor], Announced]] = {}  # by stream


def announce(x: Tensor, ids: Tensor, stream: int, source: Source | None = None) -> int:
    """The number for a launch of the stream that will announce x and ids."""
    number = next(_numbers) % ((1 << 22) - 1) + 1
    _latest[stream] = weakref.ref(x), weakref.ref(ids), Announced(number, source)
    return number


def announced(x: Tensor, ids: Tensor, stream: int) -> Announced:
    """How the latest launch of the stream announces these; by no number if they are another's or it does not."""
    found = _latest.get(stream)
    return found[2] if found is not None and found[0]() is x and found[1]() is ids else Announced()


@functools.cache
def _launch() -> Any:
    return build.function("router_mma.cu", "router", "p" * 7 + "l" * 8 + "fp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "router_mma.cu",
        device,
        (a.x.dtype == BFLOAT16, "bfloat16"),
        (0 < a.x.shape[0] <= MAX_ROWS, f"up to {MAX_ROWS} rows"),
        (a.gate.dtype == BFLOAT16, "a bfloat16 gate"),
        (
            _parts(a.x.shape[1]) > 0 and a.gate.shape[0] % 8 == 0 and a.gate.shape[0] <= MOST_EXPERTS,
            "a width in 32s up to 28,672 and experts in 8s up to 512",
        ),
        (a.n_group == a.topk_group and a.top_k <= MOST_CHOICES, "no groups"),
    ),
)
def cuda(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int, scale: float, norm: bool
) -> tuple[Tensor, Tensor]:
    given, x, (T, D), E = x, x.contiguous(), x.shape, gate.shape[0]
    parts, memory = _parts(D), workspace.current(x.device)
    stream = memory.stream
    ids = torch.empty(T, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(T, top_k, device=x.device)
    number = announce(given, ids, stream) if T == 1 else 0
    failed = _launch()(
        x.data_ptr(),
        gate.data_ptr(),
        bias.data_ptr(),
        # Sums of CTAs that share rows of the gate; the kernel leaves zeros.
        memory.zeros("router.sums", 8 * MAX_ROWS * MOST_EXPERTS).data_ptr(),
        mailbox(memory).data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        number,
        T,
        D,
        E,
        top_k,
        norm,
        parts,
        _workers(D // parts),
        scale,
        stream,
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate.shape=}"
    return ids, weights


@functools.cache
def _choose() -> Any:
    return build.function("router_topk.cu", "router_topk", "ppppllllfp")


@op.impl(
    "cuda_many",
    when=lambda a, device: build.on_hopper(
        "router_topk.cu",
        device,
        (a.x.dtype == a.gate.dtype == BFLOAT16, "bfloat16 and a bfloat16 gate"),
        (a.x.shape[0] > MAX_ROWS, f"more than {MAX_ROWS} rows"),
        (a.gate.shape[0] <= 512 and a.n_group == a.topk_group and a.top_k <= 32, "at most 512 experts, no groups"),
    ),
)
def cuda_many(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int, scale: float, norm: bool
) -> tuple[Tensor, Tensor]:
    if all(met for met, _ in skinny_gemm.needs(x, gate)):
        logits = skinny_gemm.run(x, gate, wide=True)
    else:
        logits = torch.mm(x, gate.T, out_dtype=FLOAT32)
    T, E = logits.shape
    ids = torch.empty(T, top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(T, top_k, device=x.device)
    failed = _choose()(
        logits.data_ptr(),
        bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        T,
        E,
        top_k,
        norm,
        scale,
        torch.cuda.current_stream(x.device).cuda_stream,
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate.shape=}"
    return ids, weights


def check(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int) -> None:
    E = gate.shape[0]
    assert gate.shape[1] == x.shape[1] and bias.shape == (E,), f"{x.shape=} {gate.shape=} {bias.shape=}"
    assert gate.dtype in (FLOAT32, BFLOAT16) and bias.dtype == FLOAT32, f"{gate.dtype=} {bias.dtype=}"
    assert 0 < topk_group <= n_group and E % n_group == 0 and 0 < top_k <= E // n_group * topk_group, (
        f"{E=} {n_group=} {topk_group=} {top_k=}"
    )


def router(
    x: Tensor, gate: Tensor, bias: Tensor, top_k: int, n_group: int, topk_group: int, scale: float, norm: bool
) -> tuple[Tensor, Tensor]:
    check(x, gate, bias, top_k, n_group, topk_group)
    return op(x, gate, bias, top_k, n_group, topk_group, scale, norm)
