"""Turns "auto" and None of an EngineConfig into values, once, each with its reason."""

import ctypes
import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError, sized
from perilune.core.memory import available_bytes
from perilune.dist.group import ALONE, Group, least
from perilune.engine.graphs.decode import MAX_BYTES as GRAPH_BYTES
from perilune.kv.pages import Pages
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import DRAFTER
from perilune.model.step_memory import SLACK_BYTES, STEP_TOKENS, workspace_bytes
from perilune.ops.harness import build, nvml
from perilune.ops.layouts import latent_cache
from perilune.speculation.drafter import Drafter

GB = 1e9
CONTEXT_BYTES = 520 << 20  # GPU memory of one process's CUDA context
CPU_KV_BYTES = 512 << 20  # KV cache on a CPU, unless the configuration sets a size
CPU_KV_REQUESTS = 4  # ... but at least 4 requests of max_model_len tokens, even if those take more bytes.


@dataclass(slots=True)
class Choices:
    """The automatic decisions so far, in order: (key, value, reason)."""

    made: list[tuple[str, str, str]]

    def note(self, key: str, value: object, reason: str) -> None:
        self.made.append((key, str(value), reason))


def resolve_device(config: EngineConfig, choices: Choices) -> torch.device:
    if config.device == "auto":
        if torch.cuda.is_available():
            choices.note("device", "cuda", f"found {torch.cuda.get_device_name()}")
            return torch.device("cuda")
        choices.note("device", "cpu", "no CUDA device found")
        return torch.device("cpu")
    try:
        device = torch.device(config.device)
        SLACK_BYTES[device.type]
    except (RuntimeError, KeyError) as e:
        raise ConfigError(f"device must be auto, cpu or cuda, not {config.device!r}") from e
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch finds no CUDA device here: use --device cpu")
    return device


def resolve_dtypes(
    config: EngineConfig, device: torch.device, choices: Choices
) -> tuple[EngineConfig, torch.dtype, torch.dtype]:
    dtype, kv_dtype = config.dtype, config.kv_dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        choices.note(
            "dtype", dtype, "the checkpoint's own" if device.type == "cuda" else "CPUs compute it faster than bfloat16"
        )
    if kv_dtype == "auto":
        kv_dtype = dtype
        choices.note("kv_dtype", kv_dtype, "same as dtype")
    config = dataclasses.replace(config, dtype=dtype, kv_dtype=kv_dtype)
    return config, getattr(torch, dtype), latent_cache.PACKED if kv_dtype == "fp8" else getattr(torch, kv_dtype)


def resolve_draft(
    config: EngineConfig, model_dir: Path, device: torch.device, choices: Choices
) -> tuple[EngineConfig, Path | None]:
    """The config with `draft` and `draft_dtype` resolved, and the draft model's directory; None: no draft model."""
    path = model_dir / DRAFTER
    if config.drafter is not None:
        from perilune.formats.hub import resolve_model  # its HTTP client takes 0.15 s to import

        try:
            path = resolve_model(config.drafter)
        except ConfigError as e:
            raise ConfigError(f"drafter: {e}") from e
    found = (path / "config.json").is_file()
    if config.drafter is not None and not found:
        raise ConfigError(
            f"drafter={config.drafter!r} has no config.json: give the directory of an EAGLE-3 draft model"
        )
    draft = config.draft
    if draft == "auto":
        draft = "hybrid" if found else "suffix"
        why = f"draft model in {path}" if found else "no draft model: drafts come from earlier text"
        if not found and path.is_dir():
            why = f"{path} has no config.json, so it is not used: drafts come from earlier text"
        choices.note("draft", draft, why)
    if draft in ("eagle3", "hybrid"):
        if not found:
            raise ConfigError(
                f"draft={draft!r} needs a draft model, and {model_dir.name} brings none: give one with"
                " drafter=DIRECTORY, or use draft='suffix'"
            )
        draft_dtype = config.draft_dtype
        if draft_dtype == "auto":
            draft_dtype = "fp8" if config.rest_dtype == "fp8" or build.is_hopper(device) else "dtype"
            if draft_dtype == "fp8":
                choices.note("draft_dtype", draft_dtype, "half of what drafting reads; no answer depends on it")
        return dataclasses.replace(config, draft=draft, draft_dtype=draft_dtype), path
    return dataclasses.replace(config, draft=draft), None


def resolve_declared(config: EngineConfig, drafter_dir: Path | None, choices: Choices) -> EngineConfig:
    """The config for declared acceptance: only the draft model drafts, a fixed number of tokens per step. ConfigError
    if there is no draft model."""
    declared = config.declared_acceptance
    assert declared is not None
    if drafter_dir is None:
        raise ConfigError(
            "declared_acceptance needs the draft model of --synthetic with 4 layers or more, and draft other than off "
            "or suffix"
        )
    tokens = config.draft_tokens
    if tokens is None:
        tokens = max(math.ceil(declared) - 1, 1)
        choices.note("draft_tokens", tokens, f"the fewest that bring {declared:g} tokens a step")
    choices.note("declared_acceptance", f"{declared:g}", "declared, not measured: for speed alone")
    return dataclasses.replace(config, draft="eagle3", draft_tokens=tokens)


def require_positions(config: EngineConfig, model: KimiConfig) -> None:
    """ConfigError if max_model_len is above the model's own limit."""
    if (config.max_model_len or 0) > (most := model.max_position_embeddings):
        raise ConfigError(f"max_model_len={config.max_model_len} is beyond the model's {most} positions: lower it")


def resolve_sizes(
    config: EngineConfig,
    model: KimiConfig,
    device: torch.device,
    kv_dtype: torch.dtype,
    choices: Choices,
    drafter: Drafter | None = None,
    group: Group = ALONE,
    reserved: float = 0.0,
) -> EngineConfig:
    """Fills block_size, max_model_len, max_step_tokens and kv_blocks by the memory that is free, so it must be called
    after the weights were loaded. `reserved`: bytes that must stay free for later allocations. Raises ConfigError."""
    shards = 1 if config.kv_shards == "auto" else config.kv_shards  # engine/fit.py has chosen, for real checkpoints
    config = dataclasses.replace(config, kv_shards=shards)
    if config.block_size is None:
        # The attention kernel loads a tile with one bulk copy if blocks have 64 tokens, with up to 36 if they have 16.
        size, why = (64, "one copy per tile of attention") if device.type == "cuda" else (16, "default on cpu")
        if shards > 1:
            why = f"{size} on each of {shards} ranks: {why}"
        config = dataclasses.replace(config, block_size=size * shards)
        choices.note("block_size", size * shards, why)
    assert config.block_size is not None
    if config.block_size % shards:
        raise ConfigError(f"block_size={config.block_size} is no multiple of kv_shards={shards}: give one that is")
    width = latent_cache.width(model.kv_lora_rank, model.qk_rope_head_dim, kv_dtype)
    block = Pages.block_bytes(model.num_hidden_layers, config.block_size, width, kv_dtype, shards)
    features = 0 if drafter is None else len(drafter.aux_layers)
    workspace = workspace_bytes(device, model, config, width * kv_dtype.itemsize, features, group.ranks)
    free = free_bytes(device) * config.memory_fraction - workspace - reserved
    if device.type == "cuda":
        free -= GRAPH_BYTES
    if drafter is not None:
        dtype = getattr(torch, config.dtype)
        block += drafter.block_bytes(config.block_size, dtype)
        free -= drafter.scratch_bytes(config.block_size, dtype, config.max_num_seqs)
    if device.type == "cpu":
        free /= group.ranks  # ranks on one CPU machine share its memory
    fits = least(group, int(free // block))
    if config.kv_blocks is not None and config.kv_blocks > fits:
        raise ConfigError(
            f"kv_blocks={config.kv_blocks} needs {sized(config.kv_blocks * block)}, "
            f"but only {max(0, fits)} blocks fit: lower it or raise memory_fraction"
        )
    require_positions(config, model)
    longest = config.max_model_len or model.max_position_embeddings
    blocks = config.kv_blocks
    if blocks is None:
        each = -(-longest // config.block_size)
        enough = config.max_num_seqs * each + 1
        # On a CPU other programs use the same memory, so a cache that is never full should not take all of it.
        modest = max(CPU_KV_BYTES // block, CPU_KV_REQUESTS * each) + 1 if device.type == "cpu" else enough
        blocks = min(fits, enough, modest)
        why = f"{blocks * block / GB:.2f} GB, memory_fraction {config.memory_fraction} of what is free"
        if device.type == "cuda":
            gaps = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            why += f"; gaps between weights hold {gaps / GB:.2f} GB, a step {workspace / GB:.2f}"
        if blocks == enough:
            why = f"{config.max_num_seqs} requests of {longest} tokens"
        elif blocks == modest:
            why = f"{blocks * block / GB:.2f} GB, enough for a CPU; more with --set kv_blocks=N"
        choices.note("kv_blocks", blocks, why)
    held = blocks * config.block_size
    if longest > held:
        if config.max_model_len is not None or held < 2:
            lower = "max_model_len" if fits > 1 else "max_model_len, max_num_seqs or max_step_tokens,"
            raise ConfigError(
                f"the KV cache holds {max(0, held)} tokens, less than max_model_len={longest}: "
                f"lower {lower} or raise {'memory_fraction' if config.kv_blocks is None else 'kv_blocks'}"
            )
        longest = held
        choices.note("max_model_len", longest, f"what {blocks} KV blocks hold")
    elif config.max_model_len is None:
        choices.note("max_model_len", longest, "the checkpoint's max_position_embeddings")
    step = config.max_step_tokens
    if step is None:
        step = STEP_TOKENS[device.type]
        choices.note("max_step_tokens", step, f"default on {device.type}")
    return dataclasses.replace(config, kv_blocks=blocks, max_model_len=longest, max_step_tokens=step)


def grow_segments(device: torch.device, on: bool) -> None:
    """Turns expandable segments of torch's CUDA allocator on or off; torch can return any unused 20 MB of one to the
    device. Loading needs them, because weights otherwise share segments with temporary tensors, which leave gaps
    that stay reserved: 140 GB of weights on a GPU of 150 GB left 3.7 GB free, not 6.9. Steps need them,
    because otherwise small tensors settle in the memory that a tensor of 1 GB had in the last step, and the next one
    finds no room. The setting holds for all threads of the process; memory allocated before stays as it is."""
    if device.type == "cuda":
        torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # converting weights leaves gigabytes of unused memory in torch's cache
        return torch.cuda.mem_get_info(device)[0]
    return available_bytes()


def free_on(gpu: int) -> int:
    """As `free_bytes`, of a GPU that another process will use. Asks NVML: asking CUDA would create a context of 0.55 GB
    there, for as long as this process lives."""
    found = None if gpu == torch.cuda.current_device() else nvml.device(gpu)
    sizes = (ctypes.c_ulonglong * 3)()  # total, free, used
    if found is None or found.library.nvmlDeviceGetMemoryInfo(found.handle, sizes):
        return free_bytes(torch.device("cuda", gpu))
    return sizes[1] - CONTEXT_BYTES
