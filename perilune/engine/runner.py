"""Runs step plans on the device, one after the other, beside the thread that plans them."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from perilune.core.plan import Output, StepPlan, StepResult, TokenLogprob, Work, draws
from perilune.engine import sampler
from perilune.engine.batch import build, followed
from perilune.engine.grammar import Grammars
from perilune.engine.graphs import DecodeGraphs
from perilune.engine.penalties import Adjuster
from perilune.engine.sampler import FAILED
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.ops import registry
from perilune.ops.linear import FEW_ON_CPU
from perilune.ops.threads import torch_alone
from perilune.spec.acceptance import Accepted, accept, rows_kept
from perilune.spec.drafter import Drafter, Drafts

T = TypeVar("T")


class Runner:
    """Owns the model, the KV pages and the last-token buffer; a single worker thread executes plans in order.

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
        self.overrides = dict(overrides)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=pages.data.device)
        self.adjuster = Adjuster(max_num_seqs)
        self.grammars = grammars
        self.drafter: Drafter | None = None
        self.graphs = (
            DecodeGraphs(model, pages, self.last_tokens, max_model_len) if pages.data.device.type == "cuda" else None
        )
        self.busy_seconds = 0.0
        self.follow(drafter)
        self._worker = worker

    def follow(self, drafter: Drafter | None) -> None:
        """From the next step on this draft model goes along; nothing may be in flight."""
        self.drafter = drafter
        if self.graphs is not None:
            self.graphs.follow(() if drafter is None else drafter.aux_layers)

    def launch(self, plan: StepPlan) -> "Future[Readout]":
        return self._worker.submit(self._timed, plan)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` between steps, on the thread that computes them."""
        return self._worker.submit(work, *args).result()

    def close(self) -> None:
        self._worker.shutdown()

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
            if self.graphs is not None and self.graphs.takes(plan) and (run := self.graphs.run(plan)) is not None:
                drawn = self._sample(run.logits, plan.work, run.slots)
                chains = None
                if self.drafter is not None:
                    length = min(plan.chain, self.drafter.longest)
                    tokens = drawn.tokens.clamp_min(0)
                    chains = self.graphs.chain(run, plan, self.drafter, tokens, drawn.lengths, length)
                return self._read(plan.step, drawn, [], chains)
            batch = build(plan, self.last_tokens, self.pages.block_size, self.absorb_limit)
            layers = () if self.drafter is None else self.drafter.aux_layers
            hidden, features = self.model.hidden_with_aux(batch.step, self.pages.data, layers)
            scores = [
                sampler.prompt_logprobs(w, hidden[start : start + w.count], self.model.logits)
                for w, start in zip(batch.work, batch.starts)
                if w.prompt_targets
            ]
            drawn = _Drawn((), hidden.new_empty(0, dtype=torch.int64))
            if batch.sampled:
                drawn = self._sample(self.model.logits(hidden[batch.rows]), batch.sampled, batch.slots)
            chains = None
            if self.drafter is not None:
                told = followed(batch, features, drawn.tokens.clamp_min(0), drawn.lengths)
                chains = self.drafter.propose(told, min(plan.chain, self.drafter.longest))
            return self._read(plan.step, drawn, scores, chains)

    def _sample(self, logits: Tensor, work: tuple[Work, ...], slots: Tensor) -> "_Drawn":
        """Draws a token for each row of `logits` [R, V], which belong to the draws of `work` in order."""
        wanted = draws(work)
        adjusted, cut = self.grammars.mask(self.adjuster.adjust(logits, wanted), work)
        refused = self.grammars.refusals(work)
        drawn = sampler.draw(adjusted, wanted)
        if adjusted is not logits:  # a mask may hide what is not finite
            drawn = torch.where(sampler.finite(logits), drawn, FAILED)
        tokens = self.grammars.settle(drawn.clamp_min(0), work)
        told = torch.where(drawn < 0, FAILED, tokens)
        accepted: Accepted | None = None
        if len(wanted) > len(work):
            drafts = [w.drafts for w in work]
            guesses = [w.guesses[: cut.get(i, w.drafts)] for i, w in enumerate(work)]
            accepted = accept(told, drafts, guesses, sampler.on_device)
            self.grammars.follow(tokens, accepted.lengths, work)
            if self.adjuster.counting:
                self.adjuster.count(tokens, rows_kept(accepted.lengths, drafts, sampler.on_device))
            # The last-token buffer stays as it is: such a step lands before the next is planned, with no PENDING.
        else:
            self.grammars.follow(tokens, None, work)
            self.adjuster.count(tokens)
            # A failed row must not leave FAILED there, where it would read as PENDING.
            self.last_tokens[slots] = tokens
        return _Drawn(work, told, accepted, sampler.token_logprobs(logits, tokens, wanted), refused)

    @staticmethod
    def _read(
        step: int, drawn: "_Drawn", scores: list[Callable[[], Output]], chains: Drafts | None = None
    ) -> "Readout":
        """Sends what the step brought on its way to the host."""
        told, accepted = drawn.tokens, drawn.accepted
        if accepted is not None:  # one copy for all
            told = torch.cat([told, accepted.lengths, accepted.spoilt.long()])
        sure = None
        if chains is not None:  # float64 holds ids and float32 values alike
            sure = sampler.to_host(torch.stack([chains.tokens.double(), chains.confidence.double()]))
        return Readout(
            step,
            drawn.work,
            sampler.to_host(told),
            accepted is not None,
            drawn.records,
            scores,
            sure,
            _marker(told.device),
            drawn.refused,
        )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What the sampler made of a step's logits; fields as in Readout, but on the device."""

    work: tuple[Work, ...]
    tokens: Tensor
    accepted: Accepted | None = None
    records: Callable[[], dict[int, TokenLogprob]] | None = None
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def lengths(self) -> Tensor | None:
        return None if self.accepted is None else self.accepted.lengths


@dataclass(frozen=True, slots=True)
class Readout:
    """What a queued step will bring, on its way to the host.

    drawn    [R] int64: the token of each draw of `work`, FAILED where its logits were not finite; if `drafted`
             [R + 2 S], with how many of its draws each of `work` keeps, and whether the one after them failed
    records  log-probabilities, by row
    scores   log-probabilities of prompts
    chains   [2, S, k] float64: what a draft model drafts behind each of `work`, and how sure it is
    done     the point in the device's work after which the rest may be read; None if it is there already
    refused  why requests could draw nothing, by rid
    """

    step: int
    work: tuple[Work, ...]
    drawn: Tensor
    drafted: bool
    records: Callable[[], dict[int, TokenLogprob]] | None
    scores: list[Callable[[], Output]]
    chains: Tensor | None
    done: torch.cuda.Event | None
    refused: Mapping[int, str] = field(default_factory=dict)

    def result(self) -> StepResult:
        """Waits for the device."""
        if self.done is not None:
            self.done.synchronize()
        outputs = {output.rid: output for output in (score() for score in self.scores)}
        records = {} if self.records is None else self.records()
        drawn = self.drawn.tolist()
        chains: list[tuple[tuple[int, float], ...]] = [()] * len(self.work)
        if self.chains is not None:
            chains = [tuple(zip(map(int, ids), sure)) for ids, sure in zip(*self.chains.tolist())]
        lengths, spoilt = [1] * len(drawn), [token == FAILED for token in drawn]
        if self.drafted:
            rows, count = len(drawn) - 2 * len(self.work), len(self.work)
            lengths, spoilt = drawn[rows : rows + count], drawn[rows + count :]
        first = 0
        for w, length, failed, chain in zip(self.work, lengths, spoilt, chains):
            output = outputs.get(w.rid, Output(w.rid))
            again = failed and w.drafts > 0
            error = output.error or self.refused.get(w.rid) or (sampler.NOT_FINITE if failed and not again else None)
            if error is not None:
                outputs[w.rid] = Output(w.rid, error=error)
            else:
                outputs[w.rid] = dataclasses.replace(
                    output,
                    tokens=tuple(drawn[first : first + length]),
                    logprobs=tuple(records[i] for i in range(first, first + length) if i in records),
                    again=bool(again),
                    chain=() if again else chain,
                )
            first += w.drafts + 1
        return StepResult(self.step, tuple(outputs.values()))


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
