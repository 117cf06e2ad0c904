"""What a rank should hold, cut out of the whole model's weights."""

import dataclasses

import torch
from torch import Tensor

from perilune.dist.slicing import Slicing
from perilune.model.config import KimiConfig
from perilune.model.weights import Experts, Fp8Experts, Layer, Matrix, Mlp, Moe, NvFp4Experts, Weights


def narrow(w: Weights, c: KimiConfig, s: Slicing) -> Weights:
    """The rank's part of whole weights, whatever format they are in."""
    return Weights(
        embed=w.embed[s.part(c.vocab_size)],
        layers=[_layer(layer, c, s) for layer in w.layers],
        norm=w.norm,
        lm_head=rows(w.lm_head, s),
    )


def same(a: object, b: object, where: str = "weights") -> None:
    """Fails, naming the place, unless both are records of equal tensors."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape, (where, a, b)
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), where
        assert b.is_contiguous(), where
    elif isinstance(a, list):
        assert isinstance(b, list) and len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{where}[{k}]")
    elif dataclasses.is_dataclass(a):
        assert type(a) is type(b), (where, type(a), type(b))
        for field in dataclasses.fields(a):
            same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    else:
        assert a == b or field_of(a), where


def field_of(a: object) -> bool:
    """Whether it is derived from a matrix's tensors."""
    return isinstance(a, str | tuple)


def rows(m: Matrix, s: Slicing) -> Matrix:
    own = s.part(m.weight.shape[0])
    return Matrix(*(None if t is None else t[own] for t in (m.weight, m.scale, m.row_scale)))


def columns(m: Matrix, s: Slicing) -> Matrix:
    def cut(t: Tensor | None) -> Tensor | None:
        return t if t is None or t.ndim < 2 else t[:, s.part(t.shape[1])]

    return Matrix(cut(m.weight), cut(m.scale), m.row_scale)  # type: ignore[arg-type]


def halves(t: Tensor, s: Slicing, at: int = 0) -> Tensor:
    """Of gate's rows and up's, one below the other from dimension `at` on, this rank's of each."""
    both = t.unflatten(at, (2, -1))
    return both.narrow(at + 1, s.part(both.shape[at + 1]).start, both.shape[at + 1] // s.ranks).flatten(at, at + 1)


def _mlp(m: Mlp, s: Slicing) -> Mlp:
    g = m.gate_up
    return Mlp(Matrix(*(None if t is None else halves(t, s) for t in (g.weight, g.scale, g.row_scale))),  # type: ignore[arg-type]
               columns(m.down, s))  # fmt: skip


def _experts(x: Experts, s: Slicing) -> Experts:
    if s.whole_experts:
        own = s.experts(getattr(x, dataclasses.fields(x)[0].name).shape[0])
        return type(x)(*(getattr(x, f.name)[own] for f in dataclasses.fields(x)))
    made = []
    names = [f.name for f in dataclasses.fields(x)]
    for k, name in enumerate(names):
        t = getattr(x, name)
        gate = k < len(names) // 2
        if isinstance(x, Fp8Experts) and name == "gate_up_scale":
            made.append(t[:, :, s.part(t.shape[2])])
        elif name.endswith("_global") and isinstance(x, NvFp4Experts):
            made.append(t)
        elif gate:
            made.append(halves(t, s, 1))
        else:
            made.append(t if t.ndim < 3 else t[..., s.part(t.shape[-1])])
    return type(x)(*made)


def _layer(layer: Layer, c: KimiConfig, s: Slicing) -> Layer:
    a, heads = layer.attention, s.part(c.num_attention_heads)
    attention = dataclasses.replace(
        a, q_b=rows(a.q_b, s), w_uk=a.w_uk[heads], w_uv=a.w_uv[heads], o=columns(a.o, s),
        uv_fp8=None if a.uv_fp8 is None else Matrix(a.uv_fp8.weight[heads], a.uv_fp8.scale[heads]),  # type: ignore[index]
    )  # fmt: skip
    f = layer.ffn
    if isinstance(f, Mlp):
        return dataclasses.replace(layer, attention=attention, ffn=_mlp(f, s))
    moe = Moe(f.gate, f.bias, _experts(f.experts, s), None if f.shared is None else _mlp(f.shared, s))
    return dataclasses.replace(layer, attention=attention, ffn=moe)
