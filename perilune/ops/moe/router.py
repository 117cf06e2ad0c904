"""Which experts a token goes to and with what weight (noaux_tc, docs/formats.md section 2.3), all in fp32.

s = sigmoid(x gate^T); choice = s + bias; with n_group > 1 only the topk_group groups with the largest sum of their two
best choices are kept; ids = the top_k largest choices, in descending order, ties to the lower id;
weights = s[ids] (without bias), divided by their sum + 1e-20 if `normalise`, times `factor`.
x [T, D]; gate [E, D] float32, or bfloat16 if that is what the checkpoint holds; bias [E] float32; the numbers in a
`Routing` -> `Chosen`: ids [T, top_k] int32, weights [T, top_k] float32.

"cuda" (router_mma.cu) is one launch for up to 16 rows. For one row it publishes "x is ready" and the ids while it runs,
so that moe_int4's kernel may start before the router's ends (`Publication` in `Chosen`). With more rows, that kernel
may start when x is ready (see moe_int4.py). "cuda_many" computes fp32 logits by a matrix product; router_topk.cu
selects from these.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads, workspace
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, exact
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import addresses
from perilune.ops.layouts.operands import Routing
from perilune.ops.linear import skinny_gemm
from perilune.ops.moe.chosen import Chosen, mailbox

MAX_ROWS = 16  # max rows of router_mma.cu
MOST_EXPERTS = 512
MOST_CHOICES = 32
MOST_CHUNKS = 14  # chunks of 32 values of x in a warp's registers


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
    scale: float = 1.0  # factor of the logits


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
    """x and gate are small multiples of a power of two: every order of summation gives the same logits. Rows of x with
    near-ties are set to 0."""
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
    routing = Routing(c.k, c.groups, c.kept, 2.827, c.norm)
    return {"x": x.to(g.dtype), "gate": gate.to(BFLOAT16 if c.narrow else FLOAT32), "bias": bias, "routing": routing}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.router(c.T, c.D, c.E, c.k, dtype.itemsize)


def reference(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> Chosen:
    s = torch.sigmoid(x.float() @ gate.float().T)
    choice = s + bias
    if routing.topk_group < routing.n_group:
        grouped = choice.view(len(x), routing.n_group, -1)
        best_two = grouped.sort(dim=-1, descending=True)[0][..., :2].sum(-1)
        kept = best_two.sort(dim=-1, descending=True, stable=True)[1][:, : routing.topk_group]
        dropped = torch.ones_like(best_two, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, : routing.top_k]
    weights = s.gather(-1, ids)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Chosen(ids.to(torch.int32), weights * routing.factor)


op = Op("router", CASES, TOL, inputs, cost, reference, decides=("x", "gate", "routing"))


_kernel = build.launcher("router", "router", "pppppp" + "l" * 8 + "f")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "router", device, (a.x.shape[1] % 8 == 0, "a hidden width that is a multiple of 8")
    ),
)
def cpp(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> Chosen:
    x, gate, bias = x.float().contiguous(), gate.float().contiguous(), bias.contiguous()
    (T, D), E = x.shape, gate.shape[0]
    ids = torch.empty(T, routing.top_k, dtype=torch.int32)
    weights = torch.empty(T, routing.top_k)
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
        routing.top_k,
        routing.n_group,
        routing.topk_group,
        routing.normalise,
        threads.count(),
        routing.factor,
    )
    return Chosen(ids, weights)


def _parts(D: int) -> int:
    """CTAs that split the width D: two if all 8 warps of each still have whole chunks; 0 if no split fits."""
    wanted = (2, 1, 4, 8) if D % 512 == 0 else (1, 2, 4, 8)
    fitting = (n for n in wanted if D % (32 * n) == 0 and D // n <= 32 * MOST_CHUNKS * _workers(D // n))
    return next(fitting, 0)


def _workers(width: int) -> int:
    return next((n for n in (8, 4, 2) if width % (32 * n) == 0), 1)


_launch = build.launcher("router_mma.cu", "router", "p" * 7 + "l" * 8 + "fp")


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
        (a.routing.n_group == a.routing.topk_group and a.routing.top_k <= MOST_CHOICES, "no groups"),
    ),
    waits=("router_mma.cu",),
)
def cuda(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> Chosen:
    (T, D), E, memory = x.shape, gate.shape[0], workspace.current(x.device)
    parts, box = _parts(D), mailbox(memory)
    ids = torch.empty(T, routing.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(T, routing.top_k, device=x.device)
    publication = box.publish(x) if T == 1 else None
    # Partial sums of the CTAs; zero before and after each launch.
    sums = memory.zeros("router.sums", 8 * MAX_ROWS * MOST_EXPERTS)
    x = x.contiguous()
    failed = _launch()(
        *addresses(x, gate, bias, sums, box.words, ids, weights),
        publication.number if publication else 0,
        T,
        D,
        E,
        routing.top_k,
        routing.normalise,
        parts,
        _workers(D // parts),
        routing.factor,
        memory.stream,
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate.shape=}"
    return Chosen(ids, weights, publication)


_choose = build.launcher("router_topk.cu", "router_topk", "ppppllllfp")


@op.impl(
    "cuda_many",
    when=lambda a, device: build.on_hopper(
        "router_topk.cu",
        device,
        (a.x.dtype == a.gate.dtype == BFLOAT16, "bfloat16 and a bfloat16 gate"),
        (a.x.shape[0] > MAX_ROWS, f"more than {MAX_ROWS} rows"),
        (a.gate.shape[0] <= MOST_EXPERTS, f"at most {MOST_EXPERTS} experts"),
        (a.routing.n_group == a.routing.topk_group and a.routing.top_k <= MOST_CHOICES, "no groups"),
    ),
)
def cuda_many(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> Chosen:
    if all(met for met, _ in skinny_gemm.needs(x, gate)):
        logits = skinny_gemm.run(x, gate, wide=True)
    else:
        logits = torch.mm(x, gate.T, out_dtype=FLOAT32)
    T, E = logits.shape
    ids = torch.empty(T, routing.top_k, dtype=torch.int32, device=x.device)
    weights = torch.empty(T, routing.top_k, device=x.device)
    failed = _choose()(
        logits.data_ptr(),
        bias.data_ptr(),
        ids.data_ptr(),
        weights.data_ptr(),
        T,
        E,
        routing.top_k,
        routing.normalise,
        routing.factor,
        build.stream(x.device),
    )
    assert not failed, f"CUDA error {failed}: {x.shape=} {gate.shape=}"
    return Chosen(ids, weights)


def check(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> None:
    E = gate.shape[0]
    assert gate.shape[1] == x.shape[1] and bias.shape == (E,), f"{x.shape=} {gate.shape=} {bias.shape=}"
    assert gate.dtype in (FLOAT32, BFLOAT16) and bias.dtype == FLOAT32, f"{gate.dtype=} {bias.dtype=}"
    r = routing
    fits = 0 < r.topk_group <= r.n_group and E % r.n_group == 0 and 0 < r.top_k <= E // r.n_group * r.topk_group
    assert fits, f"{E=} {routing}"


def router(x: Tensor, gate: Tensor, bias: Tensor, routing: Routing) -> Chosen:
    check(x, gate, bias, routing)
    return op(x, gate, bias, routing)
