"""Energy of a GPU, with NVML replaced by a counter that is renewed now and then, and the least time at a limit."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perilune.bench import prefill
from perilune.core.errors import ConfigError
from perilune.ops.harness import nvml, power


class Nvml:
    """650 W. `error`: what the counter of energy returns instead."""

    error = 0

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        return 0 if uuid == b"GPU-one" else 6

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: object, to: Any) -> int:
        to._obj.value = 700_000
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object, to: Any) -> int:
        renewed = int((time.perf_counter() - self.began) / 0.02)
        to._obj.value = 5_000_000 + renewed * 13_000
        return self.error


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nvml]:
    made = Nvml()
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="one"))
    yield made


def test_watts_between_two_times() -> None:
    with power.Meter() as meter:
        begin = time.perf_counter()
        while len(meter.changes) < 30:
            time.sleep(0.02)
        end = time.perf_counter()
    assert meter.limit() == 700
    assert meter.watts(begin, end) == pytest.approx(650, rel=0.2)
    changes = [joules for _, joules in meter.changes]
    assert all(b > a for a, b in itertools.pairwise(changes))
    known = len(meter.changes)
    time.sleep(0.05)
    assert len(meter.changes) == known  # the thread has ended
    with pytest.raises(ConfigError, match="renewed the counter of energy 0 times"):
        meter.watts(end + 1, end + 1)


def test_a_gpu_without_a_counter_is_one_error(library: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    library.error = 3
    with pytest.raises(ConfigError, match="does not say its power: nvmlDeviceGetTotalEnergyConsumption returned 3"):
        power.Meter()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid="other"))
    with pytest.raises(ConfigError, match="needs NVML"):
        power.Meter()


def test_least_time_at_the_limit() -> None:
    roof = power.Roof(limit=700, idle=120, tera_flop=0.8, tera_flop8=0.4, gigabyte=0.13)
    # 14.5 J each beyond idle in bfloat16 and in e4m3, and 29 J of reading: 580 W do it in 0.1 s.
    seconds = roof.seconds(14.5 / 0.8 * 1e12, 14.5 / 0.4 * 1e12, 29 / 0.13 * 1e9)
    assert seconds == pytest.approx(0.1)
    row = prefill._at_the_limit(roof, {6: 11.0, 2: 3.0}, 5.0, 4.0)
    assert row["joules_per_layer"] == 2 and row["least_ms_at_limit"] == 4 and row["fraction_at_limit"] == 0.8
