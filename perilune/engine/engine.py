"""The engine: a scheduler that decides, a runner that computes, and the loop that keeps both busy.

One step, read top to bottom (`Engine.step`): plan step N+1 while step N runs, launch it, then wait for step N, commit
its tokens and return them. Step N+1 is planned before the result of N is known, so the device does not wait for Python.
The price: if a request ends in N, its share of N+1 is computed and thrown away.

Drafts change the order. Drafts copied from known text (n-gram lookup, speculation/) need the tokens of N: where they
are expected to gain more than the overlap does, step N is committed before N+1 is planned. Drafts of a draft model stay
on the device: step N+1 is planned "chained" to N before the host knows how many drafts N accepts; no step waits.
"""

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from perilune.core.config import EngineConfig
from perilune.core.messages import Delta, EngineStats, Pixels, Submit, Want
from perilune.core.step import LEFT_OUT, PENDING, StepPlan
from perilune.engine.admission import Admission
from perilune.engine.build import Source, build, speculator
from perilune.engine.ranks import OrderCosts
from perilune.engine.readout import Readout
from perilune.engine.step_times.cost_table import capture_first, measure_costs, measure_prompts
from perilune.engine.step_times.spare import Size, SpareTime
from perilune.kv.prefix import root_of
from perilune.kv.tiers import EXPIRE_SECONDS
from perilune.loading.load import load
from perilune.ops.harness import build as build_ops
from perilune.speculation.protocol import Drafting, Observer
from perilune.speculation.step_cost import Costs

Running = tuple[StepPlan, "Future[Readout]", float]  # a step in flight: plan, result, time.perf_counter() at launch

# How long `step` blocks for a KV copy while every request waits for one. Longer: a new message is read later.
TRANSFER_WAIT_SECONDS = 0.005


class Engine:
    """A loaded model and all its unfinished requests. Not thread-safe: one owner calls submit, cancel and step.
    `source` loads the weights, from `model_dir` by default; synthetic weights use `model_dir` only as the model's name.

    drafting_seconds  total host time of planning drafts; the draft model itself runs as part of the steps
    waiting_seconds   total time that `step` waited for the device or for the compute thread
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        *,
        progress: bool = False,
        source: Source = load,
        owns_process: bool = False,
    ):
        """`owns_process`: with several ranks, the others may kill this process when its heartbeats stop."""
        parts = build(model_dir, config, progress=progress, source=source, owns_process=owns_process)
        self.config, self.scheduler, self.runner, self._ranks = parts.config, parts.scheduler, parts.runner, parts.ranks
        self._transfer = parts.transfer
        self._grammars, self._drafter, self._rejected = self.runner.grammars, self.runner.drafter, parts.rejected
        self._running: Running | None = None
        self._committed_at: float | None = None  # perf_counter() when the last result was read; None: idle since
        self._spare = SpareTime()
        self._plans_late = self.runner.pages.data.device.type == "cuda"  # a CPU's step times vary too much for it
        self.drafting_seconds = self.waiting_seconds = 0.0
        self._encoder = self.scheduler.encoder
        self._costs: dict[bool, Costs] = {}  # measured step times, by whether a draft model runs with the steps
        self.speculator: Drafting | None = None
        try:
            with self._explained():
                self.use_drafts(self.config.draft, self.config.draft_tokens, shared=self.config.prefix_cache)
                capture_first(self.runner, self.config)
                if self.scheduler.pacer is not None:
                    measure_prompts(self.runner, self.config, self.scheduler.pacer.times.record)
        except BaseException:  # else the traceback keeps this object: kv_disk's lock, ranks, kernels
            if self._ranks is not None:
                self._ranks.ready()  # else closing may wait for a rank that hangs
            with suppress(Exception):  # the first error is the cause
                self.close()
            raise
        if self._costs:
            parts.choices.note("draft_tokens", "as many as pay", str(self.costs))
        elif self.speculator is None and self.config.draft != "off":
            parts.choices.note("draft", "off for now", "kernels are being compiled: drafts come with the next start")
        self.info = parts.info(model_dir.name)
        self._admission = Admission(self.info, self._grammars, config.seed, self._schedule)
        if self._ranks is not None:
            self._ranks.ready()

    @property
    def busy(self) -> bool:
        if self._ranks is not None and self._ranks.failure is not None:
            return False  # a rank is lost: no step can run any more
        return self._running is not None or self.scheduler.has_work or self._grammars.compiling

    @property
    def idle_seconds(self) -> float | None:
        """Interval, seconds, at which to call `step` while the engine is not busy, so that KV in the tiers is deleted
        when its time to live is over; None: there are no tiers."""
        return None if self._transfer is None else EXPIRE_SECONDS

    def submit(self, request: Submit) -> None:
        """Queues a request. RequestError if it can never run, EngineError if another rank is lost. A grammar that does
        not compile is reported later, by a Delta with finish reason "error"."""
        self.check()
        self._admission.submit(request)

    def check(self) -> None:
        """EngineError if another rank is lost."""
        if self._ranks is not None:
            self._ranks.check()

    def cancel(self, rid: int) -> None:
        self.scheduler.cancel(rid)
        self._drop(rid)

    @property
    def starved(self) -> bool:
        """Whether nothing can be computed before `provide` brings the pixels of a picture."""
        return self._running is None and self._encoder is not None and self._encoder.awaiting

    @property
    def spare_seconds(self) -> float:
        """Seconds by which the caller may delay the next `step` while the device is busy. A prompt submitted meanwhile
        enters the next step instead of the one after."""
        if self._running is None or self._committed_at is None or not self._plans_late:
            return 0.0
        return max(self._committed_at + self._spare.seconds(_size(self._running[0])) - time.perf_counter(), 0.0)

    def wants(self) -> list[Want]:
        """Requests for pixels that the encoder needs now, each returned once; the caller answers with `provide`."""
        return [] if self._encoder is None else self._encoder.wants()

    def provide(self, pixels: Pixels) -> None:
        """Takes the pixels of a Want; ignored if the request has ended. RequestError if pixels and grid differ."""
        if self._encoder is not None:
            self._encoder.provide(pixels.rid, pixels.item, pixels.patches)

    def step(self) -> list[Delta]:
        """Launches step N+1, then commits step N and returns its Deltas. Commits N first if N+1 is to have drafts from
        n-gram lookup, which need N's tokens. EngineError if another rank is lost: no step can follow."""
        with self._explained():
            return self._step()

    def _step(self) -> list[Delta]:
        before, begin, waited = self._committed_at, time.perf_counter(), self.waiting_seconds
        deltas = self._admission.schedule_compiled(idle=self._running is None and not self.scheduler.has_work)
        deltas += self._expire()
        self.scheduler.take_transfers()
        running, self._running = self._running, None
        chained = None if running is None else self._plan_chained(running[0])
        first = running is not None and chained is None and self._commits_first(running[0])
        if running is not None and first:
            deltas += self._commit(*running)
            self._spare.record(None, 0.0)
        self._running = self._launch(chained)
        if self._transfer is not None:
            self._transfer.steps_run = self._running is not None
        if running is not None and not first:
            deltas += self._commit(*running)
            if before is not None:
                self._spare.record(_size(running[0]), begin - before + self.waiting_seconds - waited)
        if self._running is None:
            self._committed_at = None
            if self._transfer is not None and not deltas and self.scheduler.has_work:
                self._transfer.wait(TRANSFER_WAIT_SECONDS)
        return deltas

    @property
    def _drafting(self) -> Drafting | None:
        """The speculator, unless it is off or paused: steps are then those of an engine without drafts."""
        return None if self.speculator is None or self.speculator.paused else self.speculator

    @property
    def _observers(self) -> list[Observer]:
        return [o for o in (self.speculator, self._rejected) if o is not None]

    def _plan_chained(self, running: StepPlan) -> StepPlan | None:
        """The next step, chained to the running step. None if the next step can be planned only after the host has read
        the running step's result, or if drafts would not pay."""
        drafting = self._drafting
        # The log of rejected drafts needs their ids, which stay on the device in a chained step.
        if drafting is None or not running.work or self._rejected is not None:
            return None
        if not self.runner.can_chain or (drafts := drafting.chained(running)) is None:
            return None
        return self.scheduler.plan_chained(drafts) if self.runner.needs_no_host(running) else None

    def _commits_first(self, running: StepPlan) -> bool:
        if (drafting := self._drafting) is None or not running.work:
            return False
        # Planning now would leave out the requests with drafts in flight, because their next position is unknown: the
        # batch would split into two halves that alternate, each paying a full read of the weights.
        return any(w.drafts for w in running.work) or drafting.worth_waiting(running)

    def _launch(self, chained: StepPlan | None) -> Running | None:
        drafting = self._drafting
        plan = chained or self.scheduler.plan(LEFT_OUT if drafting is None else 0)
        if plan is None:
            return None
        if drafting is not None and plan.work:
            begin = time.perf_counter()
            if chained is None and (drafts := drafting.propose(plan)):
                plan = self.scheduler.add_drafts(plan, drafts)
            chain = drafting.chain_length(plan)
            plan = dataclasses.replace(plan, chain=chain, min_confidence=drafting.min_confidence)
            self.drafting_seconds += time.perf_counter() - begin
        launched_at = time.perf_counter()
        queued = self.runner.launch(plan)
        for observer in (drafting, self._rejected):
            if observer is not None:
                observer.maintain()
        return plan, queued, launched_at

    def _commit(self, plan: StepPlan, queued: "Future[Readout]", launched_at: float) -> list[Delta]:
        """Waits for the step's result and gives it to the scheduler and the observers."""
        begin = time.perf_counter()
        readout = queued.result().wait()
        self.runner.group.check()
        self.waiting_seconds += time.perf_counter() - begin
        result = readout.result()
        if self._ranks is not None:
            self._ranks.read(result.digest)
        before, self._committed_at = self._committed_at, time.perf_counter()
        interval = None if before is None else self._interval(plan, before, self._committed_at)
        deltas = self.scheduler.commit(result)
        if self._encoder is not None:
            self._observe_slices(plan, interval)
        if not plan.work:
            return deltas
        if interval is not None and (pacer := self.scheduler.pacer) is not None:
            decoding = [w.count for w in plan.work if w.count - w.drafts == 1]
            if not plan.slices:
                pacer.record(plan.tokens, len(decoding), plan.tokens - sum(decoding), interval)
            elif decoding:
                pacer.count(interval)
        if self.scheduler.offload is not None and not plan.slices:
            self.scheduler.offload.computed(plan, self._committed_at - max(launched_at, before or 0.0))
        if (drafting := self._drafting) is not None:
            drafting.observe(deltas, result.outputs)
            if interval is not None and not plan.slices:
                alone = not any(PENDING in w.tokens for w in plan.work)
                drafting.record_time(plan, interval, alone)
        elif self.speculator is not None:
            self.speculator.record_paused(len(plan.work), deltas)
        if self._rejected is not None:
            self._rejected.observe(plan, deltas)
        for delta in deltas:
            if delta.finish_reason is not None:
                if delta.finish_reason == "stop" and self._grammars.closed(delta.rid):
                    delta.finish_reason, delta.closed_by_grammar = "length", True
                self._drop(delta.rid)
        return deltas

    @staticmethod
    def _interval(plan: StepPlan, before: float, now: float) -> float:
        """A step's cost in seconds: from the previous step's result (`before`) to its own (`now`), both perf_counter().
        Tests replace this function by a table."""
        return now - before

    def _observe_slices(self, plan: StepPlan, seconds: float | None) -> None:
        """Gives the encoder the times of ended slices, and `seconds` (None: unknown) if the step only decoded."""
        assert self._encoder is not None and self.runner.tower is not None
        for cost in self.runner.tower.measured():
            self._encoder.record(cost.flops, cost.runs, cost.seconds)
        if seconds is not None and plan.work and not plan.slices and all(w.output_index for w in plan.work):
            self._encoder.record_step(seconds)

    def _schedule(self, request: Submit, seed: int) -> None:
        self.scheduler.submit(request, seed, time.monotonic())
        root = root_of(request.cache_keys)
        for observer in self._observers:
            observer.open(request.rid, request.prompt, root)

    def _expire(self) -> list[Delta]:
        deltas = self.scheduler.expire(time.monotonic())
        for delta in deltas:
            self._drop(delta.rid)
        return deltas

    def _drop(self, rid: int) -> None:
        """Frees what grammars and observers hold for a request that has left the scheduler."""
        self._grammars.drop(rid)
        for observer in self._observers:
            observer.drop(rid)

    def use_drafts(self, draft: str, tokens: int | None, *, shared: bool) -> None:
        """Selects the source of drafts: `draft` as EngineConfig.draft, but not "auto"; `tokens` drafts per step, None:
        as many as give the most tokens per second, by step times that are measured first. Acceptance statistics start
        anew. No request may be unfinished. `shared`: tokens of finished requests may become drafts of others."""
        assert not self.busy, "requests are in flight"
        modelled = draft in ("eagle3", "hybrid")
        drafter = self._drafter if modelled else None
        self.runner.follow(drafter)
        self.speculator = None
        if draft != "off" and tokens is None and build_ops.compiling():
            return  # step times cannot be measured while kernels compile: no drafts until the next start
        if draft != "off" and tokens is None and modelled not in self._costs:
            assert not self.scheduler.stats().blocks_cached, "measuring overwrites the cache"
            self._costs[modelled] = measure_costs(self.runner, self.config)
        if draft != "off":
            self.speculator = speculator(draft, tokens, drafter, self._costs.get(modelled), shared=shared)

    @property
    def costs(self) -> Costs:
        """Seconds of steps by size, as measured last."""
        return next(reversed(self._costs.values()))

    def order_costs(self) -> OrderCosts | None:
        """Time that sending plans to the other ranks took since the last call; None with one rank."""
        return None if self._ranks is None else self._ranks.costs()

    def on_lost_rank(self, handle: Callable[[str], None]) -> None:
        """Calls `handle(reason)` on another thread when another rank is lost."""
        if self._ranks is not None:
            self._ranks.on_failure = handle

    def _explained(self) -> AbstractContextManager[None]:
        return nullcontext() if self._ranks is None else self._ranks.explained()

    def stats(self) -> EngineStats:
        stats = self.runner.report(self.scheduler.stats())
        if self._encoder is not None:
            stats = dataclasses.replace(stats, pictures=self._encoder.encoded, picture_seconds=self._encoder.seconds)
        return stats if self.speculator is None else self.speculator.report(stats)

    def close(self) -> None:
        """Waits for the step in flight and drops the weights and the cache."""
        if self._transfer is not None and self.scheduler.offload is not None:
            self.scheduler.offload.log_summary(self.scheduler.stats())
            self._transfer.close()
        self.runner.close()
        self._grammars.close()
        if self._rejected is not None:
            self._rejected.close()
        del self.runner, self.scheduler, self._drafter, self._transfer


def _size(plan: StepPlan) -> Size | None:
    """(requests, tokens) of a step in which all requests decode; None for other steps."""
    if not plan.work or plan.slices or any(w.count - w.drafts > 1 for w in plan.work):
        return None
    return len(plan.work), plan.tokens
