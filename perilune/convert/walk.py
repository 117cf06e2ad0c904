"""A checkpoint's model computed layer by layer straight from its files, for many tokens at once.

Every expert is read once, used by all the tokens that chose it, and dropped: memory holds the activations, a layer
without its experts and a few experts, however large the model. Calibration measures activations this way, and reports
compare two checkpoints that need not fit the machine. Attention, norms and router are those of the served model;
experts are dequantised to the walk's dtype.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from perilune.convert.job import in_order
from perilune.core.errors import CheckpointError
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.served import require_served
from perilune.loading.survey import read_linear, survey
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import Span, Step, apply, mla, routing
from perilune.model.weights import Attention, Matrix
from perilune.ops.layouts.operands import Latents, Rotary
from perilune.ops.linear.linear import linear
from perilune.ops.moe.router import router
from perilune.ops.pointwise.add_rmsnorm import add_rmsnorm
from perilune.ops.pointwise.rmsnorm import rmsnorm
from perilune.ops.pointwise.swiglu import swiglu

BLOCK = 64
TOGETHER = 4096  # max tokens of an attention step or a dense layer's call; a longer sequence is a step of its own
READERS = 2  # threads that read and expand experts ahead of those in use

# Called once for each routed expert with tokens: (expert, inputs of gate and up [n, D], inputs of down [n, I]).
Observer = Callable[[int, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Sequences that attend in one step, with `blocks` cache blocks in all."""

    rows: slice
    step: Step
    blocks: int


class Walk:
    """For each layer i in order: `attend(i)`, `y = ffn(i, x)`, `add(i, y)`; then `x` is the input of lm_head.

    x  [T, D], the concatenated rows of all sequences
    """

    def __init__(
        self, checkpoint: Checkpoint, sequences: Sequence[Sequence[int]], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        config = KimiConfig.from_directory(checkpoint.path)
        require_served(config.quantization, str(checkpoint.path))
        self.config, self._checkpoint, self._found = config, checkpoint, survey(checkpoint, config)
        self._dtype, self._device = dtype, device
        self._eps, self._scale = config.rms_norm_eps, config.softmax_scale
        (self._head,) = names.model()["lm_head"]
        self._pieces = list(_pieces(sequences, device))
        blocks = max(p.blocks for p in self._pieces)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self._pages = torch.empty(blocks, BLOCK, width, dtype=dtype, device=device)
        positions = torch.cat([p.step.positions for p in self._pieces]).double()
        angles = positions[:, None] * torch.tensor(config.rope_inv_freq(), dtype=torch.float64, device=device)
        self._cos, self._sin = ((f(angles) * config.rope_magnitude).float() for f in (torch.cos, torch.sin))
        self._h = self._embedded(torch.cat([p.step.tokens for p in self._pieces]))
        self.x = rmsnorm(self._h, self._plain(*names.layer(0)["input_norm"]), self._eps)

    @property
    def layers(self) -> range:
        return range(self.config.num_hidden_layers)

    @property
    def vocab(self) -> int:
        return self._found.shapes[self._head][0]

    def attend(self, i: int) -> None:
        """Adds layer i's attention; then x is the input of its experts or MLP."""
        at = names.layer(i)
        w = self._attention_weights(at)
        out = torch.empty_like(self.x)
        for piece in self._pieces:
            rows = piece.rows
            rotary, latents = Rotary(self._cos[rows], self._sin[rows]), Latents(self._pages, piece.step.slots)
            out[rows] = mla(w, apply(w.qkv_a, self.x[rows]), rotary, piece.step, latents, self._eps, self._scale)
        self.x = add_rmsnorm(self._h, out, self._plain(*at["post_norm"]), self._eps)

    def ffn(self, i: int, x: Tensor, seen: Observer | None = None) -> Tensor:
        """[T', D] -> [T', D] float32: the experts or the MLP of layer i, for rows of this walk or of another."""
        c, at = self.config, names.layer(i)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if i < c.first_k_dense_replace:
            return _gated(self._triple(names.dense(i)), x, out)
        if c.n_shared_experts:
            _gated(self._triple(names.shared(i)), x, out)
        gate, bias = self._wide(*at["gate"]), self._wide(*at["bias"])
        chosen = router(x, gate, bias, routing(c))
        ids, shares = chosen.ids, chosen.weights
        wanted = sorted(set(ids.flatten().tolist()))
        with ThreadPoolExecutor(READERS, thread_name_prefix="walk") as pool:
            triples = in_order(pool, (partial(self._triple, names.expert(i, e)) for e in wanted), READERS + 1)
            for e, triple in zip(wanted, triples):
                rows, place = (ids == e).nonzero(as_tuple=True)
                some = x[rows]
                hidden = swiglu(torch.cat([linear(some, triple[0]), linear(some, triple[1])], -1))
                if seen is not None:
                    seen(e, some, hidden)
                out.index_add_(0, rows, linear(hidden, triple[2]).float() * shares[rows, place, None])
        return out

    def add(self, i: int, y: Tensor) -> None:
        """Ends layer i; `y` is the result of its experts or MLP. CheckpointError if the sum is not finite."""
        last = i + 1 == self.config.num_hidden_layers
        (norm,) = names.model()["norm"] if last else names.layer(i + 1)["input_norm"]
        self.x = add_rmsnorm(self._h, y.unsqueeze(1), self._plain(norm), self._eps)
        if not self.x.isfinite().all():
            raise CheckpointError(f"{self._checkpoint.path}: layer {i} gives values that are not finite")

    def head(self, rows: slice) -> Tensor:
        """Rows of lm_head; rows.start is a multiple of 128."""
        return self._linear(self._head, rows)

    # ---- reading -------------------------------------------------------------------------------------------------

    def _embedded(self, ids: Tensor) -> Tensor:
        """The embeddings [T, D]; reads only rows that occur."""
        info = self._found.tensors[names.EMBED.suffix]
        listed = ids.tolist()
        place = {token: n for n, token in enumerate(dict.fromkeys(listed))}
        table = torch.empty(len(place), *info.shape[1:], dtype=info.dtype)
        for token, row in zip(place, table):
            self._checkpoint.read_into(info, row, token * row.nbytes)
        return table[[place[token] for token in listed]].to(self._device, self._dtype)

    def _attention_weights(self, at: names.Names) -> Attention:
        c = self.config
        heads, n, latent = c.num_attention_heads, c.qk_nope_head_dim, c.kv_lora_rank
        kv_b = self._linear(at["kv_b"][0]).view(heads, n + c.v_head_dim, latent)
        return Attention(
            qkv_a=Matrix(torch.cat([self._linear(name) for name in at["qkv_a"]])),
            q_a_norm=self._plain(*at["q_a_norm"]),
            q_b=Matrix(self._linear(at["q_b"][0])),
            kv_a_norm=self._plain(*at["kv_a_norm"]),
            w_uk=kv_b[:, :n].contiguous(),
            w_uv=kv_b[:, n:].transpose(1, 2).contiguous(),
            o=Matrix(self._linear(at["o"][0])),
        )

    def _triple(self, at: names.Names) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = (self._linear(name) for name in (*at["gate_up"], *at["down"]))
        return gate, up, down

    def _linear(self, name: str, rows: slice = slice(None)) -> Tensor:
        return read_linear(self._checkpoint, self._found, name, self._dtype, rows=rows, device=self._device)

    def _plain(self, name: str) -> Tensor:
        return self._checkpoint.read(self._found.tensors[name].name).to(self._device, self._dtype)

    def _wide(self, name: str) -> Tensor:
        return self._checkpoint.read(self._found.tensors[name].name).to(self._device, torch.float32)


def run(walk: Walk, seen: Callable[[int, int, Tensor, Tensor], None] | None = None) -> None:
    """All layers; `seen` is an Observer with the layer as its first argument."""
    for i in walk.layers:
        walk.attend(i)
        walk.add(i, walk.ffn(i, walk.x, None if seen is None else partial(seen, i)))


def _gated(triple: tuple[Tensor, Tensor, Tensor], x: Tensor, out: Tensor) -> Tensor:
    """Adds down(swiglu(gate, up)) of every row to `out`."""
    gate, up, down = triple
    for begin in range(0, len(x), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        hidden = swiglu(torch.cat([linear(x[part], gate), linear(x[part], up)], -1))
        out[part] += linear(hidden, down)
    return out


def _pieces(sequences: Iterable[Sequence[int]], device: torch.device) -> Iterator[_Piece]:
    group: list[Sequence[int]] = []
    begin = 0
    for ids in sequences:
        if group and sum(map(len, group)) + len(ids) > TOGETHER:
            yield (piece := _piece(group, begin, device))
            begin, group = piece.rows.stop, []
        group.append(ids)
    yield _piece(group, begin, device)


def _piece(group: Sequence[Sequence[int]], begin: int, device: torch.device) -> _Piece:
    lengths = [len(ids) for ids in group]
    total, ends = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    needed = [-(-n // BLOCK) for n in lengths]
    tables = torch.zeros(len(group), max(needed), dtype=torch.int32)
    for row, count, end in zip(tables, needed, torch.tensor(needed).cumsum(0).tolist()):
        row[:count] = torch.arange(end - count, end)
    positions = torch.cat([torch.arange(n) for n in lengths])
    owner = torch.repeat_interleave(torch.arange(len(group)), torch.tensor(lengths))
    slots = tables[owner, positions // BLOCK].long() * BLOCK + positions % BLOCK
    span = Span(tables.to(device), ends.to(torch.int32), torch.tensor(lengths, dtype=torch.int32), slice(0, total))
    tokens = torch.tensor([t for ids in group for t in ids])
    step = Step(tokens.to(device), positions.to(device), slots.to(device), None, span)
    return _Piece(slice(begin, begin + total), step, sum(needed))
