"""An EAGLE-3 draft that learns, MLA form, in plain differentiable torch: the equations of model/eagle3.py.

Training-time test: as in serving, only the first drafted token comes from the target's features; the steps after it get
the draft's own states. Step j of the chain that begins at position t reads token t + j (the true one), attends to the
first steps' keys up to t and to its own chain's keys, and learns the target's distribution of token t + j + 1.
All chains of all rows run at once; only positions whose next token is the target's own begin one.

Letters: N tokens of a batch's rows, M chains, H heads, D hidden, J steps.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.draft.corpus import Row
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.eagle3_load import LAYER, OPTIONAL, expected

GROUPS = 4  # of neighbouring rows, each of which attends as one grid


@dataclass(frozen=True, slots=True)
class Group:
    """Rows next to each other as grids: b rows, Q chains and K tokens of the longest.

    Grids are filled by copies to distinct places, whose gradients are copies too: an index with repetitions would be
    summed up by sorting.

    chains, tokens  which of the batch's are the group's
    chain_places    [chains of the group] their places in the flat grid [b Q]; token_places of the tokens in [b K]
    hidden          [b, 1, Q, K] true where a chain must not look
    """

    chains: slice
    tokens: slice
    chain_places: Tensor
    token_places: Tensor
    hidden: Tensor

    def chain_grid(self, x: Tensor) -> Tensor:
        """[M, H, d] -> [b, H, Q, d]."""
        b, _, count, _ = self.hidden.shape
        return _grid(x[self.chains], self.chain_places, b, count)

    def token_grid(self, x: Tensor) -> Tensor:
        """[N, H, d] -> [b, H, K, d]."""
        b, _, _, count = self.hidden.shape
        return _grid(x[self.tokens], self.token_places, b, count)


def _grid(x: Tensor, places: Tensor, b: int, count: int) -> Tensor:
    flat = x.new_zeros(b * count, *x.shape[1:]).index_copy(0, places, x)
    return flat.view(b, count, *x.shape[1:]).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows one after the other, tokens and chains numbered through.

    tokens, positions [N]; taught [L] the tokens of answers, and lesson [N] the place of each token in `taught` (any, if
    it has none); begin [M] the token whose feature a chain begins with; last [M] the last token of the chain's row
    """

    tokens: Tensor
    positions: Tensor
    taught: Tensor
    lesson: Tensor
    begin: Tensor
    last: Tensor
    groups: tuple[Group, ...]

    @property
    def nbytes(self) -> int:
        own = (self.tokens, self.positions, self.taught, self.lesson, self.begin, self.last)
        grids = (t for g in self.groups for t in (g.chain_places, g.token_places, g.hidden))
        return sum(t.nbytes for t in (*own, *grids))

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> "Batch":
        """Every row must have a prompt and an answer of LEAST_ANSWER tokens or more. Little is padded if rows of like
        length are neighbours."""
        lengths = torch.tensor([len(row.ids) for row in rows])
        given = torch.tensor([row.given for row in rows])
        starts, chains = lengths.cumsum(0) - lengths, lengths - 1 - given  # chains begin from given - 1 to length - 3
        bounds = sorted({len(rows) * g // GROUPS for g in range(GROUPS + 1)})
        groups = tuple(
            _group(lengths[i:j], given[i:j], int(starts[i]), int(chains[:i].sum()), device)
            for i, j in itertools.pairwise(bounds)
        )
        offset = torch.arange(int(chains.sum())) - (chains.cumsum(0) - chains).repeat_interleave(chains)
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        answer = positions >= given.repeat_interleave(lengths)
        return cls(
            tokens=torch.tensor([t for row in rows for t in row.ids]).to(device),
            positions=positions.to(device),
            taught=answer.nonzero().squeeze(1).to(device),
            lesson=(answer.cumsum(0) - 1).clamp_min(0).to(device),
            begin=((starts + given - 1).repeat_interleave(chains) + offset).to(device),
            last=(starts + lengths - 1).repeat_interleave(chains).to(device),
            groups=groups,
        )


def _group(lengths: Tensor, given: Tensor, token: int, chain: int, device: torch.device) -> Group:
    """Of rows with these lengths and prompts; `token` and `chain` are the numbers of the group's first ones."""
    chains = lengths - 1 - given
    q, k = torch.arange(int(chains.max())), torch.arange(int(lengths.max()))
    hidden = k > (given[:, None] - 1 + q)[:, :, None]
    return Group(
        chains=slice(chain, chain + int(chains.sum())),
        tokens=slice(token, token + int(lengths.sum())),
        chain_places=(q < chains[:, None]).flatten().nonzero().squeeze(1).to(device),
        token_places=(k < lengths[:, None]).flatten().nonzero().squeeze(1).to(device),
        hidden=hidden[:, None].to(device),
    )


@dataclass(frozen=True, slots=True)
class Lesson:
    """loss: mean over chains and steps; per step of [J]: share of chains whose guess is the target's likeliest."""

    loss: Tensor
    agreement: Tensor


class Trainee:
    """`parameters` are float32, by their names in a checkpoint; `embed` and `head` [V, D] are the target's, fixed."""

    def __init__(self, config: Eagle3Config, embed: Tensor, head: Tensor, *, seed: int) -> None:
        assert config.form == "mla" and config.draft_vocab_size == config.vocab_size, config
        self.config = config
        self.embed, self.head = embed, head
        generator = torch.Generator().manual_seed(seed)
        self.parameters: dict[str, Tensor] = {}
        for name, shape in expected(config).items():
            if name in OPTIONAL:
                continue
            if len(shape) == 1:
                p = torch.ones(shape)
            else:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                p = torch.empty(shape).normal_(0, shape[1] ** -0.5 * (0.5 if into_stream else 1.0), generator=generator)
            self.parameters[name] = p.to(embed.device).requires_grad_()
        self._frequencies = torch.tensor(config.rope_inv_freq, dtype=torch.float64, device=embed.device)

    def lesson(self, batch: Batch, aux: Tensor, hidden: Tensor, steps: int, decay: float) -> Lesson:
        """Cross entropy with the target's distributions; step j weighs decay^(j - 1).

        aux [N, A D] and hidden [L, D] as captured, the latter of the batch's `taught` tokens.
        """
        c, p = self.config, self.parameters
        with torch.no_grad():
            truth = F.linear(hidden, self.head).float().softmax(-1)
            likeliest = truth.argmax(-1)
        following = batch.tokens.roll(-1)
        features = self._features(aux)
        x = self._input(following, features)
        keys, values = self._keys(x, batch.positions)
        grids = [(g.token_grid(keys), g.token_grid(values)) for g in batch.groups]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch.groups]
        losses, agreements, weights = [], [], []
        state = features.index_select(0, batch.begin)
        for j in range(steps):
            # Chains near a row's end have no step j: they are computed and count nothing.
            token = (batch.begin + j + 1).minimum(batch.last)
            valid = (batch.begin + j + 2 <= batch.last).float()
            positions = batch.positions[batch.begin] + j
            x = self._input(batch.tokens[token], state) if j else x.index_select(0, batch.begin)
            if j:
                k, v = self._keys(x, positions)
                for group, mine in zip(batch.groups, own):
                    mine.append((group.chain_grid(k), group.chain_grid(v)))
            attended = self._attend(self._queries(x, positions), grids, own, batch.groups)
            residual = self._norm(state, f"{LAYER}hidden_norm") if c.norm_before_residual else state
            h = residual + F.linear(attended, p[f"{LAYER}self_attn.o_proj.weight"])
            inner = self._norm(h, f"{LAYER}post_attention_layernorm")
            gate = F.linear(inner, p[f"{LAYER}mlp.gate_proj.weight"])
            up = F.linear(inner, p[f"{LAYER}mlp.up_proj.weight"])
            h = h + F.linear(F.silu(gate) * up, p[f"{LAYER}mlp.down_proj.weight"])
            normed = self._norm(h, "norm")
            state = normed if c.norm_output else h
            logits = F.linear(normed.to(self.head.dtype), self.head).float()
            place = batch.lesson[token]
            entropy = -(truth[place] * logits.log_softmax(-1)).sum(-1)
            count = valid.sum().clamp_min(1)
            losses.append((entropy * valid).sum() / count)
            weights.append(decay**j)
            agreements.append(((logits.argmax(-1) == likeliest[place]) * valid).sum() / count)
        loss = torch.stack(losses) @ torch.tensor(weights, device=losses[0].device) / sum(weights)
        return Lesson(loss, torch.stack(agreements).detach())

    def _norm(self, x: Tensor, name: str) -> Tensor:
        f = x.float()
        f = f * (f.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return (f * self.parameters[f"{name}.weight"]).to(x.dtype)

    def _features(self, aux: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            aux = self._norm(aux, "input_norm")
        if c.fc_norm:
            pieces = aux.chunk(c.num_aux, -1)
            aux = torch.cat([self._norm(piece, f"fc_norm.{i}") for i, piece in enumerate(pieces)], -1)
        return F.linear(aux, self.parameters["fc.weight"])

    def _input(self, tokens: Tensor, features: Tensor) -> Tensor:
        embedded = self._norm(F.embedding(tokens, self.embed).to(features.dtype), f"{LAYER}input_layernorm")
        return torch.cat([embedded, self._norm(features, f"{LAYER}hidden_norm")], -1)

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, 2 D] -> keys [R, H, n + r], values [R, H, v]."""
        c, p, at = self.config, self.parameters, f"{LAYER}self_attn"
        latent, k_pe = F.linear(x, p[f"{at}.kv_a_proj_with_mqa.weight"]).tensor_split((c.kv_lora_rank,), -1)
        kv = F.linear(self._norm(latent, f"{at}.kv_a_layernorm"), p[f"{at}.kv_b_proj.weight"])
        nope, values = kv.view(len(x), c.num_attention_heads, -1).tensor_split((c.qk_nope_head_dim,), -1)
        k_pe = self._rope(k_pe[:, None], positions).expand(-1, c.num_attention_heads, -1)
        return torch.cat((nope, k_pe), -1), values

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [R, 2 D] -> [R, H, n + r], scaled."""
        c, p, at = self.config, self.parameters, f"{LAYER}self_attn"
        q = self._norm(F.linear(x, p[f"{at}.q_a_proj.weight"]), f"{at}.q_a_layernorm")
        q = F.linear(q, p[f"{at}.q_b_proj.weight"]).view(len(x), c.num_attention_heads, -1)
        nope, pe = q.tensor_split((c.qk_nope_head_dim,), -1)
        return torch.cat((nope, self._rope(pe, positions)), -1) * c.softmax_scale

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None].double() * self._frequencies
        cos, sin = ((f(angles) * self.config.rope_magnitude).float()[:, None] for f in (torch.cos, torch.sin))
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)

    def _attend(
        self,
        q: Tensor,
        grids: Sequence[tuple[Tensor, Tensor]],
        own: Sequence[Sequence[tuple[Tensor, Tensor]]],
        groups: Sequence[Group],
    ) -> Tensor:
        """q [M, H, d]; by group, keys and values of the first steps [b, H, K, d] and of the chains [b, H, Q, d]."""
        out = []
        for group, (keys, values), chains in zip(groups, grids, own):
            length = keys.shape[2]
            queries = group.chain_grid(q)
            scores = (queries @ keys.mT).float().masked_fill(group.hidden, -math.inf)
            mine = [(queries * k).sum(-1, keepdim=True).float() for k, _ in chains]
            shares = torch.cat((scores, *mine), -1).softmax(-1).to(values.dtype)
            mixed = shares[..., :length] @ values
            for i, (_, v) in enumerate(chains):
                mixed = mixed + shares[..., length + i, None] * v
            out.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, group.chain_places))
        return torch.cat(out)

    def checkpoint(self, dtype: torch.dtype = torch.bfloat16) -> Mapping[str, Tensor]:
        return {name: p.detach().to("cpu", dtype).contiguous() for name, p in self.parameters.items()}
