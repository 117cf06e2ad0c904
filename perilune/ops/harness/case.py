"""Parts of an op's test cases: sizes of real models, tolerances, and a maker of random inputs."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Dims:
    """Sizes of a model. width: of one expert."""

    hidden: int
    heads: int
    latent: int
    rope: int
    nope: int
    value: int
    q_rank: int
    experts: int
    top_k: int
    width: int
    vocab: int


K2 = Dims(7168, 64, 512, 64, 128, 128, 1536, 384, 8, 2048, 163840)
NANO = Dims(384, 4, 512, 64, 128, 128, 192, 16, 4, 256, 4096)  # the bundled model


@dataclass(frozen=True)
class Tol:
    """|got - want| <= abs + rel * |want| everywhere, and ||got - want|| <= norm * ||want|| over the whole output."""

    abs: float
    rel: float
    norm: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Sized:
    """Base of every Case. `big` cases are checked on GPUs only: a test on CPU would take too long."""

    big: bool = False

    def tol(self, output: str, dtype: torch.dtype) -> Tol | None:
        """The tolerance of this case alone; None: the op's."""
        return None


EXACT = Tol(0.0, 0.0, 0.0, "no rounding is involved")


def exact() -> dict[torch.dtype, Tol]:
    return {FLOAT32: EXACT, BFLOAT16: EXACT}


def sums(scale: float = 1.0) -> dict[torch.dtype, Tol]:
    """Tolerances of outputs that are long sums of products of magnitude about `scale`."""
    return {
        FLOAT32: Tol(2e-5 * scale, 2e-5, 2e-6, "fp32 sums in another order"),
        BFLOAT16: Tol(1.6e-2 * scale, 1.6e-2, 4e-3, "bf16 rounding of the result and of one intermediate"),
    }


def dequantized() -> dict[torch.dtype, Tol]:
    """Tolerances of sums over experts, with weights that may be dequantised to the activations' type first."""
    why = "bf16 rounding of each weight, of gate and up, of their product, of each expert's result"
    return {FLOAT32: sums()[FLOAT32], BFLOAT16: Tol(4e-2, 3e-2, 1.2e-2, why)}


def rounded() -> dict[torch.dtype, Tol]:
    """Tolerances of elementwise formulas and short sums."""
    return {
        FLOAT32: Tol(1e-6, 4e-6, 1e-6, "a few fp32 roundings"),
        BFLOAT16: Tol(1e-4, 2**-7, 4e-3, "two bf16 roundings"),
    }


class Make:
    """Seeded inputs on `device`, with `dtype` for activations."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def randn(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, generator=self._generator, device=self.device)
        return (x * scale).to(dtype or self.dtype)

    def rand(self, *shape: int, dtype: torch.dtype = FLOAT32) -> Tensor:
        return torch.rand(*shape, generator=self._generator, device=self.device, dtype=dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform in low .. high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype)

    def permutation(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self._generator, device=self.device)

    def tensor(self, values: object, dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, float("nan"), device=self.device, dtype=self.dtype)

    def int4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """(packed, scale) of random INT4 weights [..., o, i] as checkpoints hold them; dequantised values are about
        i ** -0.5."""
        *rest, i = shape
        packed = self.integers(-(2**31), 2**31, *rest, i // 8, dtype=torch.int32)
        scale = (self.rand(*rest, i // 32) + 0.5) * (0.2 * i**-0.5)
        return packed, scale.to(BFLOAT16)

    def int4_compact(self, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """(packed, scale, row) of random INT4 weights [..., o, i] with compact scales; values about i ** -0.5."""
        *rest, i = shape
        packed = self.integers(-(2**31), 2**31, *rest, i // 8, dtype=torch.int32)
        scale = self.integers(1, 256, *rest, i // 32, dtype=torch.uint8)
        return packed, scale, ((self.rand(*rest) + 0.5) * (0.3 * i**-0.5)).to(BFLOAT16)

    def e4m3(self, *shape: int, scale: float) -> Tensor:
        """Random float8_e4m3fn of magnitude about `scale`, subnormal numbers included, no nan."""
        return (self.randn(*shape, dtype=FLOAT32) * scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def nvfp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        """(packed, scale) of random NVFP4 weights [..., o, i]; values are about 300."""
        *rest, i = shape
        packed = self.integers(0, 256, *rest, i // 2, dtype=torch.uint8)
        return packed, ((self.rand(*rest, i // 16) + 0.5) * 100).to(torch.float8_e4m3fn)


def tensors(args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every tensor among the arguments by name, also inside records: "x", "latents.pages"."""
    found: dict[str, Tensor] = {}
    for name, value in args.items():
        if isinstance(value, Tensor):
            found[name] = value
        elif is_dataclass(value):
            found |= tensors({f"{name}.{f.name}": getattr(value, f.name) for f in fields(value) if f.init})
    return found


def clone(args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with copies of all tensors, also inside records."""
    return {name: _clone(value) for name, value in args.items()}


def _clone(value: Any) -> Any:
    """A tensor's copy has the same strides, so that a non-contiguous input stays one."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**clone({f.name: getattr(value, f.name) for f in fields(value) if f.init}))
    if not isinstance(value, Tensor):
        return value
    if value.is_contiguous():
        return value.clone()
    y = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return y.copy_(value)
