"""Decode steps as CUDA graphs: everything from token ids to logits is one launch.

A graph is captured for a number of requests and a width of the block tables when traffic first asks for that pair; all
share one memory pool. A step's numbers travel in one copy into the graph's input buffer. Rows beyond the step's
requests repeat the first one, so that they touch no expert of their own, and write nothing to the cache.
"""

import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.plan import StepPlan, Work
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2, Span, Step

log = logging.getLogger("perilune.engine")

MAX_GRAPHS = 48  # the least recently used goes first
MAX_REQUESTS = 256
NARROWEST = 32  # blocks in a table
WIDENING = 4

_COLUMNS = ("ids", "rows", "positions", "slots")  # int64 [B] each, then int32: context [B], tables [B, M]


def rounded_up(requests: int) -> int:
    """The graph size for that many requests: powers of two and the numbers halfway between."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power


def table_width(blocks: int, most: int) -> int:
    width = NARROWEST
    while width < blocks:
        width *= WIDENING
    return max(min(width, most), 1)


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # bytes, on the device
    rows: Tensor  # [B] int64, in `inputs`
    step: Step  # what the graph reads besides: its tensors must live as long as the graph
    logits: Tensor  # [B, V] float32
    host: tuple[Tensor, Tensor]  # pinned: while the device copies from one, the next step is written to the other
    turn: int = 0


class DecodeGraphs:
    """Owns the graphs of one model on one device. Used by the compute thread alone."""

    def __init__(self, model: KimiK2, pages: Pages, last_tokens: Tensor, max_model_len: int) -> None:
        self._model, self._pages, self._last_tokens = model, pages, last_tokens
        self._most_blocks = -(-max_model_len // pages.block_size)
        self._graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()
        self._pool: tuple[int, int] | None = None
        self._tables: dict[int, tuple[tuple[int, ...], NDArray[np.int32]]] = {}  # by slot
        self.slots = last_tokens[:0]  # [requests] int64: the last-token rows of the step that ran last
        self.broken: str | None = None

    def takes(self, plan: StepPlan) -> bool:
        """Whether every request of the step decodes one token."""
        return (
            self.broken is None
            and len(plan.work) <= MAX_REQUESTS
            and all(w.count == 1 and w.sample and not w.prompt_targets for w in plan.work)
        )

    def logits(self, plan: StepPlan) -> Tensor | None:
        """[requests, V] float32 in the order of the plan; valid until this graph's next step. None if the step cannot
        be captured on this machine, which is then remembered."""
        width = table_width(max(len(w.blocks) for w in plan.work), self._most_blocks)
        key = (min(rounded_up(len(plan.work)), MAX_REQUESTS), width)
        found = self._graphs.get(key)
        if found is None:
            try:
                found = self._capture(*key, plan)
            except RuntimeError as e:
                self.broken = str(e).splitlines()[0]
                log.warning("decode steps run without CUDA graphs: %s", self.broken)
                return None
            self._graphs[key] = found
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        self._fill(found, key, plan)
        found.graph.replay()
        self.slots = found.rows[: len(plan.work)]
        return found.logits[: len(plan.work)]

    def latest(self) -> torch.cuda.CUDAGraph:
        """The graph that ran last: for measurements."""
        return next(reversed(self._graphs.values())).graph

    def _capture(self, requests: int, width: int, plan: StepPlan) -> _Graph:
        begin = time.perf_counter()
        size = requests * (8 * len(_COLUMNS) + 4 * (1 + width))
        device = self._last_tokens.device
        inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        host = torch.empty(2, size, dtype=torch.uint8, pin_memory=True)
        step = self._step(inputs, requests, width)
        assert step.pending is not None
        new = _Graph(torch.cuda.CUDAGraph(), inputs, step.pending[0], step, inputs, (host[0], host[1]))
        self._fill(new, (requests, width), plan)
        torch.cuda.synchronize()
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):  # the first run may allocate and compile, which a capture may not
            self._forward(step)
        side.synchronize()
        with torch.cuda.graph(new.graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            new.logits = self._forward(step)
        self._pool = new.graph.pool()
        log.info(
            "decode graph for %d requests, %d blocks each: %.2f s; %.0f MB reserved in all",
            requests,
            width,
            time.perf_counter() - begin,
            torch.cuda.memory_reserved(device) / 1e6,
        )
        return new

    def _step(self, inputs: Tensor, requests: int, width: int) -> Step:
        wide = inputs[: 8 * len(_COLUMNS) * requests].view(torch.int64).view(len(_COLUMNS), requests)
        narrow = inputs[8 * len(_COLUMNS) * requests :].view(torch.int32)
        ids, rows, positions, slots = wide.unbind()
        starts = torch.arange(requests + 1, dtype=torch.int32, device=inputs.device)
        span = Span(slice(0, requests), narrow[requests:].view(requests, width), starts, narrow[:requests])
        return Step(ids, positions, slots, span, None, (rows, self._last_tokens))

    def _forward(self, step: Step) -> Tensor:
        return self._model.logits(self._model.hidden(step, self._pages.data))

    def _fill(self, graph: _Graph, key: tuple[int, int], plan: StepPlan) -> None:
        requests, width = key
        graph.turn ^= 1
        host = graph.host[graph.turn]
        array = host.numpy()
        split = 8 * len(_COLUMNS) * requests
        columns = array[:split].view(np.int64).reshape(len(_COLUMNS), requests)
        context = array[split : split + 4 * requests].view(np.int32)
        tables = array[split + 4 * requests :].view(np.int32).reshape(requests, width)
        size = self._pages.block_size
        for i, w in enumerate(plan.work):
            slot = w.blocks[w.start // size] * size + w.start % size
            columns[:, i] = (w.tokens[0], w.slot, w.start, slot)
            context[i] = w.end
            table = self._table(w)
            tables[i, : len(table)] = table
            tables[i, len(table) :] = table[0]
        count = len(plan.work)
        columns[:, count:], context[count:], tables[count:] = columns[:, :1], context[0], tables[0]
        columns[_COLUMNS.index("slots"), count:] = -1
        graph.inputs.copy_(host, non_blocking=True)

    def _table(self, w: Work) -> NDArray[np.int32]:
        """The request's block table as an array, made anew only when it has changed."""
        known = self._tables.get(w.slot)
        if known is None or known[0] is not w.blocks:
            known = self._tables[w.slot] = (w.blocks, np.asarray(w.blocks, np.int32))
        return known[1]
