"""The optimiser: float32 master weights, Muon for the layers' matrices, AdamW for all else.

The model holds what is served (bfloat16, experts on the INT4 grid); `Optimizer.publish` writes it there from the
masters, and a gradient with respect to the rounded weight moves the master (straight-through). Muon makes each
update's singular values about equal by five Newton-Schulz rounds (coefficients of K. Jordan's Muon) and scales it to
the root mean square of an AdamW update, 0.2, as Kimi K2's report does, so that both share learning rate and decay.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from runs.kimi_nano.model import int4_grid

MUON_MOMENTUM = 0.95
BETAS = (0.9, 0.95)
EPSILON = 1e-10


def orthogonalise(g: Tensor, dtype: torch.dtype) -> Tensor:
    """g [B, m, n] -> U V^T of each, roughly: singular values between 0.7 and 1.2."""
    x = g.to(dtype)
    if tall := x.shape[-2] > x.shape[-1]:
        x = x.mT
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(dtype)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


def is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def is_matrix(name: str, p: Tensor) -> bool:
    """Whether Muon updates this parameter: the layers' linear maps, but not the router."""
    return name.startswith("layers.") and p.dim() > 1 and not name.endswith("mlp.gate.weight")


class Optimizer:
    """`state` maps "master.NAME", "first.NAME" and "second.NAME" to float32 tensors: all there is to save."""

    def __init__(self, model: nn.Module, *, muon: bool, decay: float) -> None:
        self.parameters = dict(model.named_parameters())
        self.decay = decay
        self.state: dict[str, Tensor] = {}
        self._shapes: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)  # Muon's, together by matrix shape
        self._adam: list[str] = []
        for name, p in self.parameters.items():
            self.state[f"master.{name}"] = p.detach().float().clone()
            self.state[f"first.{name}"] = torch.zeros_like(p, dtype=torch.float32)
            if muon and is_matrix(name, p):
                self._shapes[p.shape[-2:]].append(name)
            else:
                self.state[f"second.{name}"] = torch.zeros_like(p, dtype=torch.float32)
                self._adam.append(name)

    @torch.no_grad()
    def publish(self) -> None:
        """Writes the weights to be served into the model."""
        masters = [
            int4_grid(m) if is_expert(n) else m
            for n, m in zip(self.parameters, self._tensors("master", self.parameters))
        ]
        torch._foreach_copy_(list(self.parameters.values()), masters)

    @torch.no_grad()
    def step(
        self,
        rate: Tensor | float,
        number: Tensor | int,
        clip: float = 1.0,
        add: Callable[[list[Tensor]], None] | None = None,
    ) -> Tensor:
        """One update with the model's gradients, which are cleared; `number` counts from 1. Returns their norm. `add`
        sums the gradients, in float32, over ranks.

        A CUDA graph keeps numbers as they were when it was captured: there, `rate` and `number` are float32 tensors [].
        """
        grads = {name: p.grad.float() for name, p in self.parameters.items() if p.grad is not None}
        for p in self.parameters.values():
            p.grad = None
        if add:
            add(list(grads.values()))
        norm = torch.stack(torch._foreach_norm(list(grads.values()))).norm()
        torch._foreach_mul_(list(grads.values()), (clip / (norm + 1e-6)).clamp_max(1.0))
        self._adamw(grads, rate, number)
        for names in self._shapes.values():
            self._muon(names, grads, rate)
        return norm

    def _tensors(self, kind: str, names: Iterable[str]) -> list[Tensor]:
        return [self.state[f"{kind}.{name}"] for name in names]

    def _adamw(self, grads: dict[str, Tensor], rate: Tensor | float, number: Tensor | int) -> None:
        names = self._adam
        g, w = [grads[n] for n in names], self._tensors("master", names)
        first, second = self._tensors("first", names), self._tensors("second", names)
        torch._foreach_lerp_(first, g, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, g, g, 1 - BETAS[1])
        below = torch._foreach_sqrt(second)
        torch._foreach_div_(below, (1 - BETAS[1] ** number) ** 0.5)
        torch._foreach_add_(below, EPSILON)
        torch._foreach_mul_([t for t in w if t.dim() > 1], 1 - rate * self.decay)
        update = torch._foreach_div(first, below)
        torch._foreach_mul_(update, rate / (1 - BETAS[0] ** number))
        torch._foreach_sub_(w, update)

    def _muon(self, names: list[str], grads: dict[str, Tensor], rate: Tensor | float) -> None:
        g, w, momentum = [grads[n] for n in names], self._tensors("master", names), self._tensors("first", names)
        torch._foreach_mul_(momentum, MUON_MOMENTUM)
        torch._foreach_add_(momentum, g)
        torch._foreach_add_(g, momentum, alpha=MUON_MOMENTUM)  # Nesterov's look ahead
        m, n = w[0].shape[-2:]
        stacked = torch.cat([t.reshape(-1, m, n) for t in g])
        update = orthogonalise(stacked, torch.bfloat16 if stacked.is_cuda else torch.float32).float()
        parts = (update * (rate * 0.2 * max(m, n) ** 0.5)).split([t.numel() // (m * n) for t in g])
        torch._foreach_mul_(w, 1 - rate * self.decay)
        torch._foreach_sub_(w, [u.reshape(t.shape) for u, t in zip(parts, w)])
