"""Runs step plans on the device in order: CUDA graphs from the thread that plans, other steps from a compute thread."""

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from perilune.core.config import EngineConfig
from perilune.core.messages import EngineStats
from perilune.core.step import LEFT_OUT, StepPlan, Work, samples
from perilune.dist.group import exchanged
from perilune.dist.vocabulary import ONE_RANK, Vocabulary
from perilune.engine import exclusive_kernels, sampler
from perilune.engine.batch import build, followed
from perilune.engine.declared import Declared
from perilune.engine.graphs.decode import MAX_REQUESTS, DecodeGraphs
from perilune.engine.graphs.recorder import Recorder
from perilune.engine.graphs.replays import replay_seconds
from perilune.engine.masks import Grammars
from perilune.engine.penalties import Adjuster
from perilune.engine.ranks import Place, Ranks
from perilune.engine.readout import Readout, Sampled, from_calls, from_graph
from perilune.engine.sampler import FAILED
from perilune.engine.vision.tower import Tower
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.ops.harness import registry, workspace
from perilune.ops.harness.tensors import FEW_ROWS_ON_CPU
from perilune.ops.harness.threads import torch_alone
from perilune.speculation.acceptance import Accepted, accept, rows_kept
from perilune.speculation.drafter import Drafter, Drafts, Start

T = TypeVar("T")


class Runner:
    """Owns the model, the KV pages and the last-token buffer. Executes plans in order, never two at a time, as
    scheduler.py requires."""

    def __init__(
        self,
        model: KimiK2,
        pages: Pages,
        config: EngineConfig,
        grammars: Grammars,
        worker: ThreadPoolExecutor,
        drafter: Drafter | None,
        *,
        place: Place,
        ranks: Ranks | None = None,
    ):
        """`config` is resolved: it has no None where a number is needed. `ranks`: the other ranks, which run every plan
        of rank 0; None on those and with one rank."""
        assert config.max_model_len
        device = pages.data.device
        self.model, self.pages, self.grammars = model, pages, grammars
        self.group, self._vocabulary = model.group, model.vocabulary
        self._gpu, self._ranks = place.gpu, ranks
        self.absorb_limit = config.absorb_limit
        self.overrides = {**exclusive_kernels.claim(device, self), **config.ops}
        self.workspaces = workspace.Workspaces(alone=not registry.alone().items() <= self.overrides.items())
        # One row per slot and the padding row, which is written but never read.
        self.last_tokens = torch.zeros(config.max_num_seqs + 1, dtype=torch.int64, device=device)
        self.adjuster = Adjuster(config.max_num_seqs)
        self.drafter: Drafter | None = None
        self.tower: Tower | None = None
        self.graphs: DecodeGraphs | None = None
        self._declared = None
        if config.declared_acceptance is not None:
            self._declared = Declared(config.declared_acceptance, config.max_model_len, device)
        if device.type == "cuda" and not place.shared:
            recorder = Recorder(device, needed=self.group.ranks > 1)
            self.graphs = DecodeGraphs(
                model,
                pages,
                self.last_tokens,
                config.max_model_len,
                recorder,
                self_test=config.self_test,
                declared=self._declared,
            )
        self.busy_seconds = 0.0
        self.follow(drafter)
        self._worker = worker
        self._launched: Future[Readout] | None = None
        self._encoded = -1  # number of the last step with queued slices of pictures

    def follow(self, drafter: Drafter | None) -> None:
        """Selects the draft model of the following steps; None: they run without one. No step may be in flight."""
        if self._ranks is not None:
            self._ranks.order("drafter", int(drafter is not None))
        self.drafter = drafter
        if self.graphs is not None:
            self.graphs.follow(drafter)

    def launch(self, plan: StepPlan) -> "Future[Readout]":
        """Runs the plan after those launched before. A CUDA graph is launched on the caller's thread, because handing
        it to the worker takes as long as launching it; the worker must have queued the previous step first. Pictures
        are always encoded on the worker: cuDNN keeps its choice of kernels for one thread."""
        plan = self.ordered(plan)
        if self._graphed(plan):
            if plan.slices:
                self._worker.submit(self._encode, plan).result()
            elif self._launched is not None:
                wait((self._launched,))
            self._launched = Future()
            self._launched.set_result(self._timed(plan))
        else:
            self._launched = self._worker.submit(self._timed, plan)
        return self._launched

    def ordered(self, plan: StepPlan, kind: str = "plan") -> StepPlan:
        """Sends the plan to the other ranks and returns it, with `host` set; `kind` as in Ranks.plan. `host` is fixed
        here because all ranks must sample alike, and a cancelled request's grammar may be gone when the step runs."""
        if self._ranks is not None:
            if self.grammars.holds(plan.work):
                plan = replace(plan, host=True)
            self._ranks.plan(plan, kind)
        return plan

    def zero(self, blocks: int) -> None:
        """Zeroes blocks 0 .. `blocks` - 1 of the KV cache, on all ranks."""
        if self._ranks is not None:
            self._ranks.order("zero", blocks)
        self.pages.data[:, :blocks] = 0

    def call(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` between steps, on the thread that computes them."""
        return self._worker.submit(work, *args).result()

    def time_graph(self, rounds: int, *, on_caller: bool = False) -> float | None:
        """Seconds of one replay of the decode graph that ran last, in back-to-back replays, by the device's clock: the
        median of `rounds`. All ranks replay at the same time. Each round has other random tokens, the same on all
        ranks. None without graphs. No step may be in flight. `on_caller`: replay on the calling thread, which a
        profiler needs."""
        if self.graphs is None or not len(self.graphs):
            return None
        if self._ranks is not None:
            self._ranks.order("replay", rounds)
        replayed = self.graphs.latest(), self.model.config.vocab_size, rounds
        return replay_seconds(*replayed) if on_caller else self.call(replay_seconds, *replayed)

    def report(self, stats: EngineStats) -> EngineStats:
        """`stats` with the numbers of steps and graphs filled in."""
        graphs = self.graphs
        return replace(
            stats,
            step_seconds=self.busy_seconds,
            graphs=0 if graphs is None else len(graphs),
            graph_bytes=0 if graphs is None else graphs.recorder.nbytes,
        )

    def close(self) -> None:
        """Waits for the queued steps, then ends graphs, ranks and workspaces, also if one fails."""
        with ExitStack() as ends:  # called last to first
            if self.pages.data.device.type == "cuda":  # cuBLAS keeps 8 MB or more for each (stream, thread)
                ends.callback(torch._C._cuda_clearCublasWorkspaces)
            ends.callback(exclusive_kernels.release, self)
            ends.callback(self.workspaces.close)  # after the graphs, which hold addresses of its memory
            ends.callback(self.group.close)
            if self._ranks is not None:
                ends.callback(self._ranks.close)
            ends.callback(self._worker.shutdown)
            if self.graphs is not None:
                ends.callback(self.call, self.graphs.close)

    def _timed(self, plan: StepPlan) -> Readout:
        begin = time.perf_counter()
        result = self.run(plan)
        self.busy_seconds += time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Readout:
        """Queues the step on the device, without waiting for it."""
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)  # set per thread, and more than one thread queues steps
        few = self.pages.data.device.type == "cpu" and plan.tokens <= FEW_ROWS_ON_CPU
        with registry.using(self.overrides), self.workspaces.use(), torch_alone() if few else nullcontext():
            self._encode(plan)
            if not plan.work:
                return from_calls(plan.step, Sampled.nothing(self.pages.data.device), None, None, [])
            if self._graphed(plan) and (readout := self._replay(plan)) is not None:
                return readout
            return self._run_calls(self._caught_up(plan) if any(w.chained for w in plan.work) else plan)

    @torch.inference_mode()
    def _encode(self, plan: StepPlan) -> None:
        """Queues the plan's slices of pictures, unless `launch` has done so."""
        if self.tower is None or not (plan.slices or plan.dropped) or self._encoded == plan.step:
            return
        if self._gpu is not None:
            torch.cuda.set_device(self._gpu)
        self.tower.run(plan.slices, plan.dropped)
        self._encoded = plan.step

    def _graphed(self, plan: StepPlan) -> bool:
        """Whether to try the step as a CUDA graph."""
        if self.graphs is None or not plan.work or any(w.media for w in plan.work):
            return False
        return self.graphs.takes(plan)

    @property
    def can_chain(self) -> bool:
        """Whether a step may be planned before the result of a step with drafts is known."""
        return self.drafter is not None and self.graphs is not None and self.graphs.broken is None

    def needs_no_host(self, plan: StepPlan) -> bool:
        """Whether the device alone can sample the step and go on to the next: no request has penalties, a constraint or
        log-probabilities."""
        if plan.host or self.grammars.holds(plan.work):
            return False
        return not any(w.params.logprobs is not None or self.adjuster.wanted(w) for w in plan.work)

    def _run_calls(self, plan: StepPlan) -> Readout:
        """Queues the step op by op, without a CUDA graph."""
        batch = build(plan, self.last_tokens, self.pages.block_size, self.absorb_limit)
        if self.tower is not None:
            batch = replace(batch, step=replace(batch.step, replaced=self.tower.replaced(batch.work, batch.starts)))
        layers = () if self.drafter is None or plan.chain == LEFT_OUT else self.drafter.aux_layers
        hidden, features = self.model.hidden_with_aux(batch.step, self.pages.data, layers)
        scores = [
            sampler.prompt_logprobs(w, hidden[start : start + w.count], self._whole_logits)
            for w, start in zip(batch.work, batch.starts)
            if w.prompt_targets
        ]
        sampled, accepted = Sampled.nothing(hidden.device), None
        if batch.sampled:
            sampled = self._sample(self.model.logits(hidden[batch.rows]), batch.sampled, host=plan.host)
            accepted = self._accept(sampled, batch.slots)
        chains = None
        if self.drafter is not None and plan.chain != LEFT_OUT:
            lengths = None if accepted is None else accepted.lengths
            if self.tower is not None and batch.step.replaced is not None:
                shown = self.tower.replaced(batch.work, batch.starts, ahead=1)
                batch = replace(batch, step=replace(batch.step, replaced=shown))
            start = self.drafter.follow(followed(batch, features, sampled.checked.clamp_min(0), lengths))
            length = min(plan.chain, self.drafter.longest)
            if start is not None and length:
                chains = self._draft(self.drafter, start, length, plan.min_confidence)
        if self.can_chain and batch.sampled and (accepted is not None or plan.chain != LEFT_OUT):
            self._store(sampled, accepted, chains, batch.slots)
        return from_calls(plan.step, sampled, accepted, chains, scores)

    def _caught_up(self, plan: StepPlan) -> StepPlan:
        """A chained plan with its real tokens and positions, for a step without a CUDA graph. The host waits for the
        step before."""
        assert self.graphs is not None
        last, shifts, drafts = (t.tolist() for t in (self.last_tokens, self.graphs.shifts, self.graphs.draft_buffer))
        work = []
        for w in plan.work:
            if w.chained:
                shift = shifts[w.slot]
                tokens = (last[w.slot], *drafts[w.slot][: w.drafts])
                index = w.output_index + shift
                w = replace(w, start=w.start + shift, output_index=index, left=w.left - shift, tokens=tokens)
            work.append(w)
        return replace(plan, work=tuple(work))

    def _store(self, sampled: Sampled, accepted: Accepted | None, chains: Drafts | None, slots: Tensor) -> None:
        """Stores each request's last token, number of accepted drafts and draft chain by slot, for a chained step."""
        assert self.graphs is not None
        tokens, lengths = sampled.tokens, None
        if accepted is not None:
            lengths = accepted.lengths
            counts = np.array([w.drafts + 1 for w in sampled.work], np.int64)
            firsts = sampler.on_device(np.cumsum(counts) - counts, tokens.device)
            tokens = tokens[firsts + (lengths - 1).clamp_min(0)]
        self.graphs.store(slots, tokens, lengths, chains)

    def _draft(self, drafter: Drafter, start: Start, length: int, min_confidence: float) -> Drafts:
        if self.graphs is None or self.graphs.broken is not None or len(start.positions) > MAX_REQUESTS:
            return drafter.draft(start, length, min_confidence)
        return self.graphs.draft(start, length)

    def _replay(self, plan: StepPlan) -> Readout | None:
        """Runs the step as CUDA graphs; None if its size cannot be captured on this machine, or if the host samples a
        chained step."""
        assert self.graphs is not None
        if self.needs_no_host(plan):
            arriving = self.graphs.run(plan)
            return None if arriving is None else from_graph(plan, arriving)
        if any(w.chained for w in plan.work):
            return None  # the host samples, so it needs the real output indices: see `_caught_up`
        run = self.graphs.forward(plan)
        if run is None:
            return None
        sampled = self._sample(run.logits, plan.work, host=plan.host)
        arriving = self.graphs.finish(run, plan, sampled.checked, sampled.cut)
        self._record_kept(sampled, arriving.lengths if arriving.each > 1 else None)
        return from_graph(plan, arriving, sampled)

    def _whole_logits(self, hidden: Tensor) -> Tensor:
        return self._vocabulary.whole(self.model.logits(hidden))

    def _sample(self, logits: Tensor, work: tuple[Work, ...], *, host: bool) -> Sampled:
        """Samples a token for each row of `logits` [R, V]: the rows of `work` in order, V this rank's columns of the
        vocabulary or all of them. `host`: a request has a constraint, and only rank 0 has the grammar."""
        wanted, vocabulary = samples(work), self._vocabulary
        if host or any(w.params.logprobs is not None or self.adjuster.wanted(w) for w in wanted):
            logits, vocabulary = self._vocabulary.whole(logits), ONE_RANK
        adjusted = self.adjuster.adjust(logits, wanted)
        if host and self.group.ranks > 1:
            return self._sample_on_rank_0(logits, adjusted, work)
        return self._choose(logits, adjusted, work, vocabulary)

    def _sample_on_rank_0(self, logits: Tensor, adjusted: Tensor, work: tuple[Work, ...]) -> Sampled:
        """As `_choose`; the other ranks get what rank 0 chose."""
        rows, device = len(logits), logits.device
        count = 2 * rows + len(work)
        # A whole number of 16 bytes, as the exchange over peer memory needs.
        sent = torch.empty(1, count + count % 2, dtype=torch.int64, device=device)
        sampled = None
        if self.group.slicing.rank == 0:
            sampled = self._choose(logits, adjusted, work, ONE_RANK)
            cut = np.array([sampled.cut.get(i, w.drafts) for i, w in enumerate(work)], np.int64)
            torch.cat([sampled.tokens, sampled.checked, sampler.on_device(cut, device)], out=sent[0, :count])
        chosen = exchanged(self.group, sent)[0, :count]
        if sampled is not None:
            return sampled
        tokens, checked, kept = chosen.split([rows, rows, len(work)])
        drafted = any(w.drafts for w in work)  # without drafts `kept` is not needed, so the host need not wait for it
        return Sampled(work, tokens, checked, dict(enumerate(kept.tolist())) if drafted else {})

    def _choose(self, logits: Tensor, adjusted: Tensor, work: tuple[Work, ...], vocabulary: Vocabulary) -> Sampled:
        """Masks `adjusted` by the requests' constraints and samples from it; `logits` are the model's own."""
        wanted = samples(work)
        adjusted, cut = self.grammars.mask(adjusted, work)
        chosen = sampler.sample_tokens(adjusted, wanted, vocabulary)
        if adjusted is not logits:  # a mask may hide logits that are not finite
            chosen = torch.where(sampler.finite(logits), chosen, FAILED)
        tokens = self.grammars.settle(chosen.clamp_min(0), work)
        if self._declared is not None:
            tokens, cut = self._declared.rows(tokens, work, cut)
        refused = self.grammars.refusals(work)
        checked = torch.where(chosen < 0, FAILED, tokens)
        return Sampled(work, tokens, checked, cut, sampler.token_logprobs(logits, tokens, wanted), refused)

    def _accept(self, sampled: Sampled, slots: Tensor) -> Accepted | None:
        """How many of the sampled tokens each request gets; None if no request has drafts, so that each gets one.
        `slots` [S] int64: the requests' rows of the last-token buffer."""
        if not any(w.drafts for w in sampled.work):
            self._record_kept(sampled, None)
            # `tokens`, not `checked`: FAILED in that buffer would be read as PENDING.
            self.last_tokens[slots] = sampled.tokens
            return None
        allowed = [w.draft_tokens[: sampled.cut.get(i, w.drafts)] for i, w in enumerate(sampled.work)]
        accepted = accept(sampled.checked, [w.drafts for w in sampled.work], allowed, sampler.on_device)
        self._record_kept(sampled, accepted.lengths)
        return accepted

    def _record_kept(self, sampled: Sampled, lengths: Tensor | None) -> None:
        """Passes the tokens that each request got to its constraint and to the penalties' token counts: the first
        `lengths` [S] of its sampled tokens; None: its one token."""
        self.grammars.follow(sampled.tokens, lengths, sampled.work)
        if self.adjuster.counting:
            drafts = [w.drafts for w in sampled.work]
            kept = None if lengths is None else rows_kept(lengths, drafts, sampler.on_device)
            self.adjuster.count(sampled.tokens, kept)


def compute_thread(threads: int | None, place: Place) -> ThreadPoolExecutor:
    """The one thread on which an engine runs torch's ops, loading included. A second one would get its own OpenMP team:
    with more OpenMP threads than cores, libgomp lets idle workers sleep instead of spin, and every parallel region pays
    for waking them. On two cores that halves the decode speed."""
    return ThreadPoolExecutor(1, "perilune-compute", initializer=_set_threads, initargs=(threads, place))


def _set_threads(threads: int | None, place: Place) -> None:
    # Runs on the worker: OpenMP's thread count, CPU affinity and the current GPU are settings of one thread.
    if place.cores:
        os.sched_setaffinity(0, place.cores)
        threads = min(threads or len(place.cores), len(place.cores))
    if threads is not None:
        torch.set_num_threads(threads)
    if place.gpu is not None:
        torch.cuda.set_device(place.gpu)
