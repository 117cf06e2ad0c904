"""Recovers INT4 levels and scales from weights that were INT4 before."""

import torch
from torch import Tensor

from perilune.formats import int4
from perilune.formats.scheme import INT4_GROUP

NO_LATTICE = 0.01  # if a smaller share of groups matches, the weights were never INT4


def onto(w: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
    """(packed levels of weights [o, i] for given scales [o, i / 32]; whether they reproduce w exactly in its dtype)."""
    step = scale.float().unsqueeze(-1)
    groups = torch.unflatten(w.float(), -1, (-1, INT4_GROUP))
    q = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-8, 7)
    same = torch.equal((q * step).to(w.dtype).flatten(-2), w)
    return int4.pack(q.flatten(-2)), same


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """[o, i] floats -> packed [o, i / 8] int32, scale [o, i / 32] bfloat16.

    A group of bfloat16 weights that are rounded multiples of a scale gets this scale and their levels: max|w| / 7,
    max|w| / 8 and the two bfloat16 neighbours of each are tried until one reproduces every weight. Other groups get
    max|w| / 7 and the nearest levels. ValueError if w is not finite.
    """
    packed, scale = int4.quantize(w)
    if w.dtype != torch.bfloat16:
        return packed, scale
    groups = torch.unflatten(w, -1, (-1, INT4_GROUP)).flatten(0, 1)
    words, flat = torch.unflatten(packed, -1, (-1, INT4_GROUP // 8)).flatten(0, 1), scale.flatten()
    left = torch.arange(len(groups), device=w.device)
    for level in (7, 8):
        near = (groups[left].abs().amax(-1).float() / level).to(torch.bfloat16).view(torch.int16)
        for offset in (0, -1, 1):
            step = (near + offset).view(torch.bfloat16)
            wide = torch.where(step > 0, step.float(), 1.0).unsqueeze(-1)
            q = (groups[left].float() / wide).round_().clamp_(-8, 7)
            found = ((q * wide).to(torch.bfloat16) == groups[left]).all(-1) & (step > 0)
            words[left[found]], flat[left[found]] = int4.pack(q[found]), step[found]
            if offset == 0 and level == 7 and found.float().mean() < NO_LATTICE:
                return packed, scale
            left, near = left[~found], near[~found]
    return words.reshape(packed.shape), flat.view(scale.shape)
