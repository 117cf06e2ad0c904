"""The engine: a scheduler that decides, a runner that computes, and the loop that keeps both busy.

One step, read top to bottom (`Engine.step`): plan step N+1 while step N runs, queue it, then wait for step N, commit
its tokens and hand them out. The plan is made one result early, so a request that turns out to be finished may be
computed once more for nothing; in exchange the device never waits for Python.
"""

import dataclasses
import random
from concurrent.futures import Future
from pathlib import Path

import torch

from perilune.core.config import EngineConfig
from perilune.core.messages import Delta, EngineInfo, EngineStats, Submit
from perilune.core.plan import StepResult
from perilune.engine.resolve import Choices, resolve_device, resolve_dtypes, resolve_sizes
from perilune.engine.runner import Runner, compute_thread
from perilune.engine.scheduler import Scheduler
from perilune.kv.pages import Pages
from perilune.model.kimi_k2 import KimiK2
from perilune.model.load import load
from perilune.ops import registry


class Engine:
    """A loaded model and everything in flight on it. Not thread-safe: one owner calls submit, cancel and step."""

    def __init__(self, model_dir: Path, config: EngineConfig, *, progress: bool = False):
        registry.check_overrides(config.ops)
        choices = Choices([])
        device = resolve_device(config, choices)
        config, dtype, kv_dtype = resolve_dtypes(config, device, choices)
        worker = compute_thread(config.threads)
        try:
            config, model, pages = worker.submit(
                _build, model_dir, config, choices, device, dtype, kv_dtype, progress
            ).result()
        except BaseException:
            worker.shutdown(cancel_futures=True)
            raise
        assert config.kv_blocks and config.max_model_len and config.max_step_tokens
        self.config = config
        self.scheduler = Scheduler(
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_step_tokens=config.max_step_tokens,
            max_model_len=config.max_model_len,
            prefix_cache=config.prefix_cache,
        )
        self.runner = Runner(
            model,
            pages,
            max_num_seqs=config.max_num_seqs,
            absorb_limit=config.absorb_limit,
            overrides=config.ops,
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
        self._running: Future[StepResult] | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None or self.scheduler.has_work

    def submit(self, request: Submit) -> None:
        """Raises RequestError if the request can never run."""
        seed = request.params.seed
        self.scheduler.submit(request, self._seeds.getrandbits(63) if seed is None else seed)

    def cancel(self, rid: int) -> None:
        self.scheduler.cancel(rid)

    def step(self) -> list[Delta]:
        """Queue step N+1, then bring in step N."""
        plan = self.scheduler.plan()
        queued = self.runner.launch(plan) if plan is not None else None
        running, self._running = self._running, queued
        return self.scheduler.commit(running.result()) if running is not None else []

    def stats(self) -> EngineStats:
        return dataclasses.replace(self.scheduler.stats(), step_seconds=self.runner.busy_seconds)

    def close(self) -> None:
        """Waits for the step in flight and drops the weights and the cache."""
        self.runner.close()
        del self.runner, self.scheduler


def _build(
    model_dir: Path,
    config: EngineConfig,
    choices: Choices,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    progress: bool,
) -> tuple[EngineConfig, KimiK2, Pages]:
    """Loads the weights, sizes the rest by the memory that is left, and allocates it."""
    model_config, weights = load(model_dir, dtype=dtype, device=device, progress=progress)
    config = resolve_sizes(config, model_config, device, kv_dtype, choices)
    assert config.kv_blocks and config.max_model_len
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
