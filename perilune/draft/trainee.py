"""An EAGLE-3 draft that learns, in plain differentiable torch: the equations of model/eagle3.py.

Training-time test: as in serving, only the first drafted token comes from the target's features; the steps after it get
the draft's own states. Step j of the chain that begins at position t reads token t + j (the true one), attends to the
first steps' keys up to t and to its own chain's keys, and learns the target's distribution of token t + j + 1.
All chains of all rows run at once. A chain begins at every position before a token of the target's answer.

Letters: N tokens of a batch's rows, M chains, H heads, D hidden, J steps, V and W tokens of the target's and the
draft's vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from perilune.core.errors import CheckpointError
from perilune.draft import ranks
from perilune.draft.batch import Batch, Group
from perilune.draft.losses import LOSSES
from perilune.draft.vocabulary import mapping
from perilune.model import names
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.names import DRAFT_HEAD

T = TypeVar("T")
SCORES = 1 << 28  # attention scores that `recompute` holds at a time. Larger: more memory, fewer launches


@dataclass(frozen=True, slots=True)
class ChainStep:
    """Step j of all chains. token [M]: the last known token, after which one is drafted, as an index of the batch;
    valid [M]: 1 if the row has that next token, else 0; normed [M, D]: input of the head [W, D]."""

    token: Tensor
    valid: Tensor
    normed: Tensor
    head: Tensor

    @property
    def logits(self) -> Tensor:
        """[M, W] float32."""
        return F.linear(self.normed.to(self.head.dtype), self.head).float()


class Lesson(NamedTuple):
    """loss: weighted mean over chains and steps; agreement [J]: by step, the share of chains that draft the target's
    likeliest token. Both are scaled so that their mean over all parts of the batch is that of the whole batch."""

    loss: Tensor
    agreement: Tensor


class Trainee(nn.Module):
    """The draft model in training. Parameters are float32, with their names in a checkpoint; `embed` and `head` [V, D]
    are the target's and fixed.

    Parameters begin as in the checkpoint `start`, or at random; a head of the draft's own begins as the target's.

    vocabulary  the target's ids of the draft's tokens, ascending, if it has fewer
    own_head    whether it learns a head, as it must with fewer tokens
    recompute   compute attention and logits again in the backward pass: slower, but far less memory
    """

    def __init__(
        self,
        config: Eagle3Config,
        embed: Tensor,
        head: Tensor,
        *,
        seed: int,
        vocabulary: Sequence[int] | None = None,
        own_head: bool = False,
        recompute: bool = False,
        start: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        assert (vocabulary is None) == (config.draft_vocab_size == config.vocab_size), config
        assert vocabulary is None or (own_head and len(vocabulary) == config.draft_vocab_size), config
        self.config, self._names = config, names.draft(config)
        self.embed, self.head = embed, head
        self.recompute = recompute
        self.vocabulary = None if vocabulary is None else torch.tensor(vocabulary, device=embed.device)
        generator = torch.Generator().manual_seed(seed)
        for name, shape in names.draft_expected(config).items():
            if name in names.DRAFT_OPTIONAL and not (name == DRAFT_HEAD and own_head):
                continue
            if start is not None:
                if name not in start or start[name].shape != shape:
                    raise CheckpointError(f"the draft to begin with has no {name} of shape {list(shape)}")
                p = start[name].float().clone()
            elif name == DRAFT_HEAD:
                p = (head if self.vocabulary is None else head[self.vocabulary]).float().clone()
            elif len(shape) == 1:
                p = torch.ones(shape)
            else:
                into_stream = name in (*self._names["o"], *self._names["down"])
                p = torch.empty(shape).normal_(0, shape[1] ** -0.5 * (0.5 if into_stream else 1.0), generator=generator)
            _place(self, name, nn.Parameter(p.to(embed.device)))
        self._frequencies = torch.tensor(config.rope_inv_freq, dtype=torch.float64, device=embed.device)
        self._now: Mapping[str, Tensor] = {}

    @torch.no_grad()
    def settle(self, squares: Sequence[float]) -> None:
        """Scales `fc` so that features begin with a mean square of about 1, given the mean squares of the aux states.
        Without norms before `fc`, they would be as large as the target's residual stream, and the draft's own
        contributions negligible."""
        if not self.config.fc_norm and not self.config.norm_before_fc:
            for columns, square in zip(self.get_parameter(*self._names["fc"]).chunk(self.config.num_aux, -1), squares):
                columns.mul_((square + self.config.rms_norm_eps) ** -0.5)

    def lesson(self, batch: Batch, aux: Tensor, hidden: Tensor, steps: int, decay: float, loss: str = "kl") -> Lesson:
        """The loss over all drafted tokens; step j weighs decay^(j - 1).

        aux [N, A D] and hidden [L, D] as captured, the latter of the batch's `taught` tokens.
        """
        with torch.no_grad():
            truth = F.linear(hidden, self.head).float().softmax(-1)
            likeliest = truth.argmax(-1)
            if self.vocabulary is not None:
                # Not renormalised: where much probability is outside the draft's vocabulary, the loss counts less.
                truth = truth.index_select(-1, self.vocabulary)
        losses, agreements = [], []
        for j, step in enumerate(self.unrolled(batch, aux, steps)):
            place = batch.lesson[step.token]
            value, drafted = self._twice(self._judge, step, truth, place, loss)
            losses.append((value * step.valid * batch.weight).sum() / batch.totals[j] * decay**j)
            right = (drafted == likeliest[place]) * step.valid * (batch.weight > 0)
            agreements.append(right.sum() / batch.counts[j])
        mean = torch.stack(losses).sum() / sum(decay**j for j in range(steps))
        return Lesson(mean, torch.stack(agreements).detach())

    def _judge(self, step: ChainStep, truth: Tensor, place: Tensor, loss: str) -> tuple[Tensor, Tensor]:
        """(the loss of each chain's drafted token, the id of that token), [M] each."""
        logits = step.logits
        return LOSSES[loss](truth[place], logits.log_softmax(-1)), self.likeliest(logits)

    def _twice(self, function: Callable[..., T], *given: Any) -> T:
        if not self.recompute:
            return function(*given)
        found: T = checkpoint(function, *given, use_reentrant=False)
        return found

    def likeliest(self, logits: Tensor) -> Tensor:
        """[M, W] -> the target's ids [M] of the likeliest tokens."""
        own = logits.argmax(-1)
        return own if self.vocabulary is None else self.vocabulary[own]

    def unrolled(self, batch: Batch, aux: Tensor, steps: int) -> Iterator[ChainStep]:
        """The steps of all chains, each of which reads the true tokens so far; aux as captured."""
        # Read at each call: a sharded module's whole parameters exist only while `lesson` runs.
        c, p = self.config, dict(self.named_parameters())
        self._now = p
        following = batch.tokens.roll(-1)
        features = self._features(aux)
        x = self._input(following, features)
        keys, values = self._keys(x, batch.positions)
        grids = [(g.token_grid(keys), g.token_grid(values)) for g in batch.groups]
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in batch.groups]
        state = features.index_select(0, batch.begin)
        head = p.get(DRAFT_HEAD, self.head)
        for j in range(steps):
            # Chains near a row's end have no step j: it is computed all the same, with weight 0.
            token = (batch.begin + j + 1).minimum(batch.last)
            valid = (batch.begin + j + 2 <= batch.last).float()
            positions = batch.positions[batch.begin] + j
            x = self._input(batch.tokens[token], state) if j else x.index_select(0, batch.begin)
            if j:
                k, v = self._keys(x, positions)
                for group, mine in zip(batch.groups, own):
                    mine.append((group.chain_grid(k), group.chain_grid(v)))
            attended = self._attend(self._queries(x, positions), grids, own, batch.groups)
            residual = self._norm(state, "hidden_norm") if c.norm_before_residual else state
            h = residual + self._linear(attended, "o")
            inner = self._norm(h, "post_norm")
            gate, up = self._linear(inner, "gate_up"), self._linear(inner, "gate_up", 1)
            h = h + self._linear(F.silu(gate) * up, "down")
            normed = self._norm(h, "norm")
            state = normed if c.norm_output else h
            yield ChainStep(token, valid, normed, head)

    def _linear(self, x: Tensor, field: str, part: int = 0) -> Tensor:
        """Applies the linear layer number `part` of those stored under one field."""
        return F.linear(x, self._now[self._names[field][part]])

    def _norm(self, x: Tensor, field: str, part: int = 0) -> Tensor:
        f = x.float()
        f = f * (f.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
        return (f * self._now[self._names[field][part]]).to(x.dtype)

    def _features(self, aux: Tensor) -> Tensor:
        c = self.config
        if c.norm_before_fc:
            aux = self._norm(aux, "joint_norm")
        if c.fc_norm:
            pieces = aux.chunk(c.num_aux, -1)
            aux = torch.cat([self._norm(piece, "fc_norms", i) for i, piece in enumerate(pieces)], -1)
        return self._linear(aux, "fc")

    def _input(self, tokens: Tensor, features: Tensor) -> Tensor:
        embedded = self._norm(F.embedding(tokens, self.embed).to(features.dtype), "input_norm")
        return torch.cat([embedded, self._norm(features, "hidden_norm")], -1)

    def _keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, 2 D] -> keys [R, H, width of a head], values [R, H, v]."""
        c = self.config
        if c.form == "mha":
            shape, times = (len(x), c.num_key_value_heads, c.head_dim), c.num_attention_heads // c.num_key_value_heads
            k, v = (self._linear(x, "qkv", part).view(shape) for part in (1, 2))
            return self._half_rope(k, positions).repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        latent, k_pe = self._linear(x, "qkv_a", 1).tensor_split((c.kv_lora_rank,), -1)
        kv = self._linear(self._norm(latent, "kv_a_norm"), "kv_b")
        nope, values = kv.view(len(x), c.num_attention_heads, -1).tensor_split((c.qk_nope_head_dim,), -1)
        k_pe = self._rope(k_pe[:, None], positions).expand(-1, c.num_attention_heads, -1)
        return torch.cat((nope, k_pe), -1), values

    def _queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [R, 2 D] -> [R, H, width of a head], scaled."""
        c = self.config
        if c.form == "mha":
            q = self._linear(x, "qkv").view(len(x), c.num_attention_heads, -1)
            return self._half_rope(q, positions) * c.softmax_scale
        q = self._norm(self._linear(x, "qkv_a"), "q_a_norm")
        q = self._linear(q, "q_b").view(len(x), c.num_attention_heads, -1)
        nope, pe = q.tensor_split((c.qk_nope_head_dim,), -1)
        return torch.cat((nope, self._rope(pe, positions)), -1) * c.softmax_scale

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, 1, pairs]."""
        angles = positions[:, None].double() * self._frequencies
        cos, sin = ((f(angles) * self.config.rope_magnitude).float()[:, None] for f in (torch.cos, torch.sin))
        return cos, sin

    def _rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of neighbouring pairs (interleaved)."""
        cos, sin = self._turn(positions)
        even, odd = x[..., 0::2].float(), x[..., 1::2].float()
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)

    def _half_rope(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of pairs half a head apart."""
        cos, sin = self._turn(positions)
        low, high = x.float().chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(x.dtype)

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
            queries = group.chain_grid(q)
            b, heads, count, _ = queries.shape
            most = max(SCORES // (b * heads * keys.shape[2]), 1) if self.recompute else count
            parts = []
            for begin in range(0, count, most):
                some = slice(begin, begin + most)
                mine = [(k[:, :, some], v[:, :, some]) for k, v in chains]
                parts.append(self._twice(_mixed, queries[:, :, some], keys, values, group.hidden[:, :, some], mine))
            mixed = torch.cat(parts, 2)
            out.append(mixed.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, group.chain_places))
        return torch.cat(out)

    def checkpoint(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """The tensors of a checkpoint; if it is sharded, on rank 0, and every rank must call this."""
        tensors = {name: p.to(dtype) for name, p in ranks.whole(dict(self.named_parameters())).items()}
        if self.vocabulary is not None:
            tensors |= mapping(self.vocabulary, self.config.vocab_size)
        return tensors


def _mixed(
    queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of queries [b, H, Q, d] to keys [b, H, K, d] where `hidden` [b, 1, Q, K] is false, and of each query to
    its chain's own keys [b, H, Q, d] -> [b, H, Q, v]."""
    length = keys.shape[2]
    scores = (queries @ keys.mT).float().masked_fill(hidden, -math.inf)
    mine = [(queries * k).sum(-1, keepdim=True).float() for k, _ in own]
    shares = torch.cat((scores, *mine), -1).softmax(-1).to(values.dtype)
    mixed = shares[..., :length] @ values
    for i, (_, v) in enumerate(own):
        mixed = mixed + shares[..., length + i, None] * v
    return mixed


def _place(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Registers a parameter under its dotted name; makes the modules on the path to it."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    module.register_parameter(leaf, parameter)
