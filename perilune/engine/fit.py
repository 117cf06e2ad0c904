"""Plans memory before weights are read: what each GPU holds, which scales experts get, and what to refuse and why."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from perilune.core.config import EngineConfig
from perilune.core.errors import ConfigError, sized
from perilune.engine.graphs.decode import MAX_BYTES as GRAPH_BYTES
from perilune.engine.resolve import Choices, free_bytes, free_on, resolve_draft, resolve_dtypes
from perilune.engine.vision.open import bytes_beside, sees, weight_bytes
from perilune.formats import scheme, synthetic
from perilune.formats.checkpoint import Checkpoint
from perilune.formats.served import require_served
from perilune.loading.survey import Survey, survey
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.step_memory import STEP_TOKENS, workspace_bytes
from perilune.ops.layouts import latent_cache
from perilune.plan import memory
from perilune.speculation.eagle3 import scratch_tokens

# With less context in the KV cache, choose narrower weights or more GPUs where possible. Larger: more machines run with
# narrower weights.
ENOUGH_TOKENS = 32_768
INT4_BYTES = 0.5 + 2 / scheme.INT4_GROUP  # per weight, with its share of its group's bfloat16 scale
COMPACT = "int4-compact"
# Context from which on decoding is faster with KV sharded over two ranks: reading half of the KV then saves more than
# exchanging queries and outputs takes. Measured on two H200s (1 request, 9 layers, ms a step, whole / sharded): 0.916 /
# 0.983 at 10,000 tokens, 0.963 / 1.008 at 34,000, 1.130 / 1.114 at 100,000; a straight line crosses here. Larger: KV
# stays whole on every rank, and decoding long contexts is bound by reading it.
CROSSOVER_TOKENS = 83_000
BOTH = "expert_scales=compact with rest_dtype=fp8"


@dataclass(frozen=True, slots=True)
class Wanted:
    """`demand`: the memory that a configuration needs. `others`: the demand after one change of the configuration, by
    the change as an error message names it, such as "draft=off"."""

    demand: memory.Demand
    others: dict[str, memory.Demand]
    int4: bool  # experts are INT4 with bfloat16 scales


def fitted(
    model_dir: Path, config: EngineConfig, device: torch.device, choices: Choices, *, show: bool = False
) -> EngineConfig:
    """The config with `expert_scales` and `kv_shards` resolved, if the engine fits the memory that is free now.

    show  print the table of memory on stderr

    ConfigError, before weights are read, that names changes that would make it fit.
    """
    ranks, free = config.ranks, _free(config, device)
    if config.kv_shards == "auto":
        config = replace(config, kv_shards=_kv_shards(model_dir, config, device, free, choices))
    wanted = demand(model_dir, config, device)
    plan = memory.plan(wanted.demand, ranks, free)
    if not plan.fits:
        raise ConfigError(_refusal(plan, wanted, free, device))
    if show:
        sys.stderr.write("\n".join(plan.lines()) + "\n")
    sizes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in plan.takes.items() if size)
    choices.note("memory", f"{free / 1e9:.2f} GB free", f"{sizes} GB; the rest holds {plan.tokens:,} tokens of KV")
    if config.expert_scales != "auto":
        return config
    if compact := wanted.int4 and plan.footprint.name == COMPACT:
        choices.note("expert_scales", "compact", "the checkpoint's own leave too little room")
    return replace(config, expert_scales="compact" if compact else "checkpoint")


def _kv_shards(model_dir: Path, config: EngineConfig, device: torch.device, free: float, choices: Choices) -> int:
    """1 if every rank should hold the whole KV, else the number of ranks that share it; `choices` gets the reason."""
    ranks = config.ranks
    if ranks == 1:
        return 1
    whole = demand(model_dir, replace(config, kv_shards=1), device).demand
    held = memory.plan(whole, ranks, free)
    longest = config.max_model_len or KimiConfig.from_directory(model_dir).max_position_embeddings
    kept = "every rank has all KV"
    if device.type == "cpu":
        shards = 1 if held.fits else ranks
        why = f"{kept}: between processes of a CPU an exchange takes longer than reading" if held.fits else ""
    elif held.tokens < config.max_num_seqs * longest:
        shards, why = ranks, ""
    elif longest > CROSSOVER_TOKENS:
        shards = ranks
        why = f"requests may be longer than {CROSSOVER_TOKENS:,} tokens, where reading takes longer than an exchange"
    else:
        shards, why = 1, f"{kept}: it holds {config.max_num_seqs} requests of {longest:,} tokens, and they are short"
    why = why or f"on every rank the whole KV would have room for {held.tokens:,} tokens"
    if shards > 1:
        why = f"each of {ranks} ranks has its part of every request's KV: {why}"
    choices.note("kv_shards", shards, why)
    return shards


def demand(model_dir: Path, config: EngineConfig, device: torch.device) -> Wanted:
    """The memory that the engine would need, with sharded KV if `kv_shards` allows it. Reads only headers of the
    checkpoint's files. Raises as `load`."""
    nothing = Choices([])
    config, dtype, kv_dtype = resolve_dtypes(config, device, nothing)
    config, drafter_dir = resolve_draft(config, model_dir, device, nothing)
    model = KimiConfig.from_directory(model_dir)
    stored, form = _experts(model_dir, model, dtype)
    int4 = form == scheme.INT4
    if config.expert_scales == "compact" and form not in (scheme.INT4, scheme.INT4_COMPACT):
        raise ConfigError(f"expert_scales=compact is for INT4 experts, and those of {model_dir.name} are {form}")
    values = latent_cache.width(model.kv_lora_rank, model.qk_rope_head_dim, kv_dtype)
    kv_bytes = model.num_hidden_layers * values * kv_dtype.itemsize
    kv_sharded = 0 if config.kv_shards == 1 else kv_bytes
    none = drafter = scratch = fewer = memory.Footprint("drafter", 0.0, 0.0)
    own_kv = features = 0
    longest = min(config.max_model_len or ENOUGH_TOKENS, model.max_position_embeddings)
    shards = 1 if config.kv_shards == "auto" else config.kv_shards
    block = config.block_size or shards * (64 if device.type == "cuda" else 16)
    few = min(config.max_num_seqs, EngineConfig().max_num_seqs)
    if drafter_dir is not None:
        drafter, draft = _drafter(drafter_dir, config, dtype)
        own_kv, features = draft.kv_width * dtype.itemsize, draft.num_aux
        kv_bytes += own_kv
        chains = [own_kv * scratch_tokens(block, n) for n in (config.max_num_seqs, few)]
        cut = draft.form == "mha"  # ranks split keys and values by heads; latents are whole on every rank
        scratch, fewer = (memory.Footprint("scratch", n * cut, n * (not cut)) for n in chains)
    least = config.kv_blocks * block if config.kv_blocks else config.max_model_len or 2 * block
    step = config.max_step_tokens or STEP_TOKENS[device.type]
    workspace = partial(workspace_bytes, device, model, config, values * kv_dtype.itemsize, features)
    graphs = GRAPH_BYTES if device.type == "cuda" else 0
    sizes = model_of(model)
    vision = 0.0
    if sees(model_dir, config, nothing):
        vision = weight_bytes(model_dir, dtype.itemsize) + bytes_beside(model_dir, config, device, dtype)

    def demand_with(scales: str, rest: str, tokens: int) -> memory.Demand:  # expert_scales, rest_dtype, least KV
        plain, compact, narrow, _ = memory.footprints(sizes, stored, dtype.itemsize)
        if rest == "fp8":
            saved = compact.split - narrow.split
            plain = memory.Footprint(plain.name, plain.split - saved, narrow.whole)
            compact = replace(narrow, name=COMPACT)
        weights = (compact,) if scales == "compact" else (plain, compact) if scales == "auto" else (plain,)
        return memory.Demand(
            weights=weights if int4 else (plain,),
            drafter=drafter,
            scratch=scratch,
            graphs=graphs,
            workspace=workspace,
            mailboxes=2.0 * step * model.hidden_size * dtype.itemsize,
            kv_bytes=kv_bytes,
            kv_sharded=kv_sharded,
            enough=max(longest, tokens),
            least=tokens,
            fraction=config.memory_fraction,
            vision=vision,
        )

    scales, rest = config.expert_scales, config.rest_dtype
    others, given = {}, demand_with(scales, rest, least)
    if vision:
        others["vision=off"] = replace(given, vision=0.0)
    if drafter is not none:
        bare = replace(given, drafter=none, scratch=none, kv_bytes=kv_bytes - own_kv)
        others["draft=off"] = bare
    if fewer != scratch:
        others[f"max_num_seqs={few}"] = replace(given, scratch=fewer)
    if int4 and scales == "checkpoint":
        others["expert_scales=compact"] = demand_with("compact", rest, least)
    if rest != "fp8":
        others["rest_dtype=fp8"] = demand_with(scales, "fp8", least)
        if int4 and scales == "checkpoint":
            others[BOTH] = demand_with("compact", "fp8", least)
    return Wanted(given, others, int4)


def fewest_gpus(model_dir: Path, config: EngineConfig, device: torch.device, free: list[float]) -> int:
    """For `tp=auto`: the smallest number of GPUs that hold the model; `free` are the free bytes of each, in order.
    ConfigError if all of them together do not hold it."""
    wanted = demand(model_dir, config, device)
    heads = KimiConfig.from_directory(model_dir).num_attention_heads
    counts = [n for n in memory.COUNTS if heads % n == 0]
    count = memory.fewest(wanted.demand, free, counts)
    if count is None:
        most = max(n for n in counts if n <= len(free))
        least = min(free[:most])
        raise ConfigError(_refusal(memory.plan(wanted.demand, most, least), wanted, least, device))
    return count


def _refusal(plan: memory.Plan, wanted: Wanted, free: float, device: torch.device) -> str:
    """The error's text: how much memory is missing, for what, and which changes would make the model fit."""
    ranks, larger = plan.ranks, "take more or larger GPUs"
    kv_bytes = plan.demand.kv_on_each(ranks)
    short = plan.demand.least * kv_bytes - plan.left
    remedies = [words for words, other in wanted.others.items() if memory.plan(other, ranks, free).fits]
    if len(remedies) > 1:  # one of the two changes is enough: do not advise both together
        remedies = [words for words in remedies if words != BOTH]
    counts: Sequence[int] = memory.COUNTS
    if device.type == "cpu":  # its ranks share one memory
        counts, larger = (), "take a machine with more memory, or a smaller model"
    more = (n for n in counts if n > ranks and memory.plan(wanted.demand, n, free).fits)
    if (count := next(more, None)) is not None:
        remedies.append(f"tp={count} on GPUs like these")
    if plan.left > 2 * kv_bytes * 64:
        remedies.append(f"max_model_len or kv_blocks for at most {plan.tokens:,} tokens")
    sizes = ", ".join(f"{name} {sized(size)}" for name, size in plan.takes.items() if size)
    where = f"each of {ranks} ranks" if ranks > 1 else "the device"
    return (
        f"the model does not fit: {where} has {sized(free)} free, {sized(short)} too few for {sizes} and a KV "
        f"cache of {plan.demand.least:,} tokens; "
        + ("what would fit: " + ", or ".join(remedies) if remedies else larger)
    )


def _free(config: EngineConfig, device: torch.device) -> float:
    """Free bytes for each rank: on CPUs an equal share of the machine's memory, on GPUs that of the fullest GPU."""
    if device.type == "cpu":
        return free_bytes(device) / config.ranks
    if config.ranks == 1 and config.gpus is None:
        return free_bytes(device)
    listed = range(config.ranks) if config.gpus is None else [int(n) for n in config.gpus.split(",")]
    there = [n for n in listed if n < torch.cuda.device_count()]
    return min(map(free_on, there), default=0) or free_bytes(device)


def _experts(model_dir: Path, model: KimiConfig, dtype: torch.dtype) -> tuple[float, str]:
    """Bytes of the routed experts in memory, and the format of most of them."""
    routed = model.parameters().routed
    if synthetic.read(model_dir) is not None:
        return INT4_BYTES * routed, scheme.INT4
    require_served(model.quantization, str(model_dir))
    with Checkpoint.open(model_dir) as checkpoint:
        return expert_bytes(survey(checkpoint, model), model, dtype.itemsize)


def expert_bytes(found: Survey, model: KimiConfig, size: int) -> tuple[float, str]:
    """Bytes of the routed experts in memory, where an unquantised weight takes `size` bytes whatever its type in the
    file, and the format of most of them."""
    forms = [form for name, form in found.formats.items() if names.ROUTED in name]
    form = max(set(forms), key=forms.count, default=scheme.DENSE)
    if form == scheme.DENSE:
        return float(model.parameters().routed * size), form
    return float(sum(t.nbytes for name, t in found.tensors.items() if names.ROUTED in name)), form


def _drafter(path: Path, config: EngineConfig, dtype: torch.dtype) -> tuple[memory.Footprint, Eagle3Config]:
    """Memory of the draft model's weights, and its configuration."""
    draft = Eagle3Config.from_directory(path)
    here = {names.DRAFT_HEAD}
    if synthetic.read(path) is None:
        with Checkpoint.open(path) as checkpoint:
            here = {names.draft_name(name) for name in checkpoint.tensors}
    split = whole = 0
    for tensor in names.draft_tensors(draft):
        if tensor.name in names.DRAFT_OPTIONAL and tensor.name not in here:
            continue
        narrow = config.draft_dtype == "fp8" and tensor.entry.linear
        size = math.prod(tensor.shape) * (1 if narrow else dtype.itemsize)
        if tensor.entry.axis is None:
            whole += size
        else:
            split += size
    return memory.Footprint("drafter", split, whole), draft


def model_of(config: KimiConfig, vision: int = 0) -> memory.Model:
    """Numbers of weights, grouped by how ranks share them; `vision` more are whole on every rank (the vision tower)."""
    routed_rows = linear = embedding = kv_b = whole_linear = whole = 0
    for name, shape, entry, _ in names.tensors(config):
        size = math.prod(shape)
        if names.ROUTED in name:
            routed_rows += shape[0]
        elif entry.field == "embed":
            embedding += size
        elif entry.field == "kv_b":
            kv_b += size
        elif not entry.linear:
            whole += size
        elif entry.axis is None:
            whole_linear += size
        else:
            linear += size
    return memory.Model(
        routed=config.parameters().routed,
        routed_rows=routed_rows,
        linear=linear,
        embedding=embedding,
        kv_b=kv_b,
        whole_linear=whole_linear,
        whole=whole + vision,
        kv_values=config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim),
    )
