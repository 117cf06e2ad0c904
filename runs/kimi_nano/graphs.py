"""Gradients by CUDA graphs: a training step of many small kernels takes the GPU's time, not that of their launches."""

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor, nn

Losses = dict[str, Tensor]
Function = Callable[[dict[str, Tensor]], Losses]  # of inputs by name; the loss "total" is differentiated
MOST_GRAPHS = 32  # further shapes run without a graph
WARM_UP_RUNS = 2  # before a capture: kernels are compiled and libraries open their handles


class Graph:
    """One captured pass of `function` over `inputs` and the gradients of its loss "total"."""

    def __init__(
        self, function: Function, inputs: dict[str, Tensor], parameters: list[nn.Parameter], pool: tuple[int, int]
    ) -> None:
        self.inputs = {key: value.clone() for key, value in inputs.items()}
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP_RUNS):
                function(self.inputs)["total"].backward()
                clear(parameters)
        torch.cuda.current_stream().wait_stream(beside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.losses = function(self.inputs)
            self.losses["total"].backward()
        self.losses = {name: loss.detach() for name, loss in self.losses.items()}
        self.gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        clear(parameters)

    def __call__(self, inputs: dict[str, Tensor]) -> Losses:
        for key, value in inputs.items():
            self.inputs[key].copy_(value)
        self.graph.replay()
        return self.losses


class Gradients:
    """Adds the gradients of a function's loss "total" to `parameters`. With `graphs`, shapes that come again are
    replayed: gradients and losses are then overwritten by the next call of the same shape."""

    def __init__(self, parameters: Iterable[nn.Parameter], graphs: bool) -> None:
        self.parameters = list(parameters)
        self.graphs = graphs
        self._known: dict[Hashable, Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else (0, 0)

    def __call__(self, key: Hashable, function: Function, inputs: dict[str, Tensor]) -> Losses:
        key = (key, *((name, value.shape) for name, value in sorted(inputs.items())))
        if not self.graphs or (key not in self._known and len(self._known) == MOST_GRAPHS):
            losses = function(inputs)
            losses["total"].backward()
            return {name: loss.detach() for name, loss in losses.items()}
        before = [(p, p.grad) for p in self.parameters if p.grad is not None]
        clear(self.parameters)
        if key not in self._known:
            self._known[key] = Graph(function, inputs, self.parameters, self._pool)
        graph = self._known[key]
        losses = graph(inputs)
        for p, gradient in graph.gradients:
            p.grad = gradient
        both = [(p.grad, gradient) for p, gradient in before if p.grad is not None]
        if both:
            torch._foreach_add_([own for own, _ in both], [other for _, other in both])
        for p, gradient in before:
            if p.grad is None:
                p.grad = gradient
        return losses


def clear(parameters: Iterable[nn.Parameter]) -> None:
    for p in parameters:
        p.grad = None
