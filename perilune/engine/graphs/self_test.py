"""The test of a CUDA graph when it is captured: its first replay is compared with the same step without a graph, and
with the other ranks'."""

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


@dataclass(frozen=True, slots=True)
class Probe:
    """Of one run: hidden [T, D], the same on all ranks, and logits [T, V / N] made of it."""

    hidden: Tensor
    logits: Tensor


def check(eager: Probe, replayed: Probe, group: Group, name: str) -> None:
    """EngineError if the graph computes something else, or something else than another rank's."""
    begin = time.perf_counter()
    right, found = (p.logits.nan_to_num(0.0, 0.0, 0.0).float() for p in (eager, replayed))
    error = ((found - right).norm() / right.norm().clamp_min(1e-30)).double()
    bits = replayed.hidden.contiguous().view(torch.int16 if replayed.hidden.element_size() == 2 else torch.int32)
    # Weighted by place: rows in another order differ too.
    weights = torch.arange(1, bits.numel() + 1, device=bits.device)
    digest = (bits.flatten().long() * weights).sum()
    errors, digests = group.gather(torch.stack([error.view(torch.int64), digest])).cpu().unbind(1)
    worst = float(errors.view(torch.float64).max())
    if not worst <= MAX_ERROR_SHARE:
        raise EngineError(
            f"self-test: the CUDA graph of {name} gives logits that differ by {worst:.1%} from those of the same step "
            "without it; self_test=false leaves the test out"
        )
    if len(set(digests.tolist())) > 1:
        raise EngineError(f"self-test: the ranks compute different hidden states in the CUDA graph of {name}")
    log.info("self-test of %s: %.1e off, %.1f ms", name, worst, 1e3 * (time.perf_counter() - begin))
