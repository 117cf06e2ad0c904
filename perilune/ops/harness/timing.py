"""Measures implementations, and the roofline of this machine to compare with."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from perilune.core.cost import Cost
from perilune.ops.harness.case import FLOAT32, Make, clone, tensors
from perilune.ops.harness.check import SEED
from perilune.ops.harness.registry import Op

CACHE_BYTES = 64 << 20  # Calls cycle through copies of the inputs with this total size, more than caches hold.
MAX_COPIES = 16
ROUNDS = 7
ROUND_SECONDS = 4e-3


@dataclass(frozen=True)
class Roof:
    """The machine's measured roofs: bytes per second read from memory, FLOPs per second in a large matrix product."""

    bandwidth: float
    flop_rate: float


@dataclass(frozen=True)
class Timing:
    impl: str
    seconds: float
    cost: Cost
    roof: Roof

    @property
    def of_roof(self) -> float:
        """Fraction of the binding roof; above 1 if the inputs fit a cache that is faster than memory."""
        return self.cost.seconds(self.roof.flop_rate, self.roof.bandwidth) / self.seconds


def measure_roof(device: torch.device, dtype: torch.dtype) -> Roof:
    on_cpu = device.type == "cpu"
    size, n = (192 << 20, 1024) if on_cpu else (2 << 30, 8192)
    data = torch.ones(size // 4, device=device)
    # On CPU bfloat16 is computed in float32.
    a = torch.randn(n, n, device=device).to(FLOAT32 if on_cpu else dtype)
    read = _seconds([data.sum], device)[0]
    product = _seconds([lambda: a @ a], device)[0]
    return Roof(size / read, 2 * n**3 / product)


def measure(
    op: Op[..., Any], case: Any, dtype: torch.dtype, device: torch.device, names: Sequence[str], roof: Roof
) -> list[Timing]:
    """Median times of implementations `names`, interleaved; names that refuse are left out."""
    args = op.inputs(case, Make(dtype, device, SEED))
    size = sum(t.numel() * t.itemsize for t in tensors(args).values())
    copies = [tuple(clone(args).values()) for _ in range(max(1, min(MAX_COPIES, CACHE_BYTES // max(1, size))))]
    runs = {c.name: c.run for c in op.candidates if c.name in names and not op.refusal(c.name, copies[0])}
    seconds = _seconds([_rotating(run, copies) for run in runs.values()], device)
    cost = op.cost(case, dtype)
    return [Timing(name, s, cost, roof) for name, s in zip(runs, seconds)]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _rotating(run: Callable[..., Any], copies: Sequence[tuple[Any, ...]]) -> Callable[[], Any]:
    turn = 0

    def call() -> Any:
        nonlocal turn
        turn = (turn + 1) % len(copies)
        return run(*copies[turn])

    return call


def _seconds(calls: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Median seconds of a call over ROUNDS rounds (fewer of slow ones); the calls take turns within a round."""
    with torch.inference_mode():
        repeats = []
        for call in calls:
            _batch(call, 2, device)
            once = _batch(call, 1, device)
            repeats.append(max(1, int(ROUND_SECONDS / once)))
        times: list[list[float]] = [[] for _ in calls]
        for turn in range(ROUNDS):
            for call, n, seen in zip(calls, repeats, times):
                if turn < 3 or n > 1:
                    seen.append(_batch(call, n, device) / n)
    return [median(seen) for seen in times]


def _batch(call: Callable[[], Any], n: int, device: torch.device) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        for _ in range(n):
            call()
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(n):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
