"""y = silu(gate) * up, in fp32, rounded once.

gate_up [T, 2 I] with the gate first, rows may be strided; y [T, I] as gate_up. "cuda" is one pass over bfloat16.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perilune.core import cost as costs
from perilune.ops.harness import build, threads
from perilune.ops.harness.case import BFLOAT16, FLOAT32, K2, NANO, Make, Sized, Tol, rounded
from perilune.ops.harness.registry import Op
from perilune.ops.harness.tensors import aligned


@dataclass(frozen=True)
class Case(Sized):
    T: int
    I: int  # noqa: E741
    scale: float = 2.0


CASES = [
    *(Case(t, K2.width, big=t > 64) for t in (1, 8, 64, 512, 8192)),
    *(Case(t, NANO.width) for t in (1, 16, 512)),
    Case(0, 8),
    Case(3, 7),
    Case(4, 64, scale=200.0),
]
TOL = {
    "y": {
        FLOAT32: Tol(1e-6, 4e-6, 2e-6, "two units in the last place of an exponential"),
        BFLOAT16: rounded()[BFLOAT16],
    }
}


def inputs(c: Case, g: Make) -> dict[str, Any]:
    return {"gate_up": g.randn(c.T, 2 * c.I, scale=c.scale)}


def cost(c: Case, dtype: torch.dtype) -> costs.Cost:
    return costs.swiglu(c.T, c.I, dtype.itemsize)


def reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


op = Op("swiglu", CASES, TOL, inputs, cost, reference)


_kernel = build.launcher("swiglu", "swiglu", "plplll")


@op.impl(
    "cpp",
    when=lambda a, device: build.on_cpu(
        "swiglu",
        device,
        (a.gate_up.dtype == FLOAT32, "float32"),
        (a.gate_up.shape[1] % 16 == 0, "a width that is a multiple of 8"),
    ),
)
def cpp(gate_up: Tensor) -> Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    T, both = gate_up.shape
    y = torch.empty(T, both // 2)
    _kernel()(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), T, both // 2, threads.count())
    return y


_one_pass = build.launcher("swiglu.cu", "swiglu", "plpllp")


@op.impl(
    "cuda",
    when=lambda a, device: build.on_hopper(
        "swiglu.cu",
        device,
        (a.gate_up.dtype == BFLOAT16, "bfloat16"),
        (a.gate_up.shape[1] % 16 == 0, "a width that is a multiple of 8"),
    ),
)
def cuda(gate_up: Tensor) -> Tensor:
    gate_up = aligned(gate_up)
    T, both = gate_up.shape
    y = torch.empty(T, both // 2, dtype=BFLOAT16, device=gate_up.device)
    stream = build.stream(gate_up.device)
    failed = _one_pass()(gate_up.data_ptr(), gate_up.stride(0), y.data_ptr(), T, both // 2, stream)
    assert not failed, f"CUDA error {failed}: {gate_up.shape=}"
    return y


@op.impl("torch")
def two_calls(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def swiglu(gate_up: Tensor) -> Tensor:
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"{gate_up.shape=}"
    return op(gate_up)
