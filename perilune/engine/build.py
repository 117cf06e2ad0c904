"""Builds the parts of an engine from a model directory and a configuration: weights, memory, scheduler, runner."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from perilune.core.config import EngineConfig
from perilune.core.messages import EngineInfo
from perilune.engine.kv_tiers import open_tiers
from perilune.engine.masks import Grammars
from perilune.engine.resolve import Choices, resolve_device, resolve_draft, resolve_dtypes, resolve_sizes
from perilune.engine.runner import Runner, compute_thread
from perilune.engine.scheduler import Scheduler
from perilune.grammar.matcher import Vocabulary, vocabulary
from perilune.kv.pages import Pages
from perilune.kv.transfer import Transfer
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.fp8_latents import to_fp8_latents
from perilune.loading.load import load
from perilune.model.config import KimiConfig
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Weights
from perilune.ops.harness import build as ops_build
from perilune.ops.harness import registry
from perilune.ops.layouts import latent_cache
from perilune.speculation.drafter import Drafter
from perilune.speculation.drafting import Speculator
from perilune.speculation.eagle3 import load_drafter
from perilune.speculation.rejection_log import RejectedLog
from perilune.speculation.step_cost import Costs
from perilune.text.tokenizer import Tokenizer


class Source(Protocol):
    """Where an engine's configuration and weights come from: loading.load.load, or a function with its signature."""

    def __call__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, progress: bool
    ) -> tuple[KimiConfig, Weights]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of. `config` has no "auto" and no None left where a value is needed."""

    config: EngineConfig
    choices: Choices
    scheduler: Scheduler
    runner: Runner
    rejected: RejectedLog | None
    transfer: Transfer | None

    def info(self, name: str) -> EngineInfo:
        config, model = self.config, self.runner.model.config
        assert config.kv_blocks and config.block_size and config.max_model_len
        return EngineInfo(
            model=name,
            max_model_len=config.max_model_len,
            vocab_size=model.vocab_size,
            stop_token_ids=model.eos_token_ids,
            num_blocks=config.kv_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            choices=tuple(self.choices.made),
        )


def build(model_dir: Path, config: EngineConfig, *, progress: bool, source: Source = load) -> Parts:
    """Raises ConfigError and CheckpointError. `source` brings the weights."""
    registry.check_overrides(config.ops)
    choices = Choices([])
    device = resolve_device(config, choices)
    ops_build.check_nvcc(device)
    config, dtype, kv_dtype = resolve_dtypes(config, device, choices)
    config, drafter_dir = resolve_draft(config, model_dir, device, choices)
    rejected = _rejected_log(config, choices)
    worker = compute_thread(config.threads)
    weights = partial(source, model_dir, dtype=dtype, device=device, progress=progress)
    try:
        config, model, pages, drafter = worker.submit(
            _allocate, weights, config, choices, device, kv_dtype, drafter_dir
        ).result()  # fmt: skip
    except BaseException:
        worker.shutdown(cancel_futures=True)
        raise
    assert config.kv_blocks and config.block_size and config.max_model_len and config.max_step_tokens
    tiers = transfer = None
    if config.kv_host_gb is not None or config.kv_disk is not None:
        try:
            tiers, transfer = worker.submit(open_tiers, config, choices, model.weights, pages, drafter).result()
        except BaseException:
            worker.shutdown(cancel_futures=True)
            raise
    scheduler = Scheduler(
        num_blocks=config.kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_model_len=config.max_model_len,
        prefix_cache=config.prefix_cache,
        tiers=tiers,
    )
    runner = Runner(model, pages, config, Grammars(partial(_vocabulary, model_dir)), worker, drafter)
    return Parts(config, choices, scheduler, runner, rejected, transfer)


def speculator(
    draft: str, tokens: int | None, drafter: Drafter | None, costs: Costs | None, *, shared: bool
) -> Speculator:
    """As Engine.use_drafts; `costs` of steps are needed if `tokens` is None."""
    return Speculator(
        suffix=draft in ("suffix", "hybrid"),
        longest=0 if drafter is None else drafter.longest,
        fixed=tokens,
        costs=costs if tokens is None else None,
        shared=shared,
    )


def _rejected_log(config: EngineConfig, choices: Choices) -> RejectedLog | None:
    if config.log_rejected is None:
        return None
    directory, share = Path(config.log_rejected).expanduser(), config.log_rejected_share
    choices.note("log_rejected", str(directory), f"{share:.0%} of requests, at most {config.log_rejected_mb} MB")
    return RejectedLog(directory, share=share, limit_bytes=config.log_rejected_mb << 20)


def _vocabulary(model_dir: Path) -> Vocabulary:
    return vocabulary(Tokenizer.from_directory(model_dir))


def _allocate(
    source: Callable[[], tuple[KimiConfig, Weights]],
    config: EngineConfig,
    choices: Choices,
    device: torch.device,
    kv_dtype: torch.dtype,
    drafter_dir: Path | None,
) -> tuple[EngineConfig, KimiK2, Pages, Drafter | None]:
    """Loads the weights, sizes the KV cache by the memory that is left, and allocates it."""
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
