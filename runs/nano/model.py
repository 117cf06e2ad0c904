"""kimi-nano for training: the Kimi K2 text model in plain differentiable torch, at a few million parameters.

Parameters carry the checkpoint's names below `model.`, except that the experts of a layer are stacked:
`experts.gate_proj` and `.up_proj` [E, I, D], `experts.down_proj` [E, D, I]. Attention is the plain (non-absorbed) MLA;
sequences are padded on the right, so a causal mask alone is enough. Routed experts are INT4 in every forward pass:
weights are rounded to the checkpoint's grid and the gradient passes straight through.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 896
    hidden_size: int = 192
    num_hidden_layers: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    intermediate_size: int = 512
    moe_intermediate_size: int = 128
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    routed_scaling_factor: float = 1.5
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    rope_theta: float = 50000.0
    rope_factor: float = 4.0
    rope_original: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0


GROUP = 32


def int4_grid(w: Tensor) -> Tensor:
    """`w` [..., K] rounded to the pack-quantized grid: per 32 along K, scale = bf16(absmax / 7), levels -7..7."""
    g = w.unflatten(-1, (-1, GROUP))
    scale = (g.abs().amax(-1, keepdim=True) / 7).bfloat16().float().clamp_min(1e-30)
    return ((g / scale).round().clamp(-7, 7) * scale).flatten(-2)


def straight_through(w: Tensor) -> Tensor:
    return w + (int4_grid(w.detach()) - w.detach())


def mscale(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_frequencies(s: Shape) -> Tensor:
    """Inverse frequencies [rope / 2] of YaRN: divided by the factor below beta_slow turns, kept above beta_fast."""
    d, log_theta = s.qk_rope_head_dim, math.log(s.rope_theta)

    def corr(turns: float) -> float:
        return d * math.log(s.rope_original / (2 * math.pi * turns)) / (2 * log_theta)

    low, high = max(math.floor(corr(s.beta_fast)), 0), min(math.ceil(corr(s.beta_slow)), d - 1)
    ramp = ((torch.arange(d // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    base = s.rope_theta ** (-2.0 * torch.arange(d // 2) / d)
    return base / s.rope_factor * ramp + base * (1 - ramp)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Interleaved pairs: x [..., T, d], cos and sin [T, d / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s, heads = s, s.num_attention_heads
        qk = s.qk_nope_head_dim + s.qk_rope_head_dim
        self.q_a_proj = nn.Linear(s.hidden_size, s.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.RMSNorm(s.q_lora_rank, s.rms_norm_eps)
        self.q_b_proj = nn.Linear(s.q_lora_rank, heads * qk, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(s.hidden_size, s.kv_lora_rank + s.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(s.kv_lora_rank, s.rms_norm_eps)
        self.kv_b_proj = nn.Linear(s.kv_lora_rank, heads * (s.qk_nope_head_dim + s.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * s.v_head_dim, s.hidden_size, bias=False)
        self.scale = qk**-0.5 * mscale(s.rope_factor) ** 2

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s, (batch, length, _) = self.s, x.shape
        nope, rope, heads = s.qk_nope_head_dim, s.qk_rope_head_dim, s.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, heads, -1).transpose(1, 2)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((s.kv_lora_rank, rope), -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1).transpose(1, 2)
        k_pe = rotate(k_pe[:, None], cos, sin).expand(-1, heads, -1, -1)
        q = torch.cat((q[..., :nope], rotate(q[..., nope:], cos, sin)), -1)
        k = torch.cat((kv[..., :nope], k_pe), -1)
        out = F.scaled_dot_product_attention(q, k, kv[..., nope:], is_causal=True, scale=self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Sigmoid scores; the bias picks but does not weigh, and is moved by `balance`, not by gradients."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.weight = nn.Parameter(torch.empty(s.n_routed_experts, s.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(s.n_routed_experts))
        self.register_buffer("load", torch.zeros(s.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(expert ids, weights), both [N, k]."""
        scores = torch.sigmoid(F.linear(x, self.weight))
        ids = torch.topk(scores.detach() + self.e_score_correction_bias, self.s.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.training:
            self.load += torch.bincount(ids.flatten(), minlength=self.s.n_routed_experts)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.s.routed_scaling_factor

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Sign rule: raise the bias of experts with less than their share of tokens, lower the others."""
        self.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Experts(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        shape = (s.n_routed_experts, s.moe_intermediate_size, s.hidden_size)
        self.gate_proj, self.up_proj = nn.Parameter(torch.empty(shape)), nn.Parameter(torch.empty(shape))
        self.down_proj = nn.Parameter(torch.empty(shape[0], shape[2], shape[1]))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [N, D] -> [N, D]: tokens sorted by expert, one dense product per expert."""
        order = ids.flatten().argsort(stable=True)
        tokens = order // ids.shape[1]
        counts = torch.bincount(ids.flatten(), minlength=self.gate_proj.shape[0]).tolist()
        gate, up, down = (straight_through(w) for w in (self.gate_proj, self.up_proj, self.down_proj))
        outs = [
            F.linear(F.silu(F.linear(part, gate[e])) * F.linear(part, up[e]), down[e])
            for e, part in enumerate(x[tokens].split(counts))
        ]
        return torch.zeros_like(x).index_add(0, tokens, torch.cat(outs) * weights.flatten()[order, None])


class MoE(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate = Router(s)
        self.experts = Experts(s)
        self.shared_experts = MLP(s.hidden_size, s.moe_intermediate_size * s.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.gate(flat)).view_as(x) + self.shared_experts(x)


class Layer(nn.Module):
    def __init__(self, s: Shape, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        dense = index < s.first_k_dense_replace
        self.mlp: nn.Module = MLP(s.hidden_size, s.intermediate_size) if dense else MoE(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class KimiNano(nn.Module):
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
        nn.init.normal_(self.embed_tokens.weight, 0.0, 0.5)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> final hidden states [B, T, D], normed: `lm_head` makes logits of them."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def routers(self) -> list[Router]:
        return [m for m in self.modules() if isinstance(m, Router)]

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], end: int, limit: int) -> list[list[int]]:
        """Greedy continuations of a batch by recomputation, each up to and without `end`."""
        rows, live = [list(p) for p in prompts], list(range(len(prompts)))
        for _ in range(limit):
            if not live:
                break
            longest = max(len(rows[i]) for i in live)
            ids = torch.tensor([rows[i] + [0] * (longest - len(rows[i])) for i in live])
            last = torch.tensor([len(rows[i]) - 1 for i in live])
            nexts = self.lm_head(self.hidden(ids)[torch.arange(len(live)), last]).argmax(-1).tolist()
            for i, token in zip(live, nexts):
                rows[i].append(token)
            live = [i for i, token in zip(live, nexts) if token != end]
        return [row[len(p) : -1] if row[-1] == end else row[len(p) :] for row, p in zip(rows, prompts)]
