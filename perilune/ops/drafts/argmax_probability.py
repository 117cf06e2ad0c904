"""The largest logit's id per row, ties to the lower id, and its probability: a step of a draft model's chain.

logits [S, V] float32 -> ids [S] int64, in 0 .. V - 1; probability [S] float32: 1 / sum(exp(logit - largest)). A row
with nan or +inf, or of -inf alone, gives id 0 and probability 0. "cuda" is one launch in place of five. It does not let
the next kernel start early (PDL: cuda/hopper.cuh). No kernel between two steps of a draft chain may do that, because
`mla_decode` reads the latents of earlier positions before its PDL wait: the step that wrote them must have ended.
"""

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, exact, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.sampling.argmax import CASES as GREEDY
from perilune.ops.sampling.argmax import Case, argmax, inputs

CASES = [*GREEDY, *(Case(rows, 32_000, big=True) for rows in (1, 4))]
TOL = {"ids": exact(), "probability": rounded()}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.sample(c.rows, c.V)


def reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, probability = torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))
    for i, row in enumerate(logits):
        largest = row.max()  # nan if any logit is
        if bool(largest.isfinite()):
            ids[i] = (row == largest).nonzero()[0]
            probability[i] = 1 / (row - largest).double().exp().sum()
    return ids.to(logits.device), probability.to(logits.device)


op = Op("argmax_probability", CASES, TOL, inputs, cost, reference, dtypes=(FLOAT32,))


_kernel = build.launcher("argmax_probability.cu", "argmax_probability", "pppllp")


@op.impl(
    "cuda", when=lambda a, device: build.on_hopper("argmax_probability.cu", device, (a.logits.shape[0] > 0, "a row"))
)
def cuda(logits: Tensor) -> tuple[Tensor, Tensor]:
    (S, V), logits = logits.shape, logits.contiguous()
    ids = torch.empty(S, dtype=torch.int64, device=logits.device)
    probability = torch.empty(S, dtype=FLOAT32, device=logits.device)
    failed = _kernel()(
        logits.data_ptr(), ids.data_ptr(), probability.data_ptr(), S, V, build.stream()
    )  # fmt: skip
    assert not failed, f"CUDA error {failed}: {logits.shape=}"
    return ids, probability


@op.impl("composed")
def composed(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = argmax(logits)
    kept = ids.clamp_min(0)
    above = logits - logits.gather(1, kept[:, None])
    # In float32 a sum of 20,000 terms is 1e-6 off on some CPUs.
    probability = above.exp_().sum(-1, dtype=torch.float64).reciprocal_()
    return kept, probability.masked_fill_(ids < 0, 0).float()


def argmax_probability(logits: Tensor) -> tuple[Tensor, Tensor]:
    assert logits.dtype == FLOAT32 and logits.dim() == 2 and logits.shape[1] > 0, f"{logits.dtype=} {logits.shape=}"
    found: tuple[Tensor, Tensor] = op(logits)
    return found
