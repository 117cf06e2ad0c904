"""The engine: a scheduler that decides, a runner that computes, and the loop that keeps both busy.

One step, read top to bottom (`Engine.step`): plan step N+1 while step N runs, queue it, then wait for step N, commit
its tokens and hand them out. The plan is made one result early, so a request that turns out to be finished may be
computed once more for nothing; in exchange the device never waits for Python.

Drafts (speculation/drafting.py) that continue known text turn that around: where they promise more than the overlap is
worth, step N lands first and step N+1 is planned with guesses of what it will draw. A draft model's chain stays on the
device, so where all drafts are its own nothing waits: step N+1 is planned behind N, however many tokens N will bring.
"""

import dataclasses
import random
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Delta, EngineInfo, EngineStats, Submit
from perilune.core.step import LEFT_OUT, PENDING, StepPlan
from perilune.engine.client import room
from perilune.engine.cost_table import measure_costs
from perilune.engine.masks import Grammars, Session
from perilune.engine.resolve import Choices, resolve_device, resolve_draft, resolve_dtypes, resolve_sizes
from perilune.engine.runner import Readout, Runner, compute_thread
from perilune.engine.scheduler import Scheduler
from perilune.grammar.matcher import Vocabulary, vocabulary
from perilune.kv.pages import Pages
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.fp8_latents import to_fp8_latents
from perilune.loading.load import load
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Weights
from perilune.ops.harness import build, registry
from perilune.ops.layouts import latent_cache
from perilune.speculation.drafter import Drafter
from perilune.speculation.drafting import Speculator
from perilune.speculation.eagle3 import load_drafter
from perilune.speculation.rejection_log import RejectedLog
from perilune.speculation.step_cost import Costs
from perilune.text.tokenizer import Tokenizer

COMPILE_WAIT = 0.05  # seconds a step without anything else to do waits for a grammar


class Source(Protocol):
    """Where an engine's configuration and weights come from: model.load.load, or something with its signature."""

    def __call__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, progress: bool
    ) -> tuple[KimiConfig, Weights]: ...


class Engine:
    """A loaded model and everything in flight on it. Not thread-safe: one owner calls submit, cancel and step."""

    def __init__(self, model_dir: Path, config: EngineConfig, *, progress: bool = False, source: Source = load):
        """`source` brings the weights; `model_dir` then only gives the model its name."""
        registry.check_overrides(config.ops)
        choices = Choices([])
        device = resolve_device(config, choices)
        build.check_nvcc(device)
        config, dtype, kv_dtype = resolve_dtypes(config, device, choices)
        config, drafter_dir = resolve_draft(config, model_dir, device, choices)
        self._rejected = _rejected_log(config, choices)
        worker = compute_thread(config.threads)
        try:
            config, model, pages, drafter = worker.submit(
                _build,
                partial(source, model_dir, dtype=dtype, device=device, progress=progress),
                config,
                choices,
                device,
                kv_dtype,
                drafter_dir,
            ).result()
        except BaseException:
            worker.shutdown(cancel_futures=True)
            raise
        assert config.kv_blocks and config.block_size and config.max_model_len and config.max_step_tokens
        self.config = config
        self.scheduler = Scheduler(
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_model_len=config.max_model_len,
            prefix_cache=config.prefix_cache,
        )
        self._grammars = Grammars(partial(_vocabulary, model_dir))
        self._compiling: dict[int, tuple[Future[Session], Submit, int]] = {}  # by rid, not in the scheduler yet
        self.runner = Runner(
            model,
            pages,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            absorb_limit=config.absorb_limit,
            overrides=config.ops,
            grammars=self._grammars,
            worker=worker,
            drafter=drafter,
        )
        self._seeds = random.Random(config.seed)
        self._running: tuple[StepPlan, Future[Readout]] | None = None
        self._landed_at: float | None = None  # when the last step had, unless nothing followed it
        self._drafter = drafter
        self.drafting_seconds = 0.0  # of the planning thread; what a draft model computes is part of the steps
        self._costs: dict[bool, Costs] = {}  # by whether a draft model follows
        self.speculator: Speculator | None = None
        self.use_drafts(config.draft, config.draft_tokens, shared=config.prefix_cache)
        if self._costs:
            choices.note("draft_tokens", "as many as pay", str(self.costs))
        self.info = EngineInfo(
            model=model_dir.name,
            max_model_len=config.max_model_len,
            vocab_size=model.config.vocab_size,
            stop_token_ids=model.config.eos_token_ids,
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            choices=tuple(choices.made),
        )

    @property
    def busy(self) -> bool:
        return self._running is not None or self.scheduler.has_work or bool(self._compiling)

    def submit(self, request: Submit) -> None:
        """Raises RequestError if the request can never run.

        A constrained one waits for its grammars aside; if they do not compile, a Delta says so.
        """
        if request.params.bad_words:
            raise RequestError("bad_words need a tokenizer: give bad_word_ids", param="bad_words")
        request.params.check_ids(self.info.vocab_size)
        seed = self._seeds.getrandbits(63) if request.params.seed is None else request.params.seed
        if request.constraint is None:
            self._schedule(request, seed)
            if (session := self._grammars.unformed(request.params, self.info.vocab_size)) is not None:
                self._grammars.open(request.rid, session)
            return
        request.constraint.check_room(room(request.prompt, request.params, self.info))
        compiled = self._grammars.compile(request)
        self._compiling[request.rid] = (compiled, request, seed)

    def cancel(self, rid: int) -> None:
        self._compiling.pop(rid, None)
        self.scheduler.cancel(rid)
        self._forget(rid)

    def step(self) -> list[Delta]:
        """Queue step N+1, then bring in step N; the other way round where N+1 shall have drafts."""
        deltas = self._take_compiled() if self._compiling else []
        running, self._running = self._running, None
        behind = None if running is None else self._behind(running[0])
        first = behind is None and running is not None and self._lands_first(running[0])
        if running is not None and first:
            deltas += self._land(*running)
        self._running = self._launch(behind)
        if running is not None and not first:
            deltas += self._land(*running)
        if self._running is None:
            self._landed_at = None
        return deltas

    @property
    def _asked(self) -> Speculator | None:
        """Who has a say in the step at hand, if anybody: where drafting does not pay, steps are those of an engine
        without."""
        return None if self.speculator is None or self.speculator.paused else self.speculator

    def _behind(self, running: StepPlan) -> StepPlan | None:
        """The step after the one that is running, if it can go on from there without the host's having seen it."""
        speculator = self._asked
        if speculator is None or self._rejected is not None:  # whose log has what was drafted
            return None
        if not self.runner.trails or (drafts := speculator.chained(running)) is None:
            return None
        return self.scheduler.plan_behind(drafts) if self.runner.free(running) else None

    def _lands_first(self, running: StepPlan) -> bool:
        """Whether to wait for the step that is running before the next one is planned."""
        if (speculator := self._asked) is None:
            return False
        # Those with drafts could not be planned now: the batch would fall apart into two that take turns.
        return any(w.drafts for w in running.work) or speculator.worth_waiting(running)

    def _launch(self, behind: StepPlan | None) -> "tuple[StepPlan, Future[Readout]] | None":
        speculator = self._asked
        plan = behind or self.scheduler.plan(LEFT_OUT if speculator is None else 0)
        if plan is None:
            return None
        if speculator is not None:
            begin = time.perf_counter()
            if behind is None and (drafts := speculator.propose(plan)):
                plan = self.scheduler.add_drafts(plan, drafts)
            plan = dataclasses.replace(plan, chain=speculator.chain_length(plan), hope=speculator.min_confidence)
            self.drafting_seconds += time.perf_counter() - begin
        queued = self.runner.launch(plan)
        if speculator is not None:
            speculator.maintain()
        if self._rejected is not None:
            self._rejected.tidy()
        return plan, queued

    def _land(self, plan: StepPlan, queued: "Future[Readout]") -> list[Delta]:
        result = queued.result().result()
        now, before = time.perf_counter(), self._landed_at
        self._landed_at = now
        landed = self.scheduler.commit(result)
        if (speculator := self._asked) is not None:
            speculator.observe(landed, result.outputs)
            if before is not None:
                speculator.record_time(plan, now - before, not any(PENDING in w.tokens for w in plan.work))
        elif self.speculator is not None:
            self.speculator.record_paused(len(plan.work), landed)
        if self._rejected is not None:
            self._rejected.observe(plan, landed)
        for i, delta in enumerate(landed):
            if delta.finish_reason == "stop" and self._grammars.closed(delta.rid):
                landed[i] = dataclasses.replace(delta, finish_reason="length", closed_by_grammar=True)
            if delta.finish_reason is not None:
                self._forget(delta.rid)
        return landed

    def _schedule(self, request: Submit, seed: int) -> None:
        self.scheduler.submit(request, seed)
        if self.speculator is not None:
            self.speculator.open(request.rid, request.prompt)
        if self._rejected is not None:
            self._rejected.open(request.rid, request.prompt, greedy=request.params.greedy)

    def _forget(self, rid: int) -> None:
        """The request is not the scheduler's any more."""
        self._grammars.drop(rid)
        if self.speculator is not None:
            self.speculator.drop(rid)
        if self._rejected is not None:
            self._rejected.drop(rid)

    def _take_compiled(self) -> list[Delta]:
        """Schedules the requests whose grammars are ready; those that failed get their last Delta."""
        if self._running is None and not self.scheduler.has_work:
            wait([compiled for compiled, _, _ in self._compiling.values()], COMPILE_WAIT, FIRST_COMPLETED)
        deltas = []
        for rid, (compiled, request, seed) in list(self._compiling.items()):
            if not compiled.done():
                continue
            del self._compiling[rid]
            try:
                session = compiled.result()
                self._schedule(request, seed)
            except (RequestError, EngineError) as e:
                deltas.append(Delta(rid, finish_reason="error", error=str(e)))
            else:
                self._grammars.open(rid, session)
        return deltas

    def use_drafts(self, draft: str, tokens: int | None, *, shared: bool) -> None:
        """From now on drafts are made so, by what is learned from here on; nothing may be in flight. Measures what
        steps cost if their number is to be chosen by it (`tokens` None).

        `shared`: what finished requests said may help others.
        """
        assert not self.busy, "requests are in flight"
        modelled = draft in ("eagle3", "hybrid")
        self.runner.follow(self._drafter if modelled else None)
        self.speculator = None
        if draft == "off":
            return
        if tokens is None and modelled not in self._costs:
            assert not self.scheduler.stats().blocks_cached, "what the cache holds would be overwritten"
            self._costs[modelled] = measure_costs(self.runner, self.config)
        self.speculator = Speculator(
            suffix=draft in ("suffix", "hybrid"),
            longest=self._drafter.longest if modelled and self._drafter is not None else 0,
            fixed=tokens,
            costs=self._costs[modelled] if tokens is None else None,
            shared=shared,
        )

    @property
    def on_gpu(self) -> bool:
        return self.runner.graphs is not None

    @property
    def costs(self) -> Costs:
        """What steps cost, as measured last."""
        return next(reversed(self._costs.values()))

    def stats(self) -> EngineStats:
        graphs = self.runner.graphs
        stats = dataclasses.replace(
            self.scheduler.stats(),
            step_seconds=self.runner.busy_seconds,
            graphs=0 if graphs is None else len(graphs),
            graph_bytes=0 if graphs is None else graphs.nbytes,
        )
        return stats if self.speculator is None else self.speculator.report(stats)

    def close(self) -> None:
        """Waits for the step in flight and drops the weights and the cache."""
        self.runner.close()
        self._grammars.close()
        if self._rejected is not None:
            self._rejected.close()
        del self.runner, self.scheduler, self._drafter


def _rejected_log(config: EngineConfig, choices: Choices) -> RejectedLog | None:
    if config.log_rejected is None:
        return None
    directory, share = Path(config.log_rejected).expanduser(), config.log_rejected_share
    choices.note("log_rejected", str(directory), f"{share:.0%} of requests, at most {config.log_rejected_mb} MB")
    return RejectedLog(directory, share=share, limit_bytes=config.log_rejected_mb << 20)


def _vocabulary(model_dir: Path) -> Vocabulary:
    return vocabulary(Tokenizer.from_directory(model_dir))


def _build(
    source: Callable[[], tuple[KimiConfig, Weights]],
    config: EngineConfig,
    choices: Choices,
    device: torch.device,
    kv_dtype: torch.dtype,
    drafter_dir: Path | None,
) -> tuple[EngineConfig, KimiK2, Pages, Drafter | None]:
    """Loads the weights, sizes the rest by the memory that is left, and allocates it."""
    model_config, weights = source()
    if config.kv_dtype == "fp8":
        to_fp8_latents(weights)
    if config.rest_dtype == "fp8":
        loss = to_fp8(weights)
        choices.note(
            "rest_dtype",
            "fp8",
            f"{loss.matrices} matrices, {loss.saved_bytes / 1e9:.2f} GB saved, SQNR {loss.sqnr_db:.1f} dB, "
            f"worst {loss.worst_db:.1f} dB ({loss.worst})",
        )
    dtype = getattr(torch, config.dtype)
    drafter = None
    if drafter_dir is not None:
        fp8 = config.draft_dtype == "fp8"
        drafter = load_drafter(drafter_dir, model_config, weights, dtype=dtype, device=device, fp8=fp8)
    config = resolve_sizes(config, model_config, device, kv_dtype, choices, drafter)
    assert config.kv_blocks and config.block_size and config.max_model_len
    if drafter is not None:
        drafter.allocate(
            config.kv_blocks,
            config.block_size,
            dtype,
            device,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
        )
    model = KimiK2(model_config, weights, max_positions=config.max_model_len, qk_norm_eps=config.qk_norm_eps)
    pages = Pages.allocate(
        model_config.num_hidden_layers,
        config.kv_blocks,
        config.block_size,
        latent_cache.width(model_config.kv_lora_rank, model_config.qk_rope_head_dim, kv_dtype),
        kv_dtype,
        device,
    )
    return config, model, pages, drafter
