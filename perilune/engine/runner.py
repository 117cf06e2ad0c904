"""Runs step plans on the device, one after the other, beside the thread that plans them."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from perilune.core.plan import Output, StepPlan, StepResult
from perilune.engine import sampler
from perilune.engine.batch import build
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.ops import registry

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
        absorb_limit: int,
        overrides: Mapping[str, str],
        worker: ThreadPoolExecutor,
    ):
        self.model = model
        self.pages = pages
        self.absorb_limit = absorb_limit
        self.overrides = dict(overrides)
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=pages.data.device)
        self.busy_seconds = 0.0
        self._worker = worker

    def launch(self, plan: StepPlan) -> Future[StepResult]:
        return self._worker.submit(self._timed, plan)

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` between steps, on the thread that computes them."""
        return self._worker.submit(work, *args).result()

    def close(self) -> None:
        self._worker.shutdown()

    def _timed(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        result = self.run(plan)
        self.busy_seconds += time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        with registry.using(self.overrides):
            batch = build(plan, self.last_tokens, self.pages.block_size, self.absorb_limit)
            hidden = self.model.hidden(batch.step, self.pages.data)
            outputs = {
                w.rid: sampler.prompt_logprobs(w, hidden[start : start + w.count], self.model.logits)
                for w, start in zip(batch.work, batch.starts)
                if w.prompt_targets
            }
            if batch.sampled:
                logits = self.model.logits(hidden[batch.rows])
                tokens, finite = sampler.choose(logits, batch.sampled)
                self.last_tokens[batch.slots] = tokens
                records = sampler.token_logprobs(logits, tokens, batch.sampled)
                for w, token, good in zip(batch.sampled, tokens.tolist(), finite.tolist()):
                    output = outputs.get(w.rid, Output(w.rid))
                    outputs[w.rid] = (
                        dataclasses.replace(output, token=token, logprob=records.get(w.rid))
                        if good
                        else Output(w.rid, error=sampler.NOT_FINITE)
                    )
        return StepResult(plan.step, tuple(outputs.values()))


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
