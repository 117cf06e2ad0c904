"""Decode and verify steps as CUDA graphs: from token ids to the tokens that stand is one launch.

A graph is captured for a number of requests, of tokens for each and a width of the block tables when traffic first asks
for them together. Where every request of the step chooses freely it holds the whole step: forward pass, draws, which
drafts stand (ops/drafts/accept_drafts), the last-token buffer. Where one is masked, penalized or wants
log-probabilities, it ends with the logits, and the rest is queued call by call (`forward`, then `settle`).

A draft model adds two: it follows a step in a graph that belongs to the step's, and drafts in one for the number of
requests, the width and the chain's length, whichever step came before. So sizes and lengths add up instead of
multiplying, and both are launched while the step itself runs.

A step's numbers travel in one copy to the graph's inputs (engine/graph_inputs.py), what it brings in one copy back.
Where the next step goes on stays on the device too, by slot: the last token, how many drafts stood, the chain behind
them. So a step may be queued behind one whose tokens nobody has seen; a small kernel before its graph
(ops/drafts/advance_inputs) moves it to where that one ended.

All graphs share one memory pool. When what they hold outgrows MAX_BYTES all go, and traffic brings back those it needs.
"""

import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan
from perilune.engine.graph_inputs import Arrays, Fields, Inputs, Size
from perilune.engine.sampler import on_device
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.ops.drafts.accept_drafts import Report, accept_drafts
from perilune.ops.drafts.advance_inputs import Columns, Requests, advance_inputs
from perilune.ops.drafts.continuation import Continuation
from perilune.ops.sampling.sample import sample
from perilune.speculation.drafter import Drafter, Drafts, Followed, Start

log = logging.getLogger("perilune.engine")

MAX_GRAPHS = 128  # the least recently used goes first
MAX_BYTES = 1 << 30  # half of what engine/resolve.py leaves free besides weights and cache
MAX_REQUESTS = 256
MAX_ROWS = 512
EACH = (1, 2, 3, 4, 6, 9)  # tokens of a request that there are graphs for
AHEAD = max(EACH) + 2  # the column where a chain's ids begin in what a step brings; MAX_DRAFTS further, its confidences
NARROWEST = 24  # blocks in a table: of 64 positions, as many as mla_decode.attend_one leaves room beside
SPARE_BYTES = 512 << 20  # left for a capture; where there is less, cached memory is given back first
WIDENING = 4

Replay = Callable[[], None]


class Key(NamedTuple):
    """`whole`: whether the graph draws. `followed`: whether what a draft model reads comes out."""

    requests: int
    each: int
    width: int
    whole: bool
    followed: bool


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
class _Graph:
    """What a graph reads and writes: its tensors must live as long as it does.

    out   [B, AHEAD + 2 MAX_DRAFTS] float64: what ops/drafts/accept_drafts tells
    """

    inputs: Inputs
    step: Step
    following: Tensor  # [T] int64
    last: Tensor  # [B] int64
    out: Tensor
    logits: Tensor | None = None  # [T, V] float32, unless it draws
    features: Tensor | None = None  # [T, A D], for a draft model
    replay: Replay = _nothing
    follow: Replay | None = None


@dataclass(slots=True)
class _Chains:
    """`stores` [B] int64: the rows that chains belong to."""

    start: Start
    stores: Tensor
    replays: dict[int, Replay] = field(default_factory=dict)  # by length


@dataclass(frozen=True, slots=True)
class Run:
    """A step that a graph has run as far as its logits.

    logits  [R, V] float32 in the order of the plan's draws; valid until this graph's next step
    rows    [R] int64: the graph's rows that belong to draws; None: the first R
    """

    key: Key
    logits: Tensor
    rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Arriving:
    """What a step brings, on its way to the host.

    table    [>= S, AHEAD + 2 MAX_DRAFTS] float64 in host memory: a row per request, with `each` tokens, how many of its
             own stand, whether the next failed, and from AHEAD on a chain of `chain` drafts and their confidences; to
             be read before the step after the next is queued
    done     the point in the device's work after which it may be; None if it is there already
    lengths  [S] float64 on the device: the column of how many stand; valid until the next step
    """

    table: Tensor
    each: int
    chain: int
    done: torch.cuda.Event | None
    lengths: Tensor


class DecodeGraphs:
    """Owns the graphs of one model on one device. Used by one thread at a time.

    last_tokens [N] int64: the last-token buffer, whose last row nobody reads.
    shifts      [N] int64: by the same rows, the drafts that stood in the last step of whoever has the slot
    ahead       [N, MAX_DRAFTS] int64: what the draft model drafted behind it
    """

    def __init__(self, model: KimiK2, pages: Pages, last_tokens: Tensor, max_model_len: int) -> None:
        self._model, self._pages, self._last_tokens = model, pages, last_tokens
        self._most_blocks = -(-max_model_len // pages.block_size)
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._chains: dict[tuple[int, int], _Chains] = {}  # by requests and width
        device = last_tokens.device
        self.shifts = torch.zeros_like(last_tokens)
        self.ahead = torch.zeros(len(last_tokens), MAX_DRAFTS, dtype=torch.int64, device=device)
        self._continuation = Continuation(last_tokens, self.shifts, self.ahead)
        self._on_gpu = device.type == "cuda"
        columns = AHEAD + 2 * MAX_DRAFTS
        self._out = torch.zeros(MAX_REQUESTS, columns, dtype=torch.float64, device=device)
        # While one is copied to, the host reads the other: two steps may be in flight.
        self._host = [torch.zeros(MAX_REQUESTS, columns, dtype=torch.float64, pin_memory=self._on_gpu) for _ in "01"]
        self._done = [torch.cuda.Event() if self._on_gpu else None for _ in "01"]
        self._turn = 0
        self._arrays = Arrays()
        self._following = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._last = torch.zeros(MAX_REQUESTS, dtype=torch.int64, device=device)
        self._pool: tuple[int, int] | None = None
        self._given_up: list[torch.cuda.CUDAGraph] = []  # see _record
        self._side: torch.cuda.Stream | None = None
        self._drafter: Drafter | None = None
        self._known: Drafter | None = None  # the one that there are graphs of
        self._most_rows = MAX_ROWS
        self.captured, self.capture_seconds = 0, 0.0  # since the start
        self.nbytes = 0  # of device memory that the graphs hold
        self.broken: str | None = None  # why there are none, not even of one row

    def __len__(self) -> int:
        return len(self._graphs)

    def follow(self, drafter: Drafter | None) -> None:
        """From now on this draft model goes along, or none; nothing may be in flight."""
        if drafter is not None and drafter is not self._known:
            self.close()
            self._known = drafter
        self._drafter = drafter

    def close(self) -> None:
        """Gives all memory back; graphs are captured anew when steps come."""
        if self._on_gpu:
            torch.cuda.synchronize(self._last_tokens.device)
        self._graphs.clear()
        self._chains.clear()
        self._pool, self.nbytes = None, 0

    def takes(self, plan: StepPlan) -> bool:
        """Whether every request of the step decodes one token, or verifies drafts."""
        most = _each(plan)
        return (
            self.broken is None
            and len(plan.work) <= MAX_REQUESTS
            and most * rounded_up(len(plan.work)) <= self._most_rows
            and all(w.sample and w.count == w.drafts + 1 and not w.prompt_targets and w.end >= most for w in plan.work)
        )

    def run(self, plan: StepPlan) -> Arriving | None:
        """The whole step, for requests that choose freely. None if it cannot be captured on this machine, which is
        then remembered."""
        found = self._replayed(plan, whole=True)
        return None if found is None else self._chained(found[1], found[0], plan)

    def forward(self, plan: StepPlan) -> Run | None:
        """The step as far as its logits; None as with `run`."""
        found = self._replayed(plan, whole=False)
        if found is None:
            return None
        key, graph = found
        assert graph.logits is not None
        count, each = len(plan.work), key.each
        logits, rows = graph.logits[: count * each], None
        if any(w.count < each for w in plan.work):
            own = [i * each + j for i, w in enumerate(plan.work) for j in range(each - w.count, each)]
            rows = on_device(np.array(own), logits.device)
            logits = graph.logits.index_select(0, rows)
        return Run(key, logits, rows)

    def settle(self, run: Run, plan: StepPlan, drawn: Tensor, cut: Mapping[int, int]) -> Arriving:
        """The rest of a step of which `drawn` [R] is what was drawn, negative where that failed. Of the works in `cut`
        only so many drafts may stand."""
        graph, each = self._graphs[run.key], run.key.each
        fields = graph.inputs.fields
        grid = torch.zeros_like(graph.following)
        if run.rows is None:
            grid[: len(drawn)] = drawn
        else:
            grid[run.rows] = drawn
        stop = fields.stop
        if cut:
            ends = [each - w.count + cut.get(i, w.drafts) for i, w in enumerate(plan.work)]
            stop = stop.clone()
            stop[: len(ends)] = on_device(np.array(ends, np.int32), stop.device)
        report = Report(graph.out, graph.following, graph.last)
        accept_drafts(grid, fields.ids.flatten(), fields.front, stop, fields.stores, self._continuation, report)
        return self._chained(graph, run.key, plan)

    def settled(self, slots: Tensor, tokens: Tensor, lengths: Tensor | None, chains: Drafts | None) -> None:
        """Takes note of a step that ran call by call: of the requests in `slots` [S], the last `tokens` [S], how many
        stood of each (`lengths` [S], or one), and the chains behind them."""
        self._last_tokens[slots] = tokens
        self.shifts[slots] = 0 if lengths is None else (lengths - 1).clamp_min(0)
        if chains is not None:
            self.ahead[slots, : chains.tokens.shape[1]] = chains.tokens.long()

    def draft(self, start: Start, length: int) -> Drafts:
        """As the draft model's `draft`, for at most MAX_REQUESTS requests; valid until the next step."""
        count, used = start.tables.shape
        requests, width = min(rounded_up(count), MAX_REQUESTS), table_width(used, self._most_blocks)
        chains = self._room(requests, width)
        chains.stores.fill_(len(self._last_tokens) - 1)
        room = chains.start
        for to, of in ((room.states, start.states), (room.features, start.features), (room.positions, start.positions)):
            to[:count] = of
        room.tables[:count, :used] = start.tables
        self._draft(requests, width, length)
        ids, sure = self._out[:count, AHEAD:].chunk(2, 1)
        return Drafts(ids[:, :length], sure[:, :length])

    @torch.inference_mode()
    def latest(self) -> _Graph:
        """The graph that ran last, whose `replay` runs the step once more, on the same tokens: for measurements."""
        graph = next(reversed(self._graphs.values()))
        ids, rows = graph.step.tokens, graph.inputs.fields.rows.flatten()
        ids.copy_(torch.where(ids < 0, self._last_tokens[rows], ids))
        return graph

    def _replayed(self, plan: StepPlan, *, whole: bool) -> tuple[Key, _Graph] | None:
        width = table_width(max(len(w.blocks) for w in plan.work), self._most_blocks)
        requests = min(rounded_up(len(plan.work)), MAX_REQUESTS)
        key = Key(requests, _each(plan), width, whole, self._drafter is not None and plan.chain != LEFT_OUT)
        found = self._graphs.get(key)
        if found is None:
            try:
                found = self._capture(key, plan)
            except RuntimeError as e:
                rows, why = key.requests * key.each, str(e).splitlines()[0]
                log.warning("decode steps of %d rows run without CUDA graphs: %s", rows, why)
                self._most_rows = rows * 3 // 4
                self.broken = why if rows == 1 else None
                return None
            self._graphs[key] = found
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        if found.inputs.fill(plan.work):
            self._resume(found.inputs.fields)
        found.replay()
        return key, found

    def _resume(self, fields: Fields[Tensor]) -> None:
        f = fields
        columns = Columns(f.positions, f.slots, f.u)
        requests = Requests(f.context, f.front, f.behind, f.tables, f.held, f.seeds, f.draws)
        advance_inputs(f.ids, columns, requests, self._continuation, self._pages.block_size)

    def _chained(self, graph: _Graph, key: Key, plan: StepPlan) -> Arriving:
        """Lets the draft model follow a step that has settled, and sends what there is to the host."""
        chain = 0
        if self._drafter is not None and plan.chain != LEFT_OUT:
            if graph.follow is None:
                graph.follow = self._capture_follow(graph, key, plan, self._drafter)
            graph.follow()
            chain = min(plan.chain, self._drafter.longest)
            if chain:
                self._draft(key.requests, key.width, chain)
        self._turn ^= 1
        table, done = self._host[self._turn][: key.requests], self._done[self._turn]
        table.copy_(graph.out, non_blocking=True)
        if done is not None:
            done.record()
        return Arriving(table, key.each, chain, done, graph.out[: len(plan.work), key.each])

    def _capture(self, key: Key, plan: StepPlan) -> _Graph:
        if self.nbytes > MAX_BYTES:
            log.info("decode graphs hold %.0f MB: captured anew as they are needed", self.nbytes / 1e6)
            self.close()
        device, nobody, (requests, each, *_) = self._last_tokens.device, len(self._last_tokens) - 1, key
        inputs = Inputs(Size(*key[:3]), device, self._arrays, block_size=self._pages.block_size, nobody=nobody)
        rows = requests * each
        graph = _Graph(
            inputs, self._step(inputs), self._following[:rows], self._last[:requests], self._out[:requests]
        )  # fmt: skip
        if inputs.fill(plan.work):
            self._resume(inputs.fields)
        # A first run happens besides the replay to come: it must not change what that one takes for the last tokens.
        inputs.fields.stores.fill_(nobody)

        def work() -> None:
            logits, graph.features = self._forward(graph.step, key.followed)
            if key.whole:
                self._draw(graph, logits)
            else:
                graph.logits = logits

        graph.replay = self._record(work, f"{key}")
        return graph

    def _capture_follow(self, graph: _Graph, key: Key, plan: StepPlan, drafter: Drafter) -> Replay:
        requests, each, *_ = key
        starts, sampled = tuple(range(0, requests * each, each)), tuple(range(requests))
        # Which works the rows belong to matters to nobody where the step's own block tables are read.
        works = tuple(plan.work[i % len(plan.work)] for i in range(requests))
        chains = self._room(requests, key.width)
        room = chains.start

        def follow() -> None:
            assert graph.features is not None
            found = drafter.follow(
                Followed(works, starts, graph.step, graph.features, graph.following, sampled, graph.last)
            )  # fmt: skip
            assert found is not None
            room.states.copy_(found.states)
            room.features.copy_(found.features)
            room.positions.copy_(found.positions)
            room.tables.copy_(found.tables)
            chains.stores.copy_(graph.inputs.fields.stores)

        return self._recorded(follow, f"{key}, following")

    def _room(self, requests: int, width: int) -> _Chains:
        found = self._chains.get((requests, width))
        if found is None:
            assert self._drafter is not None
            stores = torch.full((requests,), len(self._last_tokens) - 1, device=self._last_tokens.device)
            found = self._chains[requests, width] = _Chains(self._drafter.blank(requests, width), stores)
        return found

    def _draft(self, requests: int, width: int, length: int) -> None:
        """Drafts from the start that lies there, which is used up; the chains go to `_out`."""
        drafter, chains = self._drafter, self._room(requests, width)
        assert drafter is not None
        replay = chains.replays.get(length)
        if replay is None:
            ids, sure = self._out[:requests, AHEAD:].chunk(2, 1)

            def draft() -> None:
                drafts = drafter.draft(chains.start, length)
                ids[:, :length], sure[:, :length] = drafts.tokens, drafts.confidence
                self.ahead[:, :length].index_copy_(0, chains.stores, drafts.tokens)

            kept = chains.start.features.clone()
            replay = self._recorded(draft, f"chains of {length} for {requests} requests, tables {width} wide")
            chains.start.features.copy_(kept)
            chains.replays[length] = replay
        replay()

    def _recorded(self, work: Callable[[], None], name: str) -> Replay:
        """As `_record`, or `work` itself if it cannot be captured."""
        try:
            return self._record(work, name)
        except RuntimeError as e:
            log.warning("no CUDA graph of %s: %s", name, str(e).splitlines()[0])
            return work

    def _record(self, work: Callable[[], None], name: str) -> Replay:
        begin, device = time.perf_counter(), self._last_tokens.device
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        with torch.cuda.stream(self._side):
            work()  # the first run may allocate and compile, which a capture may not
            self._side.synchronize()
            # The library's workspace of this stream belongs to the graphs: made in their pool, and left to it.
            torch._C._cuda_clearCublasWorkspaces()
            if torch.cuda.mem_get_info(device)[0] < SPARE_BYTES:
                torch.cuda.empty_cache()  # dear: steps of prompts have to ask for their memory anew
            before = torch.cuda.mem_get_info(device)[0]
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # which only says that there was an error before
                    graph.capture_end()
                # It gave up before it let go of the pool, where no capture could begin again: the next get another.
                # The allocator keeps asking this graph whether it is being captured, so it has to live on.
                self._given_up.append(graph)
                self._pool = None
                raise
            graph.capture_end()
        torch._C._cuda_clearCublasWorkspaces()
        self._pool = graph.pool()
        self.nbytes += max(before - torch.cuda.mem_get_info(device)[0], 0)
        seconds = time.perf_counter() - begin
        self.captured, self.capture_seconds = self.captured + 1, self.capture_seconds + seconds
        log.info("CUDA graph of %s: %.3f s; %.0f MB in all", name, seconds, self.nbytes / 1e6)
        return graph.replay

    def _step(self, inputs: Inputs) -> Step:
        fields, (requests, each, _) = inputs.fields, inputs.size
        rows = requests * each
        starts = torch.arange(0, rows + 1, each, dtype=torch.int32, device=fields.ids.device)
        span = Span(fields.tables, starts, fields.context, slice(0, rows))
        pending = (fields.rows.flatten(), self._last_tokens)
        return Step(fields.ids.flatten(), fields.positions.flatten(), fields.slots.flatten(), span, None, pending)

    def _forward(self, step: Step, followed: bool) -> tuple[Tensor, Tensor]:
        layers = self._drafter.aux_layers if followed and self._drafter is not None else ()
        hidden, features = self._model.hidden_with_aux(step, self._pages.data, layers)
        return self._model.logits(hidden), features

    def _draw(self, graph: _Graph, logits: Tensor) -> None:
        fields = graph.inputs.fields
        by_draw = (fields.temperature, fields.top_k, fields.top_p, fields.min_p, fields.u)
        drawn = sample(logits, *(x.flatten() for x in by_draw))
        report = Report(graph.out, graph.following, graph.last)
        accept_drafts(drawn, graph.step.tokens, fields.front, fields.stop, fields.stores, self._continuation, report)
