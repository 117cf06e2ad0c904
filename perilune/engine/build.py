"""Builds the parts of an engine from a model directory and a configuration: weights, memory, scheduler, runner."""

import contextlib
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError
from perilune.core.files import expanded
from perilune.core.messages import EngineInfo
from perilune.dist.group import Group, join, least
from perilune.dist.slicing import Slicing
from perilune.engine import exclusive_kernels
from perilune.engine.fit import fewest_gpus, fitted
from perilune.engine.kv_tiers.open import open_tiers, require_room
from perilune.engine.kv_tiers.ranked import RankedTransfer
from perilune.engine.masks import Grammars
from perilune.engine.ranks import Place, Progress, Ranks, places
from perilune.engine.resolve import (
    Choices,
    free_on,
    grow_segments,
    require_positions,
    resolve_declared,
    resolve_device,
    resolve_draft,
    resolve_dtypes,
    resolve_sizes,
)
from perilune.engine.runner import Runner, compute_thread
from perilune.engine.scheduler import Scheduler
from perilune.engine.step_times.pacing import Pacer
from perilune.engine.vision.open import bytes_beside, open_encoder, open_tower, sees
from perilune.engine.vision.tower import Tower
from perilune.formats import synthetic
from perilune.grammar.matcher import Vocabulary, vocabulary
from perilune.kv.pages import Pages
from perilune.kv.transfer import Transfer
from perilune.loading.cuts import own_cuts
from perilune.loading.fp8_dense import to_fp8
from perilune.loading.fp8_latents import to_fp8_latents
from perilune.loading.load import load
from perilune.loading.progress import Bar, Report
from perilune.loading.rounding import Rounding
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import DRAFTER
from perilune.model.kimi_k2 import KimiK2
from perilune.model.weights import Weights
from perilune.ops.exchange import exchange_add_rmsnorm as exchange
from perilune.ops.harness import build as ops_build
from perilune.ops.harness import registry
from perilune.ops.layouts import latent_cache
from perilune.speculation.drafter import Drafter
from perilune.speculation.drafting import Speculator
from perilune.speculation.eagle3 import load_drafter
from perilune.speculation.rejection_log import RejectedLog
from perilune.speculation.step_cost import Costs
from perilune.text.tokenizer import Tokenizer

log = logging.getLogger("perilune.engine")


class Source(Protocol):
    """Where an engine's configuration and weights come from: loading.load.load, or a function with its signature."""

    def __call__(
        self, path: Path, *, dtype: torch.dtype, device: torch.device, progress: bool | Report, slicing: Slicing
    ) -> tuple[KimiConfig, Weights]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine. `config` has no "auto", and no None where a value is needed."""

    config: EngineConfig
    choices: Choices
    scheduler: Scheduler
    runner: Runner
    rejected: RejectedLog | None
    ranks: Ranks | None
    synthetic: str  # as in EngineInfo
    transfer: Transfer | RankedTransfer | None

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
            kv_shards=self.runner.pages.shards,
            max_num_seqs=config.max_num_seqs,
            choices=tuple(self.choices.made),
            synthetic=self.synthetic,
            declared_acceptance=config.declared_acceptance,
            tp=self.runner.group.ranks,
            ep=config.ep,
            exchange=self.runner.group.name,
            media_pad=None if self.scheduler.encoder is None else self.scheduler.encoder.pad,
            pids=(os.getpid(), *(() if self.ranks is None else self.ranks.pids)),
        )


def build(
    model_dir: Path,
    config: EngineConfig,
    *,
    progress: bool | Report,
    source: Source = load,
    place: Place | None = None,
    loaded: Callable[[], None] = lambda: None,
    owns_process: bool = False,
) -> Parts:
    """The parts of rank 0, which starts the other ranks; with `place`, the parts of another rank, which calls `loaded`
    when it has its weights. `source` loads the weights of rank 0; the other ranks use `load`. `progress` as in `load`;
    one bar counts the bytes of all ranks. `owns_process` as in Engine. Raises ConfigError, CheckpointError."""
    registry.check_overrides(config.ops)
    choices = Choices([])
    mark = synthetic.read(model_dir)
    if mark is not None:
        choices.note("weights", "random", str(mark))
    elif config.declared_acceptance is not None:
        raise ConfigError("declared_acceptance is for random weights, real ones have their own: leave it out")
    device = resolve_device(config, choices)
    if config.gpus is not None and device.type == "cpu":
        raise ConfigError(f"gpus={config.gpus} names GPUs, but this engine runs on the CPU: leave it out")
    ranks = None
    if place is None:
        ops_build.check_nvcc(device)
        if source is load:
            require_positions(config, KimiConfig.from_directory(model_dir))
        ops_build.compile_ahead(device)
        if config.tp == "auto":
            config = _fewest(model_dir, config, device, choices)
        require_room(config)
        if source is load and config.ranks > 1:  # checked here, before the other ranks' processes start
            own_cuts(KimiConfig.from_directory(model_dir), Slicing(0, config.ranks, config.ep > 1), model_dir)
        if source is load:
            config = fitted(model_dir, config, device, choices, show=progress is True or owns_process)
    with contextlib.ExitStack() as shown:
        bar = None
        if place is None:
            if progress is True and config.ranks > 1 and mark is None:
                bar = shown.enter_context(Bar(f"{model_dir.name} on {config.ranks} ranks")).report
                progress = partial(bar, 0)
            place, ranks = _start_ranks(model_dir, config, device, owns_process, bar)
        if place.gpu is not None:
            torch.cuda.set_device(place.gpu)
        if ranks is not None:
            wait_loaded = ranks.wait_loaded

            def loaded() -> None:
                wait_loaded()
                shown.close()

        try:
            return _build(
                _Task(model_dir, config, choices, device, place, ranks, "" if mark is None else str(mark)),
                progress,
                source,
                loaded,
            )
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise


@dataclass(frozen=True, slots=True)
class _Task:
    model_dir: Path
    config: EngineConfig
    choices: Choices
    device: torch.device
    place: Place
    ranks: Ranks | None
    synthetic: str  # as in EngineInfo


def _fewest(model_dir: Path, config: EngineConfig, device: torch.device, choices: Choices) -> EngineConfig:
    """The config with `tp` set to the fewest ranks that hold the model."""
    count, why = config.ep, "one process computes a CPU's work fastest"
    if device.type == "cuda":
        free = [float(free_on(n)) for n in _gpus(config)]
        count, why = fewest_gpus(model_dir, config, device, free), f"the fewest of {len(free)} GPUs that hold the model"
    choices.note("tp", count, why)
    return replace(config, tp=count)


def _gpus(config: EngineConfig) -> list[int]:
    """Indices of the GPUs that ranks may use."""
    count = torch.cuda.device_count()
    gpus = list(range(count)) if config.gpus is None else [int(n) for n in config.gpus.split(",")]
    if beyond := [n for n in gpus if n >= count]:
        raise ConfigError(f"gpus names GPU {beyond[0]}, but this machine shows {count}, numbered from 0")
    return gpus


def _start_ranks(
    model_dir: Path, config: EngineConfig, device: torch.device, owns_process: bool, progress: Progress | None
) -> tuple[Place, Ranks | None]:
    gpus = None
    if device.type == "cuda" and (config.ranks > 1 or config.gpus is not None):
        gpus = _gpus(config)
        if config.gpus is not None and len(gpus) > config.ranks:
            log.warning("gpus=%s: %d are used, one for each rank: raise tp to use more", config.gpus, config.ranks)
    found = places(config, gpus)
    if config.ranks == 1:
        return found[0], None
    return found[0], Ranks(model_dir, config, found, owns_process=owns_process, progress=progress)


def _no_peers(task: _Task) -> str:
    """Why this rank cannot add partial outputs over peer memory; "" if no reason is known yet. The exchange over peer
    memory is used only if no rank has a reason."""
    if task.config.ops.get(exchange.NAME, exchange.KERNEL) != exchange.KERNEL:
        return f"{exchange.NAME} is set to {task.config.ops[exchange.NAME]}"
    if task.device.type == "cuda" and exclusive_kernels.taken(torch.device("cuda", torch.cuda.current_device())):
        return "another engine of this process runs on the GPU"
    gpus = [] if task.ranks is None else task.ranks.gpus
    for a, b in itertools.permutations(gpus, 2):
        if a != b and not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot read GPU {b}'s memory"
    return ""


def _build(task: _Task, progress: bool | Report, source: Source, loaded: Callable[[], None]) -> Parts:
    model_dir, config, choices, device = task.model_dir, task.config, task.choices, task.device
    config, dtype, kv_dtype = resolve_dtypes(config, device, choices)
    asked, (config, drafter_dir) = config.draft, resolve_draft(config, model_dir, device, choices)
    if asked == "auto" and drafter_dir is None and task.place.rank == 0 and (folder := model_dir / DRAFTER).is_dir():
        log.warning("%s has no config.json: no draft model is used; copy it again, or remove the folder", folder)
    if config.declared_acceptance is not None:
        config = resolve_declared(config, drafter_dir, choices)
    rejected = _rejected_log(config, choices) if task.place.rank == 0 else None
    worker = compute_thread(config.threads, task.place)
    slicing = task.place.slicing
    rounding = Rounding() if config.expert_scales == "compact" else None
    more: dict[str, Any] = {} if rounding is None else {"rounding": rounding}
    if source is load and config.rest_dtype == "fp8":
        more["apart"] = True
    weights = partial(source, model_dir, dtype=dtype, device=device, progress=progress, slicing=slicing, **more)

    def meet() -> Group:
        loaded()
        group = join(slicing, Path(task.place.meeting), device, shared=task.place.shared, no_peers=_no_peers(task))
        if group.ranks > 1:
            choices.note("exchange", group.name, f"how {group.ranks} ranks add their partial outputs")
        least(group, 0)  # a barrier: until every rank has joined, one may still read the rendezvous file
        if task.ranks is not None:
            task.ranks.joined(group)
        return group

    tower_dir = model_dir if source is load and sees(model_dir, config, choices) else None
    opened = None
    with contextlib.ExitStack() as failed:
        failed.callback(worker.shutdown, cancel_futures=True)
        config, model, pages, drafter, tower = worker.submit(
            _allocate, weights, config, choices, device, kv_dtype, drafter_dir, tower_dir, meet
        ).result()
        if rounding is not None and rounding.matrices:
            choices.note("expert_scales", "compact", f"made of the checkpoint's at load: {rounding}")
        if config.kv_host_gb is not None or config.kv_disk is not None:
            opened = worker.submit(open_tiers, config, choices, model, pages, drafter, task.ranks, tower).result()
            failed.callback(opened.transfer.close)
        encoder = None if tower is None else open_encoder(tower, config, choices)
        failed.pop_all()
    assert config.kv_blocks and config.block_size and config.max_model_len and config.max_step_tokens
    scheduler = Scheduler(
        num_blocks=config.kv_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_step_tokens=config.max_step_tokens,
        max_model_len=config.max_model_len,
        prefix_cache=config.prefix_cache,
        tiers=None if opened is None else opened.tiers,
        pacer=Pacer(config.decode_stretch, config.max_step_tokens, config.prompt_patience),
    )
    scheduler.encoder = encoder
    grammars = Grammars(partial(_vocabulary, model_dir))
    runner = Runner(model, pages, config, grammars, worker, drafter, place=task.place, ranks=task.ranks)
    runner.tower = tower
    return Parts(
        config,
        choices,
        scheduler,
        runner,
        rejected,
        task.ranks,
        task.synthetic,
        None if opened is None else opened.transfer,
    )


def speculator(
    draft: str, tokens: int | None, drafter: Drafter | None, costs: Costs | None, *, shared: bool
) -> Speculator:
    """The speculator for Engine.use_drafts; `costs` (seconds of steps) are needed if `tokens` is None."""
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
    directory, share = expanded(config.log_rejected, "log_rejected"), config.log_rejected_share
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
    tower_dir: Path | None,
    meet: Callable[[], Group],
) -> tuple[EngineConfig, KimiK2, Pages, Drafter | None, Tower | None]:
    """Loads the weights, joins the other ranks, sizes the KV cache by the memory that is left, and allocates it."""
    grow_segments(device, True)
    model_config, weights = source()
    group = meet()
    dtype = getattr(torch, config.dtype)
    if config.kv_dtype == "fp8":
        to_fp8_latents(weights)
    if config.rest_dtype == "fp8":
        agree = None if group.ranks == 1 else lambda x: group.gather(x).amax(0)
        loss = to_fp8(weights, agree, activations=config.fp8_activations)
        choices.note(
            "rest_dtype",
            "fp8",
            f"{loss.matrices} matrices, {loss.saved_bytes / 1e9:.2f} GB saved, SQNR {loss.sqnr_db:.1f} dB, "
            f"worst {loss.worst_db:.1f} dB ({loss.worst})",
        )
    drafter = None
    if drafter_dir is not None:
        fp8 = config.draft_dtype == "fp8"
        drafter = load_drafter(drafter_dir, model_config, weights, dtype=dtype, device=device, fp8=fp8, group=group)
    tower, reserved = None, 0.0
    if tower_dir is not None:
        tower = open_tower(tower_dir, dtype, device, group)
        reserved = bytes_beside(tower_dir, config, device, dtype)
    grow_segments(device, False)
    config = resolve_sizes(config, model_config, device, kv_dtype, choices, drafter, group, reserved)
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
    shards = 1 if config.kv_shards == "auto" else config.kv_shards
    model = KimiK2(
        model_config,
        weights,
        max_positions=config.max_model_len,
        qk_norm_eps=config.qk_norm_eps,
        group=group,
        kv_shard_tokens=config.block_size // shards if shards > 1 else None,
    )
    pages = Pages.allocate(
        model_config.num_hidden_layers,
        config.kv_blocks,
        config.block_size,
        latent_cache.width(model_config.kv_lora_rank, model_config.qk_rope_head_dim, kv_dtype),
        kv_dtype,
        device,
        shards,
    )
    grow_segments(device, True)
    return config, model, pages, drafter, tower
