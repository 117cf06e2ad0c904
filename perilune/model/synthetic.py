"""Random weights of any shape: for measuring speed where no checkpoint is at hand.

Values are zero-mean and of the size real ones have: routing is near uniform, activations stay finite, and a processor
whose clock depends on the data sees bits as random as in earnest.
"""

import torch
from torch import Tensor

from perilune.model.config import KimiConfig
from perilune.model.weights import Attention, Dense, Experts, Int4Experts, Layer, Mlp, Moe, Weights

GROUP = 32
_LOWEST_BITS = 0x11111111  # of each nibble


def random_weights(config: KimiConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Weights:
    """Weights as `load` would give for a checkpoint with INT4 experts and everything else in `dtype`."""
    return _Random(config, dtype, torch.device(device), seed).weights()


class _Random:
    def __init__(self, config: KimiConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def weights(self) -> Weights:
        c = self._config
        return Weights(
            embed=self._normal(c.vocab_size, c.hidden_size),
            layers=[self._layer(i) for i in range(c.num_hidden_layers)],
            norm=self._norm(c.hidden_size),
            lm_head=self._linear(c.vocab_size, c.hidden_size),
        )

    def _layer(self, i: int) -> Layer:
        c = self._config
        d, heads, latent, n = c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.qk_nope_head_dim
        attention = Attention(
            qkv_a=self._linear(c.q_lora_rank + latent + c.qk_rope_head_dim, d),
            q_a_norm=self._norm(c.q_lora_rank),
            q_b=self._linear(heads * c.qk_head_dim, c.q_lora_rank),
            kv_a_norm=self._norm(latent),
            w_uk=self._normal(heads, n, latent, scale=latent**-0.5),
            w_uv=self._normal(heads, latent, c.v_head_dim, scale=latent**-0.5),
            o=self._linear(d, heads * c.v_head_dim),
        )
        return Layer(
            input_norm=self._norm(d),
            attention=attention,
            post_norm=self._norm(d),
            ffn=self._mlp(c.intermediate_size) if i < c.first_k_dense_replace else self._moe(),
        )

    def _moe(self) -> Moe:
        c = self._config
        narrow = self._dtype == torch.bfloat16 and self._device.type == "cuda"
        return Moe(
            gate=self._normal(
                c.n_routed_experts,
                c.hidden_size,
                scale=c.hidden_size**-0.5,
                dtype=torch.bfloat16 if narrow else torch.float32,
            ),
            bias=self._normal(c.n_routed_experts, scale=1e-3, dtype=torch.float32),
            experts=self._experts(),
            shared=self._mlp(c.n_shared_experts * c.moe_intermediate_size) if c.n_shared_experts else None,
        )

    def _experts(self) -> Experts:
        c = self._config
        e, d, i = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
        return Int4Experts(*self._int4(e, 2 * i, d), *self._int4(e, d, i))

    def _int4(self, e: int, rows: int, inputs: int) -> tuple[Tensor, Tensor]:
        packed = torch.empty(e, rows, inputs // 8, dtype=torch.int32, device=self._device)
        for words in packed:
            words.random_(-(2**31), 2**31 - 1, generator=self._generator)
            # Levels -8 .. 7 have a mean of -1/2, and a mean is a direction that every token shares: routing would not
            # be uniform. Level -8, a nibble of zeros, becomes 0.
            some = words | words >> 1
            empty = ~(some | some >> 2) & _LOWEST_BITS
            words |= empty << 3
        scale = torch.empty(e, rows, inputs // GROUP, dtype=torch.bfloat16, device=self._device)
        scale.uniform_(0.1 * inputs**-0.5, 0.3 * inputs**-0.5, generator=self._generator)
        return packed, scale

    def _mlp(self, width: int) -> Mlp:
        d = self._config.hidden_size
        return Mlp(gate_up=self._linear(2 * width, d), down=self._linear(d, width))

    def _linear(self, o: int, i: int) -> Dense:
        return Dense(self._normal(o, i, scale=i**-0.5))

    def _norm(self, width: int) -> Tensor:
        return self._normal(width, scale=0.1).add_(1.0)

    def _normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return out.normal_(0.0, scale, generator=self._generator)
