"""Decode and verify steps as CUDA graphs: one launch from token ids to accepted tokens.

A graph has a fixed number of requests, of tokens for each, and of columns of the block tables; it is captured when a
step first needs this size. If sampling needs no host, the graph is the whole step: forward pass, sampling, accepting
drafts (ops/drafts/accept_drafts), writing the last-token buffer. If a request is masked, penalized or wants
log-probabilities, the graph ends with the logits, and the rest is queued op by op (`forward`, then `finish`).

A step's inputs reach the device in one copy (inputs.py), and its results reach the host in one copy. The state from
which a request's next step starts also stays on the device, by slot: its last token, the number of accepted drafts, the
chain drafted after them. So a step may be queued before the host has seen the tokens of the step before; a small kernel
before its graph (ops/drafts/advance_inputs) corrects token ids, positions and cache slots by the accepted drafts.

A draft model's graphs (draft.py) run after the step's. All graphs share one memory pool (recorder.py). When the graphs
hold more than MAX_BYTES, all are dropped; a graph that a later step needs is captured again.
"""

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import EngineError
from perilune.core.step import LEFT_OUT, MAX_DRAFTS, StepPlan
from perilune.dist.group import largest
from perilune.engine.declared import Declared
from perilune.engine.graphs.draft import DraftGraphs
from perilune.engine.graphs.inputs import Arrays, Fields, Inputs, Key
from perilune.engine.graphs.recorder import Recorder, Replay
from perilune.engine.graphs.self_test import Probe, check
from perilune.engine.sampler import on_device
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2, Span, Step
from perilune.ops.drafts.accept_drafts import Report, accept_drafts
from perilune.ops.drafts.advance_inputs import Columns, Requests, advance_inputs
from perilune.ops.drafts.continuation import Continuation
from perilune.ops.rows.mapped_copy import mapped_copy
from perilune.speculation.drafter import Drafter, Drafts, Followed, Start

log = logging.getLogger("perilune.engine")

MAX_GRAPHS = 128  # the least recently used is dropped first
MAX_BYTES = 1 << 30  # Memory of all graphs, reserved by engine/resolve.py. Larger: a smaller KV cache.
MAX_REQUESTS = 256  # requests of a graph; larger steps run op by op
MAX_ROWS = 512  # rows of a graph: requests times tokens of each; larger steps run op by op
GRAPH_TOKENS = (1, 2, 3, 4, 6, 9)  # tokens per request that there are graphs for
# First column of a chain's ids in a step's results; the chain's probabilities begin MAX_DRAFTS columns later.
CHAIN_COLUMN = max(GRAPH_TOKENS) + 2
COLUMNS = CHAIN_COLUMN + 2 * MAX_DRAFTS
# Table width of the smallest graphs: 24 blocks of 64 positions, the most that mla_decode.attend_one has room for.
MIN_TABLE_BLOCKS = 24
# Ratio of one table width to the next. Larger: fewer graphs, but short contexts use wider tables.
TABLE_WIDTH_RATIO = 4


def rounded_up(requests: int) -> int:
    """The graph size for that many requests: powers of two and the numbers halfway between."""
    power = 1 << (requests - 1).bit_length()
    return power * 3 // 4 if power >= 4 and requests <= power * 3 // 4 else power


def table_width(blocks: int, max_blocks: int) -> int:
    """The graph's table width, at most `max_blocks`, for a step with tables of up to `blocks` blocks."""
    width = MIN_TABLE_BLOCKS
    while width < blocks:
        width *= TABLE_WIDTH_RATIO
    return max(min(width, max_blocks), 1)


def _not_captured() -> None:
    raise AssertionError("not captured yet")


def _each(plan: StepPlan) -> int:
    """Tokens per request of the smallest graph that fits the plan."""
    longest = max([len(w.tokens) for w in plan.work])
    return next((n for n in GRAPH_TOKENS if n >= longest), longest)


@dataclass(slots=True)
class Graph:
    """A graph of T = B x `each` rows, with the tensors that it reads and writes, which must live as long as it does.

    out        [B, COLUMNS] float64: results of ops/drafts/accept_drafts, then chains
    following  [T] int64: the token after each row
    last       [B] int64: the row of each request's last accepted position
    logits     [T, V] float32, the rank's columns; None if the graph samples
    features   [T, A D], for a draft model
    follow     the draft model's graph that runs after this one
    """

    inputs: Inputs
    step: Step
    following: Tensor
    last: Tensor
    out: Tensor
    logits: Tensor | None = None
    features: Tensor | None = None
    replay: Replay = _not_captured
    follow: Replay | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A step of which a graph has computed the logits; sampling comes after it.

    logits  [R, V] float32, the rank's columns, in the order of the plan's samples; valid until this graph's next step
    rows    [R] int64: the graph's rows that are sampled; None: the first R
    """

    key: Key
    logits: Tensor
    rows: Tensor | None


@dataclass(frozen=True, slots=True)
class Arriving:
    """A graph's results on their way to the host.

    table    [>= S, COLUMNS] float64 in host memory, a row per request: `each` sampled tokens, how many of them the
             request gets, whether the logits after these are not finite, and from CHAIN_COLUMN on a chain of `chain`
             ids and their probabilities. The step after the next overwrites it: read it before that step is queued
    done     CUDA event after which the table is complete; None on a CPU
    lengths  [S] float64 on the device: how many tokens each request gets; valid until the next step
    """

    table: Tensor
    each: int
    chain: int
    done: torch.cuda.Event | None
    lengths: Tensor


class DecodeGraphs:
    """Owns the graphs of one model on one device. Used by one thread at a time.

    last_tokens   [N] int64: the last token of the request in each slot; the last row is the padding row, to which a
                  graph's rows without a request write, and which is never read
    shifts        [N] int64, by slot: drafts accepted in the request's last step
    draft_buffer  [N, MAX_DRAFTS] int64, by slot: the chain that the draft model drafted after that step
    """

    def __init__(
        self,
        model: KimiK2,
        pages: Pages,
        last_tokens: Tensor,
        max_model_len: int,
        recorder: Recorder,
        *,
        self_test: bool = True,
        declared: Declared | None = None,
    ) -> None:
        """`self_test`: every graph is replayed once and compared with the same step without a graph (self_test.py)."""
        self._self_test = self_test
        self._model, self._pages, self._last_tokens = model, pages, last_tokens
        self._max_blocks = -(-max_model_len // pages.block_size)
        self.recorder = recorder
        self._declared = declared
        self._graphs: OrderedDict[Key, Graph] = OrderedDict()
        device = last_tokens.device
        self.shifts = torch.zeros_like(last_tokens)
        self.draft_buffer = torch.zeros(len(last_tokens), MAX_DRAFTS, dtype=torch.int64, device=device)
        self._continuation = Continuation(last_tokens, self.shifts, self.draft_buffer)
        self._on_gpu = device.type == "cuda"
        self._out = torch.zeros(MAX_REQUESTS, COLUMNS, dtype=torch.float64, device=device)
        # Steps use the two tables alternately: while the device writes to one, the host reads the other.
        self._host = [torch.zeros(MAX_REQUESTS, COLUMNS, dtype=torch.float64, pin_memory=self._on_gpu) for _ in "01"]
        self._done = [torch.cuda.Event() if self._on_gpu else None for _ in "01"]
        self._turn = 0
        self._arrays = Arrays()
        self._following = torch.zeros(MAX_ROWS, dtype=torch.int64, device=device)
        self._last = torch.zeros(MAX_REQUESTS, dtype=torch.int64, device=device)
        self._drafts: DraftGraphs | None = None  # graphs of the selected draft model
        self._known: DraftGraphs | None = None  # graphs of the draft model selected last
        self._max_rows = MAX_ROWS  # lowered when a capture fails
        self.broken: str | None = None  # why not even a step of one row can be captured on this machine

    def __len__(self) -> int:
        return len(self._graphs)

    def follow(self, drafter: Drafter | None) -> None:
        """As Runner.follow."""
        self._drafts = None
        if drafter is not None:
            if self._known is None or drafter is not self._known.drafter:
                self.close()
                tested_by = self._model.group if self._self_test else None
                out = self._out[:, CHAIN_COLUMN:]
                self._known = DraftGraphs(drafter, self.recorder, out, self.draft_buffer, tested_by)
            self._drafts = self._known

    def close(self) -> None:
        """Frees all graphs and their memory; graphs are captured again when steps need them."""
        if self._on_gpu:
            torch.cuda.synchronize(self._last_tokens.device)
        self._graphs.clear()
        if self._known is not None:
            self._known.clear()
        self.recorder.clear()

    def takes(self, plan: StepPlan) -> bool:
        """Whether there can be a graph for the step: every request decodes one token, or verifies drafts."""
        each = _each(plan)
        if self.broken is not None or len(plan.work) > MAX_REQUESTS:
            return False
        if each * rounded_up(len(plan.work)) > self._max_rows:
            return False
        for w in plan.work:
            count = len(w.tokens)
            if not w.sample or count != w.drafts + 1 or w.prompt_targets or w.start + count < each:
                return False
        return True

    def run(self, plan: StepPlan) -> Arriving | None:
        """Runs the whole step, which must satisfy Runner.needs_no_host. None if this size cannot be captured on this
        machine; `takes` then refuses it from now on."""
        found = self._replay(plan, whole=True)
        return None if found is None else self._send(found[1], found[0], plan)

    def forward(self, plan: StepPlan) -> Run | None:
        """Runs the step up to its logits; None as in `run`."""
        found = self._replay(plan, whole=False)
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

    def finish(self, run: Run, plan: StepPlan, sampled: Tensor, cut: Mapping[int, int]) -> Arriving:
        """Finishes a step after `forward`: accepts drafts, runs the draft model. `sampled` [R] int64, negative where
        logits were not finite. cut[i] = n: only the first n drafts of work i may be accepted."""
        graph, each = self._graphs[run.key], run.key.each
        grid = torch.zeros_like(graph.following)
        if run.rows is None:
            grid[: len(sampled)] = sampled
        else:
            grid[run.rows] = sampled
        stop = graph.inputs.fields.stop
        if cut:
            ends = [each - w.count + cut.get(i, w.drafts) for i, w in enumerate(plan.work)]
            stop = stop.clone()
            stop[: len(ends)] = on_device(np.array(ends, np.int32), stop.device)
        self._accept(graph, grid, stop)
        return self._send(graph, run.key, plan)

    def store(self, slots: Tensor, tokens: Tensor, lengths: Tensor | None, chains: Drafts | None) -> None:
        """After a step that ran op by op, stores the state from which a chained step starts. Of the requests in `slots`
        [S] int64: their last `tokens` [S] int64, how many each got (`lengths` [S] int64; None: one), their chains."""
        self._last_tokens[slots] = tokens
        self.shifts[slots] = 0 if lengths is None else (lengths - 1).clamp_min(0)
        if chains is not None:
            self.draft_buffer[slots, : chains.tokens.shape[1]] = chains.tokens.long()

    def draft(self, start: Start, length: int) -> Drafts:
        """As Drafter.draft, for at most MAX_REQUESTS requests; valid until the next step."""
        assert self._drafts is not None
        count, used = start.tables.shape
        requests, width = min(rounded_up(count), MAX_REQUESTS), table_width(used, self._max_blocks)
        return self._drafts.draft_from(start, length, requests, width)

    @torch.inference_mode()
    def latest(self) -> Graph:
        """The graph that ran last, for measurements: its `replay` repeats the step, on the same tokens."""
        graph = next(reversed(self._graphs.values()))
        ids, rows = graph.step.tokens, graph.inputs.fields.rows.flatten()
        ids.copy_(torch.where(ids < 0, self._last_tokens[rows], ids))
        return graph

    def _replay(self, plan: StepPlan, *, whole: bool) -> tuple[Key, Graph] | None:
        width = table_width(max([len(w.blocks) for w in plan.work]), self._max_blocks)
        requests = min(rounded_up(len(plan.work)), MAX_REQUESTS)
        followed = self._drafts is not None and plan.chain != LEFT_OUT
        key = Key(requests, _each(plan), width, whole, followed)
        graph = self._graphs.get(key)
        if graph is None:
            try:
                graph = self._capture(key, plan)
            except RuntimeError as e:
                rows, why = key.requests * key.each, str(e).splitlines()[0]
                if self.recorder.needed:
                    raise EngineError(f"decode steps of {rows} rows cannot be captured: {why}") from e
                log.warning("decode steps of %d rows run without CUDA graphs: %s", rows, why)
                self._max_rows = rows * 3 // 4
                self.broken = why if rows == 1 else None
                return None
            self._graphs[key] = graph
            if len(self._graphs) > MAX_GRAPHS:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        if graph.inputs.fill(plan.work):
            self._advance(graph.inputs.fields)
        graph.replay()
        return key, graph

    def _advance(self, fields: Fields[Tensor]) -> None:
        f = fields
        columns = Columns(f.positions, f.slots, f.u)
        requests = Requests(f.context, f.front, f.chained, f.tables, f.sources, f.seeds, f.output_index)
        advance_inputs(f.ids, columns, requests, self._continuation, self._pages.block_size)

    def _send(self, graph: Graph, key: Key, plan: StepPlan) -> Arriving:
        """Runs the draft model on a step after its tokens are accepted; queues the copy of the results to the host."""
        chain, drafts = 0, self._drafts
        if drafts is not None and plan.chain != LEFT_OUT:
            if graph.follow is None:
                graph.follow = self._capture_follow(graph, key, plan, drafts)
            graph.follow()
            chain = min(plan.chain, drafts.drafter.longest)
            if chain:
                drafts.draft(key.requests, key.width, chain)
        self._turn ^= 1
        table, done = self._host[self._turn][: key.requests], self._done[self._turn]
        mapped_copy(graph.out, table, True)
        if done is not None:
            done.record()
        return Arriving(table, key.each, chain, done, graph.out[: len(plan.work), key.each])

    def _capture(self, key: Key, plan: StepPlan) -> Graph:
        if largest(self._model.group, self.recorder.nbytes) > MAX_BYTES:  # equal on all ranks: captures run collectives
            log.info("decode graphs hold %.0f MB: captured again as they are needed", self.recorder.nbytes / 1e6)
            self.close()
        device, padding, (requests, each, *_) = self._last_tokens.device, len(self._last_tokens) - 1, key
        inputs = Inputs(key, device, self._arrays, block_size=self._pages.block_size, padding_row=padding)
        rows = requests * each
        graph = Graph(inputs, self._step(inputs), self._following[:rows], self._last[:requests], self._out[:requests])
        if inputs.fill(plan.work):
            self._advance(inputs.fields)
        # `record` runs the step once before the capture. So that this changes no last tokens, it writes to padding.
        inputs.fields.stores.fill_(padding)
        drafts = self._drafts
        layers = drafts.drafter.aux_layers if key.followed and drafts is not None else ()
        vocabulary, probes = self._model.vocabulary, list[Probe]()
        testing = self._self_test

        def work() -> None:
            hidden, graph.features = self._model.hidden_with_aux(graph.step, self._pages.data, layers)
            logits = self._model.logits(hidden)
            if testing:
                probes.append(Probe(hidden, logits))
            if key.whole:
                f = inputs.fields
                how = f.temperature.flatten(), f.top_k.flatten(), f.top_p.flatten(), f.min_p.flatten()
                sampled, stop = vocabulary.sample(logits, how, f.u.flatten()), f.stop
                if self._declared is not None:
                    step = graph.step
                    sampled, stop = self._declared.grid(sampled, step.tokens, step.positions, f.front, stop)
                self._accept(graph, sampled, stop)
            else:
                graph.logits = logits

        graph.replay = self.recorder.record(work, f"{key}")
        if testing:

            def test() -> None:
                graph.replay()
                check(probes[0], probes[-1], self._model.group, f"{key}")

            self.recorder.test(test)
            testing = False
            probes.clear()
        return graph

    def _capture_follow(self, graph: Graph, key: Key, plan: StepPlan, drafts: DraftGraphs) -> Replay:
        requests, each, *_ = key
        starts, sampled = tuple(range(0, requests * each, each)), tuple(range(requests))
        # Placeholders: the draft model takes the block tables from the step's tensors, not from these works.
        works = tuple(plan.work[i % len(plan.work)] for i in range(requests))

        def followed() -> Followed:
            assert graph.features is not None
            return Followed(works, starts, graph.step, graph.features, graph.following, sampled, graph.last)

        return drafts.record_follow(followed, graph.inputs.fields.stores, key.width, f"{key}, following")

    def _step(self, inputs: Inputs) -> Step:
        fields, (requests, each, *_) = inputs.fields, inputs.size
        rows = requests * each
        starts = torch.arange(0, rows + 1, each, dtype=torch.int32, device=fields.ids.device)
        span = Span(fields.tables, starts, fields.context, slice(0, rows))
        pending = (fields.rows.flatten(), self._last_tokens)
        return Step(fields.ids.flatten(), fields.positions.flatten(), fields.slots.flatten(), span, None, pending)

    def _accept(self, graph: Graph, sampled: Tensor, stop: Tensor) -> None:
        fields = graph.inputs.fields
        report = Report(graph.out, graph.following, graph.last)
        accept_drafts(sampled, graph.step.tokens, fields.front, stop, fields.stores, self._continuation, report)
