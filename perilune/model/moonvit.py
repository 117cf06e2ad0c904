"""MoonViT-3D: images and video chunks to rows of the text model's width (docs/formats.md section 4).

A media item is a grid of (t, h, w) patches: t = 1 of an image, up to `pos_emb_time` of a chunk of video frames; h and w
are even. Items of a call are concatenated: patches by frame, then row, then column. N counts patches, C is the
tower's width, H its heads, d their width, D the text model's width.

A pass is `begin`, then `block` for each layer, then `finish`; `__call__` is all of them. A caller that runs other work
in between calls smaller parts: `project`, then `mix` for a layer (in a pass of one item also for groups of rows), and
`merge`, then `head` (of any tokens) instead of `finish`.

cuDNN's attention is the fastest one on a GPU, but the first call with each shape takes tens of milliseconds (measured
beside decoding, docs/LOG.md). So attention of groups of rows has few shapes on a GPU: PADDED_ROWS queries, and keys in
multiples of PADDED_ROWS. One extra value in all queries and keys gives padding keys an attention weight of 0. `warm`
runs each shape once, those of matrix products too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.model.moonvit_config import MAX_SIDE_PATCHES, MERGE_SIDE, MoonVitConfig

EPS = 1e-5  # epsilon of the tower's norms; no key of config.json sets it
THETA = 10000.0  # base of rotations and of the frames' sinusoids

ALL = slice(None)

PADDED_ROWS = 1024  # Queries of an attention launch on a GPU: with 16 heads, a wave of 128 CTAs of 128 rows.
WIDER = 8  # extra values per padded query and key; only the first is used, but kernels need multiples of 8
NO_WEIGHT = -30000.0  # The extra value of padding keys; queries have 1 there. exp of the scaled score is then 0.
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Grid = tuple[int, int, int]  # frames, rows and columns of patches


@dataclass(slots=True)
class Block:
    """One layer. Linear layers are [outputs, inputs]; I is the intermediate width."""

    norm0: Tensor  # [C]
    norm0_bias: Tensor
    qkv: Tensor  # [3C, C]: queries of all heads, keys, values
    qkv_bias: Tensor  # [3C]
    out: Tensor  # [C, C]
    out_bias: Tensor
    norm1: Tensor  # [C]
    norm1_bias: Tensor
    fc0: Tensor  # [I, C]
    fc0_bias: Tensor
    fc1: Tensor  # [C, I]
    fc1_bias: Tensor


@dataclass(slots=True)
class MoonVitWeights:
    """The tower and its projector, all of one dtype and device."""

    patch: Tensor  # [C, 3, P, P]: a convolution of stride P, which is one linear map of each patch
    patch_bias: Tensor  # [C]
    positions: Tensor  # [rows, columns, C]: the learned table
    blocks: list[Block]
    norm: Tensor  # [C]: after the last layer
    norm_bias: Tensor
    pre_norm: Tensor  # [C]: the projector's, of each patch of a token
    pre_norm_bias: Tensor
    linear0: Tensor  # [4C, 4C]
    linear0_bias: Tensor
    linear1: Tensor  # [D, 4C]
    linear1_bias: Tensor


@dataclass(slots=True)
class Pass:
    """A forward pass between two layers."""

    x: Tensor  # [N, C]: the residual stream
    grids: Sequence[Grid]
    rotations: Tensor  # [N, 1, d / 2] complex64: of the neighbouring pairs of a query or key
    # The layer's queries, keys and values, [N, H, d] each, or padded [rows, H, d + WIDER]; valid once projected.
    qkv: list[Tensor]


class MoonVit:
    """The tower with its projector. Runs where its weights are, in their dtype.

    `pad`: queries per attention launch for groups of rows; 0: as many as the group has, without padding.
    """

    def __init__(self, config: MoonVitConfig, weights: MoonVitWeights) -> None:
        self.config, self.weights = config, weights
        self.pad = PADDED_ROWS if weights.norm.device.type == "cuda" else 0

    def __call__(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[tokens, D], the items' rows one after the other; `begin` has the arguments and errors."""
        state = self.begin(pixels, grids)
        for i in range(self.config.num_hidden_layers):
            self.block(state, i)
        return self.finish(state)

    def begin(self, pixels: Tensor, grids: Sequence[Grid]) -> Pass:
        """Embeds the patches.

        pixels  [N, 3, P, P]: floats as `normalised` makes them, of any dtype, on the weights' device
        grids   of the items; their patches sum to N

        ValueError if a side of a grid is odd or too large, or if the grids do not have N patches in all.
        """
        w, c = self.weights, self.config
        for t, h, width in dict.fromkeys(grids):
            sides = (h, width)
            if not 1 <= t <= c.pos_emb_time or any(n % MERGE_SIDE or not 2 <= n <= MAX_SIDE_PATCHES for n in sides):
                raise ValueError(
                    f"a grid of {t} x {h} x {width} patches: 1 to {c.pos_emb_time} frames, and even sides of at most "
                    f"{MAX_SIDE_PATCHES} are possible"
                )
        if pixels.shape != (count := sum(map(math.prod, grids)), *w.patch.shape[1:]):
            raise ValueError(f"pixels of shape {tuple(pixels.shape)} for grids of {count} patches in all")
        x = F.linear(pixels.to(w.patch.dtype).flatten(1), w.patch.flatten(1), w.patch_bias)
        alike = [(grid, sum(1 for _ in some)) for grid, some in groupby(grids)]
        x = x + torch.cat([self._position(grid).repeat(items, 1) for grid, items in alike]).to(x.dtype)
        rotations = torch.cat([self._rotation(grid).repeat(items, 1) for grid, items in alike])
        return Pass(x, grids, rotations[:, None], [])

    def block(self, state: Pass, i: int) -> None:
        """Layer i, which changes `state.x`."""
        self.project(state, i, ALL)
        self.mix(state, i, ALL)

    def project(self, state: Pass, i: int, rows: slice) -> None:
        """Layer i's queries, keys and values of these rows."""
        w, c = self.weights.blocks[i], self.config
        x = F.layer_norm(state.x[rows], (c.hidden_size,), w.norm0, w.norm0_bias, EPS)
        q, k, v = F.linear(x, w.qkv, w.qkv_bias).unflatten(1, (3, c.num_attention_heads, c.head_dim)).unbind(1)
        parts = [_rotated(q, state.rotations[rows]), _rotated(k, state.rotations[rows]), v]
        if rows == ALL:
            state.qkv = parts
            return
        state.qkv = state.qkv or self._room(len(state.x))
        for whole, part in zip(state.qkv, parts):
            whole[rows, :, : c.head_dim] = part

    def _room(self, count: int) -> list[Tensor]:
        """Buffers for queries, keys and values of `count` rows; with `pad`, in whole groups and WIDER more values."""
        c, weight = self.config, self.weights.norm
        if not self.pad:
            return [weight.new_empty(count, c.num_attention_heads, c.head_dim) for _ in "qkv"]
        rows = -(-count // self.pad) * self.pad
        q, k, v = (weight.new_zeros(rows, c.num_attention_heads, c.head_dim + WIDER) for _ in "qkv")
        q[:, :, c.head_dim] = 1
        k[count:, :, c.head_dim] = NO_WEIGHT
        return [q, k, v]

    def warm(self, count: int) -> None:
        """Runs once every shape that groups of rows of an image of about `count` patches have, and the attention shapes
        of smaller images. Call it in the thread that encodes: cuDNN chooses kernels per thread. cuBLAS loads a kernel
        when a shape first needs it."""
        if not self.pad:
            return
        side = min(math.ceil(math.sqrt(count) / MERGE_SIDE) * MERGE_SIDE, MAX_SIDE_PATCHES)
        patch = self.weights.patch
        state = self.begin(patch.new_zeros(side * side, *patch.shape[1:]), [(1, side, side)])
        ends = [min(end, side * side) for end in range(self.pad, side * side + self.pad, self.pad)]
        for end in ends:
            self._padded_attention(self._room(end), slice(0, self.pad))
            self.project(state, 0, slice(0, end))
        for end in ends:
            self.mix(state, 0, slice(0, end))
        merged = self.merge(state)
        for end in ends:
            self.head(merged[: end // MERGE_SIDE**2])

    def _padded_attention(self, qkv: list[Tensor], rows: slice) -> Tensor:
        """[n, C]: these rows' queries attend to all keys."""
        q, k, v = (part.transpose(0, 1)[None] for part in qkv)
        found, scale = list[Tensor](), self.config.head_dim**-0.5
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            for first in range(rows.start, rows.stop, self.pad):
                found.append(F.scaled_dot_product_attention(q[:, :, first : first + self.pad], k, v, scale=scale)[0])
        x = torch.cat(found, 1)[:, : rows.stop - rows.start, : self.config.head_dim]
        return x.transpose(0, 1).flatten(1)

    def mix(self, state: Pass, i: int, rows: slice) -> None:
        """The rest of layer i: changes these rows of `state.x`. Call it after `project` of all rows."""
        w, c = self.weights.blocks[i], self.config
        q, k, v = state.qkv
        if rows == ALL:
            x = _attention(q, k, v, state.grids)
        else:
            x = self._padded_attention(state.qkv, rows) if self.pad else _attend(q[rows], k, v, 1)
        h = state.x[rows] + F.linear(x, w.out, w.out_bias)
        x = F.layer_norm(h, (c.hidden_size,), w.norm1, w.norm1_bias, EPS)
        x = F.gelu(F.linear(x, w.fc0, w.fc0_bias), approximate="tanh")
        h = h + F.linear(x, w.fc1, w.fc1_bias)
        if rows == ALL:
            state.x = h
        else:
            state.x[rows] = h

    def finish(self, state: Pass) -> Tensor:
        """[tokens, D]."""
        return self.head(self.merge(state))

    def merge(self, state: Pass) -> Tensor:
        """[tokens, 4C]: a token for each square of 2 x 2 patches; frames are averaged."""
        w, c = self.weights, self.config
        x = F.layer_norm(state.x, (c.hidden_size,), w.norm, w.norm_bias, EPS)
        merged, end = [], 0
        for (t, h, width), some in groupby(state.grids):
            items = sum(1 for _ in some)
            first, end = end, end + items * t * h * width
            sides = (h // MERGE_SIDE, MERGE_SIDE, width // MERGE_SIDE, MERGE_SIDE)
            squares = x[first:end].view(items, t, *sides, c.hidden_size).mean(1)
            merged.append(squares.transpose(2, 3).reshape(-1, MERGE_SIDE * MERGE_SIDE, c.hidden_size))
        x = F.layer_norm(torch.cat(merged), (c.hidden_size,), w.pre_norm, w.pre_norm_bias, c.projector_eps)
        return x.flatten(1)

    def head(self, merged: Tensor) -> Tensor:
        """[n, D], the projection of n tokens of `merge`."""
        w = self.weights
        x = F.gelu(F.linear(merged, w.linear0, w.linear0_bias))
        return F.linear(x, w.linear1, w.linear1_bias)

    def _position(self, grid: Grid) -> Tensor:
        """[t h w, C] float32: the table stretched to the grid; in a chunk of several frames also their sinusoids."""
        t, h, w = grid
        table = self.weights.positions.float()
        if table.shape[:2] != (h, w):
            channels_first = table.permute(2, 0, 1)[None]
            table = F.interpolate(channels_first, size=(h, w), mode="bicubic")[0].permute(1, 2, 0)
        if t == 1:
            return table.flatten(0, 1)
        half = self.config.hidden_size // 2
        frequency = THETA ** -(torch.arange(half, device=table.device) / half)
        angles = torch.arange(t, device=table.device)[:, None] * frequency
        frames = torch.cat([angles.sin(), angles.cos()], 1)
        return (table + frames[:, None, None]).flatten(0, 2)

    def _rotation(self, grid: Grid) -> Tensor:
        """[t h w, d / 2] complex64: even pairs rotate by column, odd ones by row; equal for all frames."""
        t, h, w = grid
        device, count = self.weights.positions.device, self.config.head_dim // 4
        frequency = THETA ** -(torch.arange(count, device=device) / count)
        columns = torch.arange(w, device=device)[:, None] * frequency
        rows = torch.arange(h, device=device)[:, None] * frequency
        both = torch.stack([columns[None].expand(h, -1, -1), rows[:, None].expand(-1, w, -1)], -1)
        angles = both.flatten(2).flatten(0, 1).repeat(t, 1)
        return torch.polar(torch.ones_like(angles), angles)


def normalised(patches: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype) -> Tensor:
    """uint8 patches [N, 3, P, P] as the tower takes them: (x / 255 - mean) / std of each colour, in float32."""
    shift, scale = (patches.new_tensor(x, dtype=torch.float32)[:, None, None] for x in (mean, std))
    return ((patches.float() / 255 - shift) / scale).to(dtype)


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """x [N, H, d] with neighbouring pairs rotated; computed in float32."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotations).flatten(-2).to(x.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, grids: Sequence[Grid]) -> Tensor:
    """[N, C]: every patch of an item attends to all patches of that item. Neighbouring items of one size share a
    launch, as the chunks of a video do."""
    parts = [_attend(q[own], k[own], v[own], items) for items, own in _runs(grids)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, items: int) -> Tensor:
    """[n, C]: the n / items queries of each item attend to all keys of that item; all [rows, H, d]."""
    # [items * length, H, d] -> [items, H, length, d]
    q, k, v = (x.unflatten(0, (items, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)


def _runs(grids: Sequence[Grid]) -> Iterator[tuple[int, slice]]:
    """For each run of neighbouring items with equal numbers of patches: (items, their rows)."""
    end = 0
    for length, some in groupby(map(math.prod, grids)):
        items = sum(1 for _ in some)
        first, end = end, end + length * items
        yield items, slice(first, end)
