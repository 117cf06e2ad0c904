"""Writes a trained kimi-nano as a K2.5 checkpoint: python -m runs.kimi_nano.export --run runs/out/kimi_nano --out DIR

Nested config, `language_model.` names, routed experts as INT4 pack-quantized, the rest bfloat16. The result is read
back and compared with the weights that training computed with; then it replaces the old content of --out.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from perilune.core.jsonfile import write_object, write_text
from perilune.formats import int4
from perilune.formats.checkpoint import INDEX, Checkpoint
from perilune.formats.writer import write
from perilune.media.limits import FILE as PREPROCESSOR_FILE
from perilune.model import names
from perilune.text.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer
from runs.kimi_nano.card import training, write_facts
from runs.kimi_nano.model import KimiNano, Shape, int4_grid
from runs.kimi_nano.optim import is_expert
from runs.kimi_nano.state import CHECKPOINT, EYES_FILE, LOG_FILE, TRAINING_FILE, Progress, load
from runs.kimi_nano.tower import PREPROCESSOR, VISION

PREFIX = "language_model."
SHARD_BYTES = 14_000_000


def served(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights and router biases among a training checkpoint's tensors, by the model's names."""
    kinds = ("master.", "buffer.")
    return {name.split(".", 1)[1]: t for name, t in tensors.items() if name.startswith(kinds)}


def spread(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Checkpoint names: the stacked experts one by one, the rest as they are."""
    for name, tensor in weights.items():
        stem, _, projection = name.rpartition(".experts.")
        if stem:
            for e, expert in enumerate(tensor):
                yield f"{PREFIX}model.{stem}.experts.{e}.{projection}.weight", expert
        else:
            yield f"{PREFIX}{'' if name.startswith('lm_head') else 'model.'}{name}", tensor


def config(s: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    """config.json as Kimi-K2.5 spells it, without the vision tower. The writer adds quantization_config."""
    tokens = {
        "bos_token_id": tokenizer.special("[BOS]"),
        "eos_token_id": tokenizer.special("<|im_end|>"),
        "pad_token_id": tokenizer.special("[PAD]"),
    }
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_attention_heads,
        "q_lora_rank": s.q_lora_rank,
        "kv_lora_rank": s.kv_lora_rank,
        "qk_nope_head_dim": s.qk_nope_head_dim,
        "qk_rope_head_dim": s.qk_rope_head_dim,
        "v_head_dim": s.v_head_dim,
        "intermediate_size": s.intermediate_size,
        "moe_intermediate_size": s.moe_intermediate_size,
        "n_routed_experts": s.n_routed_experts,
        "num_experts_per_tok": s.num_experts_per_tok,
        "n_shared_experts": s.n_shared_experts,
        "first_k_dense_replace": s.first_k_dense_replace,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": s.routed_scaling_factor,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": s.rope_factor,
            "original_max_position_embeddings": s.rope_original,
            "beta_fast": s.beta_fast,
            "beta_slow": s.beta_slow,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": s.max_position_embeddings,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dtype": "bfloat16",
        **tokens,
    }
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": tokenizer.special("<|media_pad|>"),
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        **tokens,
        "text_config": text,
    }


def read_back(directory: Path) -> KimiNano:
    """The model of an exported checkpoint, float32 on the CPU, experts dequantised."""
    text = json.loads((directory / "config.json").read_text())["text_config"]
    rope = text["rope_scaling"]
    own = {key: text[key] for key in Shape.__dataclass_fields__ if key in text}
    model = KimiNano(Shape(
        **own, rope_factor=rope["factor"], rope_original=rope["original_max_position_embeddings"],
        beta_fast=rope["beta_fast"], beta_slow=rope["beta_slow"],
    ))  # fmt: skip
    with Checkpoint.open(directory) as stored, torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            for full, place in spread({name: tensor.data}):
                stem = full.removesuffix(".weight")
                if f"{stem}.weight_packed" in stored.tensors:
                    scale = stored.read(f"{stem}.weight_scale")
                    place.copy_(int4.dequantize(stored.read(f"{stem}.weight_packed"), scale, torch.float32))
                else:
                    place.copy_(stored.read(full))
    return model


def check(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Every stored tensor must be what training computed with: the INT4 grid exactly, bfloat16 to one rounding."""
    stored = read_back(directory).state_dict()
    if stored.keys() != weights.keys():
        raise SystemExit(f"the export lacks {sorted(weights.keys() ^ stored.keys())[0]}")
    for name, tensor in weights.items():
        if is_expert(name):
            wanted = int4_grid(tensor)
        else:
            wanted = tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16().float()
        if not torch.equal(stored[name], wanted):
            raise SystemExit(f"{name}: the export differs from the trained weights")


def export(run: Path, out: Path, shard_bytes: int = SHARD_BYTES) -> Progress:
    """Writes the checkpoint of `run` to `out`; returns how far its training was."""
    shape, progress, tensors = load(run / CHECKPOINT)
    weights = served(tensors)
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = Tokenizer.from_directory(run)
    write(partial, spread(weights), config=config(shape, tokenizer), form="int4", shard_bytes=shard_bytes)
    check(partial, weights)
    for name in (VOCABULARY_FILE, CONFIG_FILE):
        shutil.copyfile(run / name, partial / name)
    generation = {
        "bos_token_id": tokenizer.special("[BOS]"),
        "eos_token_id": tokenizer.special("<|im_end|>"),
        "pad_token_id": tokenizer.special("[PAD]"),
        "temperature": 0.0,  # greedy, which scores best; the server takes its defaults from this file
    }
    (partial / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)
    return progress


def add_facts(log: Path, directory: Path) -> None:
    """Writes what the training's log says of the exported weights, or prints why that cannot be."""
    try:
        trained = training(log, directory)
    except SystemExit as e:
        print(f"no {TRAINING_FILE} beside the weights: {e}")
    else:
        write_facts(directory / TRAINING_FILE, trained)


def add_eyes(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Adds the tower, or replaces the one that is there. No file of the text model is changed; config.json, which says
    that there is a tower, is replaced last."""
    with Checkpoint.open(directory) as stored:
        kept = {n: info for n, info in stored.tensors.items() if not n.startswith(names.VISION)}
    files = {n: info.file.name for n, info in kept.items()} | dict.fromkeys(tensors, EYES_FILE)
    size = sum(info.nbytes for info in kept.values()) + sum(t.nbytes for t in tensors.values())
    settings = json.loads((directory / "config.json").read_text()) | {"vision_config": VISION}
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / f".{EYES_FILE}", {"format": "pt"})
    (directory / f".{EYES_FILE}").chmod(0o644)
    os.replace(directory / f".{EYES_FILE}", directory / EYES_FILE)
    write_object(directory / PREPROCESSOR_FILE, PREPROCESSOR)
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_text(directory / INDEX, json.dumps(index, sort_keys=True, separators=(",", ":")) + "\n")  # 888 names
    write_object(directory / "config.json", settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Export kimi-nano in the K2.5 INT4 format.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("runs/out/kimi_nano"), help="directory of the training run")
    parser.add_argument("--out", type=Path, default=Path("runs/out/kimi-nano-export"), help="checkpoint to write")
    args = parser.parse_args()
    if not (args.run / CHECKPOINT).is_file():
        parser.error(f"{args.run} has no {CHECKPOINT}: train first, python -m runs.kimi_nano.train --out {args.run}")
    progress = export(args.run, args.out)
    add_facts(args.run / LOG_FILE, args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir())
    print(json.dumps({"kind": "export", "out": str(args.out), "bytes": size, "step": progress.step}))


if __name__ == "__main__":
    main()
