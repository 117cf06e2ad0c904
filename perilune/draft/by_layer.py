"""Capture for a target that is larger than the device: each layer is read once, for many texts at a time.

The device holds one layer and the texts of a pass through it; the host holds the residual stream of all texts and the
kept states: (1 + A) D numbers a token.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perilune.draft.capture import Capture, Captured
from perilune.draft.corpus import Row
from perilune.loading.load import layers
from perilune.model.kimi_k2 import KimiK2


class ByLayer(Capture):
    """Capture with layers from the checkpoint in `path`; `model` needs none."""

    def __init__(
        self, model: KimiK2, path: Path, aux_layers: Sequence[int], *, tokens: int, block_size: int = 64
    ) -> None:
        super().__init__(model, aux_layers, tokens=tokens, block_size=block_size, layers=1)
        self._path = path

    def __call__(self, texts: Sequence[Sequence[int]]) -> Captured:
        hidden, aux = zip(*self._through(texts))
        return Captured(torch.cat(aux), torch.cat(hidden))

    def each(self, shards: Sequence[Sequence[Row]]) -> Iterator[Captured]:
        """Reads the target once; yields nothing before all shards are computed."""
        rows = [row for shard in shards for row in shard]
        found = self._through([row.ids for row in rows])
        for shard in shards:
            some = [next(found) for _ in shard]
            hidden = torch.cat([hidden[row.given :] for row, (hidden, _) in zip(shard, some)])
            yield Captured(torch.cat([aux for _, aux in some]), hidden)

    @torch.no_grad()
    def _through(self, texts: Sequence[Sequence[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """(hidden [tokens, D], aux [tokens, A D]) of each text, on the host."""
        weights, passes, left = self.model.weights, [], list(texts)
        while left:
            passes.append(self.fitting(left))
            left = left[len(passes[-1]) :]
        streams = [self._whole.entering(self.step(some)).cpu() for some in passes]
        kept: dict[int, list[Tensor]] = {}
        depth = 0
        for layer in layers(self._path, dtype=weights.norm.dtype, device=weights.norm.device):
            if depth in self.aux_layers:
                kept[depth] = [h.clone() for h in streams]
            for some, host in zip(passes, streams):
                h = host.to(weights.norm.device)
                self._whole.through(layer, h, self.step(some), self._pages.data[0])
                host.copy_(h)
            depth += 1
            del layer  # frees its memory before the next one is loaded
        kept[depth] = streams
        for number, some in enumerate(passes):
            hidden = self._whole.leaving(streams[number].to(weights.norm.device)).cpu()
            aux = torch.cat([kept[i][number] for i in self.aux_layers], -1) if self.aux_layers else hidden[:, :0]
            yield from zip(*(torch.split(x, [len(text) for text in some]) for x in (hidden, aux)))
