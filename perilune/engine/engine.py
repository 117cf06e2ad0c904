"""The engine: a scheduler that decides, a runner that computes, and the loop that keeps both busy.

One step, read top to bottom (`Engine.step`): plan step N+1 while step N runs, queue it, then wait for step N, commit
its tokens and hand them out. The plan is made one result early, so a request that turns out to be finished may be
computed once more for nothing; in exchange the device never waits for Python.
"""

import dataclasses
import random
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Delta, EngineInfo, EngineStats, Submit
from perilune.engine.client import room
from perilune.engine.grammar import Grammars, Session
from perilune.engine.resolve import Choices, resolve_device, resolve_dtypes, resolve_sizes
from perilune.engine.runner import Readout, Runner, compute_thread
from perilune.engine.scheduler import Scheduler
from perilune.kv.pages import Pages
from perilune.model.config import KimiConfig
from perilune.model.fp8_rest import to_fp8
from perilune.model.kimi_k2 import KimiK2
from perilune.model.load import load
from perilune.model.weights import Weights
from perilune.ops import registry
from perilune.text.matcher import Vocabulary, vocabulary
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
        config, dtype, kv_dtype = resolve_dtypes(config, device, choices)
        worker = compute_thread(config.threads)
        try:
            config, model, pages = worker.submit(
                _build,
                partial(source, model_dir, dtype=dtype, device=device, progress=progress),
                config,
                choices,
                device,
                kv_dtype,
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
        )
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
        self._seeds = random.Random(config.seed)
        self._running: Future[Readout] | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None or self.scheduler.has_work or bool(self._compiling)

    def submit(self, request: Submit) -> None:
        """Raises RequestError if the request can never run.

        A constrained one waits for its grammars aside; if they do not compile, a Delta says so.
        """
        request.params.check_ids(self.info.vocab_size)
        seed = self._seeds.getrandbits(63) if request.params.seed is None else request.params.seed
        if request.constraint is None:
            self.scheduler.submit(request, seed)
            return
        request.constraint.check_room(room(request.prompt, request.params, self.info))
        compiled = self._grammars.compile(request.constraint, request.prompt)
        self._compiling[request.rid] = (compiled, request, seed)

    def cancel(self, rid: int) -> None:
        self._compiling.pop(rid, None)
        self.scheduler.cancel(rid)
        self._grammars.drop(rid)

    def step(self) -> list[Delta]:
        """Queue step N+1, then bring in step N."""
        deltas = self._take_compiled() if self._compiling else []
        plan = self.scheduler.plan()
        queued = self.runner.launch(plan) if plan is not None else None
        running, self._running = self._running, queued
        if running is not None:
            landed = self.scheduler.commit(running.result().result())
            for delta in landed:
                if delta.finish_reason is not None:
                    self._grammars.drop(delta.rid)
            deltas += landed
        return deltas

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
                self.scheduler.submit(request, seed)
            except (RequestError, EngineError) as e:
                deltas.append(Delta(rid, finish_reason="error", error=str(e)))
            else:
                self._grammars.open(rid, session)
        return deltas

    def stats(self) -> EngineStats:
        return dataclasses.replace(self.scheduler.stats(), step_seconds=self.runner.busy_seconds)

    def close(self) -> None:
        """Waits for the step in flight and drops the weights and the cache."""
        self.runner.close()
        self._grammars.close()
        del self.runner, self.scheduler


def _vocabulary(model_dir: Path) -> Vocabulary:
    return vocabulary(Tokenizer.from_directory(model_dir))


def _build(
    source: Callable[[], tuple[KimiConfig, Weights]],
    config: EngineConfig,
    choices: Choices,
    device: torch.device,
    kv_dtype: torch.dtype,
) -> tuple[EngineConfig, KimiK2, Pages]:
    """Loads the weights, sizes the rest by the memory that is left, and allocates it."""
    model_config, weights = source()
    if config.rest_dtype == "fp8":
        loss = to_fp8(weights)
        choices.note(
            "rest_dtype",
            "fp8",
            f"{loss.matrices} matrices, {loss.saved_bytes / 1e9:.2f} GB saved, SQNR {loss.sqnr_db:.1f} dB, "
            f"worst {loss.worst_db:.1f} dB ({loss.worst})",
        )
    config = resolve_sizes(config, model_config, device, kv_dtype, choices)
    assert config.kv_blocks and config.block_size and config.max_model_len
    model = KimiK2(model_config, weights, max_positions=config.max_model_len, qk_norm_eps=config.qk_norm_eps)
    pages = Pages.allocate(
        model_config.num_hidden_layers,
        config.kv_blocks,
        config.block_size,
        model_config.kv_lora_rank + model_config.qk_rope_head_dim,
        kv_dtype,
        device,
    )
    return config, model, pages
