"""Training steps as CUDA graphs: steps of many small kernels then take the GPU's time, not that of their launches."""

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Tensor]
Step = Callable[[Inputs], dict[str, Tensor]]

MOST_GRAPHS = 64  # steps of further shapes run without a graph
FIRST_RUNS = 2  # steps of a shape before it is captured


class Graph:
    """One captured step. Its results are overwritten by the next replay of any graph of the pool."""

    def __init__(self, step: Step, inputs: Inputs, pool: Any) -> None:
        self.inputs = {key: value.clone() for key, value in inputs.items()}
        side = torch.cuda.Stream()  # as PyTorch requires, so that gradients are not tied to the stream of other steps
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may call CUDA meanwhile, such as the one that pins blocks.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.results = step(self.inputs)

    def __call__(self, inputs: Inputs) -> dict[str, Tensor]:
        for key, value in inputs.items():
            self.inputs[key].copy_(value)
        self.graph.replay()
        return self.results


class Graphs:
    """Runs a step; from the third time on with the same key and shapes, as a graph. `key` names all that the step
    depends on besides its inputs."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._known: dict[Hashable, Graph] = {}
        self._seen = Counter[Hashable]()
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def __call__(self, key: Hashable, step: Step, inputs: Inputs) -> dict[str, Tensor]:
        if not self.enabled:
            return step(inputs)
        key = (key, *((name, value.shape) for name, value in sorted(inputs.items())))
        if key not in self._known:
            self._seen[key] += 1
            if self._seen[key] <= FIRST_RUNS or len(self._known) == MOST_GRAPHS:
                return step(inputs)
            self._known[key] = Graph(step, inputs, self._pool)
        return self._known[key](inputs)
