"""Reads a draft's checkpoint as published: names with `midlayer.` or `layers.0.`, embedding and head optional.

A matrix may be stored as e4m3 without a scale, half as large as bfloat16: a draft's weights are between 0.01 and 0.5,
which e4m3 represents without one. A checkpoint with scales is refused, because they are surplus tensors.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from perilune.core.errors import CheckpointError, ConfigError, shown
from perilune.dist.slicing import WHOLE, Slicing
from perilune.formats import synthetic
from perilune.formats.checkpoint import Checkpoint, few
from perilune.formats.dense import FLOATS
from perilune.loading.fp8_dense import quantize, round_values
from perilune.loading.survey import Stretch, spell
from perilune.loading.synthetic import random_draft
from perilune.model import names
from perilune.model.config import KimiConfig
from perilune.model.eagle3 import Eagle3Weights, HeadAttention
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.weights import Attention, Matrix, Mlp, Weights

FP8_WIDTH = 64  # the number of inputs of an FP8 matrix must be a multiple of this
_IDS = (torch.int64, torch.int32)


def load_draft(
    path: Path,
    target: KimiConfig,
    shared: Weights,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    slicing: Slicing = WHOLE,
) -> tuple[Eagle3Config, Eagle3Weights]:
    """The draft in `path` for the model `target`. A draft without embedding or head uses the target's.

    dtype    of its weights; must be that of `shared`
    slicing  what this rank reads and holds: heads, widths of the MLP, rows of embedding and head; same as `shared`'s

    Raises CheckpointError that names the key, the tensor, or what does not fit the target; ConfigError if a tensor
    cannot be split over so many ranks.
    """
    config = Eagle3Config.from_directory(path)
    _check_target(path, config, target)
    if (mark := synthetic.read(path)) is not None:
        return config, random_draft(config, shared.embed, seed=mark.seed, slicing=slicing)
    with Checkpoint.open(path) as checkpoint, torch.no_grad():
        stored = _names(checkpoint)
        _check_tensors(checkpoint, stored, config)

        at, tensors = names.draft(config), {tensor.name: tensor for tensor in names.draft_tensors(config)}

        def slice_of(name: str) -> Tensor:
            info = checkpoint.info(stored[name])
            try:
                stretch = Stretch(info, tensors[name].part(slicing.rank, slicing.ranks))
            except ValueError as e:
                raise ConfigError(
                    f"the draft model {path} cannot be shared out evenly ({e}): run fewer ranks, or draft=suffix"
                ) from e
            stretch.read(checkpoint, piece := stretch.empty())
            return piece.to(device, dtype)

        def read(*parts: str) -> Tensor:
            pieces = [slice_of(name) for name in parts]
            return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

        def linear(field: str) -> Matrix:
            return Matrix(read(*at[field]))

        if names.DRAFT_HEAD in stored:
            lm_head: Matrix = linear("lm_head")
        elif config.draft_vocab_size == target.vocab_size and config.hidden_size == target.hidden_size:
            lm_head = shared.lm_head
        else:
            raise CheckpointError(f"{path} lacks {names.DRAFT_HEAD}, and the target's has another shape")
        own_embed = names.DRAFT_EMBED in stored
        if not own_embed and config.hidden_size != target.hidden_size:
            raise CheckpointError(f"{path} lacks {names.DRAFT_EMBED}, and the target's has another width")
        weights = Eagle3Weights(
            embed=read(*at["embed"]) if own_embed else shared.embed,
            fc=linear("fc"),
            fc_norms=torch.stack([read(name) for name in at["fc_norms"]]) if config.fc_norm else None,
            joint_norm=read(*at["joint_norm"]) if config.norm_before_fc else None,
            input_norm=read(*at["input_norm"]),
            hidden_norm=read(*at["hidden_norm"]),
            attention=_attention(config, at, read, linear),
            post_norm=read(*at["post_norm"]),
            mlp=Mlp(linear("gate_up"), linear("down")),
            norm=read(*at["norm"]),
            lm_head=lm_head,
            target_ids=_target_ids(checkpoint, stored, config, device),
        )
    return config, weights


def require_draft(path: Path, target: KimiConfig) -> Eagle3Config:
    """CheckpointError if `load_draft` could not load the draft in `path` for `target`. Reads only headers."""
    config = Eagle3Config.from_directory(path)
    _check_target(path, config, target)
    with Checkpoint.open(path) as checkpoint:
        _check_tensors(checkpoint, _names(checkpoint), config)
    return config


def to_fp8(weights: Eagle3Weights, target: Weights) -> None:
    """Replaces the draft's own matrices by FP8 ones: they are most of what a drafting step reads, and no rounding of a
    draft can change an answer. Matrices that it shares with `target` stay as they are."""
    for holder in (weights, weights.attention, weights.mlp):
        for field in dataclasses.fields(holder):
            old = getattr(holder, field.name)
            if (
                isinstance(old, Matrix)
                and old.format == "dense"
                and old is not target.lm_head
                and old.weight.shape[1] % FP8_WIDTH == 0
            ):
                setattr(holder, field.name, quantize(old.weight)[0])
    a = weights.attention
    if isinstance(a, Attention) and a.o.format == "fp8":
        a.uv_fp8 = round_values(a.w_uv)[0]


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the draft in `path` as stored, on the CPU, by the names of model/names.py; checked as by
    `load_draft`, except against a target."""
    config = Eagle3Config.from_directory(path)
    with Checkpoint.open(path) as checkpoint:
        stored = _names(checkpoint)
        _check_tensors(checkpoint, stored, config)
        return {name: checkpoint.read(own) for name, own in stored.items()}


def _attention(
    c: Eagle3Config, at: names.Names, read: Callable[..., Tensor], linear: Callable[[str], Matrix]
) -> Attention | HeadAttention:
    if c.form == "mha":
        return HeadAttention(linear("qkv"), linear("o"))
    n, v, latent = c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank
    kv_b = read(*at["kv_b"]).view(-1, n + v, latent)
    return Attention(
        qkv_a=linear("qkv_a"),
        q_a_norm=read(*at["q_a_norm"]),
        q_b=linear("q_b"),
        kv_a_norm=read(*at["kv_a_norm"]),
        w_uk=kv_b[:, :n].contiguous(),
        w_uv=kv_b[:, n:].transpose(1, 2).contiguous(),
        o=linear("o"),
    )


def _check_target(path: Path, config: Eagle3Config, target: KimiConfig) -> None:
    if config.vocab_size != target.vocab_size or config.target_hidden_size != target.hidden_size:
        raise CheckpointError(
            f"{path} was trained for a model of width {config.target_hidden_size} with {config.vocab_size} tokens, the "
            f"target has {target.hidden_size} and {target.vocab_size}: use the draft of this model"
        )
    config.aux_layers(target.num_hidden_layers)


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """Stored names by the names of model/names.py."""
    found: dict[str, str] = {}
    for name in checkpoint.tensors:
        usual = names.draft_name(name)
        if usual in found:
            raise CheckpointError(
                f"{checkpoint.path}: tensors {shown(found[usual])} and {shown(name)} are the same one"
            )
        if not usual.endswith(names.INV_FREQ):
            found[usual] = name
    return found


def _check_tensors(checkpoint: Checkpoint, stored: Mapping[str, str], config: Eagle3Config) -> None:
    wanted = names.draft_expected(config)
    ids = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    if missing := [n for n in wanted if n not in stored and n not in names.DRAFT_OPTIONAL]:
        raise CheckpointError(f"{checkpoint.path} lacks {few(missing, 'tensor')}")
    if surplus := [own for name, own in stored.items() if name not in wanted and name not in ids]:
        raise CheckpointError(f"{checkpoint.path} holds {few(surplus, 'tensor')} that no draft of this kind has")
    if "d2t" not in stored and config.draft_vocab_size != config.vocab_size:
        raise CheckpointError(
            f"{checkpoint.path} lacks d2t: {config.draft_vocab_size} of {config.vocab_size} tokens have no mapping"
        )
    for name, own in stored.items():
        info, shape = checkpoint.info(own), wanted.get(name) or ids[name]
        if tuple(info.shape) != shape:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {shown(own)} has shape {shown(list(info.shape))}, not {list(shape)}"
            )
        floats = (*FLOATS, torch.float8_e4m3fn) if len(shape) > 1 else FLOATS
        allowed = floats if name in wanted else _IDS if name == "d2t" else (torch.bool, torch.uint8, *_IDS)
        if info.dtype not in allowed:
            raise CheckpointError(
                f"{checkpoint.path}: tensor {shown(own)} is {spell(info.dtype)}, not {' or '.join(map(spell, allowed))}"
            )


def _target_ids(
    checkpoint: Checkpoint, stored: Mapping[str, str], config: Eagle3Config, device: torch.device | str
) -> Tensor | None:
    """[draft_vocab_size] int64: draft id + d2t[draft id]; None if all ids are equal in both vocabularies."""
    if "d2t" not in stored:
        return None
    own = torch.arange(config.draft_vocab_size)
    ids = own + checkpoint.read(stored["d2t"]).long()
    if bool((ids < 0).any()) or bool((ids >= config.vocab_size).any()):
        raise CheckpointError(f"{checkpoint.path}: d2t leads outside the {config.vocab_size} tokens of the target")
    return None if torch.equal(ids, own) else ids.to(device)
