"""kimi-nano for training: the Kimi K2 text model over one flat stream of tokens, in plain differentiable torch.

Whole samples lie one after another in a stream of N tokens (`Packed`), each with positions from 0, so every tensor
outside attention has N rows whatever the samples' lengths: no padding, and one compiled graph per kind of block.
Attention itself is a callable given by the caller: over packed samples in training (attention.py), over a cache when
decoding (decode.py).

All 16 routed experts of a layer and its shared expert are one wide SwiGLU layer whose activations are multiplied by
the routing weights (0 for experts not chosen): three large matrix products. Training on a GPU sorts tokens by expert
instead (experts.py), a quarter of the arithmetic and twice as fast: 6.4 instead of 12.3 ms for a layer of 131,072
tokens, gradients included, on an H200.

Parameters carry the checkpoint's names below `model.`, except that a layer's experts are stacked: `experts.gate_proj`
and `.up_proj` [E, I, D], `experts.down_proj` [E, D, I]. They hold what is served: bfloat16 on the GPU, experts on the
INT4 grid. The float32 weights that the optimiser moves are apart (optim.py); gradients pass straight through rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runs.kimi_nano.experts import Experts as GroupedExperts

GROUP = 32


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 4096
    hidden_size: int = 384
    num_hidden_layers: int = 6
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 192
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 1024
    moe_intermediate_size: int = 256
    n_routed_experts: int = 16
    num_experts_per_tok: int = 4
    n_shared_experts: int = 1
    routed_scaling_factor: float = 2.827
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    rope_theta: float = 50000.0
    rope_factor: float = 64.0
    rope_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * (0.1 * math.log(self.rope_factor) + 1.0) ** 2


def int4_grid(w: Tensor) -> Tensor:
    """`w` [..., K] rounded to the pack-quantized grid: per 32 along K, scale = bf16(absmax / 7), levels -7..7."""
    g = w.float().unflatten(-1, (-1, GROUP))
    scale = (g.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    return ((g / torch.where(scale == 0, 1.0, scale)).round().clamp(-7, 7) * scale).flatten(-2)


def yarn_frequencies(s: Shape) -> Tensor:
    """Inverse frequencies [rope / 2] of YaRN: divided by the factor below beta_slow turns, kept above beta_fast."""
    d, log_theta = s.qk_rope_head_dim, math.log(s.rope_theta)

    def corner(turns: float) -> float:
        return d * math.log(s.rope_original / (2 * math.pi * turns)) / (2 * log_theta)

    low, high = max(math.floor(corner(s.beta_fast)), 0), min(math.ceil(corner(s.beta_slow)), d - 1)
    ramp = ((torch.arange(d // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    base = s.rope_theta ** (-2.0 * torch.arange(d // 2) / d)
    return base / s.rope_factor * ramp + base * (1 - ramp)


# ---- the blocks: functions of tensors, so that one compiled graph serves every layer -------------------------------


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    f = x.float()
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs: x [N, H, d], cos and sin [N, d / 2] float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)


def attention_inputs(
    x: Tensor, cos: Tensor, sin: Tensor, norm: Tensor, q_a: Tensor, q_norm: Tensor, q_b: Tensor,
    kv_a: Tensor, kv_norm: Tensor, kv_b: Tensor, heads: int, nope: int, rope: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x [N, D] -> q and k [N, H, nope + rope], v [N, H, v]: the plain, non-absorbed form of MLA."""
    h = rms(x, norm, eps)
    q = F.linear(rms(F.linear(h, q_a), q_norm, eps), q_b).unflatten(-1, (heads, nope + rope))
    latent, k_pe = F.linear(h, kv_a).split((kv_norm.shape[0], rope), -1)
    kv = F.linear(rms(latent, kv_norm, eps), kv_b).unflatten(-1, (heads, -1))
    k_pe = rotate(k_pe[:, None], cos, sin).expand(-1, heads, -1)
    q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
    return q, torch.cat((kv[..., :nope], k_pe), -1), kv[..., nope:].contiguous()


def swiglu(h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(h, gate)) * F.linear(h, up)


def dense_block(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    """The rest of a dense layer: x [N, D], attended [N, H * v] -> [N, D]."""
    x = x + F.linear(attended, o)
    return x + F.linear(swiglu(rms(x, norm, eps), gate, up), down)


def route(h: Tensor, router: Tensor, bias: Tensor, top: int, factor: float) -> tuple[Tensor, Tensor]:
    """h [N, D] -> routing weights [N, E] float32, zero where not chosen; tokens per expert [E].

    The bias picks but does not weigh. Ties go to the lower index.
    """
    scores = torch.sigmoid(F.linear(h.float(), router.float()))
    choice = scores.detach() + bias
    mine, other = choice[:, :, None], choice[:, None, :]
    index = torch.arange(choice.shape[1], device=h.device)
    beaten = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    chosen = (beaten.sum(-1) < top).float()
    weights = scores * chosen
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * factor, chosen.sum(0)


def moe_inputs(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, router: Tensor, bias: Tensor, top: int, factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The residual stream after attention [N, D], normed [N, D], routing weights [N, E], tokens per expert [E]."""
    x = x + F.linear(attended, o)
    h = rms(x, norm, eps)
    return x, h, *route(h, router, bias, top, factor)


def moe_outputs(
    x: Tensor, h: Tensor, routed: Tensor, shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor
) -> Tensor:
    """The residual stream with what routed experts and the shared expert add."""
    return x + routed + F.linear(swiglu(h, shared_gate, shared_up), shared_down)


def moe_block(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, router: Tensor, bias: Tensor,
    gate: Tensor, up: Tensor, down: Tensor, shared_gate: Tensor, shared_up: Tensor, shared_down: Tensor,
    top: int, factor: float, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rest of a MoE layer; also the number of tokens that each expert got [E]."""
    x, h, weights, load = moe_inputs(x, attended, o, norm, router, bias, top, factor, eps)
    inner = swiglu(h, torch.cat((gate.flatten(0, 1), shared_gate)), torch.cat((up.flatten(0, 1), shared_up)))
    routed, shared = inner.split((gate.shape[0] * gate.shape[1], shared_gate.shape[0]), -1)
    routed = (routed.unflatten(-1, gate.shape[:2]) * weights.to(x.dtype)[:, :, None]).flatten(-2)
    out = torch.cat((down.transpose(0, 1).flatten(1), shared_down), -1)
    return x + F.linear(torch.cat((routed, shared), -1), out), load


def head(x: Tensor, norm: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.linear(rms(x, norm, eps), weight)


def head_loss(x: Tensor, norm: Tensor, weight: Tensor, targets: Tensor, eps: float) -> Tensor:
    """Sum of the cross entropies of the tokens whose target is not -1."""
    return F.cross_entropy(head(x, norm, weight, eps).float(), targets, ignore_index=-1, reduction="sum")


@dataclass(frozen=True)
class Blocks:
    attention_inputs: Callable[..., tuple[Tensor, Tensor, Tensor]] = attention_inputs
    dense_block: Callable[..., Tensor] = dense_block
    moe_block: Callable[..., tuple[Tensor, Tensor]] = moe_block
    head_loss: Callable[..., Tensor] = head_loss


EAGER = Blocks()


def compiled(*, grouped: bool) -> Blocks:
    """The blocks as graphs for one fixed N: called with another N they compile again. `grouped`: routed experts as
    grouped products (experts.py) instead of all as one wide layer (`moe_block`)."""

    def build(f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(f, dynamic=False, fullgraph=True)

    before, after = build(moe_inputs), build(moe_outputs)

    def by_expert(*args: Any) -> tuple[Tensor, Tensor]:
        (gate, up, down, *shared), (top, factor, eps) = args[6:12], args[12:]
        x, h, weights, load = before(*args[:6], top, factor, eps)
        return after(x, h, GroupedExperts.apply(h, weights, gate, up, down, top), *shared), load

    block = by_expert if grouped else build(moe_block)
    return Blocks(build(attention_inputs), build(dense_block), block, build(head_loss))


# attend(layer, q [N, H, nope + rope], k, v [N, H, v]) -> [N, H, v]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Seen = tuple[Tensor, Tensor]  # places of pictures' tokens in the stream [n] int64, and their embeddings [n, D]


# ---- parameters ----------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        heads, qk = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a_proj = nn.Linear(s.hidden_size, s.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = nn.Linear(s.q_lora_rank, heads * qk, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = nn.Linear(s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * s.v_head_dim, s.hidden_size, bias=False)


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)


class Router(nn.Module):
    """`load` sums the tokens per expert since the last `balance`; the bias is moved by that, not by gradients."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(s.n_routed_experts, s.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(s.n_routed_experts))
        self.register_buffer("load", torch.zeros(s.n_routed_experts), persistent=False)

    @torch.no_grad()
    def balance(self, rate: Tensor | float) -> None:
        """Sign rule: raise the bias of experts with less than their share of tokens, lower the others."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        shape = (s.n_routed_experts, s.moe_intermediate_size, s.hidden_size)
        self.gate_proj, self.up_proj = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))


class MoE(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate = Router(s)
        self.experts = Experts(s)
        self.shared_experts = MLP(s.hidden_size, s.moe_intermediate_size * s.n_shared_experts)


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp: MLP | MoE = MLP(s.hidden_size, s.intermediate_size) if index < s.first_k_dense_replace else MoE(s)


class KimiNano(nn.Module):
    """Initial weights depend on the torch seed. `to(dtype)` casts the parameters; buffers stay float32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s, i) for i in range(s.num_hidden_layers))
        self.norm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.lm_head = nn.Linear(s.hidden_size, s.vocab_size, bias=False)
        angles = torch.outer(torch.arange(s.max_position_embeddings), yarn_frequencies(s))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        residual = 1 / math.sqrt(2 * s.num_hidden_layers)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
                nn.init.normal_(p, 0.0, p.shape[-1] ** -0.5 * (residual if into_stream else 1.0))
        nn.init.normal_(self.embed_tokens.weight, 0.0, 0.05)
        nn.init.normal_(self.lm_head.weight, 0.0, 0.02)

    def cast(self, dtype: torch.dtype) -> "KimiNano":
        for p in self.parameters():
            p.data = p.data.to(dtype)
        return self

    def hidden(
        self, tokens: Tensor, positions: Tensor, attend: Attend, blocks: Blocks = EAGER, seen: Seen | None = None
    ) -> Tensor:
        """tokens and positions [N] -> the residual stream [N, D] after the last layer, not normed."""
        s, x = self.s, self.embed_tokens(tokens)
        if seen is not None:
            x = x.index_copy(0, seen[0], seen[1])
        cos, sin = self.cos[positions], self.sin[positions]
        for i, layer in enumerate(self.layers):
            a, mlp = layer.self_attn, layer.mlp
            q, k, v = blocks.attention_inputs(
                x, cos, sin, layer.input_layernorm.weight, a.q_a_proj.weight, a.q_a_layernorm.weight,
                a.q_b_proj.weight, a.kv_a_proj_with_mqa.weight, a.kv_a_layernorm.weight, a.kv_b_proj.weight,
                s.num_attention_heads, s.qk_nope_head_dim, s.qk_rope_head_dim, s.rms_norm_eps,
            )  # fmt: skip
            attended, norm = attend(i, q, k, v).flatten(1), layer.post_attention_layernorm.weight
            if isinstance(mlp, MoE):
                e, shared = mlp.experts, mlp.shared_experts
                x, load = blocks.moe_block(
                    x, attended, a.o_proj.weight, norm, mlp.gate.weight, mlp.gate.e_score_correction_bias,
                    e.gate_proj, e.up_proj, e.down_proj,
                    shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight,
                    s.num_experts_per_tok, s.routed_scaling_factor, s.rms_norm_eps,
                )  # fmt: skip
                if torch.is_grad_enabled():
                    mlp.gate.load += load.detach()
            else:
                x = blocks.dense_block(
                    x, attended, a.o_proj.weight, norm,
                    mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight, s.rms_norm_eps,
                )  # fmt: skip
        return x

    def loss(
        self,
        tokens: Tensor,
        positions: Tensor,
        targets: Tensor,
        attend: Attend,
        blocks: Blocks,
        seen: Seen | None = None,
    ) -> Tensor:
        """Sum of the cross entropies of the tokens whose target is not -1."""
        x = self.hidden(tokens, positions, attend, blocks, seen)
        return blocks.head_loss(x, self.norm.weight, self.lm_head.weight, targets, self.s.rms_norm_eps)

    def logits(self, x: Tensor) -> Tensor:
        return head(x, self.norm.weight, self.lm_head.weight, self.s.rms_norm_eps)

    def routers(self) -> list[Router]:
        return [m for m in self.modules() if isinstance(m, Router)]
