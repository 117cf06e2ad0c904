"""The emulator reports what is wrong in a kernel. Each kernel of faults.cu exists with one fault and without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_emulator import library
from tests.cuda_emulator.session import MODES, Fault, emulated, function
from tests.cuda_emulator.translate import Untranslated

pytestmark = library.needed

SOURCE = Path(__file__).with_name("faults.cu")


def kernel(name: str, signature: str) -> Callable[..., int]:
    return function(SOURCE, f"faults_{name}", signature)


def every(run: Callable[[], Any], overlap: bool = False) -> list[Any]:
    """What `run` returns in every mode, with several seeds."""
    found = []
    for mode in MODES:
        for seed in range(4):
            with emulated(mode=mode, seed=seed, overlap=overlap):
                found.append(run())
    return found


def summed(right: bool) -> bool:
    x, y = torch.arange(128.0), torch.zeros(128)
    assert kernel("sum", "ppll")(x.data_ptr(), y.data_ptr(), right, 0) == 0
    return torch.equal(y, x.sum().expand(128))


def copied(right: bool) -> bool:
    x, y = torch.arange(32 * 4), torch.zeros(32 * 4, dtype=torch.int64)
    x, y = x.int(), y.int()
    assert kernel("copy", "ppll")(x.data_ptr(), y.data_ptr(), right, 0) == 0
    return torch.equal(y.view(32, 4), x.view(32, 4).flip(0))


def in_a_ring(right: bool) -> bool:
    x = torch.arange(8 * 128).int()
    y = torch.zeros_like(x)
    assert kernel("ring", "pplll")(x.data_ptr(), y.data_ptr(), 8, right, 0) == 0
    return torch.equal(x, y)


def overlapped(right: bool) -> bool:
    y, z = torch.zeros(64), torch.zeros(64)
    assert kernel("overlap", "ppll")(y.data_ptr(), z.data_ptr(), right, 0) == 0
    return bool((z == 1).all())


@pytest.mark.parametrize("run", [summed, copied, in_a_ring, overlapped])
def test_a_missing_wait_shows_in_the_values(run: Callable[[bool], bool]) -> None:
    """A barrier, cp.async.wait_group, the wait for an empty stage, griddepcontrol.wait."""
    overlap = run is overlapped
    assert all(every(lambda: run(True), overlap))

    def seen() -> bool:
        try:
            return run(False)
        except Fault:
            return False

    assert not all(every(seen, overlap))


STUCK = {
    "stuck": ("ll", (), r"deadlock: no thread can go on[^$]*mbarrier[^$]*1 are missing[^$]*faults.cu:\d+"),
    "polling": ("pll", (torch.zeros(1, dtype=torch.int32),), r"deadlock: threads only poll[^$]*faults.cu:\d+"),
    "barrier": ("ll", (), "was not initialised"),
    "bounds": ("pll", (torch.zeros(64),), "outside of the CTA's shared memory"),
    "lanes": ("pll", (torch.zeros(32),), "lanes of a warp meet at different instructions"),
}


@pytest.mark.parametrize("name", STUCK)
def test_a_fault_is_an_error_with_its_place(name: str) -> None:
    signature, tensors, message = STUCK[name]
    run = kernel(name, signature)
    with emulated():
        assert run(*(t.data_ptr() for t in tensors), 1, 0) == 0
        for t in tensors:
            t.zero_()
        with pytest.raises(Fault, match=message):
            run(*(t.data_ptr() for t in tensors), 0, 0)
        for t in tensors:
            t.zero_()
        assert run(*(t.data_ptr() for t in tensors), 1, 0) == 0, "the emulator is usable after a fault"


def test_shared_memory_of_a_cta_that_has_ended() -> None:
    def run(right: bool) -> float:
        out = torch.zeros(1)
        kernel("cluster", "pll")(out.data_ptr(), right, 0)
        return out.item()

    assert all(v == 7 for v in every(lambda: run(True)))

    def wrong() -> bool:
        try:
            return run(False) == 7
        except Fault as e:
            assert "has ended" in str(e)
            return False

    assert not all(every(wrong))


def test_an_unknown_instruction_is_an_error_with_its_place(tmp_path: Path) -> None:
    source = tmp_path / "unknown.cu"
    source.write_text(
        '#include "cuda/hopper.cuh"\n\n__global__ void f() { asm volatile("frobnicate.b32 %0;" ::"r"(1)); }\n'
    )
    with pytest.raises(Untranslated, match=r"unknown.cu:3: .*frobnicate"):
        library.translated(source)
