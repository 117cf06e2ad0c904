"""Tests a CUDA graph when it is captured: compares its first replay with the same step without a graph, and with the
replays of the other ranks."""

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.dist.group import Group

log = logging.getLogger("perilune.engine")

# ||graph - eager|| / ||eager|| of a step's logits. Larger: damage in one of many layers goes unnoticed. Smaller:
# kernels that add in no fixed order fail.
MAX_ERROR_SHARE = 0.05
# Relative error of a drafted token's probability. Larger than for logits: an error x of a logit becomes a factor e^x.
MAX_PROBABILITY_ERROR_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Probe:
    """Results of one run of a step: hidden [T, D], equal on all ranks, and this rank's logits [T, V / N]."""

    hidden: Tensor
    logits: Tensor


def check(eager: Probe, replayed: Probe, group: Group, name: str) -> None:
    """EngineError if the graph's results differ from those without a graph, or from another rank's graph."""
    right, found = (p.logits.nan_to_num(0.0, 0.0, 0.0).float() for p in (eager, replayed))
    error = ((found - right).norm() / right.norm().clamp_min(1e-30)).double()
    _agree(error, replayed.hidden, group, name, ("logits", "hidden states", MAX_ERROR_SHARE))


def check_chains(eager: Tensor, replayed: Tensor, group: Group, name: str) -> None:
    """As `check`, for chains [B, 2 L] float64: L ids, then their probabilities, rows in the same order on all ranks. A
    chain is compared up to its first differing token: two almost equal probabilities may change the token."""
    (ids, right), (drafted, found) = (t.nan_to_num(0.0, 0.0, 0.0).chunk(2, 1) for t in (eager, replayed))
    same = (ids == drafted).long().cumprod(1)
    comparable = torch.cat([torch.ones_like(same[:, :1]), same[:, :-1]], 1)
    errors = comparable * (found - right).abs() / torch.maximum(found, right).clamp_min(1e-30)
    parts = "probabilities", "chains", MAX_PROBABILITY_ERROR_SHARE
    _agree(errors.amax(), replayed, group, name, parts)


def _agree(error: Tensor, same: Tensor, group: Group, name: str, what: tuple[str, str, float]) -> None:
    """EngineError unless `error` [] float64 is at most the last item of `what`, and `same` has equal bits on all
    ranks."""
    begin, (compared, exchanged, limit) = time.perf_counter(), what
    bits = same.contiguous().view(torch.int16 if same.element_size() == 2 else torch.int32)
    # Weighted by index, so that rows in another order give another sum.
    weights = torch.arange(1, bits.numel() + 1, device=bits.device)
    digest = (bits.flatten().long() * weights).sum()
    errors, digests = group.gather(torch.stack([error.view(torch.int64), digest])).cpu().unbind(1)
    worst = float(errors.view(torch.float64).max())
    if not worst <= limit:
        raise EngineError(
            f"self-test: the CUDA graph of {name} gives {compared} that differ by {worst:.1%} from those of the same "
            "step without it; self_test=false leaves the test out"
        )
    if len(set(digests.tolist())) > 1:
        raise EngineError(f"self-test: the ranks compute different {exchanged} in the CUDA graph of {name}")
    log.info("self-test of %s: %.1e off, %.1f ms", name, worst, 1e3 * (time.perf_counter() - begin))
