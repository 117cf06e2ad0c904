"""Runs step plans on the device, one after the other, beside the thread that plans them or on it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perilune.core.step import LEFT_OUT, MAX_DRAFTS, Output, StepPlan, StepResult, TokenLogprob, Work, draws
from perilune.engine import exclusive_kernels, sampler
from perilune.engine.batch import build, followed
from perilune.engine.graphs import AHEAD, MAX_REQUESTS, Arriving, DecodeGraphs
from perilune.engine.masks import Grammars
from perilune.engine.penalties import Adjuster
from perilune.engine.sampler import FAILED
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.ops.harness import registry
from perilune.ops.harness.tensors import FEW_ON_CPU
from perilune.ops.harness.threads import torch_alone
from perilune.speculation.acceptance import Accepted, accept, rows_kept
from perilune.speculation.drafter import Drafter, Drafts, Start

T = TypeVar("T")


class Runner:
    """Owns the model, the KV pages and the last-token buffer; plans are executed in order, never two at a time.

    That order is what the scheduler relies on: a block freed after step N was planned may be given away at once,
    because whatever step N still writes to it is written before any later step.
    """

    def __init__(
        self,
        model: KimiK2,
        pages: Pages,
        *,
        max_num_seqs: int,
        max_model_len: int,
        absorb_limit: int,
        overrides: Mapping[str, str],
        grammars: Grammars,
        worker: ThreadPoolExecutor,
        drafter: Drafter | None = None,
    ):
        self.model = model
        self.pages = pages
        self.absorb_limit = absorb_limit
        self.overrides = {**exclusive_kernels.claim(pages.data.device, self), **overrides}
        # One row more than there are slots, for what nobody reads.
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=pages.data.device)
        self.adjuster = Adjuster(max_num_seqs)
        self.grammars = grammars
        self.drafter: Drafter | None = None
        self.graphs = (
            DecodeGraphs(model, pages, self.last_tokens, max_model_len) if pages.data.device.type == "cuda" else None
        )
        self.busy_seconds = 0.0
        self.follow(drafter)
        self._worker = worker
        self._launched: Future[Readout] | None = None

    def follow(self, drafter: Drafter | None) -> None:
        """From the next step on this draft model goes along; nothing may be in flight."""
        self.drafter = drafter
        if self.graphs is not None:
            self.graphs.follow(drafter)

    def launch(self, plan: StepPlan) -> "Future[Readout]":
        """Runs the plan after those launched before. A graph's step is queued on the spot: handing it to another thread
        takes as long as queueing it. What that thread is still queueing comes first, so there is nothing to gain by
        leaving it the graph as well."""
        if self.graphs is not None and self.graphs.takes(plan):
            if self._launched is not None:
                wait((self._launched,))
            self._launched = Future()
            self._launched.set_result(self._timed(plan))
        else:
            self._launched = self._worker.submit(self._timed, plan)
        return self._launched

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` between steps, on the thread that computes them."""
        return self._worker.submit(work, *args).result()

    def close(self) -> None:
        """Waits for what is queued."""
        if self.graphs is not None:
            self.call(self.graphs.close)
        self._worker.shutdown()
        exclusive_kernels.release(self)
        if self.pages.data.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # 8 MB and more for every stream and thread that multiplied

    def _timed(self, plan: StepPlan) -> "Readout":
        begin = time.perf_counter()
        result = self.run(plan)
        self.busy_seconds += time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> "Readout":
        """Queues the step on the device; nothing here waits for it."""
        few = self.pages.data.device.type == "cpu" and plan.tokens <= FEW_ON_CPU
        with registry.using(self.overrides), torch_alone() if few else nullcontext():
            if self.graphs is not None and self.graphs.takes(plan) and (readout := self._replay(plan)) is not None:
                return readout
            if any(w.behind for w in plan.work):
                plan = self._caught_up(plan)
            batch = build(plan, self.last_tokens, self.pages.block_size, self.absorb_limit)
            layers = () if self.drafter is None or plan.chain == LEFT_OUT else self.drafter.aux_layers
            hidden, features = self.model.hidden_with_aux(batch.step, self.pages.data, layers)
            scores = [
                sampler.prompt_logprobs(w, hidden[start : start + w.count], self.model.logits)
                for w, start in zip(batch.work, batch.starts)
                if w.prompt_targets
            ]
            drawn, accepted = _Drawn.nothing(hidden.device), None
            if batch.sampled:
                drawn = self._draw(self.model.logits(hidden[batch.rows]), batch.sampled)
                accepted = self._accept(drawn, batch.slots)
            chains = None
            if self.drafter is not None and plan.chain != LEFT_OUT:
                lengths = None if accepted is None else accepted.lengths
                start = self.drafter.follow(followed(batch, features, drawn.told.clamp_min(0), lengths))
                length = min(plan.chain, self.drafter.longest)
                if start is not None and length:
                    chains = self._drafts(self.drafter, start, length, plan.hope)
            if self.trails and batch.sampled and (accepted is not None or plan.chain != LEFT_OUT):
                self._settled(drawn, accepted, chains, batch.slots)
            return Readout(
                plan.step,
                drawn.work,
                _ragged(drawn, accepted, chains),
                drawn.records,
                scores,
                _marker(hidden.device),
                drawn.refused,
            )

    @property
    def trails(self) -> bool:
        """Whether steps may be planned behind steps with drafts that have not landed."""
        return self.drafter is not None and self.graphs is not None and self.graphs.broken is None

    def free(self, plan: StepPlan) -> bool:
        """Whether no request of the step needs the host between two steps."""
        return not any(self.adjuster.asked(w) or self.grammars.holds(w) or _tells(w) for w in plan.work)

    def _caught_up(self, plan: StepPlan) -> StepPlan:
        """The plan with what the step before it brought, for which this waits: where a graph is not to be had."""
        assert self.graphs is not None
        last, shifts, ahead = (t.tolist() for t in (self.last_tokens, self.graphs.shifts, self.graphs.ahead))
        work = []
        for w in plan.work:
            if w.behind:
                shift = shifts[w.slot]
                tokens = (last[w.slot], *ahead[w.slot][: w.drafts])
                w = replace(w, start=w.start + shift, draw=w.draw + shift, left=w.left - shift, tokens=tokens)
            work.append(w)
        return replace(plan, work=tuple(work))

    def _settled(self, drawn: "_Drawn", accepted: Accepted | None, chains: Drafts | None, slots: Tensor) -> None:
        """Leaves on the device from where the next step goes on, should it be planned before this one has landed."""
        assert self.graphs is not None
        tokens, lengths = drawn.tokens, None
        if accepted is not None:
            lengths = accepted.lengths
            counts = np.array([w.drafts + 1 for w in drawn.work], np.int64)
            firsts = sampler.on_device(np.cumsum(counts) - counts, tokens.device)
            tokens = tokens[firsts + (lengths - 1).clamp_min(0)]
        self.graphs.settled(slots, tokens, lengths, chains)

    def _drafts(self, drafter: Drafter, start: Start, length: int, min_confidence: float) -> Drafts:
        if self.graphs is None or self.graphs.broken is not None or len(start.positions) > MAX_REQUESTS:
            return drafter.draft(start, length, min_confidence)
        return self.graphs.draft(start, length)

    def _replay(self, plan: StepPlan) -> "Readout | None":
        """The step through CUDA graphs; None if they turn out not to be for this machine."""
        assert self.graphs is not None
        if self.free(plan):
            arriving = self.graphs.run(plan)
            return None if arriving is None else _sent(plan, arriving)
        run = self.graphs.forward(plan)
        if run is None:
            return None
        drawn = self._draw(run.logits, plan.work)
        arriving = self.graphs.settle(run, plan, drawn.told, drawn.cut)
        self._told(drawn, arriving.lengths if arriving.each > 1 else None)
        return _sent(plan, arriving, drawn)

    def _draw(self, logits: Tensor, work: tuple[Work, ...]) -> "_Drawn":
        """Draws a token for each row of `logits` [R, V], which belong to the draws of `work` in order."""
        wanted = draws(work)
        adjusted, cut = self.grammars.mask(self.adjuster.adjust(logits, wanted), work)
        drawn = sampler.draw(adjusted, wanted)
        if adjusted is not logits:  # a mask may hide what is not finite
            drawn = torch.where(sampler.finite(logits), drawn, FAILED)
        tokens = self.grammars.settle(drawn.clamp_min(0), work)
        refused = self.grammars.refusals(work)
        told = torch.where(drawn < 0, FAILED, tokens)
        return _Drawn(work, tokens, told, cut, sampler.token_logprobs(logits, tokens, wanted), refused)

    def _accept(self, drawn: "_Drawn", slots: Tensor) -> Accepted | None:
        """What stands of what was drawn; None if no request has drafts, so that all of it does. `slots` [S] int64: the
        last-token rows of the requests."""
        if not any(w.drafts for w in drawn.work):
            self._told(drawn, None)
            # A failed row must not leave FAILED there, where it would read as PENDING.
            self.last_tokens[slots] = drawn.tokens
            return None
        guesses = [w.guesses[: drawn.cut.get(i, w.drafts)] for i, w in enumerate(drawn.work)]
        accepted = accept(drawn.told, [w.drafts for w in drawn.work], guesses, sampler.on_device)
        self._told(drawn, accepted.lengths)
        return accepted

    def _told(self, drawn: "_Drawn", lengths: Tensor | None) -> None:
        """Tells who looks back what each request keeps: `lengths` [S] of its tokens, or the one it drew."""
        self.grammars.follow(drawn.tokens, lengths, drawn.work)
        if self.adjuster.counting:
            drafts = [w.drafts for w in drawn.work]
            kept = None if lengths is None else rows_kept(lengths, drafts, sampler.on_device)
            self.adjuster.count(drawn.tokens, kept)


def _tells(work: Work) -> bool:
    return work.params.logprobs is not None


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What the sampler made of a step's logits, on the device.

    tokens   [R] int64: the token of each draw of `work`
    told     the same, FAILED where the logits were not finite
    cut      by index, the works whose drafts cannot all be followed, with how many can
    records, refused   as in Readout
    """

    work: tuple[Work, ...]
    tokens: Tensor
    told: Tensor
    cut: Mapping[int, int] = field(default_factory=dict)
    records: Callable[[], dict[int, TokenLogprob]] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)

    @staticmethod
    def nothing(device: torch.device) -> "_Drawn":
        none = torch.empty(0, dtype=torch.int64, device=device)
        return _Drawn((), none, none)


Chain = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Readout:
    """What a queued step will bring, on its way to the host.

    told     to be called when it is there: of each of `work` the tokens that stand, whether the next one's logits were
             not finite, and what a draft model drafts behind them
    records  log-probabilities, by row
    scores   log-probabilities of prompts
    done     the point in the device's work after which the rest may be read; None if it is there already
    refused  why requests could draw nothing, by rid
    """

    step: int
    work: tuple[Work, ...]
    told: Callable[[], Iterable[tuple[tuple[int, ...], bool, Chain]]]
    records: Callable[[], dict[int, TokenLogprob]] | None
    scores: list[Callable[[], Output]]
    done: torch.cuda.Event | None
    refused: Mapping[int, str] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        outputs = {output.rid: output for output in (score() for score in self.scores)}
        records = {} if self.records is None else self.records()
        first = 0
        for w, (tokens, failed, chain) in zip(self.work, self.told()):
            scored = outputs.get(w.rid)
            again = failed and w.drafts > 0
            error = (None if scored is None else scored.error) or self.refused.get(w.rid)
            if error is None and failed and not again:
                error = sampler.NOT_FINITE
            if error is not None:
                outputs[w.rid] = Output(w.rid, error=error)
            else:
                outputs[w.rid] = Output(
                    w.rid,
                    tokens,
                    tuple(records[i] for i in range(first, first + len(tokens)) if i in records) if records else (),
                    () if scored is None else scored.prompt_logprobs,
                    again=again,
                    chain=() if again else chain,
                )
            first += w.drafts + 1
        return StepResult(self.step, tuple(outputs.values()))


def _sent(plan: StepPlan, arriving: Arriving, drawn: _Drawn | None = None) -> Readout:
    """What a graph's step brings; `drawn` by calls, if it was not by the graph."""
    each, chain = arriving.each, arriving.chain
    ids, sure = slice(AHEAD, AHEAD + chain), slice(AHEAD + MAX_DRAFTS, AHEAD + MAX_DRAFTS + chain)

    def told() -> Iterator[tuple[tuple[int, ...], bool, Chain]]:
        table = arriving.table[: len(plan.work), : sure.stop if chain else each + 2]
        for w, row in zip(plan.work, table.tolist()):
            front = each - w.count
            tokens = tuple(map(int, row[front : front + int(row[each])]))
            ahead = tuple(zip(map(int, row[ids]), row[sure])) if chain else ()
            yield tokens, row[each + 1] > 0, ahead

    records, refused = (None, {}) if drawn is None else (drawn.records, drawn.refused)
    return Readout(plan.step, plan.work, told, records, [], arriving.done, refused)


def _ragged(
    drawn: _Drawn, accepted: Accepted | None, chains: Drafts | None
) -> Callable[[], Iterator[tuple[tuple[int, ...], bool, Chain]]]:
    """Sends what was drawn call by call on its way to the host; to be called when it is there."""
    rows, work = len(drawn.told), drawn.work
    sent = drawn.told if accepted is None else torch.cat([drawn.told, accepted.lengths, accepted.spoilt.long()])
    there, sure = sampler.to_host(sent), None
    if chains is not None:  # float64 holds ids and float32 values alike
        sure = sampler.to_host(torch.stack([chains.tokens.double(), chains.confidence.double()]))

    def told() -> Iterator[tuple[tuple[int, ...], bool, Chain]]:
        numbers = there.tolist()
        tokens, stand, failed = numbers[:rows], numbers[rows : rows + len(work)], numbers[rows + len(work) :]
        ahead: list[Chain] = [()] * len(work)
        if sure is not None:
            ahead = [tuple(zip(map(int, ids), confidence)) for ids, confidence in zip(*sure.tolist())]
        first = 0
        for i, w in enumerate(work):
            own = tokens[first : first + w.drafts + 1]
            if accepted is None:
                yield tuple(own), own[0] == FAILED, ahead[i]
            else:
                yield tuple(own[: stand[i]]), bool(failed[i]), ahead[i]
            first += w.drafts + 1

    return told


def _marker(device: torch.device) -> torch.cuda.Event | None:
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def compute_thread(threads: int | None) -> ThreadPoolExecutor:
    """The one thread on which an engine computes, loading included.

    libgomp lets waiting threads spin only while it manages no more of them than there are processors. A second thread
    that computes has a team of its own, and from then on every parallel region sleeps and is woken: half the decode
    speed on two cores.
    """
    return ThreadPoolExecutor(1, "perilune-compute", initializer=_set_threads, initargs=(threads,))


def _set_threads(threads: int | None) -> None:
    # OpenMP's thread count belongs to the thread that sets it, so the worker must set its own.
    if threads is not None:
        torch.set_num_threads(threads)
