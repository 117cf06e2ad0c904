"""Greedy decoding of many prompts at once with the training model: a plain key-value cache, every row in step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runs.kimi_nano.attention import Packed, padded
from runs.kimi_nano.model import KimiNano, Seen


def rounded(room: int) -> int:
    return (room + 63) // 64 * 64


class Cache:
    """Keys and values of B rows of up to `room` tokens, per layer; `lengths` [B]: tokens held."""

    def __init__(self, model: KimiNano, rows: int, room: int) -> None:
        s, weight = model.s, model.embed_tokens.weight
        heads, qk = s.num_attention_heads, s.qk_nope_head_dim + s.qk_rope_head_dim

        def empty(width: int) -> list[Tensor]:
            size = (rows, heads, room, width)
            return [torch.zeros(size, dtype=weight.dtype, device=weight.device) for _ in range(s.num_hidden_layers)]

        self.k, self.v = empty(qk), empty(s.v_head_dim)
        self.scale, self.room = s.softmax_scale, room
        self.rows = torch.arange(rows, device=weight.device)
        self.places = torch.arange(room, device=weight.device)

    def fill(self, layer: int, k: Tensor, v: Tensor, row: Tensor, place: Tensor) -> None:
        self.k[layer][row, :, place], self.v[layer][row, :, place] = k, v

    def attend(self, layer: int, q: Tensor, lengths: Tensor, room: int) -> Tensor:
        """q [B, H, d] of each row's last token -> [B, H, v]; looks at the first `room` places only."""
        k, v = self.k[layer][:, :, :room], self.v[layer][:, :, :room]
        scores = (q[:, :, None] @ k.mT).float() * self.scale
        scores.masked_fill_((self.places[:room] >= lengths[:, None])[:, None, None], float("-inf"))
        return (scores.softmax(-1).to(v.dtype) @ v)[:, :, 0]


@torch.no_grad()
def greedy(
    model: KimiNano, prompts: Sequence[Sequence[int]], end: int, limit: int, seen: Seen | None = None
) -> list[list[int]]:
    """The most probable continuation of each prompt, up to and without `end`, at most `limit` tokens. Places in
    `seen` count over all prompts in a row."""
    device, count = model.embed_tokens.weight.device, len(prompts)
    starts = torch.tensor([0, *map(len, prompts)]).cumsum(0).int().to(device)
    packed = Packed(starts, max(map(len, prompts)), int(starts[-1]))
    lengths, positions = starts.diff().long(), packed.positions()
    rows = torch.arange(count, device=device).repeat_interleave(lengths)
    cache = Cache(model, count, rounded(packed.longest + limit))
    within = padded(packed, cache.scale)

    def prefill(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.fill(layer, k, v, rows, positions)
        return within(layer, q, k, v)

    tokens = torch.tensor([t for p in prompts for t in p], device=device)
    x = model.hidden(tokens, positions, prefill, seen=seen)[starts[1:].long() - 1]
    made: list[Tensor] = []
    ended = torch.zeros(count, dtype=torch.bool, device=device)
    for i in range(limit):
        token = model.logits(x).argmax(-1)
        made.append(token)
        ended |= token == end
        if i + 1 == limit or (i % 16 == 15 and bool(ended.all())):
            break
        room = rounded(packed.longest + i + 1)

        def step(layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor = lengths, room: int = room) -> Tensor:
            cache.fill(layer, k, v, cache.rows, at)
            return cache.attend(layer, q, at + 1, room)

        x = model.hidden(token, lengths, step)
        lengths = lengths + 1
    answers = torch.stack(made, 1).tolist()
    return [a[: a.index(end)] if end in a else a for a in answers]
