"""Random weights of any shape, for measuring speed without a checkpoint.

Values are zero-mean and as large as real ones: routing is near uniform and activations stay finite. Bits are as random
as those of real weights, because a GPU's clock depends on how many bits change. Each matrix is made whole, from its own
seed, and a rank then keeps its slice: the model is the same for any number of ranks.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.dist.slicing import WHOLE, Slicing
from perilune.formats import int4_compact
from perilune.loading.apart import Apart
from perilune.loading.rounding import Rounding
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.eagle3 import Eagle3Weights
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.weights import Attention, Experts, Int4CompactExperts, Int4Experts, Layer, Matrix, Mlp, Moe, Weights

GROUP = 32
DRAFT_GAIN = 4.0
_LOWEST_BITS = 0x11111111  # of each nibble

_Cut = Callable[[Tensor], Tensor]


def random_weights(
    config: KimiConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int = 0,
    slicing: Slicing = WHOLE,
    rounding: Rounding | None = None,
    apart: Apart | None = None,
) -> Weights:
    """Weights as `load` would give for a checkpoint with INT4 experts and everything else in `dtype`."""
    return _Random(config, _Values(dtype, torch.device(device), seed, slicing, apart), rounding).weights()


class _Values:
    """Zero-mean tensors, each from its own seed, cut to this rank's slices."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, seed: int, slicing: Slicing, apart: Apart | None = None
    ) -> None:
        self.dtype, self.device, self.slicing, self._apart = dtype, device, slicing, apart
        self._seed = seed
        self._generator = torch.Generator(device)

    def generator(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=8).digest()
        return self._generator.manual_seed(int.from_bytes(digest) >> 1)

    def rows(self, t: Tensor) -> Tensor:
        return t[self.slicing.part(t.shape[0])]

    def columns(self, t: Tensor) -> Tensor:
        return t[:, self.slicing.part(t.shape[1])]

    def halves(self, t: Tensor) -> Tensor:
        """This rank's part of gate's rows, then of up's."""
        both = t.unflatten(0, (2, -1))
        return torch.flatten(both[:, self.slicing.part(both.shape[1])], 0, 1)

    def keep(self, name: str, t: Tensor, cut: _Cut | None) -> Tensor:
        if cut is None or self.slicing.ranks == 1:
            return t
        try:
            return cut(t).clone(memory_format=torch.contiguous_format)
        except ConfigError as e:
            raise ConfigError(f"{name} {list(t.shape)}: {e}") from e

    def linear(self, name: str, shape: tuple[int, ...], cut: _Cut | None = None) -> Matrix:
        made = self.normal(name, *shape, scale=shape[1] ** -0.5, cut=cut)
        return Matrix(made if self._apart is None else self._apart.empty(tuple(made.shape), made.dtype).copy_(made))

    def norm(self, name: str, *shape: int) -> Tensor:
        return self.normal(name, *shape, scale=0.1).add_(1.0)

    def normal(
        self, name: str, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None, cut: _Cut | None = None
    ) -> Tensor:
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return self.keep(name, out.normal_(0.0, scale, generator=self.generator(name)), cut)

    def attention(self, at: str, sizes: names.Letters) -> Attention:
        of, (heads, n, latent) = names.shapes(names.ATTENTION, sizes), (sizes[x] for x in "HnR")
        if sizes["H"] % self.slicing.ranks:
            raise ConfigError(f"{sizes['H']} heads cannot be split evenly over {self.slicing.ranks} ranks")
        return Attention(
            qkv_a=self.linear(f"{at}.qkv_a", of["qkv_a"]),
            q_a_norm=self.norm(f"{at}.q_a_norm", *of["q_a_norm"]),
            q_b=self.linear(f"{at}.q_b", of["q_b"], self.rows),
            kv_a_norm=self.norm(f"{at}.kv_a_norm", *of["kv_a_norm"]),
            w_uk=self.normal(f"{at}.w_uk", heads, n, latent, scale=latent**-0.5, cut=self.rows),
            w_uv=self.normal(f"{at}.w_uv", heads, latent, sizes["v"], scale=latent**-0.5, cut=self.rows),
            o=self.linear(f"{at}.o", of["o"], self.columns),
        )

    def mlp(self, at: str, sizes: names.Letters) -> Mlp:
        of = names.shapes(names.MLP, sizes)
        return Mlp(
            gate_up=self.linear(f"{at}.gate_up", of["gate_up"], self.halves),
            down=self.linear(f"{at}.down", of["down"], self.columns),
        )


class _Random:
    def __init__(self, config: KimiConfig, values: _Values, rounding: Rounding | None) -> None:
        self._config, self._values, self._rounding = config, values, rounding

    def weights(self) -> Weights:
        c, r = self._config, self._values
        return Weights(
            embed=r.normal("embed", c.vocab_size, c.hidden_size, cut=r.rows),
            layers=[self._layer(i) for i in range(c.num_hidden_layers)],
            norm=r.norm("norm", c.hidden_size),
            lm_head=r.linear("lm_head", (c.vocab_size, c.hidden_size), r.rows),
        )

    def _layer(self, i: int) -> Layer:
        c, r, at = self._config, self._values, f"layers.{i}"
        sizes = names.letters(c, c.hidden_size, c.intermediate_size)
        return Layer(
            input_norm=r.norm(f"{at}.input_norm", c.hidden_size),
            attention=r.attention(f"{at}.attention", sizes),
            post_norm=r.norm(f"{at}.post_norm", c.hidden_size),
            ffn=r.mlp(f"{at}.mlp", sizes) if i < c.first_k_dense_replace else self._moe(at),
        )

    def _moe(self, at: str) -> Moe:
        c, r = self._config, self._values
        narrow = r.dtype == torch.bfloat16 and r.device.type == "cuda"
        gate = c.n_routed_experts, c.hidden_size
        shared = names.letters(c, c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)
        dtype = torch.bfloat16 if narrow else torch.float32
        return Moe(
            gate=r.normal(f"{at}.gate", *gate, scale=gate[1] ** -0.5, dtype=dtype),
            bias=r.normal(f"{at}.bias", c.n_routed_experts, scale=1e-3, dtype=torch.float32),
            experts=self._experts(f"{at}.experts"),
            shared=r.mlp(f"{at}.shared", shared) if c.n_shared_experts else None,
        )

    def _experts(self, at: str) -> Experts:
        c, r = self._config, self._values
        d, i = c.hidden_size, c.moe_intermediate_size
        if r.slicing.whole_experts:
            own, halves, columns = r.slicing.experts(c.n_routed_experts), None, None
        else:
            own, halves, columns = slice(0, c.n_routed_experts), r.halves, r.columns
        ids = range(own.start, own.stop)
        record = Int4Experts if self._rounding is None else Int4CompactExperts
        return record(
            *self._int4([f"{at}.{e}.gate_up" for e in ids], 2 * i, d, halves),
            *self._int4([f"{at}.{e}.down" for e in ids], d, i, columns),
        )

    def _int4(self, experts: list[str], rows: int, inputs: int, cut: _Cut | None) -> list[Tensor]:
        stacks: list[Tensor] = []
        for k, name in enumerate(experts):
            made = [self._values.keep(name, t, cut) for t in self._one_int4(name, rows, inputs)]
            if self._rounding is not None:
                *made, lost = int4_compact.compacted(*made)
                self._rounding.add(name, lost)
            stacks = stacks or [t.new_empty(len(experts), *t.shape) for t in made]
            for stack, t in zip(stacks, made):
                stack[k] = t
        return stacks

    def _one_int4(self, name: str, rows: int, inputs: int) -> tuple[Tensor, Tensor]:
        r = self._values
        generator = r.generator(name)
        words = torch.empty(rows, inputs // 8, dtype=torch.int32, device=r.device)
        words.random_(-(2**31), 2**31 - 1, generator=generator)
        # Levels -8 .. 7 have a mean of -1/2, which would add the same vector to every token and make routing uneven.
        # So level -8, a nibble of zeros, becomes 0.
        some = words | words >> 1
        empty = ~(some | some >> 2) & _LOWEST_BITS
        words |= empty << 3
        scale = torch.empty(rows, inputs // GROUP, dtype=torch.bfloat16, device=r.device)
        return words, scale.uniform_(0.1 * inputs**-0.5, 0.3 * inputs**-0.5, generator=generator)


def random_draft(config: Eagle3Config, embed: Tensor, *, seed: int = 0, slicing: Slicing = WHOLE) -> Eagle3Weights:
    """Weights of a draft with latent attention and its own head. Dtype and embedding are `embed`'s [V, D], the
    target's."""
    assert config.form == "mla" and config.draft_vocab_size == config.vocab_size, config
    assert embed.shape == (config.vocab_size // slicing.ranks, config.hidden_size), embed.shape
    c, d = config, config.hidden_size
    sizes = names.letters(c, 2 * d, c.intermediate_size)
    r = _Values(embed.dtype, embed.device, seed, slicing)
    attention, mlp = r.attention("draft.attention", sizes), r.mlp("draft.mlp", sizes)
    for matrix in (attention.o, mlp.down):  # otherwise the state hardly changes, and all drafts are one token
        matrix.weight.mul_(DRAFT_GAIN)
    fc_norms = [r.norm(f"draft.fc_norms.{k}", c.target_hidden_size) for k in range(c.num_aux)] if c.fc_norm else None
    return Eagle3Weights(
        embed=embed,
        fc=r.linear("draft.fc", (d, c.num_aux * c.target_hidden_size)),
        fc_norms=torch.stack(fc_norms) if fc_norms else None,
        joint_norm=r.norm("draft.joint_norm", c.num_aux * c.target_hidden_size) if c.norm_before_fc else None,
        input_norm=r.norm("draft.input_norm", d),
        hidden_norm=r.norm("draft.hidden_norm", d),
        attention=attention,
        post_norm=r.norm("draft.post_norm", d),
        mlp=mlp,
        norm=r.norm("draft.norm", d),
        lm_head=r.linear("draft.lm_head", (c.draft_vocab_size, d), r.rows),
        target_ids=None,
    )
