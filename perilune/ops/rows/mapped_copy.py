"""Copies between a buffer of the device and pinned host memory, by a kernel that reads or writes that memory itself.

to_host   host[...] = here[...], else here[...] = host[...]. Both contiguous, of the same number of bytes, a multiple of
          4. `here` is on the device; on a GPU `host` must be pinned. The copy is queued on the current stream.

A step's inputs and results are a few KB. A copy engine would copy them only after the KV blocks already queued there
for other requests; a kernel's loads and stores share the link with those copies instead.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build
from perilune.ops.harness.case import FLOAT32, Make, Sized, exact
from perilune.ops.harness.registry import Op

WORD_BYTES = 4


@dataclass(frozen=True)
class Case(Sized):
    n: int  # numbers of 4 bytes
    to_host: bool = False


CASES = [*(Case(n, to_host) for n in (1, 7, 64, 1025, 70_001) for to_host in (False, True)), Case(0)]
TOL = {"here": exact(), "host": exact()}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    here, host = (g.integers(-(2**31), 2**31 - 1, c.n, dtype=torch.int32) for _ in range(2))
    return {"here": here, "host": host, "to_host": c.to_host}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.Cost(0, 2 * WORD_BYTES * c.n)


def reference(here: Tensor, host: Tensor, to_host: bool) -> None:
    to, source = (host, here) if to_host else (here, host)
    to.copy_(source, non_blocking=True)


op = Op("mapped_copy", CASES, TOL, inputs, cost, reference, decides=("here", "to_host"), dtypes=(FLOAT32,))


_kernel = build.launcher("mapped_copy.cu", "mapped_copy", "pplp")


@op.impl("cuda", when=lambda a, device: build.on_hopper("mapped_copy.cu", device, (a.here.numel() > 0, "an element")))
def cuda(here: Tensor, host: Tensor, to_host: bool) -> None:
    to, source = (host, here) if to_host else (here, host)
    stream = build.stream()
    failed = _kernel()(to.data_ptr(), source.data_ptr(), here.nbytes // WORD_BYTES, stream)
    assert not failed, f"CUDA error {failed}: {here.shape=} {to_host=}"


def mapped_copy(here: Tensor, host: Tensor, to_host: bool) -> None:
    assert here.nbytes == host.nbytes and here.nbytes % WORD_BYTES == 0, f"{here.shape=} {host.shape=}"
    assert here.is_contiguous() and host.is_contiguous(), "views must be contiguous"
    op(here, host, to_host)
