"""Muon for matrices, AdamW for norms and heads; whole parameters or FSDP2's shards of them.

Muon orthogonalises whole matrices. If they are sharded, each rank takes some of them: it gathers their momenta from all
ranks, orthogonalises them and broadcasts the updates.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from perilune.model.names import DRAFT_HEAD

HEAD_RATE: Final = 0.1  # ratio of a head's learning rate to that of the rest; lower, because it begins as the target's
MOMENTUM: Final = 0.95
STEPS: Final = 5  # of the Newton-Schulz iteration
COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)  # of its quintic; Jordan 2024


class Muon:
    """Muon: updates are orthogonalised momenta, scaled to the mean square of AdamW's updates (arXiv 2502.16982)."""

    def __init__(self, parameters: Mapping[str, Tensor], weight_decay: float) -> None:
        self.parameters = dict(parameters)
        self.weight_decay = weight_decay
        self.momenta = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        sharded = dist.is_initialized() and dist.get_world_size() > 1
        self._owners = _owners(self.parameters, dist.get_world_size()) if sharded else {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        updates: dict[str, Any] = {}
        for name, p in self.parameters.items():
            assert p.grad is not None, name
            momentum = self.momenta[name]
            momentum.lerp_(p.grad, 1 - MOMENTUM)
            updates[name] = p.grad.lerp(momentum, MOMENTUM)
        for name, turned in (self._shared(updates) if self._owners else _each(updates)).items():
            p = self.parameters[name]
            p.mul_(1 - rate * self.weight_decay)
            p.add_(turned, alpha=-rate * 0.2 * math.sqrt(max(p.shape)))

    def _shared(self, updates: Mapping[str, DTensor]) -> dict[str, Tensor]:
        # Gather all before broadcasting any, so that ranks orthogonalise at the same time.
        rank, mine = dist.get_rank(), {}
        for name, update in updates.items():
            whole = update.full_tensor()
            if self._owners[name] == rank:
                mine[name] = orthogonal(whole)
        found: dict[str, Tensor] = {}
        for name, update in updates.items():
            turned = mine.pop(name, None)
            if turned is None:
                turned = torch.empty(update.shape, dtype=torch.bfloat16, device=update.device)
            dist.broadcast(turned, self._owners[name])
            found[name] = distribute(turned, update)
        return found


def _each(updates: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: orthogonal(update) for name, update in updates.items()}


def distribute(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's shard of `whole`, which every rank has, placed like `like`."""
    (placement,), mesh = like.placements, like.device_mesh
    own = like.to_local()
    assert placement.is_shard(0), placement
    rows = -(-whole.shape[0] // mesh.size())
    begin = min(rows * mesh.get_local_rank(), whole.shape[0])
    local = whole[begin : begin + own.shape[0]].to(own.device, own.dtype)
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with equal singular values, roughly (they end between 0.7 and 1.2), in bfloat16.

    A CPU multiplies in float32 and rounds: many have no bfloat16 instructions, and take 20 times as long in bfloat16.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    wide = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(STEPS):
        y = x.to(wide)
        gram = (y @ y.T).bfloat16().to(wide)
        turn = torch.addmm(gram, gram, gram, beta=b, alpha=c).bfloat16().to(wide)
        x = torch.addmm(y, turn, y, beta=a).bfloat16()
    return (x.T if tall else x).contiguous()


def _owners(parameters: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """The rank that orthogonalises each parameter, with about equal work per rank; the same on every rank."""
    load, owners = [0.0] * ranks, {}
    for name, p in sorted(parameters.items(), key=lambda item: (-_work(item[1]), item[0])):
        owners[name] = rank = load.index(min(load))
        load[rank] += _work(p)
    return owners


def _work(p: Tensor) -> float:
    short, long = sorted(p.shape)
    return float(short * short) * (2 * long + short)


class Optimizer:
    """Muon or AdamW for each named parameter. The learning rate is `step`'s `rate`, for a head HEAD_RATE times that."""

    def __init__(self, parameters: Mapping[str, Tensor], *, weight_decay: float) -> None:
        matrices = {name: p for name, p in parameters.items() if p.dim() > 1 and name != DRAFT_HEAD}
        self._muon = Muon(matrices, weight_decay)
        heads = [name for name in parameters if name == DRAFT_HEAD]
        self._names = [name for name in parameters if name not in matrices and name not in heads] + heads
        self._parameters = [parameters[name] for name in self._names]
        cut = len(self._names) - len(heads)
        groups = [
            {"params": self._parameters[:cut], "share": 1.0},
            {"params": self._parameters[cut:], "share": HEAD_RATE},
        ]
        self._adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, rate: float) -> None:
        self._muon.step(rate)
        for group in self._adam.param_groups:
            group["lr"] = rate * group["share"]
        self._adam.step()
        for p in (*self._muon.parameters.values(), *self._parameters):
            p.grad = None

    def state(self) -> dict[str, Tensor]:
        """All tensors of the optimiser's state, as "NAME:KEY"."""
        found = {f"{name}:momentum": m for name, m in self._muon.momenta.items()}
        for i, values in self._adam.state_dict()["state"].items():
            found |= {f"{self._names[i]}:{key}": value for key, value in values.items()}
        return found

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Restores the tensors of `state`. They are unsharded, whether or not parameters are sharded."""
        adam: dict[int, dict[str, Any]] = {}
        for key, value in state.items():
            name, _, field = key.rpartition(":")
            if name in self._muon.momenta:
                own = self._muon.momenta[name]
                own.copy_(distribute(value, own) if isinstance(own, DTensor) else value)
            else:
                place = self._names.index(name)
                p = self._parameters[place]
                if isinstance(p, DTensor) and value.shape == p.shape:
                    value = distribute(value, p)
                adam.setdefault(place, {})[field] = value
        self._adam.load_state_dict({**self._adam.state_dict(), "state": adam})
