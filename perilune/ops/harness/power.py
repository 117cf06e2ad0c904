"""Energy of a GPU, and the least time of a computation at its power limit.

A GPU at its limit lowers its clock until its power fits, so a step takes its energy divided by the limit. The least
energy is that of the products and of the bytes read: what one large matrix product and one large sum take on the same
GPU in the same run, without the power of an idle SM clock. Such a bound is about this GPU: others of its type take a
few percent more or less for the same work.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from perilune.core.errors import ConfigError
from perilune.ops.harness import nvml

POLL_SECONDS = 0.004  # NVML renews its counter every 0.1 s
SETTLE_SECONDS, TIMED_SECONDS = 0.6, 2.0  # of a load before it is measured, and measured
SPIN_CYCLES = 2_000_000
# K2's projection after attention, a layer's most efficient product
TOKENS, INNER_WIDTH, OUTER_WIDTH = 10_000, 8192, 7168
READ_BYTES = 8 << 30


class Meter:
    """Inside `with`: samples the counter of energy of the current GPU. ConfigError without NVML."""

    def __init__(self) -> None:
        found = nvml.device(torch.cuda.current_device())
        if found is None:
            raise ConfigError("measuring power needs NVML (libnvidia-ml.so.1 of NVIDIA's driver)")
        self._device = found
        self.joules()  # refused here, not in the thread
        self.changes: list[tuple[float, float]] = []  # time.perf_counter(), joules since the driver was loaded
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="power", daemon=True)

    def joules(self) -> float:
        return self._asked("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong()) / 1e3

    def limit(self) -> float:
        """Watts."""
        return self._asked("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint()) / 1e3

    def watts(self, begin: float, end: float) -> float:
        """Mean between two times: from the first to the last change of the counter between them."""
        inside = [change for change in self.changes if begin <= change[0] <= end]
        if len(inside) < 2:
            raise ConfigError(f"NVML renewed the counter of energy {len(inside)} times in {end - begin:.2f} s")
        (first, before), (last, after) = inside[0], inside[-1]
        return (after - before) / (last - first)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        known = self.joules()
        while not self._ended.wait(POLL_SECONDS):
            now = self.joules()
            if now != known:
                self.changes.append((time.perf_counter(), now))
                known = now

    def _asked(self, name: str, value: Any) -> float:
        error = getattr(self._device.library, name)(self._device.handle, ctypes.byref(value))
        if error:
            raise ConfigError(f"this GPU does not say its power: {name} returned {error}")
        return float(value.value)


@dataclass(frozen=True)
class Roof:
    """limit, idle: watts, idle with the clock up. Joules beyond idle: tera_flop and tera_flop8, per 10^12 FLOPs of
    products in bfloat16 and in e4m3; gigabyte, per 10^9 bytes read."""

    limit: float
    idle: float
    tera_flop: float
    tera_flop8: float
    gigabyte: float

    def seconds(self, flops: float, flops8: float, nbytes: float) -> float:
        """Least time at the limit, in which the GPU also draws its idle power. flops8: FLOPs in e4m3."""
        joules = (flops * self.tera_flop + flops8 * self.tera_flop8) / 1e12 + nbytes / 1e9 * self.gigabyte
        return joules / (self.limit - self.idle)


def measure_roof() -> Roof:
    """Takes 11 s of the current GPU and 8 GiB of its memory."""
    _, idle = _sustained(lambda: torch.cuda._sleep(SPIN_CYCLES))

    def beyond_idle(call: Callable[[], object], amount: float) -> float:
        seconds, watts = _sustained(call)
        return (watts - idle) * seconds / amount

    T, i, o = TOKENS, INNER_WIDTH, OUTER_WIDTH
    tera = 2e-12 * T * i * o
    x, w = (torch.randn(n, i, device="cuda", dtype=torch.bfloat16) for n in (T, o))
    x8, w8 = (t.to(torch.float8_e4m3fn) for t in (x, w))
    one = torch.ones((), device="cuda")
    data = torch.randn(READ_BYTES // 4, device="cuda")  # of constant data, reading takes less energy
    return Roof(
        Meter().limit(),
        idle,
        beyond_idle(lambda: torch.nn.functional.linear(x, w), tera),
        beyond_idle(lambda: torch._scaled_mm(x8, w8.T, one, one, out_dtype=torch.bfloat16), tera),
        beyond_idle(lambda: data.sum(), READ_BYTES / 1e9),
    )


def _sustained(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call, and watts, while calls follow each other."""
    with torch.inference_mode(), Meter() as meter:
        ends: list[float] = []  # of calls
        before: torch.cuda.Event | None = None
        begin = time.perf_counter()
        while time.perf_counter() < begin + SETTLE_SECONDS + TIMED_SECONDS:
            call()
            event = torch.cuda.Event()
            event.record()
            if before is not None:  # one call is computed while the next is launched
                before.synchronize()
                ends.append(time.perf_counter())
            before = event
        timed = [end for end in ends if end >= begin + SETTLE_SECONDS]
        return (timed[-1] - timed[0]) / (len(timed) - 1), meter.watts(timed[0], timed[-1])
