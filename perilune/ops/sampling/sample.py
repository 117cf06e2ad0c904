"""One token per row, by temperature, top-k, top-p, min-p and a given random number.

logits [R, V] float32; temperature [R] float32; top_k [R] int32 (0: off); top_p, min_p [R] float32; u [R] float64 in
[0, 1) -> ids [R] int64. With temperature 0 the largest logit wins, ties to the lower id. Otherwise a token has
z = (logit - max) * (1 / temperature) and weight w = floor(2^36 e^z), in fp32 operations that `weights` fixes one by
one, so that every implementation on every device has the same bits. From there on all numbers are integers, exact in
any order of addition: the same logits give the same token in any batch on any device. Kept are
  the top_k tokens of the largest z; of these the fewest, from the largest z on, with at least top_p of their total
  weight, at least one (equal z: lower ids first); of these the ones with at least min_p times the largest weight;
and the token is the first, in order of ids, at which the running sum of kept weights exceeds u times their total. A
token 28 or more below the largest z has weight 0.
-inf never wins. A row with nan or +inf, or of -inf alone, gives -1.
"cuda" computes a row in a cluster of CTAs and does not sort.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, K2, NANO, Make, Sized, exact
from perilune.ops.harness.registry import Op
from perilune.ops.sampling.argmax import fits, processors, spoil

ONE = 36  # the largest weight is 2^36: sums of 2^17 such weights are exact in float64, too
LEAST = -28.0  # tokens with a smaller z have weight 0
PIECE = 64  # rows at a time in the torch implementation, which needs ten times the memory of their logits


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    mode: str
    flat: float = 3.0  # spread of the logits


CASES = [
    *(Case(rows, K2.vocab, mode, big=True) for rows in (1, 64) for mode in ("plain", "top_p", "mixed")),
    *(Case(4, K2.vocab, mode, flat=flat, big=True) for mode in ("top_p", "wide") for flat in (0.0, 0.01, 1.0, 8.0)),
    Case(4, K2.vocab, "ties", big=True),
    *(Case(rows, NANO.vocab, mode) for rows in (1, 16) for mode in ("argmax", "plain", "top_p", "mixed")),
    Case(0, 16, "mixed"),
    Case(4, 1, "mixed"),
    Case(64, 37, "mixed"),
    Case(32, 50, "ties"),
    Case(16, 1000, "mixed", flat=0.01),
    Case(16, 100, "masked"),
    Case(16, 100, "mixed", flat=3000.0),
    Case(16, 10_001, "wide"),
    Case(32, 300, "broken"),
]
TOL = {"ids": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    rows = c.rows
    logits = g.randn(rows, c.V, scale=c.flat)
    if c.mode == "ties":
        logits = g.integers(0, 3, rows, c.V).float()
    if c.mode == "masked":
        logits = logits.masked_fill(g.rand(rows, c.V) < 0.9, float("-inf"))
        logits[:, 3] = 0.0
    temperature = torch.full((rows,), 0.0 if c.mode == "greedy" else 0.8, device=g.device)
    top_k, top_p = g.integers(0, 1, rows, dtype=torch.int32), torch.ones(rows, device=g.device)
    min_p = torch.zeros(rows, device=g.device)
    if c.mode == "top_p":
        top_p = torch.full_like(top_p, 0.95)
    if c.mode == "broken":
        spoil(logits, g)
    if c.mode in ("mixed", "ties", "masked", "wide", "broken"):
        temperature = g.integers(0, 4, rows).float() * 0.5
        top_k = g.integers(0, 3, rows, dtype=torch.int32) * 7
        if c.mode == "wide":
            top_k = g.integers(-c.V, c.V + 2, rows, dtype=torch.int32).clamp_min(0)
        top_p = torch.where(g.rand(rows) < 0.5, 1.0, g.rand(rows) * 0.98 + 0.01)
        min_p = torch.where(g.rand(rows) < 0.5, 0.0, g.rand(rows) * 0.2)
    u = g.rand(rows, dtype=torch.float64)
    return {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "u": u}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.sample(c.rows, c.V)


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """z [R, V] of rows with a temperature above 0, not below LEAST; 0 where the logit is nan."""
    # Subtract the largest logit before scaling: a tiny temperature must not give inf - inf, nor 0 times inf.
    inverse = temperature.reciprocal().clamp_max(torch.finfo(FLOAT32).max)
    z = (logits - logits.amax(-1, keepdim=True)) * inverse.unsqueeze(-1)
    return z.nan_to_num_(0.0, 0.0, LEAST).clamp_(LEAST, 0.0)


def weights(z: Tensor) -> Tensor:
    """floor(2^36 e^z) as int64, with a relative error of 3e-7. The other implementations round at the same points."""
    n = (z * 1.44269502).round_()
    r = (z - n * 0.693359375).add_(n * 2.12194442e-4)
    p = torch.full_like(r, 1.38888892e-3)
    for term in (8.33333377e-3, 4.16666679e-2, 1.66666672e-1, 0.5, 1.0, 1.0):
        p.mul_(r).add_(term)
    power = ((n.int() + (127 + ONE)) << 23).view(FLOAT32)
    return p.mul_(power).long()


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    ids = []
    for r, row in enumerate(logits):
        if not bool(row.max().isfinite()):  # it is nan if any is
            ids.append(-1)
            continue
        if temperature[r] == 0:
            ids.append(int((row == row.max()).nonzero()[0]))
            continue
        z = scaled(logits[r : r + 1], temperature[r : r + 1])[0]
        w = weights(z).tolist()
        order = z.argsort(descending=True, stable=True).tolist()
        if top_k[r] > 0:
            order = order[: int(top_k[r])]
        if top_p[r] < 1:
            goal, reached, n = float(top_p[r].double()) * sum(w[i] for i in order), 0, 0
            while n == 0 or float(reached) < goal:
                reached += w[order[n]]
                n += 1
            order = order[:n]
        least = float(min_p[r].double()) * float(2**ONE)
        kept = sorted(i for i in order if w[i] >= least)
        total = sum(w[i] for i in kept)
        goal, reached = min(int(float(u[r]) * total), total - 1), 0
        for i in kept:
            reached += w[i]
            if reached > goal:
                break
        ids.append(i)
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


op = Op("sample", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


_kernel = build.launcher("sample", "sample", "pppppppll")


@op.impl("cpp", when=lambda a, device: build.on_cpu("sample", device))
def cpp(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    logits, *rows = (x.contiguous() for x in (logits, temperature, top_k, top_p, min_p, u))
    R, V = logits.shape
    ids = torch.empty(R, dtype=torch.int64)
    _kernel()(logits.data_ptr(), *(x.data_ptr() for x in rows), ids.data_ptr(), R, V)
    return ids


_cluster = build.launcher("sample.cu", "sample", "ppppppplllp")


@op.impl("cuda", when=fits)
def cuda(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    logits, *rows = (x.contiguous() for x in (logits, temperature, top_k, top_p, min_p, u))
    S, V = logits.shape
    ids = torch.empty(S, dtype=torch.int64, device=logits.device)
    failed = _cluster()(
        logits.data_ptr(),
        *(x.data_ptr() for x in rows),
        ids.data_ptr(),
        S,
        V,
        processors(S),
        build.stream(),
    )
    assert not failed, f"CUDA error {failed}: {logits.shape=}"
    return ids


@op.impl("torch")
def by_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """All rows take the same path, whatever their parameters: the host does not wait for values."""
    rows = zip(*(torch.split(x, PIECE) for x in (logits, temperature, top_k, top_p, min_p, u)))
    return torch.cat([_piece(*piece) for piece in rows])


def _piece(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    V = logits.shape[1]
    greedy = temperature == 0
    largest = logits.argmax(-1, keepdim=True)  # NaN counts as the largest
    z = scaled(logits, torch.where(greedy, 1.0, temperature))
    w = weights(z)
    falling = z.sort(-1, descending=True)[0]
    running = weights(falling).cumsum_(-1)
    k = torch.where(top_k > 0, top_k.long().clamp_max(V), V).unsqueeze(-1)
    goal = top_p.double().unsqueeze(-1) * running.gather(-1, k - 1).double()
    n = (running.double() < goal).sum(-1, keepdim=True) + 1
    n = torch.where(top_p.unsqueeze(-1) < 1, n, V).minimum(k)
    threshold = falling.gather(-1, n - 1)
    above, equal = z > threshold, z == threshold
    kept = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    kept &= w.double() >= min_p.double().unsqueeze(-1) * 2.0**ONE
    running = torch.where(kept, w, 0).cumsum_(-1)
    total = running[:, -1]
    goal = torch.minimum((u * total.double()).long(), total - 1).unsqueeze(-1)
    chosen = torch.searchsorted(running, goal, right=True).clamp_max_(V - 1)
    chosen = torch.where(greedy.unsqueeze(-1), largest, chosen)
    return torch.where(logits.gather(-1, largest).isfinite(), chosen, -1).squeeze(-1)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    R = logits.shape[0]
    assert logits.dtype == FLOAT32 and top_k.dtype == torch.int32 and u.dtype == torch.float64, f"{logits.dtype=}"
    assert all(x.shape == (R,) for x in (temperature, top_k, top_p, min_p, u)), f"{logits.shape=} {temperature.shape=}"
    return op(logits, temperature, top_k, top_p, min_p, u)
