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

from perilune.core.plan import Output, StepPlan, StepResult, TokenLogprob, Work
from perilune.engine import sampler
from perilune.engine.batch import build
from perilune.engine.grammar import Grammars
from perilune.engine.graphs import DecodeGraphs
from perilune.engine.penalties import Adjuster
from perilune.engine.sampler import FAILED
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.ops import registry
from perilune.ops.linear import FEW_ON_CPU
from perilune.ops.threads import torch_alone

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
    ):
        self.model = model
        self.pages = pages
        self.absorb_limit = absorb_limit
        self.overrides = dict(overrides)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=pages.data.device)
        self.adjuster = Adjuster(max_num_seqs)
        self.grammars = grammars
        self.graphs = (
            DecodeGraphs(model, pages, self.last_tokens, max_model_len) if pages.data.device.type == "cuda" else None
        )
        self.busy_seconds = 0.0
        self._worker = worker

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
            logits = self.graphs.logits(plan) if self.graphs is not None and self.graphs.takes(plan) else None
            if logits is not None:
                assert self.graphs is not None
                return self._sample(plan.step, logits, plan.work, self.graphs.slots, [])
            batch = build(plan, self.last_tokens, self.pages.block_size, self.absorb_limit)
            hidden = self.model.hidden(batch.step, self.pages.data)
            scores = [
                sampler.prompt_logprobs(w, hidden[start : start + w.count], self.model.logits)
                for w, start in zip(batch.work, batch.starts)
                if w.prompt_targets
            ]
            if not batch.sampled:
                return Readout(plan.step, (), None, None, scores, _marker(hidden.device))
            return self._sample(plan.step, self.model.logits(hidden[batch.rows]), batch.sampled, batch.slots, scores)

    def _sample(
        self, step: int, logits: Tensor, work: tuple[Work, ...], slots: Tensor, scores: list[Callable[[], Output]]
    ) -> "Readout":
        """Draws a token for each row of `logits` [S, V], which belong to `work` in order."""
        adjusted = self.grammars.mask(self.adjuster.adjust(logits, work), work)
        refused = self.grammars.refusals(work)
        drawn = sampler.draw(adjusted, work)
        if adjusted is not logits:  # a mask may hide what is not finite
            drawn = torch.where(sampler.finite(logits), drawn, FAILED)
        # A failed row must not leave FAILED in the last-token buffer, where it would read as PENDING.
        tokens = self.grammars.settle(drawn.clamp_min(0), work)
        self.adjuster.count(tokens)
        self.last_tokens[slots] = tokens
        records = sampler.token_logprobs(logits, tokens, work)
        told = sampler.to_host(torch.where(drawn < 0, FAILED, tokens))
        return Readout(step, work, told, records, scores, _marker(logits.device), refused)


@dataclass(frozen=True, slots=True)
class Readout:
    """What a queued step will bring, on its way to the host.

    drawn    [S] int64: the token of each of `work`, FAILED where its logits were not finite
    done     the point in the device's work after which the rest may be read; None if it is there already
    refused  why requests could draw nothing, by rid
    """

    step: int
    work: tuple[Work, ...]
    drawn: Tensor | None
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
        drawn = () if self.drawn is None else self.drawn.tolist()
        for w, token in zip(self.work, drawn):
            if token == FAILED:
                outputs[w.rid] = Output(w.rid, error=sampler.NOT_FINITE)
            elif w.rid in self.refused:
                outputs[w.rid] = Output(w.rid, error=self.refused[w.rid])
            else:
                output = outputs.get(w.rid, Output(w.rid))
                outputs[w.rid] = dataclasses.replace(output, token=token, logprob=records.get(w.rid))
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
