"""EAGLE-3 by the equations of docs/formats.md section 6, for one sequence, nothing cached."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rms(x: Tensor, w: Tensor) -> Tensor:
    return w * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def frequencies(width: int, theta: float, yarn: dict[str, Any] | None) -> tuple[Tensor, float, float]:
    """(inverse frequencies, factor on cos and sin, mscale of the softmax)."""
    base = theta ** (-2 * torch.arange(width // 2, dtype=torch.float64) / width)
    if yarn is None:
        return base, 1.0, 1.0

    def corner(turns: float) -> float:
        return width * math.log(4096 / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(corner(yarn["beta_fast"])), 0), min(math.ceil(corner(yarn["beta_slow"])), width - 1)
    ramp = ((torch.arange(width // 2) - low) / (high - low if high > low else 0.001)).clamp(0, 1)

    def mscale(m: float) -> float:
        return 0.1 * m * math.log(yarn["factor"]) + 1

    inverse = base / yarn["factor"] * ramp + base * (1 - ramp)
    return inverse, mscale(yarn["mscale"]) / mscale(yarn["mscale_all_dim"]), mscale(yarn["mscale_all_dim"])


class Plain:
    """A whole sequence of (feature, next token) pairs at once."""

    def __init__(self, raw: dict[str, Any], t: dict[str, Tensor]):
        self.raw, self.t = raw, t
        self.mla = raw["model_type"] != "llama"

    def features(self, aux: Tensor) -> Tensor:
        if self.raw.get("norm_before_fc"):
            aux = rms(aux, self.t["input_norm.weight"])
        if self.raw.get("fc_norm"):
            pieces = aux.split(self.raw["hidden_size"], -1)
            aux = torch.cat([rms(p, self.t[f"fc_norm.{i}.weight"]) for i, p in enumerate(pieces)], -1)
        return aux @ self.t["fc.weight"].T

    def __call__(self, g: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(logits, what the next step takes), of each position."""
        w = {k.removeprefix("midlayer."): v for k, v in self.t.items()}
        e = self.t["embed_tokens.weight"][tokens]
        normed = rms(g, w["hidden_norm.weight"])
        x = torch.cat([rms(e, w["input_layernorm.weight"]), normed], -1)
        a = {k.removeprefix("self_attn.").removesuffix(".weight"): v for k, v in w.items()}
        h = (normed if self.raw.get("norm_before_residual") else g) + (
            self.latent(x, a) if self.mla else self.own(x, a)
        )
        y = rms(h, w["post_attention_layernorm.weight"])
        y = torch.nn.functional.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        h = h + y @ w["mlp.down_proj.weight"].T
        out = rms(h, self.t["norm.weight"])
        return out @ self.t["lm_head.weight"].T, out if self.raw.get("norm_output") else h

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        n = len(q)
        out = torch.empty(n, q.shape[1], v.shape[2])
        for i in range(n):
            for head in range(q.shape[1]):
                out[i, head] = (k[: i + 1, head] @ q[i, head] * scale).softmax(0) @ v[: i + 1, head]
        return out.flatten(1)

    def own(self, x: Tensor, a: dict[str, Tensor]) -> Tensor:
        n, width = len(x), self.raw["head_dim"]
        inverse, magnitude, _ = frequencies(width, self.raw["rope_theta"], self.raw.get("rope_scaling"))

        def turned(y: Tensor) -> Tensor:
            out = y.clone()
            for p in range(n):
                for i in range(width // 2):
                    c, s = (f(p * float(inverse[i])) * magnitude for f in (math.cos, math.sin))
                    low, high = y[p, :, i], y[p, :, i + width // 2]
                    out[p, :, i], out[p, :, i + width // 2] = low * c - high * s, high * c + low * s
            return out

        q, k, v = ((x @ a[f"{name}_proj"].T).view(n, -1, width) for name in "qkv")
        groups = q.shape[1] // k.shape[1]
        k, v = (y.repeat_interleave(groups, 1) for y in (turned(k), v))
        return self.attend(turned(q), k, v, width**-0.5) @ a["o_proj"].T

    def latent(self, x: Tensor, a: dict[str, Tensor]) -> Tensor:
        r = self.raw
        n, heads, nope, rope = len(x), r["num_attention_heads"], r["qk_nope_head_dim"], r["qk_rope_head_dim"]
        inverse, magnitude, mscale = frequencies(rope, r["rope_theta"], r.get("rope_scaling"))

        def turned(y: Tensor) -> Tensor:
            out = y.clone()
            for p in range(n):
                for i in range(rope // 2):
                    c, s = (f(p * float(inverse[i])) * magnitude for f in (math.cos, math.sin))
                    even, odd = y[p, :, 2 * i], y[p, :, 2 * i + 1]
                    out[p, :, 2 * i], out[p, :, 2 * i + 1] = even * c - odd * s, odd * c + even * s
            return out

        q = (rms(x @ a["q_a_proj"].T, a["q_a_layernorm"]) @ a["q_b_proj"].T).view(n, heads, nope + rope)
        q = torch.cat([q[..., :nope], turned(q[..., nope:])], -1)
        ckv = x @ a["kv_a_proj_with_mqa"].T
        latent, k_pe = ckv[:, : r["kv_lora_rank"]], turned(ckv[:, None, r["kv_lora_rank"] :])
        kv = (rms(latent, a["kv_a_layernorm"]) @ a["kv_b_proj"].T).view(n, heads, -1)
        k = torch.cat([kv[..., :nope], k_pe.expand(-1, heads, -1)], -1)
        return self.attend(q, k, kv[..., nope:], (nope + rope) ** -0.5 * mscale**2) @ a["o_proj"].T

    def chain(self, aux: Tensor, tokens: Sequence[int], length: int) -> tuple[list[int], list[float]]:
        """Greedy drafts after the last of `tokens`, aux [n, .] being of all tokens before it; all computed anew."""
        g, ids = self.features(aux), list(tokens[1:])
        own = torch.arange(self.raw["draft_vocab_size"])
        ids_of = own + self.t.get("d2t", torch.zeros_like(own))
        drafts: list[int] = []
        sure: list[float] = []
        for _ in range(length):
            logits, after = self(g, torch.tensor(ids))
            best = int(logits[-1].argmax())
            drafts.append(int(ids_of[best]))
            sure.append(float(logits[-1].softmax(-1)[best]))
            g, ids = torch.cat([g, after[-1:]]), [*ids, drafts[-1]]
        return drafts, sure
