"""Decode and verify steps as CUDA graphs: everything from token ids to logits is one launch, a draft chain another.

A graph is captured for a number of requests, of tokens for each and a width of the block tables when traffic first asks
for them together; all share one memory pool. A step's numbers travel in one copy into the graph's input buffer. Rows
beyond the step's requests repeat the first one, so that they touch no expert of their own, and write nothing to the
cache. Where requests have different numbers of tokens, those with fewer get rows in front, which repeat their first
token at the positions before it and write nothing either: only what has been computed is in reach of them.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.plan import StepPlan, Work
from perilune.engine.sampler import on_device
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.spec.drafter import Drafter, Drafts, Followed

log = logging.getLogger("perilune.engine")

MAX_GRAPHS = 128  # the least recently used goes first
MAX_REQUESTS = 256
MAX_ROWS = 512
EACH = (1, 2, 3, 4, 6, 9)  # tokens of a request that there are graphs for
NARROWEST = 32  # blocks in a table
WIDENING = 4

_COLUMNS = ("ids", "rows", "positions", "slots")  # int64 [T] each, then int32: context [B], tables [B, M]

Replay = Callable[[], None]
# requests B, tokens of each m (T = B m), table width M, layers whose inputs come out
Key = tuple[int, int, int, tuple[int, ...]]


def rounded_up(requests: int) -> int:
    """The graph size for that many requests: powers of two and the numbers halfway between."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power


def table_width(blocks: int, most: int) -> int:
    width = NARROWEST
    while width < blocks:
        width *= WIDENING
    return max(min(width, most), 1)


def _nothing() -> None:
    raise AssertionError("not captured yet")


def _each(plan: StepPlan) -> int:
    most = max(w.count for w in plan.work)
    return next((n for n in EACH if n >= most), most)


@dataclass(slots=True)
class _Chain:
    """A draft chain behind a step: what it reads besides the step's own tensors, and what comes of it."""

    following: Tensor  # [T] int64; of rows beyond the step's whatever was there
    last: Tensor  # [B] int64, likewise
    firsts: Tensor  # [B] int64: the first row of each
    drafts: Drafts | None = None
    replay: Replay = _nothing


@dataclass(slots=True)
class _Graph:
    inputs: Tensor  # bytes, on the device
    rows: Tensor  # [T] int64, in `inputs`
    step: Step  # what the graph reads besides: its tensors must live as long as the graph
    logits: Tensor  # [T, V] float32
    features: Tensor  # [T, A D], for a draft model
    host: tuple[Tensor, Tensor]  # pinned: while the device copies from one, the next step is written to the other
    turn: int = 0
    replay: Replay = _nothing
    chains: dict[int, _Chain] = field(default_factory=dict)  # by length


@dataclass(frozen=True, slots=True)
class Run:
    """A step that a graph has run.

    logits   [R, V] float32 in the order of the plan's draws; valid until this graph's next step
    slots    [S] int64: the last-token rows of the requests
    firsts   [S]: the row of the graph where each request's own tokens begin
    """

    key: Key
    logits: Tensor
    slots: Tensor
    firsts: NDArray[np.int64]
    rows: Tensor | None  # [R] int64: the graph's rows that belong to draws; None: the first R


class DecodeGraphs:
    """Owns the graphs of one model on one device. Used by the compute thread alone."""

    def __init__(self, model: KimiK2, pages: Pages, last_tokens: Tensor, max_model_len: int) -> None:
        self._model, self._pages, self._last_tokens = model, pages, last_tokens
        self._most_blocks = -(-max_model_len // pages.block_size)
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._pool: tuple[int, int] | None = None
        self._tables: dict[int, tuple[tuple[int, ...], NDArray[np.int32]]] = {}  # by slot
        self._layers: tuple[int, ...] = ()
        self.broken: str | None = None

    def follow(self, layers: tuple[int, ...]) -> None:
        """From now on the graphs bring what enters these layers, for a draft model."""
        self._layers = layers

    def takes(self, plan: StepPlan) -> bool:
        """Whether every request of the step decodes one token, or verifies drafts."""
        most = _each(plan)
        return (
            self.broken is None
            and len(plan.work) <= MAX_REQUESTS
            and most * rounded_up(len(plan.work)) <= MAX_ROWS
            and all(w.sample and w.count == w.drafts + 1 and not w.prompt_targets and w.end >= most for w in plan.work)
        )

    def run(self, plan: StepPlan) -> Run | None:
        """None if the step cannot be captured on this machine, which is then remembered."""
        width = table_width(max(len(w.blocks) for w in plan.work), self._most_blocks)
        key = (min(rounded_up(len(plan.work)), MAX_REQUESTS), _each(plan), width, self._layers)
        found = self._graphs.get(key)
        if found is None:
            try:
                found = self._capture(key, plan)
            except RuntimeError as e:
                self.broken = str(e).splitlines()[0]
                log.warning("decode steps run without CUDA graphs: %s", self.broken)
                return None
            self._graphs[key] = found
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        self._fill(found, key, plan)
        found.replay()
        count, each = len(plan.work), key[1]
        firsts = np.array([i * each + each - w.count for i, w in enumerate(plan.work)], np.int64)
        rows = None
        if any(w.count < each for w in plan.work):
            ends = each * np.arange(1, count + 1)
            rows = on_device(np.concatenate([np.arange(f, e) for f, e in zip(firsts, ends)]), found.inputs.device)
        logits = found.logits[: count * each] if rows is None else found.logits.index_select(0, rows)
        return Run(key, logits, found.rows[: count * each : each], firsts, rows)

    def chain(
        self, run: Run, plan: StepPlan, drafter: Drafter, drawn: Tensor, lengths: Tensor | None, length: int
    ) -> Drafts | None:
        """As drafter.propose, behind a step just run that drew `drawn` [R], of which each request keeps `lengths` [S],
        or one."""
        graph, each, count = self._graphs[run.key], run.key[1], len(plan.work)
        found = graph.chains.get(length)
        if found is None:
            found = graph.chains[length] = self._capture_chain(graph, run, plan, drafter, length)
        if run.rows is None:
            found.following[: count * each] = drawn
            last = found.firsts[:count]
        else:
            found.following[run.rows] = drawn
            last = on_device(run.firsts, drawn.device)
        found.last[:count] = last if lengths is None else last + (lengths - 1).clamp_min_(0)
        found.replay()
        if found.drafts is None:
            return None
        return Drafts(found.drafts.tokens[:count], found.drafts.confidence[:count])

    def latest(self) -> _Graph:
        """The graph that ran last, whose `replay` runs the step once more: for measurements."""
        return next(reversed(self._graphs.values()))

    def _capture(self, key: Key, plan: StepPlan) -> _Graph:
        begin = time.perf_counter()
        requests, each, width, _ = key
        size = requests * (8 * len(_COLUMNS) * each + 4 * (1 + width))
        device = self._last_tokens.device
        inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        host = torch.empty(2, size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        step = self._step(inputs, key)
        assert step.pending is not None
        new = _Graph(inputs, step.pending[0], step, inputs, inputs, (host[0], host[1]))
        self._fill(new, key, plan)

        def forward() -> None:
            new.logits, new.features = self._forward(step)

        new.replay = self._record(forward)
        log.info(
            "decode graph for %d requests, %d tokens and %d blocks each: %.2f s; %.0f MB reserved in all",
            requests,
            each,
            width,
            time.perf_counter() - begin,
            torch.cuda.memory_reserved() / 1e6,
        )
        return new

    def _capture_chain(self, graph: _Graph, run: Run, plan: StepPlan, drafter: Drafter, length: int) -> _Chain:
        requests, each, *_ = run.key
        rows = torch.arange(requests * each, device=graph.inputs.device)
        new = _Chain(torch.zeros_like(rows), rows[::each].clone(), rows[::each].clone())
        starts = tuple(i * each for i in range(requests))
        # Which works the rows belong to matters to nobody where the step's own block tables are read.
        works = tuple(plan.work[i % len(plan.work)] for i in range(requests))

        def propose() -> None:
            followed = Followed(
                works, starts, graph.step, graph.features, new.following, tuple(range(requests)), new.last
            )
            new.drafts = drafter.propose(followed, length)

        new.replay = self._record(propose)
        return new

    def _record(self, work: Callable[[], None]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        side = torch.cuda.Stream(self._last_tokens.device)
        with torch.cuda.stream(side):  # the first run may allocate and compile, which a capture may not
            work()
        side.synchronize()
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            work()
        self._pool = graph.pool()
        return graph.replay

    def _step(self, inputs: Tensor, key: Key) -> Step:
        requests, each, width, _ = key
        rows_of_all = requests * each
        wide = inputs[: 8 * len(_COLUMNS) * rows_of_all].view(torch.int64).view(len(_COLUMNS), rows_of_all)
        narrow = inputs[8 * len(_COLUMNS) * rows_of_all :].view(torch.int32)
        ids, rows, positions, slots = wide.unbind()
        starts = torch.arange(0, rows_of_all + 1, each, dtype=torch.int32, device=inputs.device)
        tables = narrow[requests:].view(requests, width)
        span = Span(slice(0, rows_of_all), tables, starts, narrow[:requests])
        return Step(ids, positions, slots, span, None, (rows, self._last_tokens))

    def _forward(self, step: Step) -> tuple[Tensor, Tensor]:
        hidden, features = self._model.hidden_with_aux(step, self._pages.data, self._layers)
        return self._model.logits(hidden), features

    def _fill(self, graph: _Graph, key: Key, plan: StepPlan) -> None:
        requests, each, width, _ = key
        graph.turn ^= 1
        host = graph.host[graph.turn]
        array = host.numpy()
        split = 8 * len(_COLUMNS) * requests * each
        columns = array[:split].view(np.int64).reshape(len(_COLUMNS), requests, each)
        context = array[split : split + 4 * requests].view(np.int32)
        tables = array[split + 4 * requests :].view(np.int32).reshape(requests, width)
        size = self._pages.block_size
        for i, w in enumerate(plan.work):
            if each == 1:
                slot = w.blocks[w.start // size] * size + w.start % size
                columns[:, i, 0] = (w.tokens[0], w.slot, w.start, slot)
            else:
                front = each - w.count
                positions = np.arange(w.end - each, w.end)
                own = positions[front:]
                blocks = np.asarray(w.blocks[w.start // size :], np.int64)
                columns[0, i, :front], columns[0, i, front:] = w.tokens[0], w.tokens
                columns[1, i], columns[2, i] = w.slot, positions
                columns[3, i, :front] = -1
                columns[3, i, front:] = blocks[own // size - w.start // size] * size + own % size
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
