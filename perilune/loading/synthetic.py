"""Random weights of any shape: for measuring speed where no checkpoint is at hand.

Values are zero-mean and of the size real ones have: routing is near uniform, activations stay finite, and a processor
whose clock depends on the data sees bits as random as in earnest.
"""

import torch
from torch import Tensor

from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.eagle3 import Eagle3Weights
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.weights import Attention, Dense, Experts, Int4Experts, Layer, Mlp, Moe, Weights

GROUP = 32
_LOWEST_BITS = 0x11111111  # of each nibble


def random_weights(config: KimiConfig, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Weights:
    """Weights as `load` would give for a checkpoint with INT4 experts and everything else in `dtype`."""
    return _Random(config, dtype, torch.device(device), seed).weights()


class _Draws:
    """Zero-mean tensors of one generator."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self._dtype, self._device = dtype, device
        self._generator = torch.Generator(device).manual_seed(seed)

    def linear(self, o: int, i: int) -> Dense:
        return Dense(self.normal(o, i, scale=i**-0.5))

    def norm(self, width: int) -> Tensor:
        return self.normal(width, scale=0.1).add_(1.0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self._dtype, device=self._device)
        return out.normal_(0.0, scale, generator=self._generator)

    def attention(self, sizes: names.Letters) -> Attention:
        of, (heads, n, latent) = names.shapes(names.ATTENTION, sizes), (sizes[x] for x in "HnR")
        return Attention(
            qkv_a=self.linear(*of["qkv_a"]),
            q_a_norm=self.norm(*of["q_a_norm"]),
            q_b=self.linear(*of["q_b"]),
            kv_a_norm=self.norm(*of["kv_a_norm"]),
            w_uk=self.normal(heads, n, latent, scale=latent**-0.5),
            w_uv=self.normal(heads, latent, sizes["v"], scale=latent**-0.5),
            o=self.linear(*of["o"]),
        )

    def mlp(self, sizes: names.Letters) -> Mlp:
        of = names.shapes(names.MLP, sizes)
        return Mlp(gate_up=self.linear(*of["gate_up"]), down=self.linear(*of["down"]))


class _Random(_Draws):
    def __init__(self, config: KimiConfig, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        super().__init__(dtype, device, seed)
        self._config = config

    def weights(self) -> Weights:
        c = self._config
        return Weights(
            embed=self.normal(c.vocab_size, c.hidden_size),
            layers=[self._layer(i) for i in range(c.num_hidden_layers)],
            norm=self.norm(c.hidden_size),
            lm_head=self.linear(c.vocab_size, c.hidden_size),
        )

    def _layer(self, i: int) -> Layer:
        c = self._config
        sizes = names.letters(c, c.hidden_size, c.intermediate_size)
        attention = self.attention(sizes)  # first: a seed's weights depend on the order
        return Layer(
            input_norm=self.norm(c.hidden_size),
            attention=attention,
            post_norm=self.norm(c.hidden_size),
            ffn=self.mlp(sizes) if i < c.first_k_dense_replace else self._moe(),
        )

    def _moe(self) -> Moe:
        c = self._config
        narrow = self._dtype == torch.bfloat16 and self._device.type == "cuda"
        gate = c.n_routed_experts, c.hidden_size
        shared = names.letters(c, c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)
        return Moe(
            gate=self.normal(*gate, scale=gate[1] ** -0.5, dtype=torch.bfloat16 if narrow else torch.float32),
            bias=self.normal(c.n_routed_experts, scale=1e-3, dtype=torch.float32),
            experts=self._experts(),
            shared=self.mlp(shared) if c.n_shared_experts else None,
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


def random_draft(config: Eagle3Config, embed: Tensor, *, seed: int = 0) -> Eagle3Weights:
    """Weights of a draft with latent attention and a head of its own, in the type of `embed` [V, D], the target's."""
    assert config.form == "mla" and config.draft_vocab_size == config.vocab_size, config
    assert embed.shape == (config.vocab_size, config.hidden_size), embed.shape
    c, d = config, config.hidden_size
    sizes = names.letters(c, 2 * d, c.intermediate_size)
    r = _Draws(embed.dtype, embed.device, seed)
    return Eagle3Weights(
        embed=embed,
        fc=r.linear(d, c.num_aux * c.target_hidden_size),
        fc_norms=torch.stack([r.norm(c.target_hidden_size) for _ in range(c.num_aux)]) if c.fc_norm else None,
        joint_norm=r.norm(c.num_aux * c.target_hidden_size) if c.norm_before_fc else None,
        input_norm=r.norm(d),
        hidden_norm=r.norm(d),
        attention=r.attention(sizes),
        post_norm=r.norm(d),
        mlp=r.mlp(sizes),
        norm=r.norm(d),
        lm_head=r.linear(c.draft_vocab_size, d),
        target_ids=None,
    )
