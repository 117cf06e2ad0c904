"""One token per row, by temperature, top-k, top-p, min-p and a given random number.

logits [R, V] float32; temperature [R] float32; top_k [R] int32 (0: off); top_p, min_p [R] float32; u [R] float64 in
[0, 1) -> ids [R] int64. With temperature 0 the largest logit wins, ties to the lower id. Otherwise each token weighs
w = floor(2^52 softmax((logits - max) / temperature)), the softmax in fp32, and from there all is integers: exact in any
order, so that a row's token is the same in any batch. Kept are
  the top_k heaviest tokens; of these the fewest whose sum reaches top_p of theirs, at least one (equal weights: lower
  ids first); of these the ones of at least min_p times the heaviest;
and the token is the first, in order of ids, whose running sum of kept weights exceeds u times their total.
-inf never wins unless everything is -inf. A row with nan, or of -inf alone, gives some valid id.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops import compile
from perilune.ops.case import FLOAT32, K2, NANO, Make, Sized, exact
from perilune.ops.registry import Op

ONE = 2.0**52
PIECE = 64  # rows at a time, in torch: it takes ten times the memory of their logits


@dataclass(frozen=True)
class Case(Sized):
    rows: int
    V: int
    mode: str
    flat: float = 3.0  # spread of the logits


CASES = [
    *(Case(rows, K2.vocab, mode, big=True) for rows in (1, 64) for mode in ("plain", "top_p", "mixed")),
    *(Case(rows, NANO.vocab, mode) for rows in (1, 16) for mode in ("greedy", "plain", "top_p", "mixed")),
    Case(0, 16, "mixed"),
    Case(4, 1, "mixed"),
    Case(64, 37, "mixed"),
    Case(32, 50, "ties"),
    Case(16, 1000, "mixed", flat=0.01),
    Case(16, 100, "masked"),
    Case(16, 100, "mixed", flat=3000.0),
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
    if c.mode in ("mixed", "ties", "masked"):
        temperature = g.integers(0, 4, rows).float() * 0.5
        top_k = g.integers(0, 3, rows, dtype=torch.int32) * 7
        top_p = torch.where(g.rand(rows) < 0.5, 1.0, g.rand(rows) * 0.98 + 0.01)
        min_p = torch.where(g.rand(rows) < 0.5, 0.0, g.rand(rows) * 0.2)
    u = g.rand(rows, dtype=torch.float64)
    return {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "u": u}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.sample(c.rows, c.V)


def probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] of rows with a temperature above 0."""
    # Scaled after the largest is taken off: a tiny temperature must not give inf - inf. Rows are padded to whole
    # vectors, so that each is summed alike wherever it lies in memory.
    z = (logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)
    V = logits.shape[1]
    if V % 8:
        z = torch.nn.functional.pad(z, (0, -V % 8), value=float("-inf"))
    return torch.softmax(z, -1)[:, :V]


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    ids = []
    for r in range(logits.shape[0]):
        if temperature[r] == 0:
            ids.append(int(logits[r].argmax()))
            continue
        w = (probabilities(logits[r : r + 1], temperature[r : r + 1])[0].double() * ONE).nan_to_num(0.0).long()
        order = w.argsort(descending=True, stable=True).tolist()
        if top_k[r] > 0:
            order = order[: int(top_k[r])]
        weights = w.tolist()
        if top_p[r] < 1:
            goal, reached, n = float(top_p[r].double()) * sum(weights[i] for i in order), 0, 0
            while n == 0 or (reached < goal and n < len(order)):
                reached += weights[order[n]]
                n += 1
            order = order[:n]
        least = float(min_p[r].double()) * float(max(weights))
        kept = sorted(i for i in order if weights[i] >= least)
        goal, reached = int(float(u[r]) * sum(weights[i] for i in kept)), 0
        for i in kept:
            reached += weights[i]
            if reached > goal:
                break
        ids.append(i)
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


op = Op("sample", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


@functools.cache
def _kernel() -> Any:
    return compile.function("sample", "sample", "pppppppll")


@op.impl("cpp", when=lambda a, device: compile.on_cpu("sample", device))
def cpp(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    # Lists of a few numbers: a tenth of the time of torch calls on them.
    drawn = temperature.tolist()
    greedy = [r for r, t in enumerate(drawn) if t == 0]
    if len(greedy) == len(drawn):
        return logits.argmax(-1)
    p = probabilities(logits, temperature.masked_fill(temperature == 0, 1.0) if greedy else temperature).contiguous()
    R, V = logits.shape
    ids = torch.empty(R, dtype=torch.int64)
    rows = [x.contiguous() for x in (temperature, top_k, top_p, min_p, u)]
    _kernel()(p.data_ptr(), *(x.data_ptr() for x in rows), ids.data_ptr(), R, V)
    if greedy:
        ids[greedy] = logits[greedy].argmax(-1)
    return ids


@op.impl("torch")
def by_thresholds(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor
) -> Tensor:
    """Every row takes the same path, whatever it asks for: the host never waits to see the values."""
    rows = zip(*(x.split(PIECE) for x in (logits, temperature, top_k, top_p, min_p, u)))
    return torch.cat([_piece(*piece) for piece in rows])


def _piece(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    V = logits.shape[1]
    greedy = temperature == 0
    p = probabilities(logits, torch.where(greedy, 1.0, temperature)).nan_to_num(0.0)
    w = (p.double() * ONE).long()
    # Sorting the probabilities is sorting the weights, at half the bytes.
    heavy = (p.sort(-1, descending=True)[0].double() * ONE).long()
    running = heavy.cumsum(-1)
    k = torch.where(top_k > 0, top_k.long().clamp_max(V), V).unsqueeze(-1)
    goal = top_p.double().unsqueeze(-1) * running.gather(-1, k - 1).double()
    n = (running.double() < goal).sum(-1, keepdim=True) + 1
    n = torch.where(top_p.unsqueeze(-1) < 1, n, V).minimum(k)
    threshold = heavy.gather(-1, n - 1)
    above, equal = w > threshold, w == threshold
    kept = above | (equal & (equal.cumsum(-1) <= n - above.sum(-1, keepdim=True)))
    kept &= w.double() >= min_p.double().unsqueeze(-1) * heavy[:, :1].double()
    running = torch.where(kept, w, 0).cumsum(-1)
    total = running[:, -1]
    goal = torch.minimum((u * total.double()).long(), total - 1).unsqueeze(-1)
    chosen = torch.searchsorted(running, goal, right=True).squeeze(-1).clamp_max_(V - 1)
    return torch.where(greedy, logits.argmax(-1), chosen)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, u: Tensor) -> Tensor:
    R = logits.shape[0]
    assert logits.dtype == FLOAT32 and top_k.dtype == torch.int32 and u.dtype == torch.float64, f"{logits.dtype=}"
    assert all(x.shape == (R,) for x in (temperature, top_k, top_p, min_p, u)), f"{logits.shape=} {temperature.shape=}"
    return op(logits, temperature, top_k, top_p, min_p, u)
