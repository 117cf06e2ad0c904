"""INT4 with other scales: made compact, or found again in weights that were INT4 once."""

import torch
from torch import Tensor

from perilune.formats import int4, int4_compact
from perilune.formats.scheme import INT4_GROUP

NO_LATTICE = 0.01  # of the groups: below it, the weights were never INT4
_ZEROS = -0x77777778  # eight nibbles of 8, which stand for 0


def compact(packed: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """INT4 as stored -> packed, weight_scale, weight_scale_row, and the energies of the weights and of the error.

    Levels stay what they are. ValueError if scales are negative or not finite.
    """
    steps, row = int4_compact.compact(scale)
    none = scale == 0
    if none.any():  # a compact scale cannot say 0, levels can
        words = torch.unflatten(packed, -1, (-1, INT4_GROUP // 8))
        packed = torch.where(none.unsqueeze(-1), _ZEROS, words).flatten(-2)
    squares = _squares(packed)
    exact = scale.double()
    signal = (squares * exact.square()).sum().item()
    error = (squares * (int4_compact.expand(steps, row).double() - exact).square()).sum().item()
    return packed, steps, row, signal, error


def _squares(packed: Tensor) -> Tensor:
    """[o, i / 8] -> the sum of q * q over each group [o, i / 32], float64."""
    q = torch.unflatten(int4.unpack(packed), -1, (-1, INT4_GROUP))
    sums: Tensor = (q.short() * q.short()).sum(-1, dtype=torch.int32)
    return sums.double()


def onto(w: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
    """The levels of weights [o, i] for given scales [o, i / 32], packed; whether they reproduce w as w is stored."""
    step = scale.float().unsqueeze(-1)
    groups = torch.unflatten(w.float(), -1, (-1, INT4_GROUP))
    q = (groups / torch.where(step == 0, 1.0, step)).round_().clamp_(-8, 7)
    same = torch.equal((q * step).to(w.dtype).flatten(-2), w)
    return int4.pack(q.flatten(-2)), same


def quantize(w: Tensor) -> tuple[Tensor, Tensor]:
    """[o, i] floats -> packed [o, i / 8] int32, scale [o, i / 32] bfloat16.

    Groups of bfloat16 weights that are whole multiples of a scale, rounded, get back that scale and their levels: the
    largest level is taken to be 7, or 8, and the neighbours of the scale that follows are tried until one reproduces
    every weight. All others get max|w| / 7 and the nearest levels. ValueError if w is not finite.
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
